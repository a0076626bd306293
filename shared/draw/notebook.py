"""Pictures for the notebooks: pools, block tables, steps, stalls, measured lines.

Each function takes plain data or a trace and returns a `Picture`: an SVG that fits its page and
takes its colours from it, and one line that says what is to be seen, with the counts. Knows traces
and block tables; no engine, no model, no puzzle.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, ParamSpec

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from shared.engine.trace import StepRecord, Trace
from shared.measure.episode import DOCUMENT, seconds
from shared.measure.metrics import kv_use

from .picture import CHATS, COLOURS, LIGHT, plain

WIDTH = 520  # pixels; pictures shrink and grow with their page
FONT, SMALL = 13, 11

PAPER = "#fffffe"

P = ParamSpec("P")

_RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.labelcolor": LIGHT["text"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": FONT,
    "figure.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "grid.color": LIGHT["free"],
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mini-vllm",  # the same picture twice is the same file
    "text.color": LIGHT["text"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.labelsize": SMALL,
    "legend.fontsize": SMALL,
}


class Picture:
    """An SVG that a notebook shows; its text says what is on it."""

    def __init__(self, figure: Figure, text: str) -> None:
        self.text = text
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        self.svg = _tidy(buffer.getvalue(), text)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text


def _styled(draw: Callable[P, Picture]) -> Callable[P, Picture]:
    """One style for all pictures, whatever the notebook has set for its own."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Picture:
        with matplotlib.rc_context(_RC):
            return draw(*args, **kwargs)

    return styled


def _tidy(svg: str, text: str) -> str:
    """Only the drawing: no styles or names that would reach beyond it; colours of the page."""
    svg = svg[svg.index("<svg") :]
    for noise in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(noise, "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z]\w*_\d+"', "", svg)
    head = (
        f'width="{WIDTH}" role="img" aria-label="{escape(text)}" '
        'style="max-width: 100%; height: auto; stroke-linejoin: round"'
    )
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r'width="[\d.]+pt"', "", svg, count=1).replace("<svg ", f"<svg {head} ", 1)
    svg = svg.replace("'DejaVu Sans'", "sans-serif")
    svg = svg.replace(PAPER, f"var(--md-default-bg-color, {PAPER})")
    for name, (colour, _) in COLOURS.items():
        svg = svg.replace(colour, f"var(--fig-{name}, {colour})")
    # And small: a notebook is kept with its pictures.
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", svg)
    svg = re.sub(r"<g>\s*(<(?:path|text)[^<>]*(?:/>|>[^<>]*</text>))\s*</g>", r"\1", svg)
    return " ".join(svg.split())


class Table:
    """Rows as a notebook shows them. Cells are text or numbers."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.heads = list(heads)
        self.rows = [[f"{c:,}" if type(c) is int else str(c) for c in row] for row in rows]

    def _repr_html_(self) -> str:
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.heads)
        right = [all(re.fullmatch(r"[\d,.–-]+", cell) for cell in cells) for cells in columns]

        def line(tag: str, cells: Sequence[str]) -> str:
            sides = ["right" if is_number else "left" for is_number in right]
            return "".join(
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        head = f"<thead><tr>{line('th', self.heads)}</tr></thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        return "\n".join("  ".join(cells) for cells in [self.heads, *self.rows])


def _figure(height: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    return figure, list(axes)


def _bare(axis: Any, width: float, height: float) -> None:
    """An axis without ticks on which one unit is one pixel, from the top."""
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)
    axis.axis("off")


def _box(
    axis: Any, x: float, y: float, width: float, height: float, colour: str, label: str = ""
) -> None:
    box = Rectangle((x, y), width, height, facecolor=LIGHT[colour], edgecolor="none")
    axis.add_patch(box)
    if label:
        on = LIGHT["muted" if colour in ("free", "soft") else "on"]
        place = (x + width / 2, y + height / 2)
        size = SMALL if 7 * len(label) < width else 8
        axis.text(*place, label, color=on, ha="center", va="center", size=size)


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A to D and the document have their own colour everywhere; others take one in turn."""
    colours = {}
    for i, name in enumerate(names):
        own = name.lower() if name.lower() in CHATS else CHATS[i % len(CHATS)]
        colours[name] = "doc" if name == DOCUMENT else own
    return colours


# --- blocks -----------------------------------------------------------------------------------


@_styled
def pool(tables: Mapping[str, Sequence[int]], num_blocks: int) -> Picture:
    """All blocks of the pool and who holds them: `B2` is logical block 2 of B, `×3` has 3 holders.

    Raises ValueError if a table names a block that the pool does not have.
    """
    owners: dict[int, list[tuple[str, int]]] = {}
    for name, table in tables.items():
        for i, block in enumerate(table):
            if not 0 <= block < num_blocks:
                raise ValueError(f"{name} holds block {block}; the pool has {num_blocks} blocks")
            owners.setdefault(block, []).append((name, i))
    colours, columns = _colours(list(tables)), 16
    rows = -(-num_blocks // columns)
    cell, left = (WIDTH - 60) / columns, 36
    figure, (axis,) = _figure(26 * rows + 34)
    _bare(axis, left + columns * cell, 26 * rows)
    for block in range(num_blocks):
        row, column = divmod(block, columns)
        holders = owners.get(block, [])
        colour, label = "free", ""
        if len(holders) == 1:
            (name, i) = holders[0]
            colour, label = colours[name], f"{'' if name == DOCUMENT else name}{i}"
        elif holders:
            colour, label = "shared", f"×{len(holders)}"
        _box(axis, left + column * cell, 26 * row, cell - 2, 24, colour, label)
        if column == 0:
            axis.text(left - 6, 26 * row + 12, block, ha="right", va="center", size=SMALL)
    shared = sum(len(holders) > 1 for holders in owners.values())
    text = f"{len(owners)} of {num_blocks} blocks held, {num_blocks - len(owners)} free"
    text += f", {shared} shared" if shared else ""
    axis.set_title(text)
    return Picture(figure, text)


@_styled
def block_table(name: str, table: Sequence[int], num_tokens: int, block_size: int = 16) -> Picture:
    """What a sequence believes (logical blocks) and where it lies (the pool's first blocks).

    A logical block is filled as far as tokens go. Raises ValueError if the table is too short.
    """
    if len(table) * block_size < num_tokens:
        raise ValueError(f"{len(table)} blocks of {block_size} do not hold {num_tokens} tokens")
    colour = _colours([name])[name]
    columns = max(max(table) + 1, len(table) + 2)
    cell = (WIDTH - 24) / columns
    wide = (WIDTH - 24) / len(table)
    figure, (axis,) = _figure(176)
    _bare(axis, WIDTH - 24, 140)
    for i, block in enumerate(table):
        used = min(block_size, num_tokens - i * block_size)
        filled = (wide - 3) * used / block_size
        fits = filled > 24
        _box(axis, i * wide, 18, wide - 3, 30, "free", "" if fits else str(i))
        _box(axis, i * wide, 18, filled, 30, colour, str(i) if fits else "")
        ends = f"tokens {i * block_size}–{i * block_size + used - 1}"
        axis.text(i * wide, 10, ends if wide > 90 else f"{i * block_size}", size=SMALL, va="center")
        x = [(i + 0.5) * wide - 1.5, (block + 0.5) * cell - 1]
        axis.plot(x, [48, 100], color=LIGHT[colour], lw=1.2)
    for block in range(columns):
        held = block in table
        label = str(block) if cell > 16 else ""
        _box(axis, block * cell, 100, cell - 2, 26, colour if held else "free", label)
    text = f"{name}: {num_tokens} tokens in {len(table)} blocks, table {list(table)}"
    axis.set_title(f"logical blocks of {name}, and the pool below")
    return Picture(figure, text)


@_styled
def chains(prompts: Mapping[str, Sequence[bytes]], block_size: int = 16) -> Picture:
    """The hash chains of several prompts, a row each. A block that several have is shared."""
    counts: dict[bytes, int] = {}
    for hashes in prompts.values():
        for one in set(hashes):
            counts[one] = counts.get(one, 0) + 1
    columns = max(map(len, prompts.values()))
    left = 20 + 7 * max(map(len, prompts))
    wide = min(110.0, (WIDTH - 24 - left) / columns)
    figure, (axis,) = _figure(40 * len(prompts) + 46)
    _bare(axis, WIDTH - 24, 40 * len(prompts) + 16)
    colours = _colours(list(prompts))
    for row, (name, hashes) in enumerate(prompts.items()):
        y = 18 + 40 * row
        axis.text(left - 10, y + 14, name, ha="right", va="center")
        for i, one in enumerate(hashes):
            colour = "shared" if counts[one] > 1 else colours[name]
            _box(axis, left + i * wide, y, wide - 14, 28, colour, one.hex()[:6])
            if i:
                x = left + i * wide
                axis.plot([x - 14, x], [y + 14, y + 14], color=LIGHT["line"], lw=1.5)
    for i in range(columns):
        ends = f"{i * block_size}–{(i + 1) * block_size - 1}"
        axis.text(left + i * wide, 8, ends, size=SMALL, va="center", color=LIGHT["muted"])
    shared = sum(count > 1 for count in counts.values())
    text = f"{shared} of {len(counts)} different full blocks are in several prompts"
    axis.set_title(text)
    return Picture(figure, text)


@_styled
def chunks(num_tokens: int, chunk_size: int, block_size: int = 16, start_pos: int = 0) -> Picture:
    """A prompt's slots, block by block, in the colour of the chunk that writes them.

    What lies before `start_pos` was in the cache already.
    """
    if not 0 <= start_pos < num_tokens or chunk_size < 1:
        raise ValueError(f"no chunks of {chunk_size} from {start_pos} to {num_tokens}")
    num_chunks = -(-(num_tokens - start_pos) // chunk_size)
    rows = -(-num_tokens // block_size)
    cell, left = (WIDTH - 120) / block_size, 90
    figure, (axis,) = _figure(24 * rows + 36)
    _bare(axis, left + block_size * cell, 24 * rows)
    for t in range(rows * block_size):
        i, offset = divmod(t, block_size)
        number = (t - start_pos) // chunk_size
        colour, label = CHATS[number % len(CHATS)], str(t) if cell > 24 else ""
        if t < start_pos or t >= num_tokens:
            colour, label = "shared" if t < start_pos else "free", label if t < num_tokens else ""
        _box(axis, left + offset * cell, 24 * i, cell - 2, 21, colour, label)
    for i in range(rows):
        axis.text(left - 8, 24 * i + 10, f"block {i}", ha="right", va="center", size=SMALL)
    split = sum(t % block_size > 0 for t in range(start_pos + chunk_size, num_tokens, chunk_size))
    text = f"{_count(num_chunks, 'chunk')}, {_count(rows, 'block')}; "
    text += f"{_count(split, 'chunk')} beginning inside a block"
    axis.set_title(text)
    return Picture(figure, text)


# --- steps ------------------------------------------------------------------------------------


@_styled
def steps(trace: Trace, positions: Iterable[int]) -> Picture:
    """Some of a trace's steps, a column each: how many tokens of whom were computed.

    Prefill is in the request's colour, decode is pale. A cross marks who lost the blocks. Positions
    are those in `trace.steps`; others are left out, and where some are missing is a gap.
    """
    phases = dict(enumerate(trace.phases()))
    chosen = [i for i in sorted(set(positions)) if i in phases]
    if not chosen:
        raise ValueError(f"none of these steps is in the trace, which has {len(phases)}")
    names = _names(trace, chosen)
    colours = _colours(names)
    gaps = sum(later - earlier > 1 for earlier, later in pairwise(chosen))
    left, gap = 46, 14
    cell = min(40.0, (WIDTH - 24 - left - gap * gaps) / len(chosen))
    figure, (axis,) = _figure(26 * (len(names) + 2) + 32)
    _bare(axis, WIDTH - 24, 26 * (len(names) + 2))
    side = {"ha": "right", "va": "center"}
    for row, name in enumerate(names):
        axis.text(left - 8, 26 * row + 12, "doc" if name == DOCUMENT else name, **side)
    for row, label in enumerate(("tokens", "step"), len(names)):
        axis.text(left - 8, 26 * row + 12, label, size=SMALL, color=LIGHT["muted"], **side)
    middle = {"ha": "center", "va": "center"}
    lost, x, before = 0, float(left), chosen[0]
    for i in chosen:
        x += gap if i > before + 1 else 0
        record, kinds = phases[i]
        for (name, _, num_tokens), kind in zip(record.slices, kinds, strict=True):
            colour = colours[name] if kind == "prefill" else "free"
            _box(axis, x, 26 * names.index(name), cell - 2, 24, colour, str(num_tokens))
        centre = x + cell / 2 - 1
        for name in record.preempted:
            lost += 1
            y = 26 * names.index(name) + 12
            axis.text(centre, y, "×", color=LIGHT["warn"], size=18, **middle)
        size = SMALL if cell > 24 else 8
        y = 26 * len(names) + 12
        axis.text(centre, y, record.num_tokens, size=size, **middle)
        axis.text(centre, y + 26, i, size=size, color=LIGHT["muted"], **middle)
        x, before = x + cell, i
    total = sum(phases[i][0].num_tokens for i in chosen)
    text = f"{_count(len(chosen), 'step')}, {total:,} tokens computed"
    text += f", {_count(lost, 'preemption')}" if lost else ""
    axis.set_title(text)
    return Picture(figure, text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(trace: Trace, positions: Iterable[int]) -> list[str]:
    """Requests of these steps, in the order in which the trace first sees them."""
    inside: set[str] = set()
    for i in positions:
        record = trace.steps[i]
        inside |= {name for name, _, _ in record.slices} | set(record.preempted)
    order = [name for record in trace.steps for name, _, _ in record.slices]
    return [name for name in dict.fromkeys(order) if name in inside]


@_styled
def occupancy(trace: Trace, num_blocks: int, block_size: int = 16) -> Picture:
    """Blocks held in each step, and the part of them that holds tokens; preemptions marked.

    Raises ValueError if the trace has no block tables.
    """
    use = kv_use(trace.steps, block_size)
    indices = list(range(len(trace.steps)))
    held = [slots / block_size for _, _, slots in use]
    filled = [tokens / block_size for _, tokens, _ in use]
    figure, (axis,) = _figure(210)
    axis.fill_between(indices, held, step="mid", color=LIGHT["doc"], lw=0, label="held, unused")
    axis.fill_between(indices, filled, step="mid", color=LIGHT["a"], lw=0, label="tokens")
    axis.axhline(num_blocks, color=LIGHT["line"], lw=1.2, ls="--")
    axis.text(indices[-1], num_blocks, f"{num_blocks} blocks", ha="right", va="bottom", size=SMALL)
    lost = [i for i, record in enumerate(trace.steps) for _ in record.preempted]
    if lost:
        style = {"color": LIGHT["warn"], "marker": "x", "ls": "", "ms": 9, "mew": 2}
        axis.plot(lost, [num_blocks] * len(lost), label="preemption", **style)
    axis.set_ylim(0, num_blocks * 1.18)
    axis.set_xlim(indices[0] - 0.5, indices[-1] + 0.5)
    axis.set_xlabel("step")
    axis.set_ylabel("blocks")
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    slots, tokens = sum(slots for *_, slots in use), sum(tokens for _, tokens, _ in use)
    waste = 100 * (1 - tokens / slots) if slots else 0.0
    text = f"at most {max(held):.0f} of {num_blocks} blocks held, {waste:.1f} % of slots unused, "
    return Picture(figure, text + _count(len(lost), "preemption"))


@_styled
def stall(runs: Mapping[str, Trace], document: str = DOCUMENT) -> Picture:
    """When each stream got its tokens, a panel for each run; the document's steps are shaded.

    Time begins with the first of those steps. Raises ValueError if a trace has none.
    """
    panels = {name: _prefill_steps(trace, document) for name, trace in runs.items()}
    for name, found in panels.items():
        if not found:
            raise ValueError(f"{name}: the trace has no prefill of {document!r}")
    lengths = [found[-1].end - found[0].start for found in panels.values()]
    before, after = 0.25 * max(lengths), 1.3 * max(lengths)
    rows = len(runs)
    figure, axes = _figure(132 * rows + 26, rows, sharex=True)
    parts = []
    for axis, (name, found) in zip(axes, panels.items(), strict=True):
        origin = found[0].start
        for record in found:
            box = (record.start - origin, record.end - origin)
            axis.axvspan(*box, facecolor=LIGHT["doc"], edgecolor=PAPER, lw=1, alpha=0.45)
        times = _token_times(runs[name], document)
        colours = _colours(list(times))
        for row, (stream, tokens) in enumerate(times.items()):
            x = [t - origin for t in tokens if -before <= t - origin <= after]
            style = {"color": LIGHT[colours[stream]], "marker": "o", "ls": "", "ms": 3.5}
            axis.plot(x, [row] * len(x), **style)
        gap = _longest_gap(times, origin, found[-1].end)
        count = _count(len(found), "step")
        parts.append(f"{name}: {count} with the document, longest gap {seconds(gap)}")
        axis.set_title(f"{name}: longest gap {seconds(gap)}")
        axis.set_yticks(range(len(times)), list(times))
        axis.set_ylim(len(times) - 0.4, -0.6)
        axis.tick_params(left=False)
        axis.spines["left"].set_visible(False)
    axes[-1].set_xlim(-before, after)
    axes[-1].set_xlabel("seconds since the document's first step")
    return Picture(figure, "; ".join(parts))


def _prefill_steps(trace: Trace, document: str) -> list[StepRecord]:
    """The steps that computed a part of its prompt, up to its first token."""
    found = []
    for record in trace.steps:
        if any(name == document for name, _, _ in record.slices):
            found.append(record)
        if document in record.sampled:
            return found
    return found


def _token_times(trace: Trace, document: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for record in trace.steps:
        for name in record.sampled:
            if name != document:
                times.setdefault(name, []).append(record.end)
    return times


def _longest_gap(times: Mapping[str, Sequence[float]], start: float, end: float) -> float:
    """The longest time between two tokens of one stream that overlaps `start .. end`."""
    gaps = [
        later - earlier
        for tokens in times.values()
        for earlier, later in pairwise(tokens)
        if later > start and earlier < end
    ]
    return max(gaps, default=0.0)


# --- numbers ----------------------------------------------------------------------------------


@_styled
def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Picture:
    """Measured values over `x`, a line for each series, named at its end."""
    figure, (axis,) = _figure(240)
    for colour, (name, values) in zip(("doc", *CHATS), series.items(), strict=False):
        axis.plot(x, values, color=LIGHT[colour], marker="o", ms=5, lw=2)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (x[-1], values[-1]), color=LIGHT[colour], **place)
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            one.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.set_xticks(list(x), [f"{value:g}" for value in x])
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.grid(axis="y")
    ends = ", ".join(f"{name} {plain(values[-1])}" for name, values in series.items())
    return Picture(figure, f"{ylabel}, at {x[-1]:g}: {ends}")


@_styled
def bars(values: Mapping[str, float], unit: str, title: str = "") -> Picture:
    """One bar for each value, with its number."""
    figure, (axis,) = _figure(34 * len(values) + (50 if title else 24))
    names = list(values)
    axis.barh(names, list(values.values()), color=LIGHT["a"], height=0.62)
    for row, value in enumerate(values.values()):
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(f"{plain(value)} {unit}", (value, row), **beside)
    axis.set_xlim(0, 1.25 * max(values.values()) or 1)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xticks([])
    axis.tick_params(left=False, labelcolor=LIGHT["text"])
    axis.spines[["bottom", "left"]].set_visible(False)
    axis.set_title(title)
    parts = [f"{name} {plain(value)} {unit}" for name, value in values.items()]
    return Picture(figure, ", ".join(parts))


def results(content: Mapping[str, Any], table: str, columns: Sequence[str]) -> Table:
    """Some columns of one table of a benchmark's result file: medians over its rounds.

    Raises ValueError if the file has no such table.
    """
    rows = [row for row in content["rows"] if row["table"] == table]
    if not rows:
        tables = dict.fromkeys(row["table"] for row in content["rows"])
        raise ValueError(f"there is no table {table!r}, there are {', '.join(tables)}")
    params = list(dict.fromkeys(key for row in rows for key in row["params"]))
    measures = [content["columns"][column] for column in columns]
    heads = ["", *params, *(f"{m['title']} ({m['unit']})" for m in measures)]
    body = []
    for row in rows:
        values = [row["values"].get(column) for column in columns]
        medians = ["–" if value is None else plain(value["median"]) for value in values]
        body.append([row["name"], *(row["params"].get(key, "") for key in params), *medians])
    return Table(heads, body)
