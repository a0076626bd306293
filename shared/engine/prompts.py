"""From what a user hands in to token ids. Knows tokenizers, not engines."""

from __future__ import annotations

from typing import Any

from .checks import check_text


def encode(prompt: str | list[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt given as text or as token ids.

    Raises:
        TypeError: the prompt is neither, or it is text and there is no tokenizer.
        ValueError: a token id lies outside `0 .. vocab_size - 1`, or the text is empty or broken.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer; this engine has none: pass token ids")
        check_text("the prompt", prompt)
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, (list, tuple)):
        token_ids = list(prompt)
        for token_id in token_ids:
            if type(token_id) is not int:
                raise TypeError(f"token ids must be integers, got {token_id!r}")
    else:
        raise TypeError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
    if not token_ids:
        raise ValueError("the prompt is empty")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise ValueError(f"token id {wrong} lies outside the vocabulary of {vocab_size}")
    return token_ids


def chat_prompt(tokenizer: Any, messages: str | list[dict[str, str]]) -> str | list[int]:
    """A conversation in the model's own chat format, ready for `add_request`.

    Args:
        messages: one user message, or a list of `{"role": ..., "content": ...}`.

    Returns:
        Token ids; the plain text of a single message if the tokenizer has no chat template.

    Raises:
        TypeError: the messages are neither.
    """
    if isinstance(messages, str):
        if not getattr(tokenizer, "chat_template", None):
            return messages
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise TypeError(f"messages are text or a list of role and content, got {messages!r}")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    check_text("the prompt", text)
    return tokenizer.encode(text, add_special_tokens=False)  # the template brings its own


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: the model's generation config knows best, then the tokenizer."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
