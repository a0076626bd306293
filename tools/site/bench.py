"""Tables and bars on the site, from the JSON files that `python -m shared.bench` writes.

No measured number is typed into a page. Each table and figure has the machine, the versions and the
date of its run below it. A file that is not there is an error.

Knows the format of the files (see `shared.bench.results`), not how they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shared.draw import tables
from shared.draw.figures import Panel, stall
from shared.measure.machine import place
from shared.measure.results import load as load_results
from shared.measure.results import short
from tools.site.sources import ROOT, DocsError

FOLDER = ROOT / "docs" / "assets" / "bench"
NOWHERE: Mapping[str, Any] = {}


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """One result file, checked. Raises DocsError if it is missing or not what it should be."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise DocsError(f"no results {path.name}; make them with python -m shared.bench")
    try:
        content = load_results(path)
    except ValueError as error:
        raise DocsError(str(error)) from error
    if not content["complete"]:
        raise DocsError(f"{path.name} is of a run that was interrupted")
    if content["failures"]:
        raise DocsError(f"{path.name} is of a run that failed: {content['failures'][0]}")
    return content


def provenance(results: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """On what, with what, when and how: the line below every measured number."""
    versions, where = results["versions"], place(results["machine"], words["cores"])
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "numba") if name in versions
    )
    when = str(results["date"])[:10]
    return (
        f"{words['measured_on']} {escape(where)}; {escape(packages)}; {when}; "
        f"{words['commit']} {escape(str(results['commit']))}: "
        f"<code>{escape(results['command'])}</code>"
    )


def pick(
    results: Mapping[str, Any],
    table: str,
    rows: Sequence[str] = (),
    where: Mapping[str, Any] = NOWHERE,
) -> list[dict[str, Any]]:
    """The rows of one table: all, or the named ones, with the parameters `where`.

    Raises DocsError if there is no such table or row.
    """
    found = [row for row in results["rows"] if row["table"] == table]
    if not found:
        tables = dict.fromkeys(row["table"] for row in results["rows"])
        raise DocsError(
            f"{results['benchmark']}: no table {table!r}, there are {', '.join(tables)}"
        )
    found = [row for row in found if where.items() <= row["params"].items()]
    if not found:
        raise DocsError(f"{results['benchmark']}, {table}: no row with {dict(where)}")
    missing = set(rows) - {row["name"] for row in found}
    if missing:
        raise DocsError(f"{results['benchmark']}, {table}: no rows {sorted(missing)}")
    return [row for row in found if not rows or row["name"] in rows]


def median(
    results: Mapping[str, Any],
    table: str,
    column: str,
    row: str,
    where: Mapping[str, Any] = NOWHERE,
) -> float:
    """One number of a table."""
    return float(pick(results, table, [row], where)[0]["values"][column]["median"])


def ratio(
    results: Mapping[str, Any],
    table: str,
    column: str,
    row: str,
    other: str,
    where: Mapping[str, Any] = NOWHERE,
) -> str:
    """How many times the one row's median is the other's, with one decimal."""
    one, two = (median(results, table, column, name, where) for name in (row, other))
    return f"{one / two:.1f}"


def gaps(results: Mapping[str, Any], row: str) -> list[float]:
    """All gaps between two tokens of one request, of all requests of a row's series, in seconds."""
    times = [request["token_times"] for request in results["series"][row]["requests"].values()]
    return [b - a for each in times for a, b in zip(each, each[1:], strict=False)]


def spread(results: Mapping[str, Any], table: str, column: str) -> str:
    """By how many per cent the largest median of a column exceeds the smallest, rounded."""
    medians = [row["values"][column]["median"] for row in pick(results, table)]
    return f"{100 * (max(medians) / min(medians) - 1):.0f}"


def results_table(
    results: Mapping[str, Any],
    table: str,
    columns: Sequence[str],
    words: Mapping[str, str],
    rows: Sequence[str] = (),
    caption: str = "",
    where: Mapping[str, Any] = NOWHERE,
) -> str:
    """One table of a result file, as HTML in a figure with its provenance.

    What is the same in all its rows has no column: parameters in `where`, and the name of a sweep.
    """
    chosen = pick(results, table, rows, where)
    params = list(dict.fromkeys(key for row in chosen for key in row["params"] if key not in where))
    named = not params or len({row["name"] for row in chosen}) > 1
    for column in columns:
        if column not in results["columns"]:
            raise DocsError(f"{results['benchmark']}: no column {column!r}")
    heads = [*([""] if named else []), *params]
    for column in columns:
        measure = results["columns"][column]
        unit = f" ({measure['unit']})" if measure["unit"] else ""
        heads.append(f"{measure['title']}{unit}")
    body = []
    for row in chosen:
        cells = [escape(row["name"])] if named else []
        cells += [_param(row["params"].get(p, "")) for p in params]
        for column in columns:
            value = row["values"].get(column)
            cells.append("–" if value is None else short(value["median"]))
        body.append(cells)
    return _table(heads, body, f"{caption} {provenance(results, words)}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table in a figure. Cells are HTML already, heads are text."""
    table = tables.html([escape(text) for text in heads], rows, escape=False)
    return (
        '<figure class="fig measured"><div class="md-typeset__scrollwrap"><div '
        f'class="md-typeset__table">{table}</div></div><figcaption>{caption}</figcaption></figure>'
    )


def _param(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


# --- pictures ---------------------------------------------------------------------------------


def stall_picture(
    results: Mapping[str, Any], rows: Sequence[str], words: Mapping[str, str], caption: str = ""
) -> str:
    """Tokens of the streams over time, for each of `rows`, with the long request's prefill.

    Raises:
        DocsError: the file has no series of a row.
    """
    missing = [row for row in rows if row not in results["series"]]
    if missing:
        raise DocsError(f"{results['benchmark']}: no series {missing}")
    panels = []
    for row in rows:
        run = results["series"][row]["requests"]
        streams = {name: run[name]["token_times"] for name in run if name != "long"}
        long = run["long"]["token_times"]
        panels.append(Panel(row, {**streams, "long": long}, [(0, long[0])]))
    end = 1.25 * max(panel.token_times["long"][0] for panel in panels)
    wide, narrow = (stall(panels, (-0.18 * end, end), width, axis="s") for width in (700, 340))
    caption = caption or words["stall_picture"]
    plain = re.sub(r"<[^>]+>", "", caption)
    return (
        f'\n<figure class="fig measured" data-search-exclude><div class="fig__canvas fig__wide">'
        f"{wide.svg(plain)}</div>"
        f'<div class="fig__canvas fig__narrow">{narrow.svg(plain)}</div>'
        f"<figcaption>{caption} "
        f"{provenance(results, words)}</figcaption></figure>\n"
    )


def picture(name: str, alt: str, caption: str = "", page: str = "", folder: Path = FOLDER) -> str:
    """A picture that `python -m shared.bench plots` drew, light or dark as the reader has it.

    Args:
        name: of its files, before "-light.png".
        alt: what is to be seen, for those who do not see it.
        page: the page's path below `docs`.

    Raises:
        DocsError: a variant is not there.
    """
    lines = []
    for variant in ("light", "dark"):
        path = folder / f"{name}-{variant}.png"
        if not path.is_file():
            raise DocsError(
                f"no picture {path.name}; python -m shared.bench plots --out docs/assets/bench"
            )
        url = f"{'../' * page.count('/')}assets/bench/{path.name}#only-{variant}"
        lines.append(f"![{' '.join(alt.split())}]({url}){{ loading=lazy }}\n")
    figure = '<figure class="fig picture" markdown>'
    caption = f"<figcaption markdown>{caption}</figcaption>\n\n" if caption else ""
    return f"\n{figure}\n\n" + "\n".join(lines) + f"\n{caption}</figure>\n"


def claims(results: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """What the project says about itself, beside what was measured."""
    rows = [
        [
            escape(claim["text"]),
            f"{'≥' if claim['at_least'] else '≤'} {claim['limit']:g}",
            short(claim["value"]),
            words["yes" if claim["holds"] else "no"],
        ]
        for claim in results["claims"]
    ]
    if not rows:
        raise DocsError(f"{results['benchmark']}: no claims")
    heads = [words[key] for key in ("claim", "limit", "measured", "holds")]
    return _table(heads, rows, provenance(results, words))
