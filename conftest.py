"""Fixtures of all tests. The one that matters is `stage`: the engine under test, by folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. With a thread per core each, they mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import shared  # isort: skip  # noqa: F401  # before torch, so that it can say how threads wait
import torch  # isort: skip

pytest.register_assert_rewrite("tests.contract", "tests.kernels", "tests.reference")


def pytest_addoption(parser: pytest.Parser) -> None:
    try:
        parser.addoption(
            "--engine",
            metavar="DIR",
            help="test the stage in this folder (your own copy) instead of the repository's",
        )
    except ValueError:  # DIR lies in another checkout, whose conftest.py pytest loads as well
        return
    parser.addoption(
        "--client", metavar="FILE", help="test the client in this file (chapter 7) instead of ours"
    )
    parser.addoption("--long", action="store_true", help="run the random tests ten times as long")
    parser.addoption(
        "--list-refusals", action="store_true", help="print bad inputs and their answers"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--engine")
    if folder is not None and not os.path.isfile(os.path.join(folder, "__init__.py")):
        raise pytest.UsageError(f"--engine {folder!r}: there is no __init__.py in this folder")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With --list-refusals: what the tests of bad input printed, input by input."""
    if terminalreporter.config.getoption("--list-refusals"):
        for report in terminalreporter.getreports("passed"):
            lines = dict.fromkeys(report.capstdout.splitlines())
            if "test_bad_input" in report.nodeid and len(lines) > 1:
                terminalreporter.write_line("\n".join(lines))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Below the message of a failing test of a stage: the section of the course to read."""
    from tests.sections import section

    report = (yield).get_result()
    name = getattr(item, "originalname", item.name)
    found = section(item.path.stem, name) if report.failed else None
    if found and hasattr(report.longrepr, "addsection"):
        chapter, heading = found
        report.longrepr.addsection("to read", f'docs/chapters/{chapter}.md, "{heading}"')


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> ModuleType:
    """The package under test: the folder of the test file, or the one given with --engine."""
    folder = request.config.getoption("--engine")
    if folder is None:
        return importlib.import_module(f"stages.{request.path.parent.name}")
    return import_folder(Path(folder))


def import_folder(folder: Path) -> ModuleType:
    """Import a stage from any folder; its imports are relative, so the name does not matter."""
    init = folder.resolve() / "__init__.py"
    name = "engine_under_test"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[str(init.parent)]
        )
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models run on one thread: more only wait for each other. Real ones take them all."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A `(model, tokenizer)` pair with random weights; all tests share it."""
    from shared.models import load_model

    return load_model("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The default model, loaded once for all tests."""
    from shared.models import load_model

    return load_model("smollm2", device="cpu", dtype="float32")


@pytest.fixture
def make_engine(stage: ModuleType, tiny: Any) -> Iterator[Callable[..., Any]]:
    """Builds engines on the tiny model. Whatever a test did, its engines must give all blocks back.

    Options are those of the engine; blocks of 4 tokens and a pool of 64 unless said otherwise.
    """
    engines = []

    def make(**options: Any) -> Any:
        options = {"model": tiny, "block_size": 4, "num_blocks": 64, **options}
        engines.append(stage.LLMEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        for _ in range(1000):
            if not engine.has_unfinished_requests():
                break
            engine.step()
        assert not engine.has_unfinished_requests(), "requests are left that 1000 steps did not end"
        manager = engine.block_manager
        assert manager.num_free_blocks == manager.num_blocks, (
            f"nothing runs, yet only {manager.num_free_blocks} of {manager.num_blocks} blocks are "
            "free: some request ended without giving its blocks back"
        )
