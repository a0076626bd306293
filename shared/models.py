"""Loading a model and its tokenizer by name.

Knows nothing about engines, caches or attention: a stage sets its own attention function afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class LoadedModel(NamedTuple):
    model: Any  # a transformers causal language model in eval mode, without gradients
    tokenizer: Any  # its tokenizer; `chat_template` is None if the model has none


def load_model(
    name: str = "smollm2",
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    pack_linears: bool = True,
) -> LoadedModel:
    """Load a model by name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shared.smollm2 import smollm2_folder
    from shared.tiny import build_tiny_model, tiny_tokenizer

    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    if name == "tiny" or name.startswith("tiny:"):
        model, tokenizer = build_tiny_model(name[5:] or "llama"), tiny_tokenizer()
        model = model.to(device=device, dtype=dtype)
    else:
        folder = smollm2_folder() if name == "smollm2" else name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        model = model.to(device)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that `device` names; "auto" is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that `dtype` names.

    "auto" is float32 on the CPU and bfloat16 on CUDA, or float16 where the chip computes no bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
