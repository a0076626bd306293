"""The picture of the stall: every gap of every chat over time, one stage below the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from .demo_episode import DOCUMENT, Episode, seconds

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito: told apart by everybody
SHADE = "#f0e442"


def plot_gaps(episodes: Sequence[Episode], path: Path) -> None:
    """Write a PNG: each gap as a line as long as it lasted, as high as it is long.

    The lines of the four chats lie a little beside each other, or they would be one.

    All stages have the same axes: seconds since the first arrival, and the gap on a logarithmic
    scale, as a decode step and a stall are orders of magnitude apart. The time from the document's
    arrival to its first token is shaded.
    """
    figure = Figure(figsize=(9, 1.1 + 2.3 * len(episodes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(episodes), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, episode in zip(axes, episodes, strict=True):
        arrival, first_token = (time - episode.start for time in episode.prefill)
        shade = axis.axvspan(arrival, first_token, color=SHADE, alpha=0.35, lw=0)
        shade.set_label("the document is in prefill")
        chats = [name for name in episode.outputs if name != DOCUMENT]
        for i, (name, color) in enumerate(zip(chats, COLORS, strict=True)):
            gaps = [gap for gap in episode.gaps if gap.name == name]
            beside = ScaledTranslation(0, (i - 1.5) * 1.6 / 72, figure.dpi_scale_trans)
            axis.hlines(
                [gap.seconds for gap in gaps],
                [gap.start - episode.start for gap in gaps],
                [gap.end - episode.start for gap in gaps],
                color=color,
                lw=1.5,
                label=f"chat {name}",
                transform=axis.transData + beside,
            )
        longest = episode.longest_gap
        axis.annotate(
            f"longest gap {seconds(longest.seconds)}",
            ((longest.start + longest.end) / 2 - episode.start, longest.seconds),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
        )
        axis.set_title(episode.title, loc="left", fontweight="bold")
        axis.set_ylabel("gap between two tokens")
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)

    lengths = [gap.seconds for episode in episodes for gap in episode.gaps]
    axes[0].set_yscale("log")
    axes[0].set_ylim(min(lengths) / 1.5, max(lengths) * 2.5)
    axes[0].set_xlim(0, max(episode.end - episode.start for episode in episodes))
    axes[0].yaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0)))
    axes[0].yaxis.set_major_formatter(FuncFormatter(_label))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("seconds since the first chat arrived")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def _label(value: float, position: int) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
