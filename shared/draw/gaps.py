"""The picture of the stall: every gap of every stream over time, one stage below the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from shared.measure.episode import DOCUMENT, Episode, seconds

from .figures import Panel
from .palette import Theme, colours_of
from .picture import draw, halo, legend, log_axis


def plot_gaps(episodes: Sequence[Episode], path: Path) -> None:
    """Write a PNG of the demo's episodes, with times from the first arrival on."""
    panels = []
    for episode in episodes:
        arrival, first_token = (time - episode.start for time in episode.prefill)
        times = {
            f"chat {name}": [time - episode.start for time in output.metrics.token_times]
            for name, output in episode.outputs.items()
            if name != DOCUMENT
        }
        panels.append(Panel(episode.title, times, [(arrival, first_token)]))

    def paint(figure: Figure, theme: Theme) -> None:
        paint_gaps(figure, theme, panels, "time since the first chat arrived (s)")

    draw(path, paint, height_of_gaps(len(panels)))


def height_of_gaps(count: int) -> float:
    """Inches for so many panels."""
    return 0.8 + 1.75 * count


def paint_gaps(figure: Figure, theme: Theme, panels: Sequence[Panel], x_label: str) -> None:
    """Each gap as a line as long as it lasted, as high as it is long.

    The lines of the streams lie a little beside each other, or they would be one. All panels have
    the same axes, the gaps' logarithmic: a decode step and a stall are orders of magnitude apart.
    The time from the long prompt's arrival to its first token is shaded.

    Raises:
        ValueError: a panel has no gap.
    """
    axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    lengths: list[float] = []
    for axis, panel in zip(axes, panels, strict=True):
        lengths += _paint_panel(axis, theme, panel)
    log_axis(axes[0].yaxis)
    axes[0].set_ylim(min(lengths) / 1.6, max(lengths) * 3)
    times = [time for panel in panels for one in panel.token_times.values() for time in one]
    axes[0].set_xlim(min(0.0, *times), max(times))
    axes[-1].set_xlabel(x_label)
    figure.supylabel("gap between two tokens (ms)", fontsize="medium", color=theme["muted"])
    legend(figure, axes[0])


def _paint_panel(axis: Any, theme: Theme, panel: Panel) -> list[float]:
    """One stage; returns the lengths of all gaps in milliseconds."""
    for span in panel.prefill:
        shade = axis.axvspan(*span, color=theme["doc"], alpha=0.16, lw=0, zorder=0)
        shade.set_label("long prompt in prefill")
    found = []
    colours = colours_of(panel.token_times)
    middle = (len(panel.token_times) - 1) / 2
    for i, (name, times) in enumerate(panel.token_times.items()):
        gaps = [((b - a) * 1e3, a, b) for a, b in pairwise(times)]
        beside = ScaledTranslation(0, (i - middle) * 1.5 / 72, axis.figure.dpi_scale_trans)
        axis.hlines(
            *([gap[part] for gap in gaps] for part in range(3)),
            color=theme[colours[name]],
            lw=1.4,
            label=name,
            transform=axis.transData + beside,
        )
        found += gaps
    if not found:
        raise ValueError(f"{panel.title}: there is no gap between two tokens")
    length, start, end = max(found)
    axis.annotate(
        f"longest gap {seconds(length / 1e3)}",
        ((start + end) / 2, length),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        path_effects=halo(theme),
    )
    axis.set_title(panel.title)
    return [length for length, _, _ in found]
