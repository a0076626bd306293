"""How many blocks of KV cache a machine has room for, and how numbers get to its device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from .model_shape import ModelShape

logger = logging.getLogger(__name__)

# Default share of what is free that may be used, as others use the memory, too. On CUDA the
# weights are loaded by then, and what a forward takes at its peak is subtracted.
DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.25}


def to_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """`values` as a tensor on `device`. From pinned memory the copy waits for nothing there."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def bytes_per_block(shape: ModelShape, block_size: int) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    return block_size * per_token * shape.dtype.itemsize


def choose_num_blocks(shape: ModelShape, config: Any, profile: Callable[[], None]) -> int:
    """`config.num_blocks`, or as many as fit in memory and as all sequences together could fill.

    Args:
        config: a stage's `EngineConfig` with its `max_model_len` known.
        profile: runs the largest possible forward; called on CUDA only, where the memory
            that it takes at its peak is not there for the cache.

    Raises:
        ValueError: there is no room for one block, or for `num_blocks` of them.
    """
    block_bytes = bytes_per_block(shape, config.block_size)
    if config.num_blocks:
        total = _total_memory(shape.device)
        if config.num_blocks * block_bytes > total:
            raise ValueError(
                f"num_blocks {config.num_blocks} with block_size {config.block_size} take "
                f"{config.num_blocks * block_bytes} bytes; {shape.device} has {total}"
            )
        _log_pool(shape, config, config.num_blocks)
        return config.num_blocks
    share = config.memory_utilization or DEFAULT_UTILIZATION[shape.device.type]
    if shape.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself counts as free
        free, _ = torch.cuda.mem_get_info(shape.device)
        before = torch.cuda.memory_allocated(shape.device)
        torch.cuda.reset_peak_memory_stats(shape.device)
        profile()
        peak = torch.cuda.max_memory_allocated(shape.device) - before
        torch.cuda.empty_cache()
        # Recorded graphs keep the memory of their forward, whose batch is no larger than this one.
        num_forwards = 1 if getattr(config, "enforce_eager", True) else 2
        budget = int(free * share) - num_forwards * peak
    else:
        budget = int(psutil.virtual_memory().available * share)
    useful = config.max_num_seqs * -(-config.max_model_len // config.block_size)
    num_blocks = min(useful, budget // block_bytes)
    if num_blocks < 1:
        raise ValueError(f"no memory for one block of {block_bytes} bytes: {budget} bytes left")
    logger.info(
        "%.0f %% of memory may be used: %.2f GiB for the KV cache", 100 * share, budget / 2**30
    )
    _log_pool(shape, config, num_blocks)
    return num_blocks


def _log_pool(shape: ModelShape, config: Any, num_blocks: int) -> None:
    """Say what the pool holds: tokens, and requests of the full length."""
    blocks_each = -(-config.max_model_len // config.block_size)
    logger.info(
        "KV cache: %s tokens (%d blocks of %d, %.2f GiB), %.1f requests of %s tokens",
        *(f"{num_blocks * config.block_size:,}", num_blocks, config.block_size),
        num_blocks * bytes_per_block(shape, config.block_size) / 2**30,
        *(num_blocks / blocks_each, f"{config.max_model_len:,}"),
    )


def _total_memory(device: torch.device) -> int:
    """Bytes, whether they are in use or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total
