"""Puts measured tables into README.md, from the same JSON files as the site's.

Each stands between `<!-- measured: FILE | TABLE | COLUMNS -->` and `<!-- end -->`; a file that is
not there yet leaves the place empty. `python tools/site/readme.py` rewrites all, `--check` compares.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a program, it finds its neighbours like the tests do

from shared.draw.tables import markdown  # noqa: E402
from shared.measure.machine import place  # noqa: E402
from shared.measure.results import short  # noqa: E402
from tools.site.bench import FOLDER, load, pick  # noqa: E402

MARKS = re.compile(r"(<!-- measured: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str, title: str, columns: list[str]) -> str:
    """A table of a result file in Markdown, with machine, date and command below it."""
    results = load(name)
    measures = [results["columns"][column] for column in columns]
    heads = [m["title"] + (f" ({m['unit']})" if m["unit"] else "") for m in measures]
    rows = []
    for row in pick(results, title):
        values = [row["values"].get(column) for column in columns]
        cells = ["–" if value is None else short(value["median"]) for value in values]
        rows.append([row["name"], *cells])
    where, date = place(results["machine"]), str(results["date"])[:10]
    model = f"{results['model']['name']} in {results['model']['dtype']}"
    below = f"<sub>{where}; {model}; {date}; `{results['command']}`</sub>"
    return f"{markdown(['', *heads], rows)}\n\n{below}\n"


def fill(text: str) -> str:
    """`text` with every measured table made anew."""

    def replace(match: re.Match[str]) -> str:
        name, title, columns = (part.strip() for part in match[2].split("|"))
        body = table(name, title, columns.split()) if (FOLDER / f"{name}.json").is_file() else ""
        return f"{match[1]}{body}{match[3]}"

    return MARKS.sub(replace, text)


def main() -> int:
    """Rewrite or compare; returns 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = fill(before)
    if args.check:
        if before != after:
            print("README.md is behind docs/assets/bench: run python tools/site/readme.py")
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
