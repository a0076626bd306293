"""What every attention backend keeps: `from tests.kernels.every_backend import *` in its tests.

They need a fixture `kernels`, the backend's module. K1 .. K5 name well-known faults of kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .cases import (
    DTYPES,
    PLAIN,
    Problem,
    assert_close,
    decode,
    load,
    make_problem,
    one_by_one,
    prefill,
)


@pytest.fixture
def device() -> str:
    """Where the tensors are; tests of kernels for a GPU override this."""
    return "cpu"


@pytest.mark.parametrize("dtype", DTYPES)
def test_k1_store_writes_its_slots_and_no_other(
    kernels: ModuleType, device: str, dtype: torch.dtype
) -> None:
    k_cache, v_cache = torch.full((2, 5, 4, 3, 80), -7.0, dtype=dtype, device=device)
    key, value = torch.randn(2, 3, 4, 80).to(dtype).to(device).transpose(1, 2)
    for slots in ([6, -1, 0, 17], [-1] * 4):
        kernels.store_kv(key, value, k_cache, v_cache, torch.tensor(slots, device=device))
        for cache, rows in ((k_cache, key), (v_cache, value)):
            flat = cache.flatten(0, 1)
            assert torch.equal(flat[[6, 0, 17]], rows[[0, 2, 3]])
            untouched = [i for i in range(20) if i not in (6, 0, 17)]
            assert (flat[untouched] == -7).all()  # the last slot too, where an index of -1 would go


@pytest.mark.parametrize("dtype", DTYPES)
def test_k4_mixed_batch_equals_its_members(
    kernels: ModuleType, device: str, dtype: torch.dtype
) -> None:
    case = PLAIN._replace(dtype=dtype)
    for contexts, query_lens, attend in (
        ([1, 700, 16, 33], [1] * 4, decode),
        ([300, 1, 20, 64], [7, 1, 20, 33], prefill),
    ):
        together = make_problem(case, contexts, query_lens, device)
        out = attend(kernels, together)
        for rows, alone in one_by_one(together):
            assert_close(attend(kernels, alone), out[rows].double(), dtype)


@pytest.mark.parametrize("context", [127, 128])
def test_k5_last_position_of_a_full_block_table(
    kernels: ModuleType, device: str, context: int
) -> None:
    problem = make_problem(PLAIN, [context, 40], [1, 1], device, max_blocks=8)
    assert_close(decode(kernels, problem), problem.answer, PLAIN.dtype)
    assert_close(prefill(kernels, problem), problem.answer, PLAIN.dtype)


def test_strided_rows_are_taken_as_they_come(kernels: ModuleType, device: str) -> None:
    """Models hand over [T, H, D] as a view of [H, T, D]."""
    problem = make_problem(PLAIN, [50, 20, 33], [1] * 3, device)
    problem.query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not problem.query.is_contiguous()
    assert_close(decode(kernels, problem), problem.answer, PLAIN.dtype)
    assert_close(prefill(kernels, problem), problem.answer, PLAIN.dtype)


def must_notice(
    kernels: ModuleType,
    fault: tuple[str, str],
    folder: Path,
    decode: Callable[[ModuleType, Problem], Tensor],
    device: str = "cpu",
) -> None:
    """A check must fail on kernels with a typical fault, or it would prove nothing.

    Args:
        fault: what is replaced in the source, and by what.
        folder: takes the faulty copy.
    """

    def check(kernels: ModuleType) -> None:
        for query_lens, attend in (([17, 3], prefill), ([1, 1], decode)):
            problem = make_problem(PLAIN, [17, 150], query_lens, device)
            assert_close(attend(kernels, problem), problem.answer, PLAIN.dtype)

    check(kernels)
    source = Path(str(kernels.__file__))
    text = source.read_text()
    assert fault[0] in text, "what is broken here is no longer in the source"
    for neighbour in source.parent.glob("paged_attention_*.py"):
        shutil.copy(neighbour, folder)
    (folder / "mutant.py").write_text(text.replace(*fault))
    with pytest.raises(AssertionError, match="not close"):
        check(load(folder / "mutant.py"))
