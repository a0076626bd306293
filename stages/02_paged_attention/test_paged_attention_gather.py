"""The gather backend, against dense attention in float64: what the other backends must do, too."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.kernels.cases import GRID, Case, check_decode, check_prefill, pairwise
from tests.kernels.every_backend import *  # noqa: F403


@pytest.fixture(scope="module")
def kernels(stage: ModuleType) -> ModuleType:
    return importlib.import_module(f"{stage.__name__}.paged_attention_gather")


@pytest.mark.parametrize("case", pairwise(GRID), ids=str)
def test_k3_grid(kernels: ModuleType, case: Case) -> None:
    check_decode(kernels, case)
    check_prefill(kernels, case)
