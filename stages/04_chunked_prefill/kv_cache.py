"""The memory of the KV cache: one pool of blocks for each layer."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.model_shape import ModelShape


class KVCache:
    """Keys and values of all layers.

    `pool` has shape `[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]`; index 0 of
    the second axis holds keys, 1 values. It is not cleared: a slot holds garbage until written.
    """

    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.pool = torch.empty(
            (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""
        return self.pool[layer_idx, 0], self.pool[layer_idx, 1]
