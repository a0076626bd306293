"""A few shapes as SVG on one line, in the colours of `docs/assets/course.css`.

One line, so that a drawing can stand in an indented block of Markdown; colours by CSS variable, so
that it is right in both modes. Knows nothing of what it draws.
"""

from __future__ import annotations

from html import escape

COLOURS = {
    name: f"var(--fig-{name.lower()})"
    for name in (
        *("A", "B", "C", "D", "doc", "shared"),
        *("free", "line", "text", "muted", "on", "warn", "soft"),
    )
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
        extra = f' stroke="{COLOURS[stroke]}"' if stroke else ""
        extra += f' opacity="{opacity:g}"' if opacity != 1 else ""
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'rx="{radius:g}" fill="{COLOURS[fill]}"{extra}>{inside}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: object,
        style: str = "",
        anchor: str = "start",
        fill: str = "",
    ) -> None:
        """Words at a place. `style`: classes of course.css: small, code, muted, on, strong."""
        classes = f' class="{style}"' if style else ""
        colour = f' style="fill:{COLOURS[fill]}"' if fill else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{colour}>'
            f"{escape(str(words))}</text>"
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
    ) -> None:
        """A line along `d`, in SVG's own notation."""
        extra = ' stroke-dasharray="4 3"' if dashed else ""
        if arrow:
            self._has_arrows = True
            extra += ' marker-end="url(#arrow)"'
        style = f'fill="none" stroke="{COLOURS[stroke]}" stroke-width="{width:g}"'
        self._parts.append(f'<path d="{d}" {style}{extra}/>')

    def circle(self, x: float, y: float, radius: float, fill: str = "line") -> None:
        """A filled circle around a point."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{COLOURS[fill]}"/>'
        )

    def svg(self, label: str) -> str:
        """The drawing. `label` is read out where it cannot be seen."""
        defs = ""
        if self._has_arrows:
            defs = (
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
                f'fill="{COLOURS["line"]}"/></marker></defs>'
            )
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(label, quote=True)}" '
            f'style="max-width:{self.width:g}px;min-width:{min(self.width, 560):g}px">'
            f"{defs}{''.join(self._parts)}</svg>"
        )
