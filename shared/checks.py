"""Checks of option values that all stages share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def check_options(options: Any, shares: tuple[str, ...] = ()) -> None:
    """Check every field of a dataclass of options by its annotation.

    An `int` must be at least 1 and a `float` above 0; a field whose default is None may be None.

    Args:
        shares: names of fields that may not exceed 1.

    Raises:
        ValueError: a field is wrong; the message names it, what it may be, and what it is.
    """
    for field in dataclasses.fields(options):
        name, kind, value = field.name, str(field.type).split()[0], getattr(options, field.name)
        if value is None and field.default is None:
            continue
        if kind == "int" and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if kind == "float" and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
        if kind in ("bool", "str") and type(value).__name__ != kind:
            raise ValueError(f"{name} must be a {kind}, got {value!r}")
        if name in shares and value > 1:
            raise ValueError(f"{name} is a share and must be at most 1, got {value}")
