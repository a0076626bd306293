"""A few shapes as SVG on one line, in the colours of the palette.

One line, so that a drawing can stand in an indented block of Markdown; colours by CSS variable, so
that it is right in both modes of a page. Knows nothing of what it draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

from .palette import COLOURS, variable

# How letters look, by name; several may be joined by spaces.
STYLES = {
    "small": 'font-size="11.5"',
    "tiny": 'font-size="8.5"',
    "code": 'font-size="12" font-family="var(--md-code-font-family, monospace)"',
    "strong": 'font-weight="600"',
    **{name: f'fill="{variable(name)}"' for name in COLOURS},
}


class Canvas:
    """Collects shapes; `svg` returns them. Lengths are pixels at full width."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []
        self._has_arrows = False

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "free",
        stroke: str = "",
        opacity: float = 1,
        radius: float = 2,
        title: str = "",
    ) -> None:
        """A rectangle; a `title` is shown when one points at it."""
        extra = f' stroke="{variable(stroke)}"' if stroke else ""
        extra += f' opacity="{opacity:g}"' if opacity != 1 else ""
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'rx="{radius:g}" fill="{variable(fill)}"{extra}>{inside}</rect>'
        )

    def text(
        self, x: float, y: float, words: object, style: str = "", anchor: str = "start"
    ) -> None:
        """Words at a place. `style`: names of `STYLES`."""
        extra = "".join(f" {STYLES[name]}" for name in style.split())
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}"{side}{extra}>{escape(str(words))}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        stroke: str = "line",
        width: float = 1,
        arrow: bool = False,
    ) -> None:
        """A straight line from one point to the other, where the arrow's head is."""
        self.path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", stroke, width, arrow=arrow)

    def path(
        self,
        d: str,
        stroke: str = "line",
        width: float = 1,
        dashed: bool = False,
        arrow: bool = False,
        fill: str = "",
    ) -> None:
        """A line along `d`, in SVG's own notation; with `fill` an area."""
        extra = ' stroke-dasharray="4 3"' if dashed else ""
        if arrow:
            self._has_arrows = True
            extra += ' marker-end="url(#ARROW)"'
        style = f'fill="none" stroke="{variable(stroke)}" stroke-width="{width:g}"'
        style = f'fill="{variable(fill)}"' if fill else style
        self._parts.append(f'<path d="{d}" {style}{extra}/>')

    def circle(self, x: float, y: float, radius: float, fill: str = "line") -> None:
        """A filled circle around a point."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{variable(fill)}"/>'
        )

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is drawn meanwhile belongs to `name`, by which a page finds it; "" is no part."""
        self._parts.append(f'<g data-part="{escape(name)}">' if name else "")
        yield
        self._parts.append("</g>" if name else "")

    def brace(self, x1: float, x2: float, y: float, depth: float = 8, stroke: str = "line") -> None:
        """A bracket from `x1` to `x2` that is open at `y`, upwards unless `depth` is negative."""
        self.path(f"M{x1:.1f} {y:.1f}v{depth:g}H{x2:.1f}v{-depth:g}", stroke, 1.4)

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: object,
        fill: str,
        opacity: float = 1,
        title: str = "",
    ) -> None:
        """A rectangle with a word in its middle, in small letters or none where it is narrow."""
        self.rect(x, y, width, height, fill, opacity=opacity, title=title)
        pale = fill in ("free", "soft") or opacity < 0.5
        self.fit(x + width / 2, y + height / 2 + 4, width, words, "muted" if pale else "on")

    def fit(self, x: float, y: float, width: float, words: object, style: str) -> None:
        """Words around `x`, in small letters, in tiny ones, or not at all, as `width` allows."""
        room = width / max(1, len(str(words)))
        if room > 4.7:
            self.text(x, y, words, f"{'small' if room > 6.5 else 'tiny'} {style}", "middle")

    def cross(self, x: float, y: float, stroke: str = "warn") -> None:
        """A mark around a point."""
        self.path(f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", stroke, 2.5)

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """What colours mean: `(colour, words)`, side by side."""
        for colour, words in entries:
            self.rect(x, y - 10, 12, 12, colour, stroke="line" if colour == "free" else "")
            self.text(x + 17, y, words, "small muted")
            x += 30 + 6.6 * len(words)

    def svg(self, label: str, heading: str = "", style: str = "") -> str:
        """The drawing.

        Args:
            label: read out where the drawing cannot be seen.
            heading: written above it.
            style: CSS of the whole; as it is, a drawing fills its frame and no more.
        """
        defs, parts = "", "".join(self._parts)
        if self._has_arrows:
            # A name of its own: one that is defined in a drawing that is not shown draws nothing.
            arrow = f"arrow-{zlib.crc32(parts.encode()):08x}"
            parts = parts.replace("url(#ARROW)", f"url(#{arrow})")
            defs = (
                f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
                f'fill="{variable("line")}"/></marker></defs>'
            )
        top, width = 26 if heading else 0, max(self.width, 7.2 * len(heading) + 8)
        head = f'<text x="4" y="-10">{escape(heading)}</text>' if heading else ""
        style = style or f"max-width:{self.width:g}px;min-width:{min(self.width, 560):g}px"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
            f'viewBox="0 {-top} {width:g} {self.height + top:g}" role="img" '
            f'aria-label="{escape(label, quote=True)}" font-size="13" fill="{variable("text")}" '
            f'style="font-family:var(--md-text-font-family,sans-serif);{style}">'
            f"{defs}{head}{parts}</svg>"
        )
