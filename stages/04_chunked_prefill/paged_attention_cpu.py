"""PagedAttention on the CPU: decode as plain loops (Numba), prefill and store with torch.

Knows tensors, block tables and slots. Does not know sequences, models, or who owns a block.

One layer's K (and likewise its V) is a pool of blocks `[num_blocks, block_size, num_kv_heads,
head_dim]`. Token `t` of a sequence lies in block `block_table[t // block_size]` at offset
`t % block_size`. Decode reads it there; `_attend` below is the whole idea.
"""

import functools
import logging
import threading
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy import float32, int32
from torch import Tensor

# With its OpenMP layer, and torch imported first, Numba runs on torch's own threads. With any
# other layer it has threads besides, and the two fight: torch's spin for milliseconds after each
# operation, on the cores that Numba's want.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# What the compiler may assume of floats. Sums may be reordered, or they would not be vectorised.
# NaN and infinity stay legal: the running maximum starts at minus infinity.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

logger = logging.getLogger(__name__)
CACHE = Path(__file__).parent / "__pycache__"
# Numba knows no 16-bit floats, so it gets their bits.
BITS = {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.uint16}
PREFILL_PIECE = 2048  # tokens: so many earlier ones are gathered at a time, which bounds memory


def _jit(**options):
    """`numba.njit` that keeps what it compiled on disk, if any folder for that is writable.

    What is kept is bound to this module's name. A copy of the file, or this one imported by another
    name, must not find it, so the name is part of the path.
    """

    def decorate(function):
        elsewhere, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(CACHE / __name__)
        try:
            return numba.njit(cache=True, fastmath=FASTMATH, **options)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return numba.njit(fastmath=FASTMATH, **options)(function)
        finally:
            numba.config.CACHE_DIR = elsewhere

    return decorate


@_jit()
def _exp(x):
    """e**x for x <= 0, as exact as float32 is. The C library's exp would stop vectorisation."""
    y = max(x * float32(1.4426950408889634), float32(-126))  # e**x = 2**y = 2**n * e**f
    n = np.floor(y + float32(0.5))
    f = (y - n) * float32(0.6931471805599453)  # at most 0.35 in size, so a short series will do
    series = f * float32(1 / 720) + float32(1 / 120)
    series = series * f + float32(1 / 24)
    series = series * f + float32(1 / 6)
    series = series * f + float32(1 / 2)
    series = series * f + float32(1)
    series = series * f + float32(1)
    return series * int32((int32(n) + 127) << 23).view(np.float32)


def _widen(row, scratch):
    """`row` [D] as float32. A 16-bit row comes as bare bits, and is widened into `scratch`."""


@overload(_widen)
def _widen_by_dtype(row, scratch):
    def from_float32(row, scratch):
        return row

    def from_bfloat16(row, scratch):  # the upper half of a float32
        for d in range(row.size):
            scratch[d] = int32(row[d] << 16).view(np.float32)
        return scratch

    def from_float16(row, scratch):  # spread the bits, then make up for the smaller exponent bias
        for d in range(row.size):
            bits = int32((row[d] & 0x8000) << 16 | (row[d] & 0x7FFF) << 13)
            scratch[d] = bits.view(np.float32) * float32(2.0**112)
        return scratch

    return {types.float32: from_float32, types.int16: from_bfloat16}.get(row.dtype, from_float16)


@intrinsic
def _fetch_line(typing_context, row, offset):
    """Ask memory for the cache line at `offset` bytes of `row`; nobody waits for it."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        start = builder.bitcast(
            context.make_array(row)(context, builder, arguments[0]).data, pointer
        )
        signature = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature)
        reading, second_level, data = number(0), number(2), number(1)
        builder.call(prefetch, [builder.gep(start, [arguments[1]]), reading, second_level, data])
        return context.get_dummy_value()

    return types.void(row, types.intp), generate


@_jit()
def _four(rows, next_rows, slot, written, kv_head, scratch):
    """Rows `slot .. slot + 4` of a block for one KV head, [D] float32 each.

    Behind the last written slot lies what nobody wrote, so the last row stands in for it. The same
    rows of the next block are asked for on the way: a processor foresees the next row, but not
    where a block table goes on.
    """
    last = written - 1
    s0, s1, s2, s3 = slot, min(slot + 1, last), min(slot + 2, last), min(slot + 3, last)
    for s in (s0, s1, s2, s3):
        row = next_rows[s, kv_head]
        for offset in range(0, row.size * row.itemsize, 64):
            _fetch_line(row, offset)
    return (
        _widen(rows[s0, kv_head], scratch[0]),
        _widen(rows[s1, kv_head], scratch[1]),
        _widen(rows[s2, kv_head], scratch[2]),
        _widen(rows[s3, kv_head], scratch[3]),
    )


# Online softmax. One query head's output is sum(e**s_t * v_t) / sum(e**s_t) over the tokens t, with
# scores s_t. So that no e**s_t overflows, the largest score m is taken off each; it cancels. But m
# is known only at the end. So keep the largest *so far*, and with it two sums:
#     total = sum(e**(s_t - m))        acc = sum(e**(s_t - m) * v_t)
# When a block brings a larger one, m', all terms are off by one and the same factor, since
# e**(s_t - m') = e**(s_t - m) * e**(m - m'). So multiply both sums by e**(m - m') and go on. At
# the end the output is acc / total. The context is read once, and nothing as long as it is stored.
# The same factor joins sums over two parts of a context: that is `_merge`.
@_jit()
def _attend(query, k_cache, v_cache, block_table, blocks, context_len, scale, sums):
    """All heads of one sequence attend to its logical blocks `range(*blocks)`.

    query [H, D] float32. Fills `sums`: acc [H, D], maximum [H] and total [H], as above.
    """
    acc, maximum, total = sums
    num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads  # so many query heads share a KV head
    weights = np.empty((num_heads, block_size + 3), np.float32)
    scratch = np.empty((4, head_dim), np.float32)
    acc[:], maximum[:], total[:] = 0, -np.inf, 0

    for i in range(blocks[0], blocks[1]):
        keys, values = k_cache[block_table[i]], v_cache[block_table[i]]
        ahead = block_table[min(i + 1, blocks[1] - 1)]
        next_keys, next_values = k_cache[ahead], v_cache[ahead]
        written = min(block_size, context_len - i * block_size)  # slots that hold a token of ours

        # 1. Scores, four tokens at a time with all their heads: in the order of memory, which the
        #    processor prefetches, and with each query loaded once for four keys.
        for slot in range(0, written, 4):
            for kv_head in range(num_kv_heads):
                k0, k1, k2, k3 = _four(keys, next_keys, slot, written, kv_head, scratch)
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
                weights[head, slot] = _exp(weights[head, slot] - new_maximum)
                block_total += weights[head, slot]
            total[head] += block_total
            for slot in range(written, written + 3):  # where the last row stands in
                weights[head, slot] = 0

        # 3. Values, likewise: one pass over `acc` for four tokens.
        for slot in range(0, written, 4):
            for kv_head in range(num_kv_heads):
                v0, v1, v2, v3 = _four(values, next_values, slot, written, kv_head, scratch)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    w0, w1 = weights[head, slot], weights[head, slot + 1]
                    w2, w3 = weights[head, slot + 2], weights[head, slot + 3]
                    for d in range(head_dim):
                        acc[head, d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@_jit()
def _merge(acc, maximum, total, out):
    """Join the sums over parts of one context: [parts, H, D], [parts, H] twice -> out [H, D].

    Of no part the output is 0.
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


@_jit()
def _cut_evenly(context_lens, block_size, num_threads):
    """Lay the blocks of all sequences in a row and cut it into one equal range per worker.

    sequence   |     0     |           1           |     2     |
    worker     |       0       |       1       |       2       |
    part       |     0     | 1 |       2       | 3 |     4     |

    A worker's share of one sequence is a part. Its number is `worker + sequence`: along the row
    each bar raises one of the two, so no number comes twice, and a sequence's are consecutive.

    Returns where each sequence starts in the row, [B + 1], and each worker, [workers + 1].
    """
    starts = np.zeros(context_lens.size + 1, np.int64)
    for b in range(context_lens.size):
        starts[b + 1] = starts[b] + (context_lens[b] + block_size - 1) // block_size
    workers = max(1, min(num_threads, starts[-1]))  # none without a block
    return starts, np.arange(workers + 1) * starts[-1] // workers


@_jit()
def _fit(query, k_cache, v_cache, block_tables, context_lens):
    """Whether shapes and contexts agree. Python would take longer to ask than we to answer."""
    batch, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    if k_cache.shape != v_cache.shape or head_dim != cache_dim or num_heads % num_kv_heads:
        return False
    if context_lens.size != batch or block_tables.shape[0] != batch:
        return False
    return batch == 0 or context_lens.max() <= block_tables.shape[1] * block_size


@_jit(parallel=True)
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


@functools.lru_cache(maxsize=1)  # to remember is faster than to ask
def _use_threads(torch_threads: int, python_thread: int) -> int:
    """Let Numba use as many threads as torch does, if it has them; how many that are.

    Numba keeps the number for each thread of Python.
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
        block_tables: int32 `[B, max_blocks]`. Entries behind the context are not read; those
            before its end are trusted to be blocks of the pool.
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


def warm_up(dtype: torch.dtype) -> None:
    """Compile now what a first decode would wait for; later starts find it on disk."""
    if not (CACHE / __name__).exists():
        logger.info("compiling the attention kernels for this machine, once")
    query, cache = torch.zeros(1, 1, 8, dtype=dtype), torch.zeros(1, 1, 1, 8, dtype=dtype)
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
    """Attention of slices of sequences: causal among their own tokens, and to all earlier ones.

    Args:
        query: `[T, H, D]`, the slices one after another.
        key, value: `[T, KVH, D]` of the same tokens.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`; read before the slices only.
        block_tables: int32 `[B, max_blocks]`.
        context_lens: int32 `[B]`, tokens in the cache, the slice included. A slice starts at
            position `context_len - query_len`.
        query_start_loc: int32 `[B + 1]`, slice i has the rows `[i] .. [i + 1]`.
        max_query_len: unused here; sizes the grid of the CUDA kernel, which is called alike.
        scale: factor on the scores.

    Returns:
        `[T, H, D]`. Memory besides is bounded by `PREFILL_PIECE` tokens, however long the context.
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
            # Both were divided by their own sum, e**lse. Weigh them by their part of the whole.
            part = torch.sigmoid(earlier_lse - lse)[..., None]
            result = torch.lerp(result.to(part.dtype), earlier.to(part.dtype), part)
            lse = torch.logaddexp(lse, earlier_lse)
        out[rows] = result
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False):
    """Dense attention of `[T, H, D]` to `[S, KVH, D]`: the output, and its log-sum-exp `[T, H]`.

    Calls what torch's scaled_dot_product_attention runs on a CPU: that keeps the log-sum-exp to
    itself. No mask is made, and no K or V repeated: the group is a dimension of stride 0.
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
