"""The Numba decode kernel, CPU prefill and store, against dense attention in float64."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest
import torch

from tests.kernels.cases import (
    GRID,
    PLAIN,
    Case,
    Problem,
    assert_close,
    check_decode,
    check_prefill,
    decode,
    make_problem,
    pairwise,
    prefill,
)
from tests.kernels.every_backend import *  # noqa: F403
from tests.kernels.every_backend import must_notice


@pytest.fixture(scope="module")
def kernels(stage: ModuleType) -> ModuleType:
    return importlib.import_module(f"{stage.__name__}.paged_attention_cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`test_k3_decode` takes each pair of values, and with --long every combination."""
    if metafunc.function is test_k3_decode:
        cases = GRID if metafunc.config.getoption("--long") else pairwise(GRID)
        metafunc.parametrize("case", cases, ids=str)


def test_k3_decode(kernels: ModuleType, case: Case) -> None:
    check_decode(kernels, case)


@pytest.mark.parametrize("case", pairwise(GRID), ids=str)
def test_k3_prefill(kernels: ModuleType, case: Case) -> None:
    check_prefill(kernels, case)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("contexts", [[1], [500], [15, 1, 300, 0, 16], [1, 1, 1, 200], [0, 0]])
def test_decode_however_the_blocks_are_shared_out(
    kernels: ModuleType, num_workers: int, contexts: list[int]
) -> None:
    """More workers than sequences, than blocks; cuts inside and between sequences."""
    problem = make_problem(PLAIN, contexts, [1] * len(contexts))
    assert_close(decode_by(kernels, problem, num_workers), problem.answer, PLAIN.dtype)


def decode_by(kernels: ModuleType, problem: Problem, num_workers: int) -> torch.Tensor:
    """`paged_decode` as on a machine with so many cores."""
    tensors = (problem.query, problem.k_cache, problem.v_cache, problem.block_tables)
    out = torch.full_like(problem.query, torch.nan)
    assert kernels._decode(
        *(x.numpy() for x in (*tensors, problem.context_lens)),
        *(np.float32(problem.scale), num_workers, out.numpy()),
    )
    return out


def test_torch_keeps_its_threads(kernels: ModuleType) -> None:
    """Numba follows torch, also when torch changes its mind, and never the other way round."""
    problem = make_problem(PLAIN, [300, 20], [1, 1])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, before, 1, before + 3):
            torch.set_num_threads(num_threads)
            assert_close(decode(kernels, problem), problem.answer, PLAIN.dtype)
            assert torch.get_num_threads() == num_threads
            assert numba.get_num_threads() == min(num_threads, numba.config.NUMBA_NUM_THREADS)
    finally:
        torch.set_num_threads(before)


def test_every_cut_gives_a_part_a_number_of_its_own(kernels: ModuleType) -> None:
    for contexts in ([1, 5, 300, 0, 0, 17], [0, 33], [1] * 9, [1000]):
        lens = torch.tensor(contexts, dtype=torch.int32).numpy()
        for num_threads in range(1, 12):
            starts, cuts = kernels._cut_evenly(lens, 16, num_threads)
            shares = {
                (worker, b): min(cuts[worker + 1], starts[b + 1]) - max(cuts[worker], starts[b])
                for worker in range(len(cuts) - 1)
                for b in range(len(contexts))
            }
            parts = [worker + b for (worker, b), blocks in shares.items() if blocks > 0]
            assert len(parts) == len(set(parts))
            assert sum(blocks for blocks in shares.values() if blocks > 0) == starts[-1]
            work = [cuts[i + 1] - cuts[i] for i in range(len(cuts) - 1)]
            assert max(work) - min(work) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scores_of_any_size(kernels: ModuleType, scale: float, num_workers: int) -> None:
    """Scores of several hundred overflow e**s unless the largest one of all parts is subtracted."""
    problem = make_problem(PLAIN, [700, 90], [1, 1], scale=scale * PLAIN.head_dim**-0.5)
    got = decode_by(kernels, problem, num_workers)
    torch.testing.assert_close(got.double(), problem.answer, rtol=1e-4, atol=1e-5)


def test_parts_are_joined_by_the_largest_of_their_maxima(kernels: ModuleType) -> None:
    """The largest score of all is in part 0, 1 or 2; by another one, e**200 would overflow."""
    for largest in range(3):
        maximum = np.zeros((3, 1), dtype=np.float32)
        maximum[largest] = 200
        acc = np.arange(1, 13, dtype=np.float32).reshape(3, 1, 4)
        out = np.empty((1, 4), dtype=np.float32)
        kernels._merge(acc, maximum, np.full((3, 1), 2, dtype=np.float32), out)
        np.testing.assert_allclose(out, acc[largest] / 2, rtol=1e-6)


def test_a_context_longer_than_the_block_table_is_refused(kernels: ModuleType) -> None:
    problem = make_problem(PLAIN, [128, 40], [1, 1], max_blocks=8)
    problem.context_lens[0] = 129
    with pytest.raises(ValueError, match=r"\(2, 8\).*129"):
        decode(kernels, problem)


def test_long_past_is_read_in_pieces(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole blocks, however long a piece may be; the last one has a token; all weigh rightly."""
    piece = 2 * PLAIN.block_size
    monkeypatch.setattr(kernels, "PREFILL_PIECE", piece + 5)
    problem = make_problem(PLAIN, [piece * 4 + 1 + 9, 60], [9, 60])
    assert_close(prefill(kernels, problem), problem.answer, torch.float32)


def test_errors_name_the_numbers(kernels: ModuleType) -> None:
    problem = make_problem(PLAIN, [20, 5], [1, 1])
    problem.query = problem.query.double()
    with pytest.raises(TypeError, match="float64"):
        decode(kernels, problem)
    problem = make_problem(PLAIN, [20, 5], [1, 1])
    problem.query = problem.query[:, :5]
    with pytest.raises(ValueError, match=r"\(2, 5, 64\)"):
        decode(kernels, problem)
    problem = make_problem(PLAIN, [20, 5], [3, 5])
    problem.context_lens[0] = 2
    with pytest.raises(ValueError, match="3 rows, context 2"):
        prefill(kernels, problem)


def test_runs_where_no_folder_is_writable(kernels: ModuleType) -> None:
    """Numba refuses `cache=True` when it finds no place for its files; we then go without."""
    folder = str(Path(str(kernels.__file__)).parent)
    program = f"""
import importlib, sys, types
from numba.core import caching
caching.CacheImpl._locator_classes = []
sys.modules["kernels"] = package = types.ModuleType("kernels")
package.__path__ = [{folder!r}]
module = importlib.import_module("kernels.paged_attention_cpu")
print(float(module.exp(0.0)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("1.0", 0), done.stderr


MUTANTS = {
    "reads one slot too many": (
        "min(block_size, context_len - i * block_size)",
        "min(block_size, context_len + 1 - i * block_size)",
    ),
    "swaps the head map": (
        "range(kv_head * group, (kv_head + 1) * group)",
        "range(kv_head, num_heads, num_kv_heads)",
    ),
    "a block does not rescale": ("acc[head, d] *= rescale", "acc[head, d] *= 1"),
    "the merge does not rescale": ("acc[part, head, d] * rescale", "acc[part, head, d]"),
    "prefill sees what comes after": ("scale, causal=True)", "scale, causal=False)"),
    "prefill weighs a part as the other": ("earlier_lse - lse)", "lse - earlier_lse)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_noticed(kernels: ModuleType, tmp_path: Path, mutant: str) -> None:
    must_notice(kernels, MUTANTS[mutant], tmp_path, partial(decode_by, num_workers=3))
