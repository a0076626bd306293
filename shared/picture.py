"""How all pictures look, in one place: size, colours, letters, a light and a dark variant.

Colours are those of Okabe and Ito, which everybody tells apart, lightened for the dark variant.
Warm is prefill and what it costs (so is stage 03), cool is decode (so is stage 04). Where colour
matters, the kind of line or a label says the same.

Knows matplotlib; no results, no stages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from . import files

WIDTH = 6.6  # inches; letters of 10 points are then still letters on a phone
DPI = 200
PALETTE = 96  # colours of a file: enough for smooth letters, and a third of the bytes


@dataclass(frozen=True)
class Theme:
    """The colours of one variant.

    Attributes:
        name: ends the file's name.
        warm, cool, third: the main colours, in the order of their importance.
        chats: one for each of four streams.
        shade: behind the time in which a long prompt is in prefill.
    """

    name: str
    background: str
    text: str
    muted: str
    grid: str
    warm: str
    cool: str
    third: str
    chats: tuple[str, str, str, str]
    shade: str


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#1f2a33",
    muted="#5a6670",
    grid="#e3e7ea",
    warm="#d55e00",
    cool="#0072b2",
    third="#009e73",
    chats=("#0072b2", "#009e73", "#cc79a7", "#56b4e9"),
    shade="#fbe8d8",
)
DARK = Theme(
    name="dark",
    background="#1e2529",  # the site's
    text="#dfe5ea",
    muted="#9aa6b0",
    grid="#323c43",
    warm="#f2995a",
    cool="#56b4e9",
    third="#3cc79d",
    chats=("#56b4e9", "#3cc79d", "#e59cc5", "#f0e442"),
    shade="#3b2f27",
)
THEMES = (LIGHT, DARK)

Paint = Callable[[Figure, Theme], None]


def draw(
    path: str | Path, paint: Paint, height: float, theme: Theme = LIGHT, caption: str = ""
) -> None:
    """Write a PNG of `WIDTH` x `height` inches.

    Args:
        paint: puts axes into an empty figure.
        caption: below it in small letters, and in the file as "Description".
    """
    with matplotlib.rc_context(_look(theme)):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        paint(figure, theme)
        if caption:
            lines = textwrap.fill(caption, 118)
            figure.supxlabel(lines, x=0.012, ha="left", fontsize=7, color=theme.muted)
        canvas.draw()
        pixels = Image.frombuffer(
            "RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())
        ).convert("RGB")
    info = PngInfo()
    info.add_text("Description", caption)
    png = io.BytesIO()
    pixels = pixels.quantize(PALETTE, dither=Image.Dither.NONE)
    pixels.save(png, "PNG", optimize=True, pnginfo=info)
    files.save(path, png.getvalue())


def _look(theme: Theme) -> dict[str, Any]:
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelcolor": theme.muted,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme.muted,
        "axes.facecolor": theme.background,
        "figure.facecolor": theme.background,
        "grid.color": theme.grid,
        "hatch.color": theme.background,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "text.color": theme.text,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
    }


# --- axes -------------------------------------------------------------------------------------


def log_axis(axis: Any, subs: tuple[float, ...] = (1.0, 3.0)) -> None:
    """Make an x or y axis (`axes.xaxis`, `axes.yaxis`) logarithmic, with plain numbers at it."""
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log")
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """A number as people write it: 0.03, 1, 2.5, 4,096."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def legend(figure: Figure, axes: Any, columns: int = 6) -> None:
    """One legend for all axes, above them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        *(handles, labels),
        loc="outside upper left",
        ncols=columns,
        handlelength=1.3,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def halo(theme: Theme) -> list[Any]:
    """Path effects for a label that may lie on lines: it stays readable."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground=theme.background)]
