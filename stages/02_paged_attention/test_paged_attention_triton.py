"""The Triton kernels: interpreted, compiled for GPUs that are not here, and on the one that is.

Each in a process of its own, since Triton decides at import what it does. The checks themselves
are in `tests/kernels/triton_cases.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from tests.kernels import __file__ as kernels_file

pytest.importorskip("triton", reason="needs triton (Linux)")

CASES = Path(kernels_file).with_name("triton_cases.py")
ROOT = CASES.parent.parent.parent


def run(command: list[str], stage: ModuleType, **environment: str) -> str:
    """Run python in the checkout, on the stage's kernels; its output if it ended well."""
    source = Path(stage.__path__[0], "paged_attention_triton.py")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command, *([str(source)] if "pytest" not in command else [])],
        cwd=ROOT,
        # One thread: the interpreter's operations are far too small for more.
        env={**inherited, "TRITON_KERNELS": str(source), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail(done.stdout, pytrace=False)
    return done.stdout


def run_cases(stage: ModuleType, tmp_path: Path, **environment: str) -> None:
    """Run the cases, and see from their report that they did run."""
    report = tmp_path / "report.xml"
    run(["-m", "pytest", "-q", str(CASES), f"--junitxml={report}"], stage, **environment)
    counts = ElementTree.parse(report).getroot()[0].attrib
    assert int(counts["tests"]) > 40
    assert [counts[kind] for kind in ("failures", "errors", "skipped")] == ["0"] * 3


@pytest.mark.slow
def test_interpreted(stage: ModuleType, tmp_path: Path) -> None:
    run_cases(stage, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device(stage: ModuleType, tmp_path: Path) -> None:
    run_cases(stage, tmp_path)


@pytest.mark.slow
def test_compiles_for_gpus_and_fits_them(stage: ModuleType, tmp_path: Path) -> None:
    table = run(
        ["-m", "tests.kernels.compile_triton"],
        stage,
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_DEFAULT_FP_FUSION="1",
    )
    print(table)
    for arch in (75, 80, 90, 100):
        for kernel in ("store", "decode", "merge", "prefill"):
            assert any({kernel, f"sm_{arch}"} <= {*line.split()} for line in table.splitlines())
