"""The gather backend, against dense attention in float64: what the other backends must do, too."""

from __future__ import annotations

import importlib
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
    pairwise,
    prefill,
)


@pytest.fixture(scope="module")
def kernels(stage: ModuleType) -> ModuleType:
    return importlib.import_module(f"{stage.__name__}.paged_attention_gather")


@pytest.mark.parametrize("case", pairwise(GRID), ids=str)
def test_k3_grid(kernels: ModuleType, case: Case) -> None:
    """Decodes with a row of padding; whole prompts, the end of one, one token after a long past."""
    contexts = [context for context in (*case.contexts, 40) if context]
    problem = make_problem(case, [*contexts, 0], [1] * (len(contexts) + 1))
    assert_close(decode(kernels, problem), problem.answer, case.dtype)
    problem = make_problem(case, contexts, [*contexts[:-2], 1, 13])
    assert_close(prefill(kernels, problem), problem.answer, case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_k4_mixed_batch_equals_its_members(kernels: ModuleType, dtype: torch.dtype) -> None:
    together = make_problem(Case(dtype, 64, 3, 16), [300, 1, 20, 64], [7, 1, 20, 33])
    out = prefill(kernels, together)
    for rows, alone in one_by_one(together):
        assert_close(prefill(kernels, alone), out[rows].double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_k1_store_writes_its_slots_and_no_other(kernels: ModuleType, dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.full((2, 5, 4, 2, 8), -7.0, dtype=dtype)
    key, value = torch.randn(2, 4, 2, 8).to(dtype)
    kernels.store_kv(key, value, k_cache, v_cache, torch.tensor([6, -1, 0, 17]))
    for cache, rows in ((k_cache, key), (v_cache, value)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[6, 0, 17]], rows[[0, 2, 3]])
        untouched = [i for i in range(20) if i not in (6, 0, 17)]
        assert (flat[untouched] == -7).all()  # the last slot too, where an index of -1 would go
