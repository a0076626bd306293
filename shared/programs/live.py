"""Several answers growing side by side in the terminal. Knows text, not engines."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text


class LiveAnswers:
    """A panel for each prompt, redrawn as its answer grows.

    Where the output is no terminal (a pipe, a log), each answer is printed once, when it is
    complete.

    Args:
        titles: one line for each answer.
    """

    def __init__(self, titles: list[str], console: Console | None = None) -> None:
        self.titles = titles
        self.texts = [""] * len(titles)
        self.notes = [""] * len(titles)
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveAnswers:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def update(self, index: int, text: str, finish_reason: str | None = None) -> None:
        """Show `text`, the whole answer so far, as answer `index`."""
        self.texts[index] = text
        if finish_reason:
            self.notes[index] = finish_reason
        if self.console.is_terminal:
            self._live.update(self._render(), refresh=True)
        elif finish_reason:
            self.console.print(self._panel(index))

    def _panel(self, index: int) -> Panel:
        return Panel(
            Text(self.texts[index].strip()),
            title=Text(self.titles[index], style="bold", overflow="ellipsis"),
            title_align="left",
            subtitle=self.notes[index] or None,
            subtitle_align="right",
            border_style="dim" if self.notes[index] else "green",
        )

    def _render(self) -> Group:
        return Group(*(self._panel(i) for i in range(len(self.titles))))
