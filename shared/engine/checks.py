"""Checks of option values that all stages share."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

MOST = 2**31 - 1  # block tables and kernels count in 32 bits


def check_options(options: Any, shares: tuple[str, ...] = ()) -> None:
    """Check every field of a dataclass of options by its annotation.

    An `int` must be from 1 to `MOST` and a `float` above 0; a field whose default is None may be
    None.

    Args:
        shares: names of fields that may not exceed 1.

    Raises:
        ValueError: a field is wrong; the message names it, what it may be, and what it is.
    """
    for field in dataclasses.fields(options):
        name, kind, value = field.name, str(field.type).split()[0], getattr(options, field.name)
        if value is None and field.default is None:
            continue
        if kind == "int" and (type(value) is not int or not 1 <= value <= MOST):
            raise ValueError(f"{name} must be an integer from 1 to {MOST}, got {value!r}")
        is_number = type(value) in (int, float) and 0 < value <= sys.float_info.max
        if kind == "float" and not is_number:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        if kind in ("bool", "str") and type(value).__name__ != kind:
            raise ValueError(f"{name} must be a {kind}, got {value!r}")
        if name in shares and value > 1:
            raise ValueError(f"{name} is a share and must be at most 1, got {value}")


def check_text(name: str, text: Any) -> None:
    """Raise TypeError if `text` is no string, ValueError if it has half of a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, got {short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} of {len(text)} is {text[error.start]!a}"
        raise ValueError(f"{name} is not valid Unicode: {where}") from error


def short(value: Any, most: int = 80) -> str:
    """`repr(value)` for a message, cut in its middle if it has more than `most` characters."""
    text = repr(value)
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
