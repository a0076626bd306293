"""Parts of the CPU kernel that only make it fast: how it is compiled, reads rows, computes exp.

Knows Numba and processors. The kernel itself, `paged_attention_cpu`, can be read without this file.
"""

from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy import float32, int32

# With its OpenMP layer, and torch imported first, Numba runs on torch's own threads. With any
# other layer it has threads of its own, which compete with torch's: those spin for milliseconds
# after each operation, on the cores that Numba's threads need.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# What the compiler may assume about floats. Sums may be reordered, or they would not be vectorised.
# NaN and infinity stay legal: the running maximum starts at minus infinity.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

CACHE = Path(__file__).parent / "__pycache__"
# Numba knows no 16-bit floats, so it gets their bits.
BITS = {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.uint16}


def jit(name, **options):
    """`numba.njit` that keeps the compiled code on disk, if its folder is writable.

    Args:
        name: of the module that compiles. Compiled code is bound to it, and a copy of the file
            under another name must not find it, so the name is part of the path.
    """

    def decorate(function):
        elsewhere, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(CACHE / name)
        try:
            return numba.njit(cache=True, fastmath=FASTMATH, **options)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return numba.njit(fastmath=FASTMATH, **options)(function)
        finally:
            numba.config.CACHE_DIR = elsewhere

    return decorate


@jit(__name__)
def exp(x):
    """e**x for x <= 0, as exact as float32. The C library's exp would prevent vectorisation."""
    y = max(x * float32(1.4426950408889634), float32(-126))  # e**x = 2**y = 2**n * e**f
    n = np.floor(y + float32(0.5))
    f = (y - n) * float32(0.6931471805599453)  # at most 0.35 in size, so a short series is enough
    series = f * float32(1 / 720) + float32(1 / 120)
    series = series * f + float32(1 / 24)
    series = series * f + float32(1 / 6)
    series = series * f + float32(1 / 2)
    series = series * f + float32(1)
    series = series * f + float32(1)
    return series * int32((int32(n) + 127) << 23).view(np.float32)


def _widen(row, scratch):
    """`row` [D] as float32. A 16-bit row comes as its bits and is widened into `scratch`."""


@overload(_widen)
def _widen_by_dtype(row, scratch):
    def from_float32(row, scratch):
        return row

    def from_bfloat16(row, scratch):  # the upper half of a float32
        for d in range(row.size):
            scratch[d] = int32(row[d] << 16).view(np.float32)
        return scratch

    def from_float16(row, scratch):  # spread the bits, then correct the exponent bias
        for d in range(row.size):
            bits = int32((row[d] & 0x8000) << 16 | (row[d] & 0x7FFF) << 13)
            scratch[d] = bits.view(np.float32) * float32(2.0**112)
        return scratch

    return {types.float32: from_float32, types.int16: from_bfloat16}.get(row.dtype, from_float16)


@intrinsic
def _fetch_line(typing_context, row, offset):
    """Prefetch the cache line at `offset` bytes of `row`, without waiting for it."""

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


@jit(__name__)
def four_rows(rows, next_rows, slot, written, kv_head, scratch):
    """Rows `slot..slot + 4` of a block for one KV head, [D] float32 each.

    Slots past the last written one are uninitialised, so the last written row takes their place.
    The same rows of the next block are prefetched: a processor predicts that the next row will be
    read, but not which block comes next in a table.
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
