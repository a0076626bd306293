"""Stage 01's attention behind the interface of the kernels, for machines that cannot run them.

Copies each sequence's blocks into one tensor and calls SDPA. It is as slow as stage 01.
Shapes and units are those of `paged_attention_cpu`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write rows `[T, num_kv_heads, head_dim]` into their slots; rows with slot -1 are dropped."""
    written = slots >= 0  # an index of -1 would silently hit the pool's last slot
    if not written.all():
        key, value, slots = key[written], value[written], slots[written]
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
) -> Tensor:
    """Slices of one row: `query` is `[B, num_heads, head_dim]`, and so is the result."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return _attend(query, k_cache, v_cache, block_tables, context_lens, starts, scale)


def paged_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Slices of any length: `query` is `[T, num_heads, head_dim]`, and so is the result."""
    return _attend(query, k_cache, v_cache, block_tables, context_lens, query_start_loc, scale)


def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    output = torch.zeros_like(query)
    starts = query_start_loc.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        q = query[starts[i] : starts[i + 1]]
        if context_len == 0:
            continue  # a row of padding
        blocks = block_tables[i, : -(-context_len // k_cache.shape[1])].long()
        # Up to context_len only: slots after it in the last block were never written.
        k, v = (cache[blocks].flatten(0, 1)[:context_len] for cache in (k_cache, v_cache))
        # The slice is the end of the context: its last row sees all, the row before one less.
        mask = torch.ones(len(q), context_len, dtype=torch.bool, device=q.device)
        mask = mask.tril(context_len - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        output[starts[i] : starts[i + 1]] = out[0].transpose(0, 1)
    return output
