"""The Triton kernels, against dense attention in float64.

Not collected by itself: stage tests run this file in a process of its own, since Triton decides at
import whether kernels are compiled or interpreted. TRITON_KERNELS names the file with the kernels;
with TRITON_INTERPRET=1 they run on the CPU, over a small part of the grid, else on the GPU, over
all of it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cases import (
    DTYPES,
    GRID,
    PLAIN,
    Case,
    Problem,
    assert_close,
    check_decode,
    check_prefill,
    decode,
    load,
    make_problem,
    one_by_one,
    pairwise,
    prefill,
    slots_of,
)
from tests.kernels.every_backend import *  # noqa: F403
from tests.kernels.every_backend import must_notice

SOURCE = Path(os.environ.get("TRITON_KERNELS", ""))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return load(SOURCE)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(scope="module", autouse=True)
def interpreted_dot_of_bfloat16() -> None:
    """The interpreter keeps bfloat16 as bare bits, and its dot multiplies these. Widen them."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.data.dtype != np.uint16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def problem_of(case: Case, contexts: list[int], query_lens: list[int], **options) -> Problem:
    return make_problem(case, contexts, query_lens, device=DEVICE, **options)


@pytest.mark.parametrize("case", pairwise(GRID) if INTERPRETED else GRID, ids=str)
def test_k3_grid(kernels: ModuleType, case: Case) -> None:
    check_decode(kernels, case, DEVICE, num_splits=3)
    check_prefill(kernels, case, DEVICE)


def test_small_part_of_the_grid_has_all_pairs() -> None:
    small = pairwise(GRID)
    assert len(small) < 30
    for i in range(4):
        for j in range(i):
            assert {(c[i], c[j]) for c in small} == {(c[i], c[j]) for c in GRID}


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64, None])
def test_any_number_of_splits(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, num_splits: int | None
) -> None:
    """Down to one tile per split: more splits than the merge takes at once, and empty ones."""
    monkeypatch.setattr(kernels, "MIN_SPLIT_LEN", 1)
    case = PLAIN
    tile = kernels.decode_config(case.group, case.head_dim, case.dtype, 80)["TILE"]
    assert 700 // tile > kernels.MERGE_TILE
    problem = problem_of(case, [700, 0, 1, 33], [1] * 4)
    assert_close(decode(kernels, problem, num_splits=num_splits), problem.answer, case.dtype)


def test_splits_fill_the_chip(kernels: ModuleType) -> None:
    choose = kernels.choose_num_splits
    assert choose(512, 4096, 132) == 2  # a batch that nearly fills it by itself
    assert choose(8, 8192, 132) == 64
    assert choose(8, 1000, 132) == 8  # a short context is not cut to pieces
    assert choose(3, 1, 132) == 1
    assert choose(10_000, 100_000, 132) == 1


@pytest.mark.parametrize("query_lens", [[1], [200], [1, 1, 50, 1], [129, 0, 64, 3]])
def test_slices_of_any_length(kernels: ModuleType, query_lens: list[int]) -> None:
    """Slices over several row tiles, empty ones, and some with a past that ends within a block."""
    contexts = [length + 37 * (i % 2) for i, length in enumerate(query_lens)]
    problem = problem_of(PLAIN, contexts, query_lens)
    assert_close(prefill(kernels, problem), problem.answer, PLAIN.dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("is_small", [False, True])
def test_tiles_within_one_block_and_over_several(
    kernels: ModuleType, block_size: int, is_small: bool
) -> None:
    case = PLAIN._replace(dtype=torch.float16, block_size=block_size)
    problem = problem_of(case, [64, 150, 200, 65], [64, 1, 90, 33])
    assert_close(prefill(kernels, problem, is_small=is_small), problem.answer, case.dtype)
    problem = problem_of(case, [64, 150, 1, 0, 128], [1] * 5)
    for num_splits in (1, 3):
        assert_close(decode(kernels, problem, num_splits=num_splits), problem.answer, case.dtype)


def test_warm_up_calls_every_kernel(kernels: ModuleType) -> None:
    shape = SimpleNamespace(
        num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=torch.device(DEVICE)
    )
    kernels.warm_up(shape, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_k4_mixed_batch_equals_its_members(kernels: ModuleType, dtype: torch.dtype) -> None:
    """To the last bit: no program sees another's rows."""
    case = PLAIN._replace(dtype=dtype)
    together = problem_of(case, [1, 300, 16, 33], [1] * 4)
    out = decode(kernels, together, num_splits=2)
    for rows, alone in one_by_one(together):
        assert torch.equal(decode(kernels, alone, num_splits=2), out[rows])

    together = problem_of(case, [150, 1, 20, 64], [7, 1, 20, 33])
    out = prefill(kernels, together, is_small=False)
    for rows, alone in one_by_one(together):
        assert torch.equal(prefill(kernels, alone, is_small=False), out[rows])


def test_grid_may_be_larger_than_the_batch_needs(kernels: ModuleType) -> None:
    """A recorded launch has the grid of the longest context that may come, and padding rows."""
    problem = problem_of(PLAIN, [5, 0, 300, 0], [1] * 4)
    out = kernels.paged_decode(
        problem.query, problem.k_cache, problem.v_cache, problem.block_tables,
        problem.context_lens, 100_000, problem.scale,
    )  # fmt: skip
    assert_close(out, problem.answer, PLAIN.dtype)
    assert (out[[1, 3]] == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is only used when written")
def test_pool_of_more_than_2_31_elements(kernels: ModuleType) -> None:
    """32-bit offsets would wrap around."""
    small = problem_of(PLAIN._replace(dtype=torch.float16), [70, 40], [1, 1])
    count, *block = small.k_cache.shape
    shift = 2**31 // small.k_cache[0].numel()
    large = torch.empty(2, shift + count, *block, dtype=torch.float16, device=DEVICE)
    large[0, shift:], large[1, shift:] = small.k_cache, small.v_cache
    small.k_cache, small.v_cache = large
    small.block_tables += shift
    assert_close(decode(kernels, small), small.answer, torch.float16)
    assert_close(prefill(kernels, small), small.answer, torch.float16)
    slots = slots_of(small.block_tables[0], 68, 70, PLAIN.block_size)
    kernels.store_kv(small.key, small.value, *large, slots)
    assert torch.equal(large[0].flatten(0, 1)[slots], small.key)


def test_errors_name_the_numbers(kernels: ModuleType) -> None:
    problem = problem_of(PLAIN, [20, 5], [1, 1])
    for query, error, match in (
        (problem.query.double(), TypeError, "float64"),
        (problem.query[:, :5], ValueError, r"\(2, 5, 64\)"),
        (problem.query[..., ::2], ValueError, r"\(2, 6, 32\)"),
    ):
        problem.query = query
        with pytest.raises(error, match=match):
            decode(kernels, problem)
        with pytest.raises(error, match=match):
            prefill(kernels, problem)


MUTANTS = {
    "decode loads one token too many": (
        "tl.minimum(start + split_len, context_len)",
        "tl.minimum(start + split_len, context_len + 1)",
    ),
    "decode sees one token too few": ("context_len - 1, tl.int32", "context_len - 2, tl.int32"),
    "prefill loads one token too many": (
        "end = start_pos + last_token + 1",
        "end = start_pos + last_token + 2",
    ),
    "prefill sees one token ahead": (
        "position = start_pos + token",
        "position = start_pos + token + 1",
    ),
    "the tile on the diagonal has no mask": ("// GROUP + 1) // TILE", "// GROUP + TILE) // TILE"),
    "the last rows are left out": ("- 1 - tl.program_id(0)", "- 2 - tl.program_id(0)"),
    "decode swaps the head map": (
        "head = kv_head * GROUP + m\n",
        "head = m * KV_HEADS + kv_head\n",
    ),
    "prefill swaps the head map": (
        "kv_head * GROUP + row % GROUP",
        "row % GROUP * KV_HEADS + kv_head",
    ),
    "a tile does not rescale": ("acc = acc * rescale[:, None] +", "acc = acc +"),
    "the merge does not rescale": ("part * part_rescale[:, None]", "part"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_noticed(kernels: ModuleType, tmp_path: Path, mutant: str) -> None:
    must_notice(kernels, MUTANTS[mutant], tmp_path, partial(decode, num_splits=2), DEVICE)


def test_triton_is_as_told(kernels: ModuleType) -> None:
    """That the interpreter ran, or did not, is what the process was started for."""
    assert (type(kernels._decode_kernel).__name__ == "InterpretedFunction") == INTERPRETED
    assert triton.knobs.runtime.interpret == INTERPRETED
