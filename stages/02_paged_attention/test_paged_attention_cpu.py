"""The Numba decode kernel, CPU prefill and store, against dense attention in float64.

K1 .. K5 name well-known faults of such kernels.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.kernels.cases import (
    DTYPES,
    GRID,
    Case,
    assert_close,
    decode,
    make_problem,
    one_by_one,
    prefill,
    slots_of,
)

PLAIN = Case(torch.float32, head_dim=64, group=3, block_size=16)


@pytest.fixture(scope="module")
def kernels(stage: ModuleType) -> ModuleType:
    return importlib.import_module(f"{stage.__name__}.paged_attention_cpu")


@pytest.mark.parametrize("case", GRID, ids=str)
def test_k3_decode(kernels: ModuleType, case: Case) -> None:
    problem = make_problem(case, case.contexts, [1] * 5)
    assert_close(decode(kernels, problem), problem.answer, case.dtype)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_k3_prefill(kernels: ModuleType, case: Case) -> None:
    """Whole prompts, the end of one, and a slice of one token after a long past."""
    contexts = [context for context in (*case.contexts, 40) if context]
    query_lens = [*contexts[:-2], 1, 13]
    problem = make_problem(case, contexts, query_lens)
    assert_close(prefill(kernels, problem), problem.answer, case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("contexts", [[1], [500], [15, 1, 300, 0, 16], [1, 1, 1, 200], [0, 0]])
def test_decode_however_the_blocks_are_shared_out(
    kernels: ModuleType, dtype: torch.dtype, num_threads: int, contexts: list[int]
) -> None:
    """More threads than sequences, than blocks, than cores; cuts inside and between sequences."""
    problem = make_problem(PLAIN._replace(dtype=dtype), contexts, [1] * len(contexts))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_close(decode(kernels, problem), problem.answer, dtype)
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


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scores_of_any_size(kernels: ModuleType, scale: float) -> None:
    """Scores of several hundred overflow e**s unless the maximum is taken off, block by block."""
    problem = make_problem(PLAIN, [700, 90], [1, 1])
    problem.query *= scale
    dense = [
        torch.nn.functional.scaled_dot_product_attention(
            problem.query[i].double()[:, None], *(x.double() for x in kv), scale=problem.scale
        )[:, 0]
        for i, kv in enumerate(gathered(problem))
    ]
    got = decode(kernels, problem)
    torch.testing.assert_close(got.double(), torch.stack(dense), rtol=1e-4, atol=1e-5)


def gathered(problem):
    """K and V of each sequence, `[H, context, D]`, repeated for the query heads."""
    block_size, group = problem.k_cache.shape[1], problem.query.shape[1] // problem.key.shape[1]
    for table, context in zip(problem.block_tables, problem.context_lens.tolist(), strict=True):
        slots = slots_of(table, 0, context, block_size)
        yield [
            cache.flatten(0, 1)[slots].transpose(0, 1).repeat_interleave(group, 0)
            for cache in (problem.k_cache, problem.v_cache)
        ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_k4_mixed_batch_equals_its_members(kernels: ModuleType, dtype: torch.dtype) -> None:
    case = PLAIN._replace(dtype=dtype)
    together = make_problem(case, [1, 700, 16, 33], [1] * 4)
    out = decode(kernels, together)
    for rows, alone in one_by_one(together):
        assert_close(decode(kernels, alone), out[rows].double(), dtype)

    together = make_problem(case, [300, 1, 20, 64], [7, 1, 20, 33])
    out = prefill(kernels, together)
    for rows, alone in one_by_one(together):
        assert_close(prefill(kernels, alone), out[rows].double(), dtype)


@pytest.mark.parametrize("context", [127, 128])
def test_k5_last_position_of_a_full_block_table(kernels: ModuleType, context: int) -> None:
    problem = make_problem(PLAIN, [context, 40], [1, 1], max_blocks=8)
    assert_close(decode(kernels, problem), problem.answer, torch.float32)
    assert_close(prefill(kernels, problem), problem.answer, torch.float32)
    problem.context_lens[0] = 129
    with pytest.raises(ValueError, match="129.*128"):
        decode(kernels, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_k1_store_writes_its_slots_and_no_other(kernels: ModuleType, dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.full((2, 5, 4, 2, 8), -7.0, dtype=dtype)
    key, value = torch.randn(2, 4, 2, 8).to(dtype)
    slots = torch.tensor([6, -1, 0, 17])
    kernels.store_kv(key, value, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, key), (v_cache, value)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[6, 0, 17]], rows[[0, 2, 3]])
        untouched = [i for i in range(20) if i not in (6, 0, 17)]
        assert (flat[untouched] == -7).all()  # the last slot too, where an index of -1 would go
    kernels.store_kv(key, value, k_cache, v_cache, torch.full((4,), -1))
    assert (k_cache.flatten(0, 1)[19] == -7).all()


def test_long_past_is_read_in_pieces(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end inside blocks, a last one of one token; the parts are weighed rightly."""
    monkeypatch.setattr(kernels, "PREFILL_PIECE", 37)
    problem = make_problem(PLAIN, [37 * 4 + 1 + 9, 60], [9, 60])
    assert_close(prefill(kernels, problem), problem.answer, torch.float32)


def test_strided_rows_are_taken_as_they_come(kernels: ModuleType) -> None:
    """Models hand over [T, H, D] as a view of [H, T, D]."""
    problem = make_problem(PLAIN, [50, 20, 33], [1] * 3)
    problem.query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not problem.query.is_contiguous()
    assert_close(decode(kernels, problem), problem.answer, torch.float32)
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
    program = f"""
import importlib.util
from numba.core import caching
caching.CacheImpl._locator_classes = []
spec = importlib.util.spec_from_file_location("kernels", {kernels.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(float(module._exp(0.0)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("1.0", 0), done.stderr
