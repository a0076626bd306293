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

# What each architecture has beyond the common sizes: its own names for them, and values that make
# its peculiarity felt (a multiplier of 1 would hide that it is dropped).
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    # Tied to its embeddings, a model repeats its input unless the layers have more weight.
    "gemma": {"initializer_range": 0.4},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "gpt2": {"num_key_value_heads": 4, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "starcoder2": {"initializer_range": 0.4},
    "cohere": {},
    "glm4": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


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


def tiny_config(arch: str = "llama", **changes: Any) -> Any:
    """A two-layer config of architecture `arch`, one of `ARCHITECTURES`.

    `arch` is transformers' `model_type`; `changes` go into the config as they are. The sizes:
    hidden 64, 4 heads of 16, 2 KV heads where the architecture can share them, 512 tokens in the
    vocabulary, 1024 positions.
    """
    from transformers import AutoConfig

    if arch not in ARCHITECTURES:
        raise ValueError(
            f"no tiny model of architecture {arch!r}; known: {', '.join(ARCHITECTURES)}"
        )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": TINY_VOCAB_SIZE,
        "max_position_embeddings": 1024,
        # Ten times the usual spread. With less, attention hardly matters, and greedy decoding says
        # one token over and over: a test on it could not fail.
        "initializer_range": 0.2,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    return AutoConfig.for_model(arch, **{**sizes, **ARCHITECTURES[arch], **changes})


def build_tiny_model(arch: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A float32 model on the CPU with the config `tiny_config(arch, **changes)`.

    The same arguments give the same weights, and torch's global generator is left as it was.
    """
    return build_random_model(tiny_config(arch, **changes), seed, noise=0.1)


def build_random_model(
    config: Any,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    noise: float = 0.0,
) -> Any:
    """A model of `config` with seeded random weights, made in `dtype` on `device` from the start.

    transformers sets biases to 0 and norm weights to 1, which would hide one that is dropped;
    `noise` is the standard deviation of what is added to them.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
        if noise:
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model
