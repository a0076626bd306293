"""Attention over the paged KV cache: write K and V, then read them in place.

Knows tensors and block tables, but no sequences and no scheduler. `transformers` calls
`paged_attention` in every layer with the `AttentionMetadata` of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from .kv_cache import KVCache

IMPLEMENTATION = __package__.replace(".", "_")  # our name in transformers' registry


@dataclass
class AttentionMetadata:
    """Where the T rows of one flattened forward are in the cache. They belong to n slices.

    Attributes:
        kv_cache: the pool that is written and read.
        slots: int64 `[T]`, where each row's key and value go; -1 writes nothing.
        query_start_loc: int32 `[n + 1]`, row offsets; slice i has the rows `[i]..[i + 1]`.
        context_lens: int32 `[n]`, tokens each slice attends to: all up to its own last one.
        block_tables: int32 `[n, max_blocks]`, padded with zeros.
        num_decodes: how many slices at the front have one row.
        max_query_len, max_context_len: at least the largest; they size the kernels' grids.
        kernels: the backend's module, see `shared.engine.backends`.
    """

    kv_cache: KVCache
    slots: Tensor
    query_start_loc: Tensor
    context_lens: Tensor
    block_tables: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    kernels: ModuleType


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
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernels, n = meta.kernels, meta.num_decodes

    # 1. Write first: a token reads itself from the cache like any other.
    kernels.store_kv(key, value, k_cache, v_cache, meta.slots)

    # 2. Nothing is gathered: the kernels read through the block tables. Slices of one row
    # come first and have a kernel of their own.
    output = torch.empty_like(query)
    if n > 0:
        output[:n] = kernels.paged_decode(
            query=query[:n], k_cache=k_cache, v_cache=v_cache, scale=scaling,
            block_tables=meta.block_tables[:n], context_lens=meta.context_lens[:n],
            max_context_len=meta.max_context_len,
        )  # fmt: skip
    if n < len(query):
        output[n:] = kernels.paged_prefill(
            query=query[n:], key=key[n:], value=value[n:], k_cache=k_cache, v_cache=v_cache,
            block_tables=meta.block_tables[n:], context_lens=meta.context_lens[n:],
            query_start_loc=meta.query_start_loc[n:] - n, max_query_len=meta.max_query_len,
            scale=scaling,
        )  # fmt: skip
    return output[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
