"""What every stage with kernels keeps: an engine computes with those that its options name."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from shared.engine.backends import BACKENDS

from .helpers import MakeEngine, expect, greedy, make_prompt, run

ON_CPU = ("gather", "numba", "plain")


@pytest.mark.parametrize("asked", ON_CPU)
def test_the_backend_that_was_asked_for(
    make_engine: MakeEngine, stage: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    used = set()

    def watch(backend: str, name: str) -> None:
        module: Any = importlib.import_module(f"{stage.__name__}.{BACKENDS[backend][0]}")
        function = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            used.add((backend, name))
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    kernels = ("paged_decode", "paged_prefill", "store_kv")
    for backend in ON_CPU:
        for name in kernels:
            watch(backend, name)
    engine = make_engine(attention_backend=asked)
    run(engine, [make_prompt(5)], greedy(3))
    expect(
        used, {(asked, name) for name in kernels}, f"kernels that attention_backend={asked!r} used."
    )
