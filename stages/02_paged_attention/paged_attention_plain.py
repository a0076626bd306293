"""PagedAttention in its plainest form: one sequence after another, block by block.

Knows tensors, block tables and slots, but no sequences and no models. It is slow; the other
backends compute the same and pass the same tests.

One layer's K (and likewise its V) is a pool of blocks `[num_blocks, block_size, num_kv_heads,
head_dim]`. Token `t` of a sequence is in block `block_table[t // block_size]` at offset
`t % block_size`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write rows `[T, num_kv_heads, head_dim]` into their slots; rows with slot -1 are dropped."""
    block_size = k_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = key[row]
            v_cache[slot // block_size, slot % block_size] = value[row]


# Online softmax. The output of one query is sum(e**s_t * v_t) / sum(e**s_t) over the tokens t, with
# scores s_t. To keep e**s_t from overflowing, the largest score m is subtracted from each; it
# cancels. But m is known only at the end, so keep the largest *so far* and, with it, two sums:
#     total = sum(e**(s_t - m))        acc = sum(e**(s_t - m) * v_t)
# When a block brings a larger maximum m', every term is off by the same factor, because
# e**(s_t - m') = e**(s_t - m) * e**(m - m'). So multiply both sums by e**(m - m') and go on. The
# context is read once, and nothing as long as the context is ever stored.
def attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale
) -> Tensor:
    """The Q rows of one slice, `[Q, num_heads, head_dim]`, which are the end of its context."""
    query_len, num_heads, _ = query.shape
    block_size, group = k_cache.shape[1], num_heads // k_cache.shape[2]
    positions = torch.arange(context_len - query_len, context_len, device=query.device)
    acc = torch.zeros_like(query, dtype=torch.float32)  # [Q, H, D]
    total = acc.new_zeros(query_len, num_heads, 1)
    maximum = torch.full_like(total, -torch.inf)

    for i in range(-(-context_len // block_size)):
        first, last = i * block_size, min((i + 1) * block_size, context_len)  # tokens
        block = block_table[i]  # all of PagedAttention: logical block in, physical block out
        keys = k_cache[block, : last - first].float().repeat_interleave(group, dim=1)  # [n, H, D]
        values = v_cache[block, : last - first].float().repeat_interleave(group, dim=1)

        scores = torch.einsum("qhd,nhd->qhn", query.float(), keys) * scale
        in_the_future = torch.arange(first, last, device=query.device) > positions[:, None]
        scores.masked_fill_(in_the_future[:, None], -torch.inf)  # [Q, 1, n]

        new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        rescale = torch.exp(maximum - new_maximum)
        weights = torch.exp(scores - new_maximum)
        acc = acc * rescale + torch.einsum("qhn,nhd->qhd", weights, values)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        maximum = new_maximum
    return (acc / total).to(query.dtype) if context_len else torch.zeros_like(query)


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
    starts = torch.arange(len(query) + 1)
    return paged_prefill(
        query, query, query, k_cache, v_cache, block_tables, context_lens, starts, 1, scale
    )


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
    """Slices of any length: `query` is `[T, num_heads, head_dim]`, and so is the result.

    `key` and `value` are not needed: `store_kv` has written them to the cache.
    """
    output = torch.empty_like(query)
    starts = query_start_loc.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        output[rows] = attend(query[rows], k_cache, v_cache, block_tables[i], context_len, scale)
    return output
