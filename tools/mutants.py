"""Plants small faults, one at a time, and counts how many the tests notice: `make mutants`.

`pyproject.toml` says under `[tool.mutants]` which files get faults, which tests must notice, and
which faults are not worth a run. The tests run on a copy of the repository, so the working tree is
never touched. `make mutants ARGS="scheduler"` takes only the files whose path contains a word.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent


def main(argv: list[str] | None = None) -> int:
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
    args.out.mkdir(parents=True, exist_ok=True)
    survivors: dict[str, list[str]] = {}
    print(f"{'file':48} {'faults':>6} {'noticed':>8} {'share':>6}")
    for path, tests in files.items():
        outcomes = run(path, tests, settings, args.out)
        counts = Counter(noticed for _, noticed in outcomes)
        share = 100 * counts[True] / max(1, len(outcomes))  # a short file may have none
        print(f"{path:48} {len(outcomes):6} {counts[True]:8} {share:5.1f}%", flush=True)
        survivors[path] = [diff for diff, noticed in outcomes if not noticed]
    (args.out / "survivors.json").write_text(json.dumps(survivors, indent=1), encoding="utf-8")
    for path, diffs in survivors.items():
        for diff in diffs:
            print(f"\nnot noticed in {path}:\n{diff}")
    return 0


def run(path: str, tests: list[str], settings: dict[str, Any], out: Path) -> list[tuple[str, bool]]:
    """Each fault planted in `path` as a diff, and whether a test failed because of it.

    Raises CalledProcessError if the tests fail without a fault, too.
    """
    session = out / (path.replace("/", ".") + ".sqlite")
    session.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        copy_repository(Path(folder))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

        def call(*words: object) -> str:
            done = subprocess.run(
                list(map(str, words)),
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            done.check_returncode()
            return done.stdout

        call(*command)
        config = Path(folder) / "cosmic-ray.toml"
        config.write_text(
            "[cosmic-ray]\n"
            f'module-path = "{path}"\n'
            f"timeout = {settings['timeout']}\n"
            "excluded-modules = []\n"
            f"test-command = {json.dumps(shlex.join(command))}\n"
            '[cosmic-ray.distributor]\nname = "local"\n'
            "[cosmic-ray.filters.operators-filter]\n"
            f"exclude-operators = {json.dumps(settings['leave-out'])}\n",
            encoding="utf-8",
        )
        call(TOOLS / "cosmic-ray", "init", config, session)
        call(TOOLS / "cr-filter-operators", session, config)
        call(TOOLS / "cosmic-ray", "exec", config, session)
        lines = call(TOOLS / "cosmic-ray", "dump", session).splitlines()
    results = [result for _, result in map(json.loads, lines) if result]
    return [
        (result["diff"] or "", result["test_outcome"] != "survived")
        for result in results
        if result["worker_outcome"] != "skipped"
    ]


def copy_repository(folder: Path) -> None:
    """What git knows of, as it lies in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


if __name__ == "__main__":
    sys.exit(main())
