"""PagedAttention on the CPU, fast: decode as loops compiled by Numba, prefill by torch's SDPA.

Knows tensors, block tables and slots, but no sequences and no models. Read
`paged_attention_plain` first: it computes the same. Here one sequence may be split among workers,
and `_attend` takes four tokens at a time.
"""

import functools
import logging
import threading

import numba
import numpy as np
import torch
from numpy import float32
from torch import Tensor

from shared.engine.model_shape import ModelShape

from .paged_attention_simd import BITS, CACHE, exp, four_rows, jit

logger = logging.getLogger(__name__)
PREFILL_PIECE = 2048  # earlier tokens gathered at a time, which bounds the memory needed


# The online softmax of `paged_attention_plain`, with loops over heads and dimensions. The division
# by `total` is left to `_merge`, because this may be only a part of the context.
@jit(__name__)
def _attend(query, k_cache, v_cache, block_table, blocks, context_len, scale, sums):
    """All heads of one sequence attend to its logical blocks `range(*blocks)`.

    query [H, D] float32. Fills `sums`: acc [H, D], maximum [H] and total [H], as above.
    """
    acc, maximum, total = sums
    num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads  # query heads that share a KV head
    weights = np.empty((num_heads, block_size + 3), np.float32)
    scratch = np.empty((4, head_dim), np.float32)
    acc[:], maximum[:], total[:] = 0, -np.inf, 0

    for i in range(blocks[0], blocks[1]):
        keys, values = k_cache[block_table[i]], v_cache[block_table[i]]
        ahead = block_table[min(i + 1, blocks[1] - 1)]
        next_keys, next_values = k_cache[ahead], v_cache[ahead]
        written = min(block_size, context_len - i * block_size)  # slots that hold its tokens

        # 1. Scores, four tokens at a time with all their heads: in the order of memory, which the
        #    processor prefetches, and with each query loaded once for four keys.
        for slot in range(0, written, 4):
            for kv_head in range(num_kv_heads):
                k0, k1, k2, k3 = four_rows(keys, next_keys, slot, written, kv_head, scratch)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    s0 = s1 = s2 = s3 = float32(0)
                    for d in range(head_dim):
                        s0 += query[head, d] * k0[d]
                        s1 += query[head, d] * k1[d]
                        s2 += query[head, d] * k2[d]
                        s3 += query[head, d] * k3[d]
                    weights[head, slot] = s0 * scale
                    weights[head, slot + 1] = s1 * scale
                    weights[head, slot + 2] = s2 * scale
                    weights[head, slot + 3] = s3 * scale

        # 2. Scores become weights; the sums so far are rescaled to the new maximum.
        for head in range(num_heads):
            new_maximum = max(maximum[head], weights[head, :written].max())
            rescale = np.exp(maximum[head] - new_maximum)
            maximum[head] = new_maximum
            total[head] *= rescale
            for d in range(head_dim):
                acc[head, d] *= rescale
            block_total = float32(0)
            for slot in range(written):
                weights[head, slot] = exp(weights[head, slot] - new_maximum)
                block_total += weights[head, slot]
            total[head] += block_total
            for slot in range(written, written + 3):  # these rows were read twice
                weights[head, slot] = 0

        # 3. Values, likewise: one pass over `acc` for four tokens.
        for slot in range(0, written, 4):
            for kv_head in range(num_kv_heads):
                v0, v1, v2, v3 = four_rows(values, next_values, slot, written, kv_head, scratch)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    w0, w1 = weights[head, slot], weights[head, slot + 1]
                    w2, w3 = weights[head, slot + 2], weights[head, slot + 3]
                    for d in range(head_dim):
                        acc[head, d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@jit(__name__)
def _merge(acc, maximum, total, out):
    """Join the sums over parts of one context: [parts, H, D], [parts, H] twice -> out [H, D].

    With no parts the output is zero. The factor that rescales a sum to a larger maximum also joins
    sums that have different maxima.
    """
    parts, num_heads, head_dim = acc.shape
    out[:] = 0
    if parts == 0:
        return
    for head in range(num_heads):
        peak = maximum[:, head].max()
        whole = float32(0)
        for part in range(parts):
            rescale = np.exp(maximum[part, head] - peak)
            whole += total[part, head] * rescale
            for d in range(head_dim):
                out[head, d] += acc[part, head, d] * rescale
        for d in range(head_dim):
            out[head, d] /= whole


@jit(__name__)
def _cut_evenly(context_lens, block_size, num_threads):
    """Put the blocks of all sequences in a row and cut it into one equal range per worker.

    sequence   |     0     |           1           |     2     |
    worker     |       0       |       1       |       2       |
    part       |     0     | 1 |       2       | 3 |     4     |

    A worker's share of one sequence is a part, numbered `worker + sequence`. Along the row each bar
    raises one of the two, so all numbers differ, and those of a sequence are consecutive.

    Returns where each sequence starts in the row, [B + 1], and each worker, [workers + 1].
    """
    starts = np.zeros(context_lens.size + 1, np.int64)
    for b in range(context_lens.size):
        starts[b + 1] = starts[b] + (context_lens[b] + block_size - 1) // block_size
    workers = max(1, min(num_threads, starts[-1]))  # none without a block
    return starts, np.arange(workers + 1) * starts[-1] // workers


@jit(__name__)
def _fit(query, k_cache, v_cache, block_tables, context_lens):
    """Whether shapes and contexts agree. Compiled, because it would be too slow in Python."""
    batch, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    if k_cache.shape != v_cache.shape or head_dim != cache_dim or num_heads % num_kv_heads:
        return False
    if context_lens.size != batch or block_tables.shape[0] != batch:
        return False
    return batch == 0 or context_lens.max() <= block_tables.shape[1] * block_size


@jit(__name__, parallel=True)
def _decode(query, k_cache, v_cache, block_tables, context_lens, scale, num_threads, out):
    """`paged_decode` on arrays: query [B, H, D] float32, out the same, to be filled.

    Returns False, with nothing done, if the arguments do not fit together.
    """
    if not _fit(query, k_cache, v_cache, block_tables, context_lens):
        return False
    batch, num_heads, head_dim = query.shape
    starts, cuts = _cut_evenly(context_lens, k_cache.shape[1], num_threads)
    workers = cuts.size - 1
    acc = np.empty((workers + batch, num_heads, head_dim), np.float32)
    maximum = np.empty((workers + batch, num_heads), np.float32)
    total = np.empty((workers + batch, num_heads), np.float32)

    for worker in numba.prange(workers):
        for b in range(batch):
            first, last = max(cuts[worker], starts[b]), min(cuts[worker + 1], starts[b + 1])
            if first < last:
                part = worker + b
                sums = acc[part], maximum[part], total[part]
                blocks, block_table = (first - starts[b], last - starts[b]), block_tables[b]
                context_len = context_lens[b]
                _attend(query[b], k_cache, v_cache, block_table, blocks, context_len, scale, sums)

    for b in range(batch):
        first, last = b, b
        if context_lens[b] > 0:
            first += np.searchsorted(cuts, starts[b], "right") - 1
            last += np.searchsorted(cuts, starts[b + 1], "left")
        _merge(acc[first:last], maximum[first:last], total[first:last], out[b])
    return True


@functools.lru_cache(maxsize=1)  # asking Numba each time would be slower
def _use_threads(torch_threads: int, python_thread: int) -> int:
    """Let Numba use as many threads as torch, if it has that many; return the number.

    Numba keeps one number for each Python thread.
    """
    num_threads = min(torch_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    torch.set_num_threads(torch_threads)  # which the first call above may have changed
    return num_threads


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
) -> Tensor:
    """Attention of one token per sequence over the whole of its context, read block by block.

    Args:
        query: `[B, H, D]`, dtype of the caches. KV head h serves the heads from `h * H // KVH`.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`, contiguous, in float32, bfloat16
            or float16. Sums are float32 in any case.
        block_tables: int32 `[B, max_blocks]`. Entries past the context are not read; the others
            are trusted to be blocks of the pool.
        context_lens: int32 `[B]`, tokens in the cache, this one included; 0 in a padding row.
        max_context_len: unused here; sizes the grid of the CUDA kernel, which is called alike.
        scale: factor on the scores, usually `D ** -0.5`.

    Returns:
        `[B, H, D]` in the query's dtype, zeros in padding rows.

    Source: Kwon et al. 2023, PagedAttention; the split of one context among workers: Dao et al.
    2023, Flash-Decoding.
    """
    if k_cache.dtype not in BITS or not query.dtype == k_cache.dtype == v_cache.dtype:
        dtypes = f"{query.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        raise TypeError(f"query, k_cache and v_cache must be of one dtype of {[*BITS]}: {dtypes}")
    num_threads = _use_threads(torch.get_num_threads(), threading.get_ident())
    bits, rows = BITS[query.dtype], query.float().contiguous()
    out = torch.empty_like(rows)
    fits = _decode(
        *(rows.numpy(), *((x.view(bits) if bits else x).numpy() for x in (k_cache, v_cache))),
        *(block_tables.numpy(), context_lens.numpy(), np.float32(scale), num_threads, out.numpy()),
    )
    if not fits:
        shapes = [tuple(x.shape) for x in (query, k_cache, v_cache, block_tables, context_lens)]
        raise ValueError(
            "query, k_cache, v_cache, block_tables and context_lens do not fit together: "
            f"shapes {shapes}, longest context {max(context_lens.tolist(), default=0)}"
        )
    return out.to(query.dtype)


def warm_up(shape: ModelShape, block_size: int) -> None:
    """Compile what the first decode would otherwise wait for. Later starts load it from disk."""
    if not (CACHE / __name__).exists():
        logger.info("compiling the attention kernels for this machine, once")
    query, cache = (torch.zeros(*size, dtype=shape.dtype) for size in ((1, 1, 8), (1, 1, 1, 8)))
    one = torch.ones(1, dtype=torch.int32)
    paged_decode(query, cache, cache, torch.zeros(1, 1, dtype=torch.int32), one, 1, 1.0)


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
    """Attention of slices: causal among their own tokens, and to all earlier ones.

    Args:
        query: `[T, H, D]`, the slices one after another.
        key, value: `[T, KVH, D]` of the same tokens.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`; read before the slices only.
        block_tables: int32 `[B, max_blocks]`.
        context_lens: int32 `[B]`, tokens in the cache, the slice included. A slice starts at
            position `context_len - query_len`.
        query_start_loc: int32 `[B + 1]`, slice i has the rows `[i]..[i + 1]`.
        max_query_len: unused here; sizes the grid of the CUDA kernel, which is called alike.
        scale: factor on the scores.

    Returns:
        `[T, H, D]`. The copies take memory for `PREFILL_PIECE` tokens, however long the context.
    """
    block_size = k_cache.shape[1]
    piece = max(1, PREFILL_PIECE // block_size) * block_size  # whole blocks
    out = torch.empty_like(query)
    bounds = query_start_loc.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        start_pos = context_len - (rows.stop - rows.start)
        if start_pos < 0:
            raise ValueError(f"slice {i}: {context_len - start_pos} rows, context {context_len}")
        if rows.start == rows.stop:
            continue
        result, lse = _sdpa(query[rows], key[rows], value[rows], scale, causal=True)
        for first in range(0, start_pos, piece):
            last = min(first + piece, start_pos)
            blocks = block_tables[i, first // block_size : -(-last // block_size)]
            k, v = (cache.index_select(0, blocks).flatten(0, 1) for cache in (k_cache, v_cache))
            earlier, earlier_lse = _sdpa(query[rows], k[: last - first], v[: last - first], scale)
            # Each was divided by its own sum, e**lse. Weight each by its share of both sums.
            part = torch.sigmoid(earlier_lse - lse)[..., None]
            result = torch.lerp(result.to(part.dtype), earlier.to(part.dtype), part)
            lse = torch.logaddexp(lse, earlier_lse)
        out[rows] = result
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False):
    """Dense attention of `[T, H, D]` to `[S, KVH, D]`: the output, and its log-sum-exp `[T, H]`.

    Calls what torch's scaled_dot_product_attention calls on a CPU, because that does not return
    the log-sum-exp. K and V are not repeated for the group: it is a dimension of stride 0.
    """
    num_kv_heads = key.shape[1]
    q = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [KVH, group, T, D]
    k, v = (x.transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write the K and V of T tokens, `[T, KVH, D]` each, into their slots of the caches.

    Args:
        slots: int64 `[T]`, `block * block_size + offset`. A slot of -1 (padding) writes nothing.
    """
    written = slots >= 0  # torch would take -1 for the pool's last slot
    if not written.all():
        key, value, slots = key[written], value[written], slots[written]
    for cache, rows in (k_cache, key), (v_cache, value):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
