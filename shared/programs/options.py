"""Types of options that are numbers in a range."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(low: int, high: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, got {text!r}"
            )
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of an option that is a number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:g} to {high:g}, got {text!r}")
        return value

    return parse
