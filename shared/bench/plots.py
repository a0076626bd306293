"""Pictures of the results in a folder, each light and dark.

Reads the JSON files that the benchmarks wrote, and nothing else. A picture whose numbers are not
there is left out, with the command that makes them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from shared.draw.figures import Panel
from shared.draw.gaps import height_of_gaps, paint_gaps
from shared.draw.palette import CHATS, THEMES, Theme
from shared.draw.picture import draw, halo, legend, log_axis
from shared.draw.text import plain
from shared.measure.episode import seconds
from shared.measure.machine import place
from shared.measure.results import load, short

from .options import Parser

Content = Mapping[str, Any]
LINES = {"stage 03": ("doc", "--", "s"), "stage 04": ("a", "-", "o")}
LINES["stage 04, target"] = ("b", "-.", "^")
STALL_ROWS = {"stage 03": "Stage 03: whole prompts", "stage 04": "Stage 04: chunks of {} tokens"}
LONG = "long"  # the request that makes the others wait; all others are streams


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument(
        "--out", default="build/bench", metavar="DIR", help="where the JSON is and pictures go"
    )


def main(args: argparse.Namespace, console: Console) -> int:
    """Draw what can be drawn.

    Returns:
        0; 1 if a file cannot be drawn, or if there is nothing to draw.
    """
    folder = Path(args.out)
    drawn, broken = 0, set()
    for picture in PICTURES:
        path = folder / f"{picture.benchmark}.json"
        how = f"make it with python -m shared.bench {picture.benchmark}"
        if not path.exists():
            say(console, f"skipped: {picture.name}: no {path}; {how}")
            continue
        if path in broken:
            continue
        try:
            paths = paint_all(picture, load(path), folder)
        except Lacking as error:
            say(console, f"skipped: {picture.name}: {path} has no {error}; {how}")
            continue
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            broken.add(path)
            continue
        drawn += 1
        for one in paths:
            say(console, f"written: {one}")
    return int(bool(broken) or not drawn)


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class Lacking(Exception):
    """The results are of a run without what a picture shows; says what that is."""


@dataclass(frozen=True)
class Picture:
    """A picture of one result file.

    Attributes:
        name: of its files, before "-light.png".
        benchmark: whose results it shows.
        height: in inches.
        paint: puts it into a figure. Raises `Lacking`.
    """

    name: str
    benchmark: str
    height: float
    paint: Callable[[Figure, Theme, Content], None]


def paint_all(picture: Picture, content: Content, folder: Path) -> list[Path]:
    """Write both variants; returns their paths.

    Raises:
        Lacking: the run was without what the picture shows.
        ValueError: the file is not as `results` writes it.
    """
    paths = []
    for theme in THEMES:
        path = folder / f"{picture.name}-{theme['name']}.png"
        try:
            draw(
                path,
                lambda figure, theme: picture.paint(figure, theme, content),
                picture.height,
                theme,
                caption(content),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{picture.benchmark}.json: cannot draw {picture.name}: {why}") from (
                error
            )
        paths.append(path)
    return paths


def caption(content: Content) -> str:
    """On what, with what, when: the line below each picture."""
    machine, model, settings = content["machine"], content["model"], content["settings"]
    where = place(machine)
    what = f"{model['name']}, {model['dtype']}" if model else ""
    if content["benchmark"] == "simulate":
        where, what = f"simulated: {settings['shape']} on {settings['gpu']}", ""
    parts = [
        where,
        what,
        f"torch {content['versions']['torch']}",
        content["date"][:10],
        f"commit {content['commit']}" if content["commit"] else "no commit",
        content["command"].removeprefix("python -m "),
        "" if content["complete"] else "INTERRUPTED",
        "FAILED" if content["failures"] else "",
    ]
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts if part)


# --- the ladder -------------------------------------------------------------------------------

LADDER = ("output_tok_s", "ttft_p50", "itl_p50", "stall")


def rows_of(content: Content, table: str) -> list[Any]:
    """The rows of one table. Raises `Lacking`."""
    rows = [row for row in content["rows"] if row["table"] == table]
    if not rows:
        raise Lacking(f"table {table!r}")
    return rows


def paint_ladder(figure: Figure, theme: Theme, content: Content) -> None:
    """A dot for each way to serve, one panel for each measure; a line from worst to best round."""
    rows = rows_of(content, "ladder")
    names = [row["name"] for row in rows]
    all_axes = figure.subplots(1, len(LADDER), sharey=True)
    for axes, key in zip(all_axes, LADDER, strict=True):
        column = content["columns"][key]
        found = [(i, row["values"][key]) for i, row in enumerate(rows) if key in row["values"]]
        low = min(value["min"] for _, value in found)
        high = max(value["max"] for _, value in found)
        log_axis(axes.xaxis, subs=(1.0, 3.0) if high < 8 * low else (1.0,))
        for i, value in found:
            color = theme["a"] if names[i].startswith("stage") else theme["muted"]
            axes.plot([value["min"], value["max"]], [i, i], color=color, lw=1.2)
            axes.plot(value["median"], i, "o", color=color, ms=5.5)
            axes.annotate(
                short(value["median"]),
                (value["max"], i),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
        room = max(high / low, 2) ** 0.1
        axes.set_xlim(low / room, high * room**5)  # for the number to the right of the last dot
        axes.set_title(column["title"], fontsize=9)
        better = {"higher": "more is better", "lower": "less is better"}[column["better"]]
        axes.set_xlabel(f"{column['unit']}, log\n{better}", fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=7)
    all_axes[0].set_yticks(range(len(names)), names)
    all_axes[0].set_ylim(len(names) - 0.4, -0.6)


# --- the stall --------------------------------------------------------------------------------


def stall_runs(content: Content) -> dict[str, tuple[str, Any]]:
    """Title and raw data of stages 03 and 04. Raises `Lacking`."""
    chunk = content["settings"]["chunk_size"]
    return {
        name: (title.format(chunk), raw_data(content, name)) for name, title in STALL_ROWS.items()
    }


def raw_data(content: Content, name: str) -> Any:
    """What `stall` took down of one run. Raises `Lacking`."""
    if name not in content["series"]:
        raise Lacking(f"raw data of {name}")
    return content["series"][name]


def label_of(request: str) -> str:
    """How the legend calls a request."""
    return "long prompt" if request == LONG else request.replace("-", " ")


def paint_stall(figure: Figure, theme: Theme, content: Content) -> None:
    """All gaps of the streams over time."""
    panels = []
    for title, run in stall_runs(content).values():
        long = run["requests"][LONG]
        times = {
            label_of(name): request["token_times"]
            for name, request in run["requests"].items()
            if name != LONG
        }
        panels.append(Panel(title, times, [(long["arrival"], long["token_times"][0])]))
    paint_gaps(figure, theme, panels, "time since the long prompt arrived (s)")


def tokens_of(step: Content, requests: Content) -> tuple[int, int]:
    """(decode tokens, prefill tokens) of a step. In these runs nothing is preempted."""
    decode = sum(n for name, start, n in step["slices"] if start >= requests[name]["prompt_tokens"])
    return decode, sum(n for _, _, n in step["slices"]) - decode


def paint_steps(figure: Figure, theme: Theme, content: Content) -> None:
    """Each step as a bar, as high as the tokens that it computed."""
    runs = stall_runs(content)
    all_axes = figure.subplots(len(runs), 1, sharex=True, sharey=True)
    ends, most = [], 1
    for axes, (title, run) in zip(all_axes, runs.values(), strict=True):
        steps = run["steps"]
        first = min(i for i, step in enumerate(steps) if step["end"] > 0)
        last = min(i for i, step in enumerate(steps) if LONG in step["sampled"])
        ends.append(last - first)
        tokens = [tokens_of(step, run["requests"]) for step in steps]
        most = max(most, *(sum(both) for both in tokens))
        x = [i - first for i in range(len(steps))]
        bottoms = [max(decode, 1) for decode, _ in tokens]  # a logarithmic axis begins at 1
        axes.bar(x, [both[0] for both in tokens], 0.8, color=theme["a"], label="decode")
        axes.bar(
            *(x, [prefill for _, prefill in tokens], 0.8, bottoms),
            color=theme["doc"],
            label="prefill",
        )
        worst = max(range(first, last + 1), key=lambda i: steps[i]["end"] - steps[i]["start"])
        axes.annotate(
            f"longest step {seconds(steps[worst]['end'] - steps[worst]['start'])}",
            (worst - first, sum(tokens[worst])),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            path_effects=halo(theme),
        )
        axes.set_title(title)
    log_axis(all_axes[0].yaxis, subs=(1.0,))
    all_axes[0].set_ylim(1, most * 4)
    all_axes[0].set_xlim(-8.6, max(ends) + 8.6)
    all_axes[-1].set_xlabel("after the long prompt arrived (steps)")
    figure.supylabel("computed in a step (tokens)", fontsize="medium", color=theme["muted"])
    legend(figure, all_axes[0])


def paint_cdf(figure: Figure, theme: Theme, content: Content) -> None:
    """Share of the streams' gaps that are no longer than so much, with a scale that shows the tail.

    Each further step of the scale has a tenth of the gaps: 90 %, 99 %, 99.9 %.
    """
    axes = figure.subplots()
    most = 0
    for name, (hue, style, _) in LINES.items():
        if name not in content["series"]:
            continue
        color = theme[hue]
        gaps = sorted(
            (b - a) * 1e3
            for request, one in content["series"][name]["requests"].items()
            if request != LONG
            for a, b in pairwise(one["token_times"])
        )
        if not gaps:
            raise ValueError(f"{name}: there is no gap between two tokens")
        most = max(most, len(gaps))
        left = [1 - (i + 0.5) / len(gaps) for i in range(len(gaps))]  # share of longer ones
        axes.step(gaps, left, style, where="post", color=color, label=name)
        axes.plot(gaps[-1], left[-1], "o", color=color, ms=4)
        axes.annotate(
            seconds(gaps[-1] / 1e3),
            (gaps[-1], left[-1]),
            xytext=(-5, 5),
            textcoords="offset points",
            ha="right",
        )
    if not most:
        raise Lacking("raw data of stage 03 or 04")
    log_axis(axes.xaxis)
    axes.set_yscale("log")
    ticks = [share for share in (0.5, 0.1, 0.01, 0.001, 1e-4) if share > 0.4 / most]
    axes.set_yticks(ticks, [f"{plain(100 * (1 - share))} %" for share in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(1, 0.22 / most)
    axes.grid(axis="x")
    axes.set_xlabel("gap between two tokens, ITL (ms)")
    axes.set_ylabel("gaps that are no longer (%)")
    legend(figure, axes)


def paint_pool(figure: Figure, theme: Theme, content: Content) -> None:
    """Blocks that each request holds over time, with both ways to allocate a long prompt's."""
    at_once = "All of a prompt's blocks at once (reserve_full_prompt)"
    runs = {
        "Blocks chunk by chunk": raw_data(content, "stage 04"),
        at_once: raw_data(content, "stage 04, reserved"),
    }
    ends: list[float] = []
    all_axes = figure.subplots(len(runs), 1, sharex=True, sharey=True)
    for axes, (title, run) in zip(all_axes, runs.items(), strict=True):
        steps = run["steps"]
        x = [*(step["start"] for step in steps), steps[-1]["end"]]
        ends += x[0], x[-1]
        names = list(run["requests"])
        held = [[step["blocks"].get(name, 0) for step in steps] for name in names]
        colors = [
            theme["doc"] if name == LONG else theme[CHATS[i % 4]] for i, name in enumerate(names)
        ]
        axes.stackplot(
            x,
            [[*one, one[-1]] for one in held],
            step="post",
            colors=colors,
            labels=[label_of(name) for name in names],
            lw=0,
        )
        pool = steps[0]["free_blocks"] + sum(steps[0]["blocks"].values())
        axes.axhline(pool, color=theme["muted"], lw=1, ls="--", label=f"pool of {pool}")
        axes.set_title(title)
    all_axes[-1].set_xlim(min(ends), max(ends))
    all_axes[-1].set_ylim(0, pool * 1.06)
    all_axes[-1].set_xlabel("time since the long prompt arrived (s)")
    figure.supylabel("KV cache held (blocks)", fontsize="medium", color=theme["muted"])
    legend(figure, all_axes[0])


# --- sweeps -----------------------------------------------------------------------------------


def plot_values(axes: Any, x: Sequence[float], values: Sequence[Content], **look: Any) -> None:
    """A line through the medians, and at each `x` one from the worst to the best round."""
    axes.plot(x, [value["median"] for value in values], ms=5, **look)
    low, high = ([value[part] for value in values] for part in ("min", "max"))
    axes.vlines(x, low, high, color=look["color"])


def paint_chunks(figure: Figure, theme: Theme, content: Content) -> None:
    """What a chunk size costs the streams and what it costs the long prompt itself."""
    rows = sorted(rows_of(content, "chunk size"), key=lambda row: row["params"]["chunk"])
    axes = figure.subplots()
    x = [row["params"]["chunk"] for row in rows]
    lines = {
        "gap_max": (theme["a"], "-", "o", "longest gap of the streams"),
        "long_ttft": (theme["doc"], "--", "s", "TTFT of the long prompt"),
    }
    for key, (color, style, marker, label) in lines.items():
        values = [row["values"][key] for row in rows]
        plot_values(axes, x, values, linestyle=style, marker=marker, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [plain(size) for size in x])
    axes.set_xticks([], minor=True)
    log_axis(axes.yaxis, subs=(1.0, 2.0, 5.0))
    axes.set_xlabel("chunk size (tokens)")
    axes.set_ylabel("longest gap, TTFT (ms)")
    legend(figure, axes)


def paint_goodput(
    figure: Figure, theme: Theme, content: Content, table: str = "goodput", limits: str = "limits"
) -> None:
    """Share of the requests that are in time, and how many those are a second, by arrival rate."""
    rows = rows_of(content, table)
    left, right = figure.subplots(1, 2)
    for name, (hue, style, marker) in LINES.items():
        mine = sorted(
            (row for row in rows if row["name"] == name), key=lambda row: row["params"]["rate"]
        )
        rates = [row["params"]["rate"] for row in mine]
        for axes, key in ((left, "in_time"), (right, "goodput")) if mine else ():
            values = [row["values"][key] for row in mine]
            look = {"linestyle": style, "marker": marker, "color": theme[hue], "label": name}
            plot_values(axes, rates, values, **look)
    left.axhline(99, color=theme["muted"], lw=1, ls=":", label="99 %")
    left.set_ylim(0, 104)
    right.set_ylim(0)
    left.set_ylabel("in time (%)")
    right.set_ylabel("goodput (requests/s)")
    for axes in (left, right):
        axes.set_xlim(0)
        axes.set_xlabel("arrivals (requests/s)")
    ttft, itl = (plain(content["settings"][limits][key]) for key in ("ttft_ms", "itl_ms"))
    left.set_title(f"In time: TTFT ≤ {ttft} ms, every gap ≤ {itl} ms", fontsize=9)
    legend(figure, left)


PICTURES: Sequence[Picture] = (
    Picture("ladder", "ladder", 2.9, paint_ladder),
    Picture("gaps", "stall", height_of_gaps(2), paint_stall),
    Picture("steps", "stall", 3.9, paint_steps),
    Picture("itl-cdf", "stall", 3.1, paint_cdf),
    Picture("pool", "stall", 3.9, paint_pool),
    Picture("chunk-sizes", "sweeps", 3.1, paint_chunks),
    Picture("goodput", "goodput", 3.0, paint_goodput),
    Picture(
        *("goodput-simulated", "simulate", 3.0),
        functools.partial(paint_goodput, table="(e) goodput", limits="(e) limits"),
    ),
)
