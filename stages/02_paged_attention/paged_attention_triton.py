"""PagedAttention on CUDA: the kernels that store, decode and prefill, in Triton.

Knows tensors, block tables and slots. Does not know sequences, models, or who owns a block.

One layer's K (and likewise its V) is a pool of blocks `[num_blocks, block_size, num_kv_heads,
head_dim]`. Token `t` of a sequence is in block `block_table[t // block_size]` at offset
`t % block_size`. `paged_attention_plain.py` has the same algorithm in its plainest form and derives
the online softmax. Read that first.

Three rules hold in every kernel. Slots past the end of a context are not loaded. (Loading them with
a weight of 0 would not do: they may hold NaN, and 0 * NaN is NaN.) Offsets into a pool are 64-bit,
since it may have more than 2**31 elements. The grid depends on shapes and Python numbers only, so
that a CUDA graph can record the launch; a program that finds nothing to do returns.

Triton compiles a kernel anew when a pointer falls off a multiple of 16 bytes, or a number off a
multiple of 16. With the batch both change all the time for lengths, tables and strides. So these
are named below as arguments that it must not look at, and `warm_up` compiles what there is.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.engine.model_shape import ModelShape

CUDA_GRAPHS = True  # no function here waits for the device, so its launches can be recorded
LOG2E = 1.4426950408889634  # e**x = 2**(x * LOG2E); the hardware computes 2**x
MIN_SPLIT_LEN = 128  # tokens; a shorter split saves less than its merge costs
MAX_SPLITS = 64
MERGE_TILE = 16  # splits that are merged at once
NUMBERS = ["block_tables", "context_lens", "query_start_loc", "slots"]  # loaded one by one


@triton.jit(
    do_not_specialize=["key_stride_t", "key_stride_h", "value_stride_t", "value_stride_h"],
    do_not_specialize_on_alignment=NUMBERS,
)
def _store_kernel(
    key, value, k_cache, v_cache, slots,
    key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid [T]: one token's K and V, all heads, into its slot."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)  # a number
    if slot < 0:
        return
    i = tl.arange(0, PADDED)
    head, d, mask = i // HEAD_DIM, i % HEAD_DIM, i < KV_HEADS * HEAD_DIM
    from_key = key + t * key_stride_t + head * key_stride_h + d
    from_value = value + t * value_stride_t + head * value_stride_h + d
    to = slot * (KV_HEADS * HEAD_DIM) + i
    k = tl.load(from_key, mask=mask)  # [PADDED]
    v = tl.load(from_value, mask=mask)  # [PADDED]
    tl.store(k_cache + to, k, mask=mask)
    tl.store(v_cache + to, v, mask=mask)


@triton.jit
def _attend_tile(
    q, k_cache, v_cache, block_table, kv_head, first, position, end, scale, acc, maximum, total,
    MASKED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: rows q `[M, D]` attend to TILE tokens from `first` on.

    position `[M]`: of each row; it attends to all tokens up to there, one at least, here or in an
    earlier step. Tokens from `end` on are not loaded. Not MASKED: every row attends to all TILE.
    first is a multiple of TILE, scale includes LOG2E. Returns acc `[M, D]`, maximum `[M]` (of
    scores times LOG2E) and total `[M]`, brought forward.
    """
    t, d = first + tl.arange(0, TILE), tl.arange(0, D)
    if BLOCK_SIZE % TILE == 0:  # the tile lies in one block
        block = tl.load(block_table + first // BLOCK_SIZE).to(tl.int64)  # a number
    else:  # each token looks up its own
        block = tl.load(block_table + t // BLOCK_SIZE, mask=t < end, other=0).to(tl.int64)  # [TILE]
    row = ((block * BLOCK_SIZE + t % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    from_k = k_cache + row[:, None] + d[None, :]
    from_v = v_cache + row[:, None] + d[None, :]
    mask = (d < HEAD_DIM)[None, :]
    if MASKED:
        mask = mask & (t < end)[:, None]

    k = tl.load(from_k, mask=mask, other=0.0)  # [TILE, D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, TILE]
    if MASKED:
        visible = (t[None, :] <= position[:, None]) & (t < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    rescale = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    v = tl.load(from_v, mask=mask, other=0.0)  # [TILE, D]
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_maximum, total * rescale + tl.sum(weights, 1)


@triton.jit
def _split_len(context_len, num_splits, TILE: tl.constexpr, MIN_LEN: tl.constexpr):
    """Tokens in each split of a context except the last: whole tiles, and not too few."""
    return tl.cdiv(tl.maximum(tl.cdiv(context_len, num_splits), MIN_LEN), TILE) * TILE


@triton.jit(
    do_not_specialize=["query_stride_b", "query_stride_h", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=NUMBERS,
)
def _decode_kernel(
    query, k_cache, v_cache, block_tables, context_lens, out, split_maximum, split_total,
    scale, query_stride_b, query_stride_h, table_stride, num_splits,
    ONE_SPLIT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, MIN_LEN: tl.constexpr,
):  # fmt: skip
    """Grid [B, KV_HEADS, num_splits]: one sequence's query group over one split of its context.

    The group's heads are the rows of the dot, so that K and V are loaded once for all of them.
    ONE_SPLIT: out is the result, `[B, HEADS, HEAD_DIM]`, zeros where the context is empty. Else it
    is `[B, HEADS, num_splits, HEAD_DIM]`, float32 and not divided by the totals, with split_maximum
    and split_total `[B, HEADS, num_splits]` beside it, float32; nothing where a split is empty.
    """
    b, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens + b)  # a number
    split_len = _split_len(context_len, num_splits, TILE, MIN_LEN)
    start = split * split_len
    end = tl.minimum(start + split_len, context_len)
    if start >= end and not ONE_SPLIT:
        return

    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, M), tl.arange(0, D)
    head = kv_head * GROUP + m
    mask = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    from_query = query + b * query_stride_b + head[:, None] * query_stride_h + d[None, :]
    q = tl.load(from_query, mask=mask, other=0.0)  # [M, D]

    table = block_tables + b * table_stride
    position = tl.full([M], context_len - 1, tl.int32)
    acc = tl.zeros([M, D], tl.float32)
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for first in range(start, end, TILE):
        acc, maximum, total = _attend_tile(
            q, k_cache, v_cache, table, kv_head, first, position, end, scale, acc, maximum, total,
            True, KV_HEADS, BLOCK_SIZE, HEAD_DIM, D, TILE,
        )  # fmt: skip

    to = (b * HEADS + head) * num_splits + split
    if ONE_SPLIT:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(split_maximum + to, maximum, mask=m < GROUP)
        tl.store(split_total + to, total, mask=m < GROUP)
    to_out = out + to[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=NUMBERS)
def _merge_kernel(
    split_acc, split_maximum, split_total, context_lens, out, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    MIN_LEN: tl.constexpr, MERGE_TILE: tl.constexpr,
):  # fmt: skip
    """Grid [B, HEADS]: the splits of one head, each rescaled to the largest maximum, become one.

    out is `[B, HEADS, HEAD_DIM]`; zeros where the context is empty.
    """
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context_len = tl.load(context_lens + b)  # a number
    used = tl.cdiv(context_len, _split_len(context_len, num_splits, TILE, MIN_LEN))
    d = tl.arange(0, D)

    acc = tl.zeros([D], tl.float32)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, used, MERGE_TILE):
        split = first + tl.arange(0, MERGE_TILE)
        exists = split < used
        at = (b * HEADS + head) * num_splits + split
        mask = exists[:, None] & (d < HEAD_DIM)[None, :]
        from_part = split_acc + at[:, None] * HEAD_DIM + d[None, :]
        part_maximum = tl.load(split_maximum + at, mask=exists, other=float("-inf"))  # [MERGE_TILE]
        part_total = tl.load(split_total + at, mask=exists, other=0.0)  # [MERGE_TILE]
        part = tl.load(from_part, mask=mask, other=0.0)  # [MERGE_TILE, D]

        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        rescale, part_rescale = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
        acc = acc * rescale + tl.sum(part * part_rescale[:, None], 0)
        total = total * rescale + tl.sum(part_total * part_rescale, 0)
        maximum = new_maximum

    result = acc / tl.where(total > 0, total, 1.0)
    to = out + (b * HEADS + head) * HEAD_DIM + d
    tl.store(to, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(
    do_not_specialize=["query_stride_t", "query_stride_h", "table_stride"],
    do_not_specialize_on_alignment=NUMBERS,
)
def _prefill_kernel(
    query, k_cache, v_cache, block_tables, context_lens, query_start_loc, out,
    scale, query_stride_t, query_stride_h, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid [row tiles, KV_HEADS, B]: M rows of one slice over all tokens up to their own.

    A row is a query token and one head of the group, token by token: row r is token r // GROUP.
    The first programs take the last rows, which attend to most tokens, so that none of these
    starts when all others are done. Writes out `[T, HEADS, HEAD_DIM]`.
    """
    kv_head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start = tl.load(query_start_loc + b).to(tl.int64)  # a number
    query_end = tl.load(query_start_loc + b + 1).to(tl.int64)  # a number
    query_len = (query_end - query_start).to(tl.int32)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.cdiv(query_len * GROUP, M) - 1 - tl.program_id(0)
    if tile < 0:
        return

    row, d = tile * M + tl.arange(0, M), tl.arange(0, D)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    mask = (token < query_len)[:, None] & (d < HEAD_DIM)[None, :]
    from_rows = (query_start + token) * query_stride_t + head * query_stride_h
    from_query = query + from_rows[:, None] + d[None, :]
    q = tl.load(from_query, mask=mask, other=0.0)  # [M, D]

    # A slice is the end of its context: that gives the position of each row, and the mask.
    start_pos = tl.load(context_lens + b) - query_len  # a number
    position = start_pos + token
    last_token = tl.minimum((tile * M + M - 1) // GROUP, query_len - 1)
    end = start_pos + last_token + 1
    full = (start_pos + tile * M // GROUP + 1) // TILE * TILE  # up to the first row's own token

    table = block_tables + b * table_stride
    acc = tl.zeros([M, D], tl.float32)
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for first in range(0, full, TILE):  # before the diagonal: every row attends to all
        acc, maximum, total = _attend_tile(
            q, k_cache, v_cache, table, kv_head, first, position, end, scale, acc, maximum, total,
            False, KV_HEADS, BLOCK_SIZE, HEAD_DIM, D, TILE,
        )  # fmt: skip
    for first in range(full, end, TILE):  # on the diagonal
        acc, maximum, total = _attend_tile(
            q, k_cache, v_cache, table, kv_head, first, position, end, scale, acc, maximum, total,
            True, KV_HEADS, BLOCK_SIZE, HEAD_DIM, D, TILE,
        )  # fmt: skip

    result = acc / total[:, None]
    to = ((query_start + token) * HEADS + head) * HEAD_DIM
    to_out = out + to[:, None] + d[None, :]
    tl.store(to_out, result.to(out.dtype.element_ty), mask=mask)


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write the K and V of T tokens, `[T, KVH, D]` each, into their slots of the caches.

    Args:
        key, value: the last dimension contiguous.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`, contiguous.
        slots: int64 `[T]`, `block * block_size + offset`. A slot of -1 (padding) writes nothing.
    """
    _check(key, k_cache, v_cache)
    num_kv_heads, head_dim = k_cache.shape[2:]
    _store_kernel[(len(key),)](
        key, value, k_cache, v_cache, slots,
        *key.stride()[:2], *value.stride()[:2],
        KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(num_kv_heads * head_dim),
    )  # fmt: skip


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one token per sequence over the whole of its context, read block by block.

    Args:
        query: `[B, H, D]`, dtype of the caches, last dimension contiguous. KV head h serves the
            heads from `h * H // KVH`.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`, contiguous; float16, bfloat16 or
            float32. Sums are float32 in any case.
        block_tables: int32 `[B, max_blocks]`. Entries behind the context are not read.
        context_lens: int32 `[B]`, tokens in the cache, this one included; 0 in a padding row.
        max_context_len: at least the largest of context_lens; with the batch it sets the grid.
        scale: factor on the scores, usually `D ** -0.5`.
        num_splits: into how many parts to split each context; None: enough to fill the chip.

    Returns:
        `[B, H, D]` in the query's dtype, zeros in padding rows.

    Source: Kwon et al. 2023, PagedAttention; the splits: Dao et al. 2023, Flash-Decoding.
    """
    _check(query, k_cache, v_cache)
    batch, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if num_splits is None:
        num_splits = choose_num_splits(
            batch * num_kv_heads, max_context_len, _num_processors(query.device)
        )
    config = decode_config(num_heads // num_kv_heads, head_dim, query.dtype, _arch(query.device))
    same = {key: config[key] for key in ("D", "TILE", "MIN_LEN")}

    out = query.new_empty(batch, num_heads, head_dim)
    splits = (batch, num_heads, num_splits)
    if one_split := num_splits == 1:  # nothing to merge
        acc = maximum = total = out
    else:
        acc = query.new_empty(*splits, head_dim, dtype=torch.float32)
        maximum, total = query.new_empty(2, *splits, dtype=torch.float32)
    _decode_kernel[(batch, num_kv_heads, num_splits)](
        query, k_cache, v_cache, block_tables, context_lens, acc, maximum, total,
        scale * LOG2E, *query.stride()[:2], block_tables.stride(0), num_splits,
        ONE_SPLIT=one_split, HEADS=num_heads, KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, **config,
    )  # fmt: skip
    if not one_split:
        _merge_kernel[(batch, num_heads)](
            acc, maximum, total, context_lens, out, num_splits,
            HEADS=num_heads, HEAD_DIM=head_dim, MERGE_TILE=MERGE_TILE, **same,
        )  # fmt: skip
    return out


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
    is_small: bool | None = None,
) -> Tensor:
    """Attention of slices of sequences, causal: each token to all up to itself, by block table.

    Args:
        query: `[T, H, D]`, the slices one after another; last dimension contiguous.
        key, value: unused here; `store_kv` has put them where the kernel reads them.
        k_cache, v_cache: `[num_blocks, block_size, KVH, D]`, contiguous, the slices included.
        block_tables: int32 `[B, max_blocks]`.
        context_lens: int32 `[B]`, tokens in the cache, the slice included. A slice starts at
            position `context_len - query_len`.
        query_start_loc: int32 `[B + 1]`, slice i has the rows `[i]..[i + 1]`.
        max_query_len: at least the longest slice; with the batch it sets the grid.
        scale: factor on the scores.
        is_small: whether a program takes few rows; None: if the chip would be idle otherwise.

    Returns:
        `[T, H, D]`.
    """
    _check(query, k_cache, v_cache)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    config = prefill_config(head_dim, query.dtype, _arch(query.device))
    if is_small is None:
        programs = triton.cdiv(max_query_len * group, config["M"]) * num_kv_heads
        is_small = programs * len(context_lens) < _num_processors(query.device)
    if is_small:
        config |= small(config)
    out = query.new_empty(query.shape)
    grid = (triton.cdiv(max_query_len * group, config["M"]), num_kv_heads, len(context_lens))
    _prefill_kernel[grid](
        query, k_cache, v_cache, block_tables, context_lens, query_start_loc, out,
        scale * LOG2E, *query.stride()[:2], block_tables.stride(0),
        HEADS=num_heads, KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim,
        **config,
    )  # fmt: skip
    return out


def warm_up(shape: ModelShape, block_size: int) -> None:
    """Compile all kernels that this model will need: seconds each, so not while requests wait."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    like: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    query, key = torch.zeros(1, heads, dim, **like), torch.zeros(1, kv_heads, dim, **like)
    k_cache, v_cache = torch.zeros(2, 1, block_size, kv_heads, dim, **like)
    table = torch.zeros(1, 1, dtype=torch.int32, device=shape.device)
    lens = torch.ones(1, dtype=torch.int32, device=shape.device)
    starts = torch.arange(2, dtype=torch.int32, device=shape.device)
    store_kv(key, key, k_cache, v_cache, torch.zeros(1, dtype=torch.long, device=shape.device))
    for num_splits in (1, 2):
        paged_decode(query, k_cache, v_cache, table, lens, 1, 1.0, num_splits)
    for is_small in (False, True):
        paged_prefill(query, key, key, k_cache, v_cache, table, lens, starts, 1, 1.0, is_small)


def choose_num_splits(programs: int, max_context_len: int, num_processors: int) -> int:
    """Splits per context, so that `programs` times as many are a few for each processor."""
    useful = triton.cdiv(max_context_len, MIN_SPLIT_LEN)
    return max(1, min(triton.cdiv(4 * num_processors, programs), useful, MAX_SPLITS))


def decode_config(group: int, head_dim: int, dtype: torch.dtype, arch: int) -> dict[str, int]:
    """Tile sizes and launch options of `_decode_kernel`. Fixed: nothing is tuned at run time.

    Args:
        arch: compute capability, 90 for sm_90.
    """
    d = _padded(head_dim)
    most = 64 if arch >= 80 else 32  # without tensor cores a larger tile spills registers
    return {
        "D": d,
        "M": _padded(group),
        "TILE": max(16, min(most, 8192 // (d * dtype.itemsize))),  # 8 KiB of K, as much of V
        "MIN_LEN": MIN_SPLIT_LEN,
        "num_warps": 4,
        # Loading a tile of K waits for a load from the block table. To have two tiles in flight,
        # the compiler needs twice the stages. Before sm_80 it cannot overlap them.
        "num_stages": 5 if arch >= 80 else 1,
    }


def prefill_config(head_dim: int, dtype: torch.dtype, arch: int) -> dict[str, int]:
    """The same for `_prefill_kernel`, as large as registers allow without spilling much."""
    d = _padded(head_dim)
    if arch >= 80 and dtype.itemsize == 2:  # tensor cores
        m, tile, num_warps = (128, 64, 8) if d <= 64 else (128, 32, 8) if d == 128 else (64, 32, 8)
        return {"D": d, "M": m, "TILE": tile, "num_warps": num_warps, "num_stages": 3}
    # Exact float32 cannot use them, and Triton has none before sm_80: on a T4 a prefill is
    # right, but slower than the chip could be. A decode waits for memory anyhow.
    m, tile, num_warps = (32, 32, 4) if d <= 64 else (16, 32, 4) if d == 128 else (16, 16, 4)
    return {"D": d, "M": m, "TILE": tile, "num_warps": num_warps, "num_stages": 2}


def small(config: dict[str, int]) -> dict[str, int]:
    """What changes in a `prefill_config` for programs of few rows, of which there are more."""
    return {"M": min(32, config["M"]), "num_warps": min(4, config["num_warps"])}


def _padded(size: int) -> int:
    """The next size that a dot can have: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def _check(rows: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse what the kernels would misread. rows is query, key or value `[T, heads, D]`."""
    dtypes = (rows.dtype, k_cache.dtype, v_cache.dtype)
    if len({*dtypes}) > 1 or rows.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"rows, k_cache and v_cache must be of one dtype, 16 or 32 bits: {dtypes}")
    shapes = [tuple(x.shape) for x in (rows, k_cache, v_cache)]
    heads, dim = rows.shape[1:]
    if k_cache.shape != v_cache.shape or dim != k_cache.shape[3] or heads % k_cache.shape[2]:
        raise ValueError(f"rows, k_cache and v_cache do not fit together: {shapes}")
    if dim > 256:
        raise ValueError(f"head_dim is {dim}, at most 256 is supported")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and rows.stride(2) == 1):
        raise ValueError("k_cache, v_cache and the last dimension of the rows must be contiguous")


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; a few for the interpreter, which has no device."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _arch(device: torch.device) -> int:
    """Compute capability, 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor
