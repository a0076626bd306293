"""What the demo shows while the running example is served, and the table after it.

`LiveView` redraws a screen, `PlainView` prints a line per event; both are told of arrivals and
outputs, and ask the engine how far each request is. Know nothing of how an engine decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared.engine.outputs import RequestOutput
from shared.measure.episode import DOCUMENT, Arrival, Episode, seconds
from shared.measure.metrics import hit_rate, percentile, span

STILL = 0.5  # seconds without a token after which a reader notices
REFRESH = 5  # redraws per second: each takes some of the time that is shown


def one_line(text: str) -> str:
    """A model's text without line breaks, and without what would move the cursor."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


class View:
    """What both views keep: who has arrived, their last outputs, the chats' longest gap so far.

    Args:
        before: label and longest gap, in seconds, of each stage that was served before.
    """

    def __init__(
        self,
        console: Console,
        engine: Any,
        title: str,
        arrivals: Sequence[Arrival],
        before: dict[str, float],
    ):
        self.before = before
        self.console = console
        self.engine = engine
        self.title = title
        self.arrivals = {arrival.name: arrival for arrival in arrivals}
        self.present: set[str] = set()
        self.outputs: dict[str, RequestOutput] = {}
        self.longest = 0.0
        self.start = time.perf_counter()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def arrived(self, arrival: Arrival) -> None:
        """Take down that a request was added."""
        self.present.add(arrival.name)

    def stepped(self, outputs: list[RequestOutput]) -> None:
        """Take down what a step put out."""
        for output in outputs:
            self.outputs[output.request_id] = output
            times = output.metrics.token_times
            if output.request_id != DOCUMENT and len(times) > 1:
                self.longest = max(self.longest, times[-1] - times[-2])


class PlainView(View):
    """A line per event, for logs: arrivals, first tokens, chunks, stalls, ends."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._prefilled = 0
        self._told = STILL / 2  # the longest gap that was worth a line
        self._print(f"\n{self.title}")

    def arrived(self, arrival: Arrival) -> None:
        """A line for it."""
        super().arrived(arrival)
        self._line(
            arrival.name, f"arrives: {arrival.title}, {len(arrival.prompt_token_ids):,} tokens"
        )

    def stepped(self, outputs: list[RequestOutput]) -> None:
        """A line for each thing worth one."""
        super().stepped(outputs)
        progress = self.engine.progress(DOCUMENT)
        if progress and progress["prefilled_tokens"] > self._prefilled:
            self._prefilled = progress["prefilled_tokens"]
            total = progress["prompt_tokens"]
            self._line(DOCUMENT, f"{self._prefilled:,} of {total:,} prompt tokens are in the cache")
        if self.longest >= 2 * self._told:
            self._told = self.longest
            self._line("chats", f"longest gap so far: {seconds(self.longest)}")
        for output in outputs:
            metrics = output.metrics
            if len(output.token_ids) == 1:
                found = f", {metrics.num_cached_tokens} prompt tokens were cached"
                self._line(output.request_id, f"first token after {seconds(metrics.ttft)}{found}")
            if output.finished:
                text = one_line(output.text)
                text = text if len(text) <= 60 else f"{text[:57]}..."
                count, reason = len(output.token_ids), output.finish_reason
                self._line(output.request_id, f"ends ({reason}) after {count} tokens: {text}")

    def _line(self, name: str, event: str) -> None:
        now = time.perf_counter() - self.start
        self._print(f"{now:8.2f} s  {name:<8}  {event}")

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class LiveView(View):
    """Streams, states, the document's progress and the growing gap, redrawn a few times a second.

    A thread draws, since a step may take seconds and the gap grows all the while. It only reads.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._end: float | None = None
        self._live = Live(
            console=self.console,
            refresh_per_second=REFRESH,
            get_renderable=self.render,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._end = time.perf_counter()
        self._live.stop()

    def render(self) -> RenderableType:
        """The screen now: at most 24 lines, more text where the terminal is higher."""
        now = self._end or time.perf_counter()
        spare = self.console.size.height - 24
        lines = 3 + min(5, max(0, spare // 3))
        return Group(
            self._header(now),
            self._chats(now, lines),
            self._document(2 + (spare >= 4)),
            self._states(),
            self._longest_gap(now),
        )

    def _header(self, now: float) -> RenderableType:
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        title = Text(self.title.split(":")[0], style="bold")
        grid.add_row(title, Text(f"{now - self.start:.1f} s"))
        return grid

    def _chats(self, now: float, lines: int) -> RenderableType:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        width = self.console.size.width // 2
        panels = [
            self._chat(arrival, now, lines, width - 4)
            for arrival in self.arrivals.values()
            if not arrival.is_document
        ]
        for left, right in zip(panels[::2], panels[1::2], strict=True):
            grid.add_row(left, right)
        return grid

    def _chat(self, arrival: Arrival, now: float, lines: int, width: int) -> Panel:
        output = self.outputs.get(arrival.name)
        waits = self._waits(arrival.name, now)
        still = waits >= STILL
        style = "red" if still else "green"
        if output is None or output.finished:
            style = "dim"
        note = Text(f"waits for {waits:.1f} s", style="bold red") if still else None
        return Panel(
            self._tail(output, lines, width),
            title=Text(f"{arrival.name}: {arrival.title}", style="bold"),
            title_align="left",
            subtitle=note,
            subtitle_align="right",
            border_style=style,
            height=lines + 2,
        )

    def _document(self, lines: int) -> RenderableType:
        arrival = self.arrivals[DOCUMENT]
        output, progress = self.outputs.get(DOCUMENT), self._progress(DOCUMENT)
        total = len(arrival.prompt_token_ids)
        done = progress["prefilled_tokens"] if progress else total if output else 0
        width = self.console.size.width - 4
        count = f"{done:,} of {total:,} tokens"
        bar = ProgressBar(total, done, width=width - len(count) - 10, complete_style="cyan")
        line = Table.grid(padding=(0, 1))
        line.add_row("prefill", bar, count)
        style = "dim" if output is None or output.finished else "green"
        if output is None and DOCUMENT in self.present:
            style = "yellow"
        return Panel(
            Group(line, self._tail(output, lines - 1, width)),
            title=Text(f"{DOCUMENT}: {arrival.title}", style="bold"),
            title_align="left",
            border_style=style,
            height=lines + 2,
        )

    def _states(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        # Widths that hold whatever comes: columns that move as numbers grow are hard to read.
        table.add_column("request", width=8, no_wrap=True)
        table.add_column("state", width=13, no_wrap=True)
        for name, width in {"prompt in cache": 15, "generated": 11, "blocks": 6}.items():
            table.add_column(name, width=width, justify="right", no_wrap=True)
        table.add_column("first token", width=13, justify="right", no_wrap=True)
        for arrival in self.arrivals.values():
            table.add_row(*self._state(arrival))
        return table

    def _state(self, arrival: Arrival) -> tuple[str, ...]:
        total = f"{len(arrival.prompt_token_ids):,}"
        output, progress = self.outputs.get(arrival.name), self._progress(arrival.name)
        generated = f"{len(output.token_ids) if output else 0} / {arrival.max_tokens}"
        first = seconds(output.metrics.ttft) if output else "-"
        if progress and not output:
            first = f"waits {seconds(progress['seconds'])}"
        if progress:
            state, blocks = progress["state"], str(progress["blocks_held"])
            in_cache = f"{progress['prefilled_tokens']:,} / {total}"
        else:
            state, blocks = "finished" if output else "not here yet", "-"
            in_cache = f"- / {total}"
        return arrival.name, state, in_cache, generated, blocks, first

    def _longest_gap(self, now: float) -> RenderableType:
        waits = [self._waits(name, now) for name in self.arrivals if name != DOCUMENT]
        longest = max([self.longest, *waits])
        style = "bold red" if longest >= STILL else "bold"
        line = Text.assemble(" longest gap of the chats so far: ", (seconds(longest), style))
        for label, gap in self.before.items():
            line.append(f"   {label}: {seconds(gap)}", style="dim")
        line.truncate(self.console.size.width, overflow="ellipsis")
        return line

    def _waits(self, name: str, now: float) -> float:
        """Seconds since the last token of a chat that is streaming; 0 if it is not."""
        output = self.outputs.get(name)
        if output is None or output.finished:
            return 0.0
        return max(0.0, now - output.metrics.token_times[-1])

    def _progress(self, name: str) -> dict[str, Any] | None:
        try:
            return self.engine.progress(name)
        except KeyError:  # it ended in the other thread between two looks
            return None

    def _tail(self, output: RequestOutput | None, lines: int, width: int) -> Text:
        """The end of a text, as many lines as there is room for."""
        wrapped = Text(one_line(output.text) if output else "").wrap(self.console, width)
        return Text("\n").join(wrapped[-lines:])


# --- afterwards -------------------------------------------------------------------------------

TIMES: dict[str, Callable[[Episode], float | None]] = {
    "longest gap": lambda e: e.longest_gap.seconds,
    "median gap before the document": lambda e: e.stall.usual if e.stall else None,
    "median gap while it is in prefill": lambda e: (
        percentile(e.stall.gaps, 50) if e.stall else None
    ),
    "p99 gap while it is in prefill": lambda e: percentile(e.stall.gaps, 99) if e.stall else None,
    "document's time to first token": lambda e: e.document.metrics.ttft,
    "total time": lambda e: span(list(e.outputs.values())),
}


def results(episodes: Sequence[Episode], caption: str) -> Group:
    """What was measured, a column per stage, and how the first one compares with the last."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for episode in episodes:
        table.add_column(episode.label, justify="right", no_wrap=True)
    first, last = episodes[0], episodes[-1]
    if first is not last:
        short = " / ".join(e.label.removeprefix("stage ") for e in (first, last))
        table.add_column(short, justify="right", no_wrap=True)
    for name, value in TIMES.items():
        row = [seconds(value(episode)) for episode in episodes]
        if first is not last:
            one, other = value(first), value(last)
            row.append(f"{one / other:.3g} x" if one and other else "-")
        table.add_row(name, *row)
    table.add_row("chats' prompts found in the cache", *map(_hit_rate, episodes))
    return Group("", table, "", Text(caption))


def _hit_rate(episode: Episode) -> str:
    chats = [output for name, output in episode.outputs.items() if name != DOCUMENT]
    rate = hit_rate(chats)["hit_rate"]
    return "-" if rate is None else f"{rate:.0f} %"
