"""The plain backend, against dense attention in float64, and that its faults are noticed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.kernels.cases import GRID, Case, check_decode, check_prefill, decode, pairwise
from tests.kernels.every_backend import *  # noqa: F403
from tests.kernels.every_backend import must_notice


@pytest.fixture(scope="module")
def kernels(stage: ModuleType) -> ModuleType:
    return importlib.import_module(f"{stage.__name__}.paged_attention_plain")


@pytest.mark.parametrize("case", pairwise(GRID), ids=str)
def test_k3_grid(kernels: ModuleType, case: Case) -> None:
    check_decode(kernels, case)
    check_prefill(kernels, case)


MUTANTS = {
    "ignores the table": ("block = block_table[i]", "block = i"),
    "reads past the context": (
        "(i + 1) * block_size, context_len)",
        "(i + 1) * block_size, 10**9)",
    ),
    "sees the future": ("> positions[:, None]", "> positions[:, None] + 1"),
    "does not rescale the output": ("acc = acc * rescale", "acc = acc"),
    "does not rescale the total": ("total = total * rescale", "total = total"),
    "swaps the head map": ("repeat_interleave(group, dim=1)  # [n, H, D]", "repeat(1, group, 1)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_noticed(kernels: ModuleType, tmp_path: Path, mutant: str) -> None:
    must_notice(kernels, MUTANTS[mutant], tmp_path, decode)
