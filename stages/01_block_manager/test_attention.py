"""Attention through block tables against attention that never heard of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shared.engine.model_shape import ModelShape
from tests.kernels.cases import GRID, Case, assert_close, pairwise, slots_of
from tests.kernels.cases import attend as dense_attention

from .attention import AttentionMetadata, paged_attention, store_kv
from .kv_cache import KVCache


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    shape = ModelShape(
        num_layers=2,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=1000,
        vocab_size=1,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache = KVCache(shape, num_blocks, block_size)
    cache.pool.fill_(float("nan"))  # K2: what was never written must not be read
    return cache


def layer(layer_idx: int) -> nn.Module:
    """A layer as far as attention looks at it."""
    module = nn.Module()
    module.layer_idx = layer_idx  # type: ignore[assignment]
    return module


def attend(
    cache: KVCache, layer_idx: int, parts: list[tuple[int, int]], heads: tuple[int, int], dim: int
) -> tuple[Tensor, list[Tensor]]:
    """Attention of one step, and the right answers.

    Args:
        parts: (context length, query length) of each sequence; what lies before its query is in
            the cache already. A query length is 1 or the whole context, as in this stage.
        heads: query heads and KV heads.
    """
    num_heads, num_kv_heads = heads
    block_size, dtype = cache.block_size, cache.pool.dtype
    free = torch.randperm(cache.pool.shape[2]).tolist()
    starts, slots, tables, rows, answers = [0], [], [], [], []
    for context_len, query_len in parts:
        table = [free.pop() for _ in range(-(-context_len // block_size))]
        where = slots_of(torch.tensor(table), 0, context_len, block_size)
        key, value = torch.randn(2, context_len, num_kv_heads, dim).to(dtype)
        query = torch.randn(query_len, num_heads, dim).to(dtype)
        before = context_len - query_len
        store_kv(key[:before], value[:before], *cache.layer(layer_idx), where[:before])
        rows.append((query, key[before:], value[before:]))
        answers.append(dense_attention(query, key, value, dim**-0.5))
        slots.append(where[before:])
        tables.append(table)
        starts.append(starts[-1] + query_len)
    width = max(map(len, tables))
    metadata = AttentionMetadata(
        kv_cache=cache,
        slots=torch.cat(slots),
        query_start_loc=starts,
        context_lens=[context_len for context_len, _ in parts],
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
    )
    query, key, value = (torch.cat(x).transpose(0, 1)[None] for x in zip(*rows, strict=True))
    output, weights = paged_attention(
        layer(layer_idx), query, key, value, None, attn_metadata=metadata
    )
    assert weights is None and output.shape == (1, starts[-1], num_heads, dim)
    return output[0], answers


@pytest.mark.parametrize("case", pairwise(GRID), ids=str)
def test_K3_K4_a_mixed_batch(case: Case) -> None:
    """Prefills and decodes side by side, contexts around a block's end."""
    torch.manual_seed(0)
    num_kv_heads = 1 if case.group == 8 else 2
    lengths = sorted({1, 2, 2 * case.block_size - 1, *case.contexts} - {0})
    parts = [(n, n) for n in lengths if n < 1000] + [(n, 1) for n in lengths]
    num_blocks = sum(-(-n // case.block_size) for n, _ in parts) + 2
    cache = make_cache(num_blocks, case.block_size, num_kv_heads, case.head_dim, case.dtype)
    heads = (num_kv_heads * case.group, num_kv_heads)
    output, answers = attend(cache, 1, parts, heads, case.head_dim)
    assert cache.layer(0)[0].isnan().all(), "another layer's cache was written"
    for part, got, answer in zip(parts, output.split([q for _, q in parts]), answers, strict=True):
        try:
            assert_close(got, answer, case.dtype)
        except AssertionError as error:
            raise AssertionError(f"context and query of {part} tokens: {error}") from None


def test_K1_rows_are_written_to_their_slots_and_nowhere_else() -> None:
    cache = make_cache(3, 4, num_kv_heads=1, head_dim=2)
    k_cache, v_cache = cache.layer(0)
    key, value = torch.randn(2, 2, 1, 2)
    store_kv(key, value, k_cache, v_cache, torch.tensor([6, 1]))
    for rows, pool in ((key, k_cache), (value, v_cache)):
        slots = pool.flatten(0, 1)
        assert torch.equal(slots[[6, 1]], rows)
        assert slots.isnan().all(dim=(1, 2)).tolist() == [slot not in (1, 6) for slot in range(12)]


def test_a_scale_of_the_model_s_own() -> None:
    cache = make_cache(2, 4, num_kv_heads=1, head_dim=8)
    query, key, value = torch.randn(3, 1, 1, 3, 8)
    metadata = AttentionMetadata(cache, torch.arange(3), [0, 3], [3], torch.tensor([[0]]))
    output, _ = paged_attention(layer(0), query, key, value, None, 0.5, attn_metadata=metadata)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    wanted = dense_attention(*rows, scale=0.5)
    assert (output[0] - wanted).abs().max() < 1e-5
