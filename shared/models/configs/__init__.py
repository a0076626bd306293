"""The shapes of real models, as their makers' configs have them; no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """What there is, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """The fields of one config. Raises ValueError if there is none of that name."""
    if name not in names():
        raise ValueError(f"no shape {name!r}; there are {', '.join(names())}")
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
