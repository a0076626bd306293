"""Measured numbers: collected round by round, printed as tables, written as JSON.

The JSON is what pictures, docs and `compare` read:

    format, version, benchmark, complete      what it is; `complete` is false after Ctrl-C
    date, commit, command, seed, settings     how it was made
    machine, versions, model                  on what; no host names and no paths
    workloads    name -> checksum and sizes
    columns      key -> title, unit, formula, better ("lower", "higher" or "")
    rows         table, name, params, values: key -> {median, min, max, rounds: [one per round]}
    claims       text, value, limit, at_least, holds
    failures     what makes the run worthless: rows whose tokens differ
    notes        sentences for the reader
    series       name -> raw data of one run, for pictures

Knows numbers, not how they are measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.engine import files
from shared.measure.machine import machine_facts
from shared.measure.metrics import MEASURES, Measure
from shared.measure.results import FORMAT, VERSION, short

PACKAGES = ("torch", "transformers", "numba", "numpy", "triton")
ROOT = Path(__file__).resolve().parents[2]

Values = Mapping[str, float | None]
Key = tuple[str, str, tuple[tuple[str, Any], ...]]  # table, row, its params


@dataclass(frozen=True)
class Claim:
    """Something that the project says about itself, beside what was measured here.

    Attributes:
        at_least: the value should be `limit` or more; else `limit` or less.
    """

    text: str
    value: float
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Report:
    """The results of one benchmark while they come in.

    Args:
        benchmark: its name, also that of the file.
        command: as the user typed it, see `clean_command`.
        settings: options that matter, by name.
    """

    def __init__(
        self, benchmark: str, command: str = "", seed: int = 0, settings: Values | None = None
    ) -> None:
        self.benchmark = benchmark
        self.command = command
        self.seed = seed
        self.settings: dict[str, Any] = dict(settings or {})
        self.model: dict[str, Any] = {}
        self.workloads: dict[str, dict[str, Any]] = {}
        self.columns: dict[str, Measure] = {}
        self.claims: list[Claim] = []
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.series: dict[str, Any] = {}
        self.complete = False
        self._rounds: dict[Key, list[dict[str, float | None]]] = {}
        self._shown: dict[str, list[str]] = {}

    def show(self, table: str, columns: Iterable[str] | Mapping[str, Measure]) -> None:
        """Choose the columns of a table, in order: keys of `MEASURES`, or measures of its own.

        What is measured beyond them goes to the JSON only.
        """
        if not isinstance(columns, Mapping):
            columns = {key: MEASURES[key] for key in columns}
        self.columns.update(columns)
        self._shown[table] = list(columns)

    def measure(self, table: str, name: str, values: Values, **params: Any) -> None:
        """Add one round's numbers to the row `name` with `params`."""
        key = (table, name, tuple(params.items()))
        self._rounds.setdefault(key, []).append(dict(values))
        for column in values:
            if column in MEASURES:
                self.columns.setdefault(column, MEASURES[column])

    def claim(self, text: str, value: float | None, limit: float, at_least: bool) -> None:
        """Add a claim, unless its value could not be measured."""
        if value is not None:
            self.claims.append(Claim(text, value, limit, at_least))

    def rounds(self, table: str, name: str, column: str, **params: Any) -> list[float]:
        """What the rounds of one row measured, without those that measured nothing."""
        found = self._rounds.get((table, name, tuple(params.items())), [])
        values = (values.get(column) for values in found)
        return [value for value in values if value is not None]

    def median(self, table: str, name: str, column: str, **params: Any) -> float | None:
        """The median over the rounds; None without any."""
        found = self.rounds(table, name, column, **params)
        return statistics.median(found) if found else None

    def ratio(self, table: str, one: str, other: str, column: str, **params: Any) -> float | None:
        """Median over the rounds of `one` / `other`, both of the same round.

        Rows of one round ran next to each other, so what slows the machine down for a while
        cancels; in a ratio of medians it would not.
        """
        pairs = zip(
            self.rounds(table, one, column, **params),
            self.rounds(table, other, column, **params),
            strict=False,
        )
        ratios = [a / b for a, b in pairs if b]
        return statistics.median(ratios) if ratios else None

    def rows(self) -> list[dict[str, Any]]:
        """All rows with medians and spread, in the order in which they were first measured."""
        rows = []
        for (table, name, params), rounds in self._rounds.items():
            values = {}
            for column in dict.fromkeys(key for values in rounds for key in values):
                found = self.rounds(table, name, column, **dict(params))
                if found:
                    values[column] = {
                        "median": statistics.median(found),
                        "min": min(found),
                        "max": max(found),
                        "rounds": found,
                    }
            rows.append({"table": table, "name": name, "params": dict(params), "values": values})
        return rows

    def content(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "benchmark": self.benchmark,
            "complete": self.complete,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": git_commit(),
            "command": self.command,
            "seed": self.seed,
            "settings": self.settings,
            "machine": machine_facts(),
            "versions": versions(),
            "model": self.model,
            "workloads": self.workloads,
            "columns": {key: asdict(measure) for key, measure in self.columns.items()},
            "rows": self.rows(),
            "claims": [asdict(claim) | {"holds": claim.holds} for claim in self.claims],
            "failures": self.failures,
            "notes": self.notes,
            "series": self.series,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `folder/NAME.json`, at once or not at all; returns its path."""
        path = Path(folder) / f"{self.benchmark}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(path, layout(self.content()))
        return path

    def print(self, console: Console) -> None:
        """Tables, then formulas, notes, claims and failures."""
        rows = self.rows()
        tables = list(dict.fromkeys(row["table"] for row in rows))
        for title in tables:
            mine = [row for row in rows if row["table"] == title]
            known = dict.fromkeys(key for row in mine for key in row["values"])
            keys = self._shown.get(title, [key for key in known if key in self.columns])
            keys = [key for key in keys if key in known]
            self._print_table(console, title, mine, keys)
        shown = {key for keys in self._shown.values() for key in keys}
        used = {key for row in rows for key in row["values"]}
        self._print_formulas(console, [key for key in self.columns if key in shown & used])
        for note in self.notes:
            console.print(f"Note: {note}", highlight=False, markup=False)
        for claim in self.claims:
            sign, word = ("≥" if claim.at_least else "≤"), ("yes" if claim.holds else "NO")
            console.print(
                f"{word:>4}  {claim.text}: {claim.value:.2f} ({sign} {claim.limit:g})",
                style="green" if claim.holds else "yellow",
                highlight=False,
                markup=False,
            )
        for failure in self.failures:
            console.print(f"FAILED  {failure}", style="bold red", markup=False)

    def _print_table(
        self, console: Console, title: str, rows: list[dict[str, Any]], keys: list[str]
    ) -> None:
        """One table, cut into several below each other where the terminal is too narrow."""
        heads = [(self.columns[key].title, self.columns[key].unit) for key in keys]
        cells = [[cell(row["values"].get(key)) for key in keys] for row in rows]
        params = list(dict.fromkeys(name for row in rows for name in row["params"]))
        left = [
            [row["name"], *(str(row["params"].get(name, "")) for name in params)] for row in rows
        ]
        widths = [
            max(len(head[0]), len(head[1]), *(len(line[i]) for line in cells)) + 2
            for i, head in enumerate(heads)
        ]
        margin = sum(
            max(len(text) for text in column) + 2
            for column in zip(["", *params], *left, strict=True)
        )
        for part in pack(widths, console.width - margin):
            table = Table(title=title, title_justify="left", box=None, header_style="bold")
            table.add_column("", no_wrap=True)
            for name in params:
                table.add_column(name, justify="right", no_wrap=True)
            for i in part:
                table.add_column(f"{heads[i][0]}\n{heads[i][1]}", justify="right", no_wrap=True)
            for names, line in zip(left, cells, strict=True):
                table.add_row(*map(escape, names), *(line[i] for i in part))
            console.print(table)
            console.print()

    def _print_formulas(self, console: Console, keys: list[str]) -> None:
        formulas: dict[str, list[str]] = {}
        for key in keys:
            measure = self.columns[key]
            formulas.setdefault(measure.formula, []).append(measure.title)
        for formula, titles in formulas.items():
            name = titles[0] if len(titles) == 1 else titles[0].rsplit(" ", 1)[0]
            console.print(f"{name} = {formula}", style="dim", highlight=False, markup=False)
        if keys:
            console.print(
                "Cells are medians over the rounds; ± is half of (largest - smallest).\n",
                style="dim",
                highlight=False,
            )


def cell(value: Mapping[str, Any] | None) -> str:
    """Median and spread, as short as they can be told."""
    if value is None:
        return "-"
    text = short(value["median"])
    spread = (value["max"] - value["min"]) / 2
    return f"{text} ±{short(spread)}" if len(value["rounds"]) > 1 else text


def pack(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split columns of these widths into groups that fit into `room`, at least one in each."""
    groups: list[list[int]] = [[]]
    used = 0
    for i, width in enumerate(widths):
        if groups[-1] and used + width > room:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += width
    return groups


def layout(content: Mapping[str, Any]) -> str:
    """JSON with a line for each member of each part, so that two results can be diffed."""

    def lines(opening: str, members: Iterable[str], closing: str) -> str:
        return f"{opening}\n  " + ",\n  ".join(members) + f"\n {closing}"

    def dump(value: Any) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    parts = []
    for name, value in content.items():
        text = dump(value)
        if value and isinstance(value, list):
            text = lines("[", map(dump, value), "]")
        elif value and isinstance(value, dict):
            text = lines("{", (f"{dump(k)}: {dump(v)}" for k, v in value.items()), "}")
        parts.append(f" {dump(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# --- where and with what ----------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Python and the packages that do the work."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit that is measured, with "+changes" if files differ from it; None without git."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", "shared", "stages")
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None
