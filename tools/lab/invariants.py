"""What the lab checks after every step, in the words of the chapters.

Each invariant is a row of a chapter's table "The rules" (or a line of its list). It is found
by the words with which it begins, so a page says what the chapter says; a row that is gone is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "docs" / "chapters"

# key -> chapter, words in the row's first cell
ROWS = {
    "reads": (0, "No step reads a cache slot"),
    "finishes": (0, "Every accepted request finishes"),
    "owner": (1, "free or in exactly one table"),
    "table": (1, "exactly as many blocks"),
    "order": (1, "are in arrival order"),
    "ends": (1, "gives the blocks back"),
    "behind": (2, "beyond the end of a context"),
    "refs": (3, "reference count is"),
    "published": (3, "What is published is in the cache"),
    "name": (3, "A reused block has lost its hash"),
    "full": (3, "Only full blocks are shared"),
    "parent": (3, "The parent of a published block"),
    "twice": (3, "No content is published twice"),
    "one": (3, "At least one token of every request"),
    "slot": (4, "come from the index in the whole sequence"),
    "past": (4, "attends up to its own end"),
    "samples": (4, "Only the last chunk samples"),
    "budget": (4, "Between two tokens of a stream"),
    "seat": (4, "A PREFILLING sequence counts"),
    "youngest": (4, "The youngest is preempted in favour"),
}


def _cells(text: str) -> Iterable[tuple[str, str]]:
    """(invariant, what breaks) of a chapter's section."""
    found = re.search(r"^## The rules.*?(?=^## )", text, re.M | re.S)
    section = found.group() if found else ""
    for line in re.sub(r"\n {2,}", " ", section).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 2:
            yield cells[0], cells[1]
        elif line.startswith("- "):
            yield line[2:], ""


def sentences() -> dict[str, dict[str, str | int]]:
    """key -> chapter, invariant and what breaks. Raises ValueError for a row that is not there."""
    found: dict[str, dict[str, str | int]] = {}
    for key, (chapter, words) in ROWS.items():
        [path] = CHAPTERS.glob(f"{chapter}-*.md")
        rows = [row for row in _cells(path.read_text(encoding="utf-8")) if words in row[0]]
        if len(rows) != 1:
            raise ValueError(f"{path.name} has {len(rows)} rows with {words!r}, expected one")
        anchor = "the-rules" + ("-and-what-breaks-without-them" if chapter else "")
        page = f"chapters/{path.stem}.html#{anchor}"
        found[key] = {"chapter": chapter, "page": page, "holds": rows[0][0], "if": rows[0][1]}
    return found
