"""Pictures for the notebooks: pools, block tables, steps, stalls, measured lines.

Each function takes plain data or a trace and returns a `Picture`: an SVG that fits its page and
takes its colours from it, and one line that says what is to be seen, with the counts. Knows traces
and block tables; no engine, no model, no puzzle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from shared.engine.trace import StepRecord, Trace
from shared.measure.episode import DOCUMENT, seconds
from shared.measure.metrics import kv_use

from . import figures
from .canvas import Canvas
from .figures import Chart, Panel, StepColumn, ticks
from .palette import CHATS
from .tables import html
from .text import plain

WIDTH = 560  # pixels; pictures shrink and grow with their page


class Picture:
    """An SVG that a notebook shows; its text says what is on it."""

    def __init__(self, canvas: Canvas, text: str, heading: str | None = None) -> None:
        self.text = text
        paper = "background:var(--md-default-bg-color,#fffffe);max-width:100%;height:auto"
        self.svg = canvas.svg(text, text if heading is None else heading, paper)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text


class Table:
    """Rows as a notebook shows them. Cells are text or numbers."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.heads = list(heads)
        self.rows = [[f"{c:,}" if type(c) is int else str(c) for c in row] for row in rows]

    def _repr_html_(self) -> str:
        return html(self.heads, self.rows)

    def __repr__(self) -> str:
        return "\n".join("  ".join(cells) for cells in [self.heads, *self.rows])


# --- blocks -----------------------------------------------------------------------------------


def pool(tables: Mapping[str, Sequence[int]], num_blocks: int) -> Picture:
    """All blocks of the pool and who holds them: `B2` is logical block 2 of B, `×3` has 3 holders.

    Raises ValueError if a table names a block that the pool does not have.
    """
    canvas = figures.pool(tables, num_blocks, WIDTH)
    owners = figures.owners_of(tables)
    shared = sum(len(holders) > 1 for holders in owners.values())
    text = f"{len(owners)} of {num_blocks} blocks held, {num_blocks - len(owners)} free"
    return Picture(canvas, text + (f", {shared} shared" if shared else ""))


def block_table(name: str, table: Sequence[int], num_tokens: int, block_size: int = 16) -> Picture:
    """What a sequence believes (logical blocks) and where it lies (the pool's first blocks).

    A logical block is filled as far as tokens go. Raises ValueError if the table is too short.
    """
    words = f"logical blocks of {name}", "the pool, from block 0"
    canvas = figures.block_table(name, {name: table}, num_tokens, block_size, words, WIDTH)
    text = f"{name}: {num_tokens} tokens in {len(table)} blocks, table {list(table)}"
    return Picture(canvas, text, heading="")


def chains(prompts: Mapping[str, Sequence[bytes]], block_size: int = 16) -> Picture:
    """The hash chains of several prompts, a row each. A block that several have is shared."""
    canvas = figures.chains(prompts, block_size, list(prompts), WIDTH)
    holders = [one for hashes in prompts.values() for one in set(hashes)]
    shared = sum(holders.count(one) > 1 for one in set(holders))
    text = f"{shared} of {len(set(holders))} different full blocks are in several prompts"
    return Picture(canvas, text)


def chunks(num_tokens: int, chunk_size: int, block_size: int = 16, start_pos: int = 0) -> Picture:
    """A prompt's slots, block by block, in the colour of the chunk that writes them.

    What lies before `start_pos` was in the cache already.
    """
    if not 0 <= start_pos < num_tokens or chunk_size < 1:
        raise ValueError(f"no chunks of {chunk_size} from {start_pos} to {num_tokens}")
    num_chunks = -(-(num_tokens - start_pos) // chunk_size)
    rows = -(-num_tokens // block_size)
    left = 62
    cell = (WIDTH - left - 4) / block_size
    canvas = Canvas(WIDTH, 24 * rows + 4)
    for t in range(rows * block_size):
        i, offset = divmod(t, block_size)
        colour, label = CHATS[(t - start_pos) // chunk_size % len(CHATS)], str(t)
        if t < start_pos or t >= num_tokens:
            colour, label = ("shared", label) if t < start_pos else ("free", "")
        canvas.cell(left + offset * cell, 24 * i, cell - 2, 21, label, colour)
    for i in range(rows):
        canvas.text(left - 8, 24 * i + 15, f"block {i}", "small", "end")
    split = sum(t % block_size > 0 for t in range(start_pos + chunk_size, num_tokens, chunk_size))
    text = f"{_count(num_chunks, 'chunk')}, {_count(rows, 'block')}; "
    return Picture(canvas, text + f"{_count(split, 'chunk')} beginning inside a block")


# --- steps ------------------------------------------------------------------------------------


def steps(trace: Trace, positions: Iterable[int]) -> Picture:
    """Some of a trace's steps, a column each: how many tokens of whom were computed.

    Prefill is strong, decode is pale. A cross marks who lost the blocks. Positions are those in
    `trace.steps`; others are left out, and where some are missing is a gap.
    """
    phases = dict(enumerate(trace.phases()))
    chosen = [i for i in sorted(set(positions)) if i in phases]
    if not chosen:
        raise ValueError(f"none of these steps is in the trace, which has {len(phases)}")
    columns = []
    for i in chosen:
        record, kinds = phases[i]
        columns.append(
            StepColumn(
                i,
                {name: num_tokens for name, _, num_tokens in record.slices},
                [s[0] for s, kind in zip(record.slices, kinds, strict=True) if kind == "prefill"],
                record.preempted,
            )
        )
    names = {name: name for name in _names(trace, chosen)}
    canvas = figures.steps(columns, names, ("step", "tokens"), WIDTH)
    total = sum(phases[i][0].num_tokens for i in chosen)
    lost = sum(len(column.preempted) for column in columns)
    text = f"{_count(len(chosen), 'step')}, {total:,} tokens computed"
    return Picture(canvas, text + (f", {_count(lost, 'preemption')}" if lost else ""))


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


def occupancy(trace: Trace, num_blocks: int, block_size: int = 16) -> Picture:
    """Blocks held in each step, and the part of them that holds tokens; preemptions marked.

    Raises ValueError if the trace has no block tables.
    """
    use = kv_use(trace.steps, block_size)
    held = [slots / block_size for _, _, slots in use]
    filled = [tokens / block_size for _, tokens, _ in use]
    canvas = Canvas(WIDTH, 240)
    last = len(held)
    x_ticks = [tick for tick in ticks(0, last) if tick <= last]
    chart = Chart(
        canvas, x_ticks, [0, num_blocks // 2, num_blocks], ("step", "blocks"), x_span=(0, last)
    )
    series = {"held, unused": ("doc", held), "tokens": ("a", filled)}
    for colour, values in series.values():
        chart.line(list(enumerate([*values, values[-1]])), colour, steps=True, filled=True)
    pool = chart.y(num_blocks)
    canvas.path(f"M{chart.left:.1f} {pool:.1f}H{chart.right:.1f}", width=1.2, dashed=True)
    lost = [i for i, record in enumerate(trace.steps) for _ in record.preempted]
    for i in lost:
        canvas.cross(chart.x(i + 0.5), pool)
    entries = [(colour, name) for name, (colour, _) in series.items()]
    canvas.legend(chart.left + 40, 16, [*entries, *([("warn", "× preemption")] if lost else [])])
    slots, tokens = sum(slots for *_, slots in use), sum(tokens for _, tokens, _ in use)
    waste = 100 * (1 - tokens / slots) if slots else 0.0
    text = f"at most {max(held):.0f} of {num_blocks} blocks held, {waste:.1f} % of slots unused, "
    return Picture(canvas, text + _count(len(lost), "preemption"), heading="")


def stall(runs: Mapping[str, Trace], document: str = DOCUMENT) -> Picture:
    """When each stream got its tokens, a panel for each run; the document's steps are shaded.

    Time begins with the first of those steps. Raises ValueError if a trace has none.
    """
    panels, parts, longest = [], [], 0.0
    for name, trace in runs.items():
        found = _prefill_steps(trace, document)
        if not found:
            raise ValueError(f"{name}: the trace has no prefill of {document!r}")
        origin = found[0].start
        times = _token_times(trace, document)
        gap = _longest_gap(times, origin, found[-1].end)
        count = _count(len(found), "step")
        parts.append(f"{name}: {count} with the document, longest gap {seconds(gap)}")
        panels.append(
            Panel(
                f"{name}: longest gap {seconds(gap)}",
                {one: [time - origin for time in tokens] for one, tokens in times.items()},
                [(record.start - origin, record.end - origin) for record in found],
            )
        )
        longest = max(longest, found[-1].end - origin)
    canvas = figures.stall(panels, (-0.25 * longest, 1.3 * longest), WIDTH, axis="s")
    return Picture(canvas, "; ".join(parts), heading="")


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


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Picture:
    """Measured values over `x`, a line for each series, named at its end."""
    values = [value for each in series.values() for value in each]
    low, high = (min(values) / 1.3, max(values) * 1.3) if log else (0, max(values))
    y_ticks = ticks(low, high, log)
    canvas = Canvas(WIDTH, 260)
    chart = Chart(
        canvas,
        list(x),
        y_ticks,
        (xlabel, ylabel),
        log,
        right=20 + 7 * max(map(len, series)),
        y_span=(low, high) if log else None,
    )
    for colour, (name, each) in zip(("doc", *CHATS), series.items(), strict=False):
        chart.line(list(zip(x, each, strict=True)), colour)
        for place, value in zip(x, each, strict=True):
            canvas.circle(chart.x(place), chart.y(value), 4, colour)
        canvas.text(chart.right + 8, chart.y(each[-1]) + 4, name, f"small {colour}")
    ends = ", ".join(f"{name} {plain(each[-1])}" for name, each in series.items())
    return Picture(canvas, f"{ylabel}, at {x[-1]:g}: {ends}", heading="")


def bars(values: Mapping[str, float], unit: str, title: str = "") -> Picture:
    """One bar for each value, with its number."""
    canvas = Canvas(WIDTH, 30 * len(values) + 4)
    left = 22 + 7 * max(map(len, values))
    scale = (WIDTH - left - 90) / (max(values.values()) or 1)
    for row, (name, value) in enumerate(values.items()):
        y = 4 + 30 * row
        canvas.text(left - 8, y + 16, name, "small", "end")
        canvas.rect(left, y, value * scale, 22, "a")
        canvas.text(left + value * scale + 8, y + 16, f"{plain(value)} {unit}", "small")
    parts = [f"{name} {plain(value)} {unit}" for name, value in values.items()]
    return Picture(canvas, ", ".join(parts), title)


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
