"""Plants small faults, one at a time, and counts how many the tests notice: `make mutants`.

`pyproject.toml` says under `[tool.mutants]` which files get faults, which tests must notice, which
changes are not worth a run, and which are no faults: lines that do the same in other words, each
with its reason. The tests run on a copy of the repository, so the working tree is never touched.
`make mutants ARGS="scheduler"` takes only the files whose path contains a word.

cosmic-ray makes the faults. Each meets the tests in a fork of this process, which has imported the
large libraries once for all: that is most of the time of a run that fails early.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ["hypothesis", "numba", "pytest", "torch", "transformers"]


def main(argv: list[str] | None = None) -> int:
    """The program. Returns the exit code: 0, or 2 if it was called wrongly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only files whose path contains one of these")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants", metavar="DIR")
    args = parser.parse_args(argv)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "mutants"
    ]
    files = {
        path: tests
        for path, tests in settings["files"].items()
        if not args.words or any(word in path for word in args.words)
    }
    if not files:
        print(f"no file of [tool.mutants.files] contains {args.words}", file=sys.stderr)
        return 2

    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True  # Python tells old bytecode by the second in which it was made
    for name in LIBRARIES:
        importlib.import_module(name)
    args.out = args.out.resolve()  # the tests run in another folder
    args.out.mkdir(parents=True, exist_ok=True)
    survivors: dict[str, list[str]] = {}
    print(f"{'file':44} {'changes':>7} {'no fault':>8} {'faults':>6} {'noticed':>7} {'share':>6}")
    for path, tests in files.items():
        changes = list(plant(path, tests, settings["leave-out"], args.out))
        survivors[path] = [diff for diff, noticed in changes if not noticed]
        harmless = sum(bool(excuse(diff, settings["no-fault"])) for diff in survivors[path])
        faults, noticed = len(changes) - harmless, len(changes) - len(survivors[path])
        share = 100 * noticed / max(1, faults)  # a short file may have none
        print(
            f"{path:44} {len(changes):7} {harmless:8} {faults:6} {noticed:7} {share:5.1f}%",
            flush=True,
        )
    (args.out / "survivors.json").write_text(json.dumps(survivors, indent=1), encoding="utf-8")
    for path, diffs in survivors.items():
        for diff in diffs:
            reason = excuse(diff, settings["no-fault"])
            print(f"\nno fault ({reason})" if reason else "\nnot noticed", f"in {path}:\n{diff}")
    return 0


def plant(
    path: str, tests: list[str], leave_out: list[str], out: Path
) -> Iterator[tuple[str, bool]]:
    """Each change to `path` as a diff, and whether a test failed, or hung, because of it.

    Raises RuntimeError if the tests fail without a change, too.
    """
    with tempfile.TemporaryDirectory(dir=out) as name:
        folder = Path(name)
        copy_repository(folder)
        start = time.monotonic()
        if fails(folder, tests, limit=3600):
            raise RuntimeError(
                f"{path}: the tests fail as it is:\n{log(folder).read_text()[-4000:]}"
            )
        limit = max(30, 4 * (time.monotonic() - start))
        source = (folder / path).read_text(encoding="utf-8")
        for changed in changes_to(source, leave_out):
            (folder / path).write_text(changed, encoding="utf-8")
            lines = difflib.unified_diff(
                source.splitlines(), changed.splitlines(), n=1, lineterm=""
            )
            yield "\n".join(list(lines)[2:]), fails(folder, tests, limit)


def changes_to(source: str, leave_out: list[str]) -> Iterator[str]:
    """The source with one change, for every operator and every place where it applies."""
    from cosmic_ray import mutating, plugins

    for name in sorted(plugins.operator_names()):
        if any(re.fullmatch(pattern, name) for pattern in leave_out):
            continue
        operator = plugins.get_operator(name)
        for occurrence in count():
            changed = mutating.mutate_code(source, operator(), occurrence)
            if changed is None:
                break
            yield changed


def fails(folder: Path, tests: list[str], limit: float) -> bool:
    """Whether `tests`, run in `folder`, fail or take more than `limit` seconds."""
    process: Any = multiprocessing.get_context("fork").Process(
        target=run_pytest, args=(folder, tests)
    )
    process.start()
    process.join(limit)
    passed = process.exitcode == 0
    try:
        os.killpg(process.pid, signal.SIGKILL)  # it, and what it started
    except ProcessLookupError:
        pass
    process.join()
    return not passed


def run_pytest(folder: Path, tests: list[str]) -> None:
    """Run `tests` in `folder`, in this process, which ends with pytest's exit code."""
    import pytest

    os.setsid()
    os.chdir(folder)
    sys.path[:] = ["", *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    with log(folder).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def log(folder: Path) -> Path:
    """Where the tests in `folder` write."""
    return folder / "pytest.log"


def excuse(diff: str, reasons: dict[str, str]) -> str | None:
    """Why a change is no fault, if one of the patterns fits the first line that it adds."""
    line = next((line[1:].strip() for line in diff.splitlines() if line.startswith("+")), "")
    found = (reason for pattern, reason in reasons.items() if re.fullmatch(pattern, line))
    return next(found, None)


def copy_repository(folder: Path) -> None:
    """The files that git knows, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


if __name__ == "__main__":
    sys.exit(main())
