"""The figures that several places show: the pool, block tables, hash chains, steps, the stall.

Each takes plain data and returns a `Canvas`; words come from the caller. Knows no engine, no trace
and no page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .canvas import Canvas
from .palette import DOCUMENTS, colours_of

Tables = Mapping[str, Sequence[int]]
EDGE = 4  # pixels left free at both sides


# --- blocks -----------------------------------------------------------------------------------


def owners_of(tables: Tables) -> dict[int, list[tuple[str, int]]]:
    """Block -> (owner, logical block) for each table that holds it."""
    owners: dict[int, list[tuple[str, int]]] = {}
    for name, table in tables.items():
        for i, block in enumerate(table):
            owners.setdefault(block, []).append((name, i))
    return owners


def pool(
    tables: Tables,
    num_blocks: int,
    width: float,
    legend: Sequence[tuple[str, str]] = (),
    columns: int = 16,
) -> Canvas:
    """All blocks of the pool: `B2` is logical block 2 of B, `×3` has three holders.

    Args:
        legend: colours with their words, above.
        columns: blocks in a row.

    Raises:
        ValueError: a table names a block that the pool does not have.
    """
    owners, colours = owners_of(tables), colours_of(tables)
    for name, table in tables.items():
        for block in table:
            if not 0 <= block < num_blocks:
                raise ValueError(f"{name} holds block {block}; the pool has {num_blocks} blocks")
    top = 30 if legend else EDGE
    canvas = Canvas(width, top + -(-num_blocks // columns) * 27 + 8)
    canvas.legend(EDGE, 16, list(legend))
    cell = (width - 2 * EDGE) / columns
    for block in range(num_blocks):
        x, y = EDGE + block % columns * cell, top + block // columns * 27
        held = owners.get(block, [])
        title = f"block {block}: " + (", ".join(f"{name} {i}" for name, i in held) or "free")
        colour, label = "free", str(block)
        if len(held) == 1:
            (name, i) = held[0]
            colour, label = colours[name], f"{'' if name in DOCUMENTS else name}{i}"
        elif held:
            colour, label = "shared", f"×{len(held)}"
        canvas.cell(x + 1, y + 1, cell - 2, 25, label, colour, title=title)
    return canvas


def block_row(
    canvas: Canvas, x: float, y: float, width: float, tables: Tables, count: int, name: str
) -> list[float]:
    """The pool's first `count` blocks in a row, those of `name` strong; returns their middles."""
    owners, colours = owners_of(tables), colours_of(tables)
    each = width / count
    for block in range(count):
        owner = owners[block][0][0] if block in owners else ""
        opacity = 1 if owner in (name, "") else 0.3
        colour = colours[owner] if owner else "free"
        canvas.cell(x + block * each, y, each - 2, 28, block, colour, opacity)
    return [x + (block + 0.5) * each - 1 for block in range(count)]


def block_table(
    name: str,
    tables: Tables,
    num_tokens: int,
    block_size: int,
    words: tuple[str, str],
    width: float,
) -> Canvas:
    """What a sequence believes (logical blocks) and where it lies (the pool's first blocks).

    A logical block is filled as far as tokens go.

    Args:
        words: above the one, below the other.

    Raises:
        ValueError: the table is too short.
    """
    table = tables[name]
    if len(table) * block_size < num_tokens:
        raise ValueError(f"{len(table)} blocks of {block_size} do not hold {num_tokens} tokens")
    colour, inside = colours_of(tables)[name], width - 2 * EDGE
    canvas = Canvas(width, 206)
    canvas.text(EDGE, 18, words[0], "small muted")
    canvas.text(EDGE, 194, words[1], "small muted")
    wide = min(168, inside / len(table))
    gap = min(8, wide / 12)
    shown = max(max(max(one, default=0) for one in tables.values()) + 1, len(table) + 2)
    middles = block_row(canvas, EDGE, 142, inside, tables, shown, name)
    for i, block in enumerate(table):
        x, used = EDGE + i * wide, min(block_size, num_tokens - i * block_size)
        slot = (wide - gap) / block_size
        if slot >= 4:
            for j in range(block_size):
                canvas.rect(
                    x + j * slot, 28, slot - 1, 24, colour if j < used else "free", radius=1
                )
        else:
            canvas.rect(x, 28, wide - gap, 24, "free")
            canvas.rect(x, 28, used * slot, 24, colour)
        x1, x2 = x + (wide - gap) / 2, middles[block]
        if wide > 16:
            ends = f"{i * block_size} .. {i * block_size + used - 1}"
            ends = ends if wide > 56 else str(i * block_size)
            canvas.text(x1, 68, ends, "small muted", "middle")
        d = f"M{x1:.1f} 76C{x1:.1f} 112 {x2:.1f} 102 {x2:.1f} 138"
        canvas.path(d, "line", 1.4, arrow=True)
    return canvas


def chains(
    prompts: Mapping[str, Sequence[bytes]],
    block_size: int,
    labels: Sequence[str],
    width: float,
    words: tuple[str, str] = ("tokens", "parent"),
) -> Canvas:
    """The hash chains of several prompts, a row each. A block that several have is shared.

    Args:
        labels: of the rows.
        words: for tokens, and for a hash that enters the next one.
    """
    counts: dict[bytes, int] = {}
    for hashes in prompts.values():
        for one in set(hashes):
            counts[one] = counts.get(one, 0) + 1
    colours = colours_of(prompts)
    left = 14 + 7 * max(map(len, labels))
    each = min(212, (width - EDGE - left) / max(map(len, prompts.values())))
    gap = each * 0.28
    canvas = Canvas(width, 66 * len(prompts) + 2)
    for row, (name, hashes) in enumerate(prompts.items()):
        y = 6 + row * 66
        canvas.text(EDGE, y + 29, labels[row], "small")
        for i, one in enumerate(hashes):
            x = left + i * each
            middle = x + (each - gap) / 2
            canvas.rect(x, y, each - gap, 50, "shared" if counts[one] > 1 else colours[name])
            ends = f"{i * block_size} .. {(i + 1) * block_size - 1}"
            ends = f"{words[0]} {ends}" if each > 150 else ends
            canvas.text(middle, y + 20, ends, "small on", "middle")
            canvas.text(middle, y + 38, one.hex()[: int(each / 15)] + "…", "code on", "middle")
            if i:
                canvas.line(x - gap + 2, y + 25, x - 2, y + 25, "line", 1.4, arrow=True)
            if i and gap > 50:
                canvas.text(x - gap / 2, y + 18, words[1], "small muted", "middle")
    return canvas


# --- steps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepColumn:
    """What one step did.

    Attributes:
        tokens: computed, by request.
        prefill: those of them whose tokens belong to a prompt.
        preempted: who lost the blocks.
        parts: under what name a page finds a slice, by request.
    """

    index: int
    tokens: Mapping[str, int]
    prefill: Sequence[str] = ()
    preempted: Sequence[str] = ()
    parts: Mapping[str, str] = field(default_factory=dict)


def steps(
    columns: Sequence[StepColumn], names: Mapping[str, str], words: tuple[str, str], width: float
) -> Canvas:
    """Steps from left to right, requests from top to bottom: how many tokens were computed.

    Prefill is strong, decode is pale. A cross marks who lost the blocks. Where steps are missing is
    a gap.

    Args:
        names: of the requests, each with its label.
        words: for a step's number, and for its tokens.
    """
    left = 18 + 7.2 * max(map(len, (*names.values(), *words)))
    gaps = [b.index > a.index + 1 for a, b in zip(columns, columns[1:], strict=False)]
    each = min(42, (width - left - EDGE - 14 * sum(gaps)) / len(columns))
    bottom = 28 + 26 * len(names)
    canvas = Canvas(left + each * len(columns) + 14 * sum(gaps) + EDGE, bottom + 26)
    canvas.text(EDGE, 18, words[0], "small muted")
    canvas.text(EDGE, bottom + 17, words[1], "small muted")
    for row, label in enumerate(names.values()):
        canvas.text(EDGE, 45 + 26 * row, label, "small")
    colours, x = colours_of(names), left
    for column, gap in zip(columns, [False, *gaps], strict=True):
        x += 14 if gap else 0
        canvas.fit(x + each / 2, 18, each, column.index, "muted")
        for row, name in enumerate(names):
            y, tokens = 28 + 26 * row, column.tokens.get(name, 0)
            opacity = 1 if name in column.prefill else 0.72
            if tokens:
                label = f"{tokens:,}"
                with canvas.part(column.parts.get(name, "")):
                    canvas.cell(x + 1, y, each - 2, 24, label, colours[name], opacity)
            else:
                canvas.rect(x + 1, y, each - 2, 24, "free", opacity=0.55)
            if name in column.preempted:
                canvas.cross(x + each / 2, y + 12)
        total = f"{sum(column.tokens.values()):,}"
        canvas.fit(x + each / 2, bottom + 17, each, total, "muted")
        x += each
    return canvas


# --- the stall --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """What one stage did, over time.

    Attributes:
        title: above it.
        token_times: of each request by its name.
        prefill: when the long prompt was computed, as (start, end).
        steps: all steps, as (start, end, tokens of the long prompt).
    """

    title: str
    token_times: Mapping[str, Sequence[float]]
    prefill: Sequence[tuple[float, float]] = ()
    steps: Sequence[tuple[float, float, int]] = field(default=())


def stall(
    panels: Sequence[Panel],
    span: tuple[float, float],
    width: float,
    axis: str = "",
    steps: str = "",
) -> Canvas:
    """Tokens as they come out, a row for each request, one stage below the other.

    Args:
        span: the time that is shown, in each of them.
        axis: what follows a number below, such as "s"; empty for no axis.
        steps: the label of a row with the steps; empty for none.
    """
    labels = [name for panel in panels for name in panel.token_times]
    left, right, (start, end) = 22 + 7 * max(map(len, (*labels, steps))), width - 10, span
    rows = max(len(panel.token_times) for panel in panels)
    height = 36 + 21 * rows + (40 if steps else 0)
    canvas = Canvas(width, len(panels) * height + (22 if axis else 0))

    def x(time: float) -> float:
        return left + (min(max(time, start), end) - start) / (end - start) * (right - left)

    for i, panel in enumerate(panels):
        top = 18 + i * height
        bottom = top + 14 + 21 * rows
        canvas.text(EDGE, top, panel.title, "strong")
        for begin, finish in panel.prefill:
            wide = max(x(finish) - x(begin) - 1, 1)
            canvas.rect(x(begin), top + 9, wide, bottom - top - 9, "doc", opacity=0.16)
        colours = colours_of(panel.token_times)
        for row, (name, times) in enumerate(panel.token_times.items()):
            y = top + 24 + row * 21
            canvas.text(EDGE, y + 4, name, "small muted")
            canvas.line(left, y, right, y, "free", 2)
            for time in times:
                if start <= time <= end:
                    canvas.circle(x(time), y, 3.6, colours[name])
        if steps:
            canvas.text(EDGE, bottom + 17, steps, "small muted")
        for begin, finish, tokens in panel.steps if steps else ():
            middle, wide = (x(begin) + x(finish)) / 2, x(finish) - x(begin)
            canvas.rect(x(begin) + 0.5, bottom + 6, wide - 1, 14, "doc" if tokens else "line")
            if tokens and wide > 7 * len(f"{tokens:,}"):
                canvas.text(middle, bottom + 35, f"{tokens:,}", "small muted", "middle")
    if axis:
        tick = round_step((end - start) / 5)
        bottom = len(panels) * height + 2
        for n in range(math.ceil(start / tick), int(end / tick) + 1):
            canvas.line(x(n * tick), bottom, x(n * tick), bottom + 5, "line")
            canvas.text(x(n * tick), bottom + 18, f"{n * tick:g} {axis}", "small muted", "middle")
    return canvas


def round_step(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= value))


# --- charts -----------------------------------------------------------------------------------


class Chart:
    """Axes on a canvas. `x` and `y` say where a value is drawn."""

    def __init__(
        self,
        canvas: Canvas,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        labels: tuple[str, str],
        log: bool = False,
        x_span: tuple[float, float] | None = None,
        right: float = 14,
        y_span: tuple[float, float] | None = None,
        unit: str = "",
    ) -> None:
        self.canvas, self.log = canvas, log
        self.left, self.right = 58, canvas.width - right
        self.top, self.bottom = 30, canvas.height - 46
        self.x_span = x_span or (min(x_ticks), max(x_ticks))
        self.y_span = y_span or (min(y_ticks), max(y_ticks))
        for value in y_ticks:
            canvas.line(self.left, self.y(value), self.right, self.y(value), "free")
            canvas.text(self.left - 8, self.y(value) + 4, f"{value:,g}{unit}", "small muted", "end")
        for value in x_ticks:
            canvas.text(self.x(value), self.bottom + 18, f"{value:,g}", "small muted", "middle")
        middle = (self.left + self.right) / 2
        canvas.text(middle, self.bottom + 38, labels[0], "small muted", "middle")
        canvas.text(EDGE, 16, labels[1], "small muted")

    def _share(self, value: float, span: tuple[float, float]) -> float:
        low, high = map(math.log, span) if self.log else span
        return ((math.log(value) if self.log else value) - low) / ((high - low) or 1)

    def x(self, value: float) -> float:
        """Where a value is, in pixels from the left."""
        return self.left + self._share(value, self.x_span) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Where a value is, in pixels from the top."""
        return self.bottom - self._share(value, self.y_span) * (self.bottom - self.top)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        width: float = 2.2,
        steps: bool = False,
        filled: bool = False,
    ) -> None:
        """A line through points, or with `filled` the area below; `steps`: a value holds on."""
        d = ""
        for i, (x, y) in enumerate(points):
            there = f"{self.x(x):.1f} {self.y(y):.1f}"
            d += f"H{there.replace(' ', 'V')}" if steps and i else f"{'L' if i else 'M'}{there}"
        if filled:
            d += f"V{self.bottom:.1f}H{self.x(points[0][0]):.1f}Z"
        self.canvas.path(d, colour, width, fill=colour if filled else "")


def ticks(low: float, high: float, log: bool = False) -> list[float]:
    """A few round values: from at most `low` to at least `high`, or if `log` between them."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**n for n in decades for m in (1, 2, 5) if low <= m * 10.0**n <= high]
        return found if len(found) < 7 else [v for v in found if math.log10(v) % 1 == 0]
    step = round_step(max(high - low, 1e-9) / 5)
    return [n * step for n in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]
