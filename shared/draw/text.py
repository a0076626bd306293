"""Numbers as people read them."""

from __future__ import annotations


def plain(value: float) -> str:
    """A number as people write it: 0.03, 1, 2.5, 4,096."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
