"""The facts of a model that an engine needs; `shared.models.inspect_model` finds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelShape:
    """What an engine must know of a model; lengths in tokens."""

    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # longest sequence, prompt and output together
    vocab_size: int  # width of the logits
    dtype: torch.dtype  # of K and V
    device: torch.device
