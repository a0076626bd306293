"""The result files of benchmarks, as others read them, and how their numbers are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.engine import files

FORMAT = "mini-vllm-bench"
VERSION = 1


def load(path: str | Path) -> dict[str, Any]:
    """Read what `Report.save` wrote. Raises ValueError if it is something else."""
    return files.load_json(path, FORMAT, VERSION)


def short(number: float) -> str:
    """Three digits that count, and no more; thousands apart."""
    size = abs(number)
    return f"{number:,.0f}" if size >= 99.95 or not size else f"{number:.{1 + (size < 9.995)}f}"
