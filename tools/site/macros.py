"""What the pages can call: code, diffs, figures, numbers and results, in the page's language.

The plugin `mkdocs-macros` calls `define_env`. Pages then say, in double braces, for instance
`code("stages/01_block_manager/block_manager.py", "slot_mapping")`. An error ends the build.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from shared.measure.results import short  # noqa: E402
from tools.site import (  # noqa: E402
    bench as docs_bench,
    example as docs_example,
    figures as docs_figures,
    hero as docs_hero,
    lab as docs_lab,
    sources as docs_code,
    tables as docs_tables,
    viewer as docs_viewer,
)

DATA = ROOT / "docs" / "_data"
DEFAULT_LOCALE = "en"


def read_data(name: str, locale: str = DEFAULT_LOCALE) -> dict[str, Any]:
    """`_data/NAME.LOCALE.yml`, or the English one where there is none in that language."""
    path = DATA / f"{name}.{locale}.yml"
    if not path.is_file():
        path = DATA / f"{name}.{DEFAULT_LOCALE}.yml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def define_env(env: Any) -> None:
    """Add macros and variables to the pages. Called once, by the plugin."""

    def locale() -> str:
        return getattr(env.page.file, "locale", None) or DEFAULT_LOCALE

    def words() -> dict[str, Any]:
        return read_data("words", locale())

    env.variables["fact"] = docs_example.facts()

    @env.macro
    def code(path: str, name: str, **options: Any) -> str:
        """A function, a class or a part of it, as it stands in the repository."""
        return docs_code.listing(path, name, **options)

    @env.macro
    def stage_diff(before: int, after: int) -> str:
        """What a stage changes, file by file, with the reasons from `_data/diffs.*.yml`."""
        sentences = read_data("diffs", locale())[f"{before:02d}-{after:02d}"]
        return docs_code.stage_diff(before, after, sentences, words()["diff"])

    @env.macro
    def figure(name: str) -> str:
        """A drawing made by `tools/site/figures.py`, with its caption."""
        return docs_figures.figure(name, words()["figures"])

    @env.macro
    def results(
        name: str,
        table: str,
        columns: list[str],
        rows: Any = (),
        caption: str = "",
        where: Any = docs_bench.NOWHERE,
    ) -> str:
        """A table of measured numbers, with machine and date."""
        said, found = words()["results"], docs_bench.load(name)
        return docs_bench.results_table(found, table, columns, said, rows, caption, where)

    @env.macro
    def measured_value(name: str, table: str, column: str, row: str, **where: Any) -> str:
        """One measured number in a sentence."""
        return short(docs_bench.median(docs_bench.load(name), table, column, row, where))

    @env.macro
    def measured_setting(name: str, key: str) -> str:
        """A number with which something was measured."""
        return short(docs_bench.load(name)["settings"][key])

    @env.macro
    def measured_ratio(
        name: str, table: str, column: str, row: str, other: str, **where: Any
    ) -> str:
        """Two measured numbers in a sentence: `row` over `other`."""
        return docs_bench.ratio(docs_bench.load(name), table, column, row, other, where)

    @env.macro
    def measured_spread(name: str, table: str, column: str) -> str:
        """By how many per cent the rows of a table differ at most."""
        return docs_bench.spread(docs_bench.load(name), table, column)

    @env.macro
    def measured_gaps(name: str, row: str) -> str:
        """How many gaps between tokens one round of a row had."""
        return f"{len(docs_bench.gaps(docs_bench.load(name), row)):,}"

    @env.macro
    def measured_stall(name: str, rows: Any = ("stage 03", "stage 04"), caption: str = "") -> str:
        """The tokens of the streams as they came, from the raw data of one round."""
        said, found = words()["results"], docs_bench.load(name)
        return docs_bench.stall_picture(found, rows, said, caption)

    @env.macro
    def measured_picture(name: str, picture: str, alt: str, caption: str = "") -> str:
        """A picture of the result file NAME, in its light and its dark variant."""
        docs_bench.load(name)  # which must be whole
        page = getattr(env.page.file, "src_uri", "")
        return docs_bench.picture(picture, alt, caption, page)

    @env.macro
    def measured_claims(name: str) -> str:
        """The project's claims beside what was measured."""
        return docs_bench.claims(docs_bench.load(name), words()["results"])

    @env.macro
    def table(name: str) -> str:
        """A table computed by `tools/site/tables.py`."""
        return docs_tables.table(name, words()["tables"])

    @env.macro
    def lab(kind: str, **data: str) -> str:
        """A part of the lab; with `open="yes"` it opens by itself."""
        return docs_lab.element(kind, words()["lab"], **data)

    @env.macro
    def hero() -> str:
        """The replay that opens the home page."""
        return docs_hero.element(words()["hero"])

    @env.macro
    def trace_viewer() -> str:
        """The viewer of recorded runs."""
        return docs_viewer.viewer(words()["viewer"])
