"""Tables and bars on the site, from the JSON files that `python -m shared.bench` writes.

No measured number is typed into a page. Each table and figure has the machine, the versions and the
date of its run below it. A file that is not there is an error, unless it is listed as pending; then
the page says that it is pending, and no number.

Knows the format of the files (see `shared.bench.results`), not how they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tools.docs_code import DocsError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "assets" / "bench"
FORMAT, VERSION = "mini-vllm-bench", 1


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """One result file, checked. Raises DocsError if it is missing or not what it should be."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise DocsError(f"no results {path.name}; make them with python -m shared.bench")
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise DocsError(f"{path.name} is not a {FORMAT} file of version {VERSION}")
    if not content["complete"]:
        raise DocsError(f"{path.name} is of a run that was interrupted")
    if content["failures"]:
        raise DocsError(f"{path.name} is of a run that failed: {content['failures'][0]}")
    return dict(content)


def provenance(results: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """On what, with what, when and how: the line below every measured number."""
    machine, versions = results["machine"], results["versions"]
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} {words['cores']}"
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "numba") if name in versions
    )
    when = str(results["date"])[:10]
    return (
        f"{words['measured_on']} {escape(str(place))}; {escape(packages)}; {when}; "
        f"{words['commit']} {escape(str(results['commit']))}: "
        f"<code>{escape(results['command'])}</code>"
    )


def number(value: float) -> str:
    """Three digits that count, thousands apart."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def pick(results: Mapping[str, Any], table: str, rows: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of one table, all or the named ones. Raises DocsError if one is missing."""
    found = [row for row in results["rows"] if row["table"] == table]
    if not found:
        tables = dict.fromkeys(row["table"] for row in results["rows"])
        raise DocsError(
            f"{results['benchmark']}: no table {table!r}, there are {', '.join(tables)}"
        )
    missing = set(rows) - {row["name"] for row in found}
    if missing:
        raise DocsError(f"{results['benchmark']}, {table}: no rows {sorted(missing)}")
    return [row for row in found if not rows or row["name"] in rows]


def results_table(
    results: Mapping[str, Any],
    table: str,
    columns: Sequence[str],
    words: Mapping[str, str],
    rows: Sequence[str] = (),
    caption: str = "",
) -> str:
    """One table of a result file, as HTML in a figure with its provenance."""
    chosen = pick(results, table, rows)
    params = list(dict.fromkeys(key for row in chosen for key in row["params"]))
    for column in columns:
        if column not in results["columns"]:
            raise DocsError(f"{results['benchmark']}: no column {column!r}")
    heads = ["", *params]
    for column in columns:
        measure = results["columns"][column]
        unit = f" ({measure['unit']})" if measure["unit"] else ""
        heads.append(f"{measure['title']}{unit}")
    body = []
    for row in chosen:
        cells = [escape(row["name"]), *(escape(str(row["params"].get(p, ""))) for p in params)]
        for column in columns:
            value = row["values"].get(column)
            cells.append("–" if value is None else number(value["median"]))
        body.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return (
        f'<figure class="fig measured"><div class="md-typeset__scrollwrap"><div '
        f'class="md-typeset__table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></div>"
        f"<figcaption>{caption} {provenance(results, words)}</figcaption></figure>"
    )


def value(results: Mapping[str, Any], table: str, row: str, column: str, **params: Any) -> float:
    """One median. Raises DocsError unless exactly one row fits."""
    fitting = [
        each
        for each in pick(results, table, [row])
        if all(each["params"].get(key) == wanted for key, wanted in params.items())
    ]
    if len(fitting) != 1 or column not in fitting[0]["values"]:
        raise DocsError(
            f"{results['benchmark']}, {table}, {row} {params}: {len(fitting)} rows, column {column}"
        )
    return float(fitting[0]["values"][column]["median"])
