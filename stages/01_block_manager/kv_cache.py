"""The memory of the KV cache: one pool of blocks per layer, and how large it can be."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from shared.models import ModelShape

# Share of memory that the pool may take by default: on CUDA of the device, where weights and
# activations come off it first; on CPU of what is available, since other programs live there too.
DEFAULT_MEMORY_UTILIZATION = {"cuda": 0.9, "cpu": 0.25}


class KVCache:
    """Keys and values of all layers.

    `pool` has shape `[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]`; index 0 of
    the second axis holds keys, 1 values. It is not cleared: a slot holds garbage until written.
    """

    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = torch.empty(
            (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""
        return self.pool[layer_idx, 0], self.pool[layer_idx, 1]


def bytes_per_block(shape: ModelShape, block_size: int) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    return block_size * per_token * shape.dtype.itemsize


def free_memory(device: torch.device, utilization: float | None, peak_bytes: int) -> int:
    """Bytes that the pool may take.

    Args:
        device: where the model lives.
        utilization: share of memory, see `EngineConfig.memory_utilization`.
        peak_bytes: most memory in use during the largest forward (CUDA only).
    """
    share = DEFAULT_MEMORY_UTILIZATION[device.type] if utilization is None else utilization
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total * share) - peak_bytes
    return int(psutil.virtual_memory().available * share)
