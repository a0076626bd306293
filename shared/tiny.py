"""Models made on the spot from a seed: for tests, and for a first look without any weights.

Random weights write nonsense, but the same nonsense every time, and every architecture runs through
the same code as a trained one. The tokenizer is a small byte-level BPE, so that text works too.
"""

from __future__ import annotations

from typing import Any

import torch

TINY_VOCAB_SIZE = 512
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """A byte-level BPE of 512 tokens: 3 special ones, 256 bytes, 253 pairs of letters.

    Any text round-trips; a character outside ASCII is several tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters, vowels = "etaoinshrdlcumwfgypbvkjxqz", "eaoiu"
    space = "Ġ"  # how the byte-level alphabet writes a space
    merges = [(space, letter) for letter in letters]
    merges += [(letter, vowel) for vowel in vowels for letter in letters]
    merges += [(vowel, letter) for vowel in vowels for letter in letters if letter not in vowels]
    special = [PAD, IM_START, IM_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges[: TINY_VOCAB_SIZE - len(special) - len(alphabet)]
    tokens = special + alphabet + [left + right for left, right in merges]

    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(arch: str = "llama") -> Any:
    """A two-layer config of architecture `arch` (a `model_type` of transformers)."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        arch,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=TINY_VOCAB_SIZE,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def build_tiny_model(arch: str = "llama", seed: int = 0) -> Any:
    """A float32 model on the CPU with the config `tiny_config(arch)`; the same for the same seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(arch), dtype=torch.float32)
    return model.eval().requires_grad_(False)
