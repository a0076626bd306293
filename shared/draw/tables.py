"""Tables as HTML and as Markdown, from text that is ready to be read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

Rows = Sequence[Sequence[object]]


def html(heads: Sequence[str], rows: Rows, escape: bool = True) -> str:
    """On one line; columns of numbers are aligned to the right.

    Args:
        escape: cells are text. Without it they are HTML already.
    """
    columns = zip(*rows, strict=True) if rows else ([] for _ in heads)
    right = [all(re.fullmatch(r"[\d,.–-]+", str(cell)) for cell in each) for each in columns]
    return _table(heads, rows, "html" if escape else "unsafehtml", right).replace("\n", "")


def markdown(heads: Sequence[str], rows: Rows, left: int = 1) -> str:
    """The columns from the `left`-th on are aligned to the right."""
    return _table(heads, rows, "pipe", [i >= left for i in range(len(heads))])


def _table(heads: Sequence[str], rows: Rows, form: str, right: Sequence[bool]) -> str:
    sides = ["right" if one else "left" for one in right]
    return tabulate(rows, heads, form, disable_numparse=True, colalign=sides if rows else None)
