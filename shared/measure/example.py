"""The course's running example, in words and numbers: four chats stream, a long document arrives.

Chapters, figures, notebooks and demo all take it from here. The numbers are those of SmolLM2's
tokenizer and chat template; a test counts them. Knows no tokenizer and no engine.
"""

from __future__ import annotations

# All five prompts begin with the same tokens: the system prompt, the user's turn and LEAD.
SYSTEM = (
    "You tell stories slowly, in long and very calm sentences. Say what people see and hear and "
    "think, and do not hurry to the end."
)
LEAD = "Tell me about"
STORIES = {
    "A": "foxes",
    "B": "a fox who learns to read.",
    "C": "a night train in the desert, its driver and an unread letter.",
    "D": "a baker, her old oven, and the boy who carries her bread to the harbour on the morning "
    "the fire goes out",
}
TASK = (
    "these pages of the Python language reference in a few sentences.\n\n"  # the document follows
)

SYSTEM_TOKENS = 40  # that all prompts have in common: two blocks of 16 and a half
CHATS = {"A": 47, "B": 53, "C": 61, "D": 70}  # prompt tokens, the common ones included
DOCUMENT_TOKENS = 1500

# A chat comes when the one before it has this many tokens, the document when D has.
BETWEEN_CHATS = 2
BEFORE_DOCUMENT = 6
