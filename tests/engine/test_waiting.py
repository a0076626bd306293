"""How threads wait is said before torch is loaded, and what the user says wins."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared import load_stage
from shared.waiting import OF_THE_USER, SETTINGS, wait_briefly

ROOT = Path(__file__).resolve().parents[2]

NAME = load_stage(4).__name__

# What libgomp itself says it uses, when torch loads it: the only witness that cannot be fooled.
TELL = "OMP_DISPLAY_ENV"


def fresh(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, with nothing said about waiting but `env`."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_THE_USER}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {TELL: "verbose", "PYTHONPATH": str(ROOT)} | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


needs_libgomp = pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")


@needs_libgomp
@pytest.mark.parametrize(
    ("code", "env", "spins"),
    [
        (f"import importlib; importlib.import_module({NAME!r})", {}, SETTINGS["GOMP_SPINCOUNT"]),
        ("import shared, torch", {"GOMP_SPINCOUNT": "77"}, "77"),
        ("import shared, torch", {"KMP_BLOCKTIME": "5"}, "300000"),
    ],
)
def test_what_libgomp_is_told(code: str, env: dict[str, str], spins: str) -> None:
    done = fresh(code, **env)
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
    assert "too late" not in done.stderr


@needs_libgomp
def test_too_late_is_told() -> None:
    done = fresh("import torch, shared")
    assert f"GOMP_SPINCOUNT = '{SETTINGS['GOMP_SPINCOUNT']}'" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "import shared first" in line]
    assert f"GOMP_SPINCOUNT={SETTINGS['GOMP_SPINCOUNT']} before Python starts" in line


def test_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environ: dict[str, str] = {}
    assert wait_briefly(environ, {}) and environ == SETTINGS
    assert wait_briefly(environ, {"torch": None}) and environ == SETTINGS  # a child process
    for name in OF_THE_USER:
        environ = {name: "1"}
        assert wait_briefly(environ, {"torch": None}) and environ == {name: "1"}
    assert caplog.text == ""
    environ = {}
    assert not wait_briefly(environ, {"torch": None}) and environ == {}
    assert "too late" in caplog.text
