"""How all PNG pictures look, in one place: size, letters, a light and a dark variant.

`doc` is prefill and what it costs (so is stage 03), `a` is decode (so is stage 04). Where colour
matters, the kind of line or a label says the same.

Knows matplotlib; no results, no stages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shared.engine import files

from .palette import LIGHT, Theme
from .text import plain

WIDTH = 6.6  # inches; letters of 10 points are then still letters on a phone
DPI = 200
PALETTE = 96  # colours of a file: enough for smooth letters, and a third of the bytes


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
            figure.supxlabel(lines, x=0.012, ha="left", fontsize=7, color=theme["muted"])
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
        "axes.labelcolor": theme["muted"],
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme["muted"],
        "axes.facecolor": theme["background"],
        "figure.facecolor": theme["background"],
        "grid.color": theme["free"],
        "hatch.color": theme["background"],
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "text.color": theme["text"],
        "xtick.color": theme["muted"],
        "ytick.color": theme["muted"],
        "xtick.labelcolor": theme["text"],
        "ytick.labelcolor": theme["text"],
    }


# --- axes -------------------------------------------------------------------------------------


def log_axis(axis: Any, subs: tuple[float, ...] = (1.0, 3.0)) -> None:
    """Make an x or y axis (`axes.xaxis`, `axes.yaxis`) logarithmic, with plain numbers at it."""
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log")
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())


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

    return [withStroke(linewidth=2.5, foreground=theme["background"])]
