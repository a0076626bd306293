"""`make lab`: the notebooks in JupyterLab, on a reader's own copy.

Copies stand in `my_notebooks/`, beside `notebooks/`, so that their links hold; git ignores them. A
copy that is there stays as the reader left it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "my_notebooks"


def copy(root: Path) -> list[str]:
    """Copy each notebook that has no copy yet. Returns a line for each older than its source."""
    folder, stale = root / FOLDER, []
    folder.mkdir(exist_ok=True)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        mine = folder / path.name
        if not mine.exists():
            shutil.copyfile(path, mine)
        elif mine.stat().st_mtime < path.stat().st_mtime:
            stale.append(
                f"{FOLDER}/{path.name} is older than the course's; remove it for a new copy"
            )
    return stale


def command(python: str, arguments: list[str]) -> list[str]:
    """JupyterLab for this machine alone, on the copies."""
    fixed = ["--ServerApp.ip=127.0.0.1", f"--ServerApp.preferred_dir={FOLDER}"]
    fixed += ["--LabApp.news_url=None"]  # it asks nobody for news
    fixed += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    return [python, "-m", "jupyterlab", *fixed, *arguments]


def main() -> None:
    """Copy, and become JupyterLab, which ends with Ctrl-C."""
    print(*copy(ROOT), sep="\n", end="", flush=True)
    os.chdir(ROOT)
    line = command(sys.executable, sys.argv[1:])
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
