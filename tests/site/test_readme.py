"""The README's figures are those of the committed result files, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.site import readme

ROOT = Path(__file__).resolve().parents[2]


def test_measured_tables_are_current() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.MARKS.search(text), "no measured table in the README"
    assert readme.fill(text) == text, "run python tools/site/readme.py"


def test_a_changed_figure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(readme, "short", lambda value: "nonsense")
    monkeypatch.setattr(readme.Path, "is_file", lambda self: True)
    monkeypatch.setattr(readme, "load", lambda name: SOME_RESULTS)
    assert "nonsense" in readme.fill(text)


SOME_RESULTS = {
    "columns": dict.fromkeys(
        "gap_max gap_usual gap_p99 stall_ratio long_ttft".split()
        + "output_tok_s ttft_p50 itl_p50 itl_max".split(),
        {"title": "t", "unit": "ms"},
    ),
    "rows": [
        {"table": name, "name": "stage 03", "params": {}, "values": {"gap_max": {"median": 1.0},
         "output_tok_s": {"median": 2.0}}}
        for name in ("stall", "ladder", "throughput")
    ],
    "machine": {"cpu": "c", "cores": 2},
    "model": {"name": "m", "dtype": "d"},
    "date": "2026-01-01",
    "command": "x",
}  # fmt: skip


def test_named_paths_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
