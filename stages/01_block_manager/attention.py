"""Attention over the paged KV cache: write, gather, attend.

Knows tensors and block tables, but no sequences and no scheduler. `transformers` calls
`paged_attention` in every layer with the `AttentionMetadata` of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from .kv_cache import KVCache

IMPLEMENTATION = __package__.replace(".", "_")  # our name in transformers' registry


@dataclass
class AttentionMetadata:
    """Where the T rows of one flattened forward are in the cache. They belong to n slices.

    Attributes:
        kv_cache: the pool that is written and read.
        slots: int64 `[T]`, where each row's key and value go.
        query_start_loc: n + 1 row offsets; slice i has the rows `[i]..[i + 1]`.
        context_lens: for each slice the tokens it attends to: all up to its own last one.
        block_tables: int64 `[n, max_blocks]`, padded with zeros.
    """

    kv_cache: KVCache
    slots: Tensor
    query_start_loc: list[int]
    context_lens: list[int]
    block_tables: Tensor


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attn_metadata: AttentionMetadata,
    **_: object,
) -> tuple[Tensor, None]:
    """One layer's attention, in the form that `transformers.AttentionInterface` asks for.

    `query` is `[1, num_heads, T, head_dim]`, `key` and `value` `[1, num_kv_heads, T, head_dim]`;
    `scaling` multiplies the scores, None is `head_dim ** -0.5`. Returns `[1, T, num_heads,
    head_dim]`, and no attention weights.
    """
    meta = attn_metadata
    k_cache, v_cache = meta.kv_cache.layer(module.layer_idx)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))

    # 1. Write first: a token reads itself from the cache like any other.
    store_kv(key, value, k_cache, v_cache, meta.slots)

    # 2. Copy each sequence's blocks into one tensor, then attend to that.
    output = torch.empty_like(query)
    for i, context_len in enumerate(meta.context_lens):
        rows = slice(meta.query_start_loc[i], meta.query_start_loc[i + 1])
        k, v = gather_kv(k_cache, v_cache, meta.block_tables[i], context_len)
        output[rows] = attend(query[rows], k, v, scaling)
    return output[None], None


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write rows `[T, num_kv_heads, head_dim]` into their slots, of which none is named twice."""
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)


def gather_kv(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int
) -> tuple[Tensor, Tensor]:
    """Copy one sequence's keys and values into `[context_len, num_kv_heads, head_dim]` each.

    Stops at `context_len`: the slots after it were never written.
    """
    blocks = block_table[: -(-context_len // k_cache.shape[1])]
    k, v = (cache.index_select(0, blocks).flatten(0, 1) for cache in (k_cache, v_cache))
    return k[:context_len], v[:context_len]


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of one sequence.

    A slice is either the whole context (prefill: causal) or its last token (decode: sees all).

    Args:
        query: `[query_len, num_heads, head_dim]`.
        key, value: `[context_len, num_kv_heads, head_dim]`.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    causal = query.shape[0] > 1
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
