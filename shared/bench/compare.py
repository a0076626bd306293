"""Two results of one benchmark side by side: the ratio of their medians, row by row."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.measure.results import load, short

from .options import Parser
from .results import pack


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument("one", metavar="A.json", help="the result to compare with")
    parser.add_argument("other", metavar="B.json", help="the result in question")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print B / A. Green is better by more than the spread of both, red is worse."""
    try:
        return show(load(args.one), load(args.other), console)
    except (AttributeError, KeyError, TypeError) as error:
        wrong = f"{args.one} or {args.other} is not as a benchmark writes it"
        raise ValueError(f"{wrong}: {error!r}") from error


def show(one: dict[str, Any], other: dict[str, Any], console: Console) -> int:
    """Print the ratios; returns 0."""
    for line in differences(one, other):
        console.print(f"Note: {line}", markup=False, highlight=False)
    rows = matching(one, other)
    if not rows:
        raise ValueError("the two results have no row in common")
    for title in dict.fromkeys(row["table"] for row, _ in rows):
        mine = [(a, b) for a, b in rows if a["table"] == title]
        columns = [key for key in other["columns"] if any(ratio(a, b, key) for a, b in mine)]
        for part in pack([max(10, len(title_of(other, key)) + 2) for key in columns], 90):
            table = Table(title=f"{title}: B / A", title_justify="left", box=None)
            table.add_column("", no_wrap=True)
            for i in part:
                table.add_column(title_of(other, columns[i]), justify="right", no_wrap=True)
            for a, b in mine:
                cells = [cell(a, b, columns[i], other["columns"][columns[i]]) for i in part]
                table.add_row(escape(label(a)), *cells)
            console.print(table)
            console.print()
    return 0


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What should be the same for a fair comparison, and is not."""
    found = []
    for name in ("benchmark", "machine", "versions", "model", "settings", "seed", "complete"):
        if one[name] != other[name]:
            found.append(f"{name} differs: A has {one[name]}, B has {other[name]}")
    for name in one["workloads"].keys() & other["workloads"].keys():
        if one["workloads"][name]["checksum"] != other["workloads"][name]["checksum"]:
            found.append(f"workload {name} differs: its prompts, lengths or times are others")
    return found


def matching(
    one: dict[str, Any], other: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of both with the same table, name and params."""
    theirs = {(r["table"], label(r)): r for r in other["rows"]}
    pairs = ((row, theirs.get((row["table"], label(row)))) for row in one["rows"])
    return [(a, b) for a, b in pairs if b is not None]


def label(row: dict[str, Any]) -> str:
    """A row by its name and params, which tell it from the others of its table."""
    return ", ".join([row["name"], *(f"{k} {v}" for k, v in row["params"].items())])


def title_of(content: dict[str, Any], key: str) -> str:
    """What stands above a column."""
    return content["columns"][key]["title"]


def ratio(a: dict[str, Any], b: dict[str, Any], key: str) -> float | None:
    """Median of B over median of A; None if either lacks it or A's is 0."""
    one, other = (row["values"].get(key) for row in (a, b))
    return other["median"] / one["median"] if one and other and one["median"] else None


def cell(a: dict[str, Any], b: dict[str, Any], key: str, column: dict[str, Any]) -> str:
    """The ratio, coloured if the two ranges of rounds do not overlap."""
    value = ratio(a, b, key)
    if value is None:
        return "-"
    text = short(value)
    one, other = a["values"][key], b["values"][key]
    apart = other["min"] > one["max"] or other["max"] < one["min"]
    if not apart or not column["better"] or len(one["rounds"]) < 2 or len(other["rounds"]) < 2:
        return text
    good = (value > 1) == (column["better"] == "higher")
    return f"[{'green' if good else 'red'}]{text}[/]"
