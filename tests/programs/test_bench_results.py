"""Results: medians, claims, the file, its comparison, and whether rows agree."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.bench import compare, results
from shared.bench.options import base_name, clean_command
from shared.bench.results import Claim, Report
from shared.engine.outputs import RequestMetrics, RequestOutput
from shared.measure.agreement import Agreement, first_difference
from shared.measure.metrics import Measure
from shared.measure.results import load, short
from shared.programs.options import number, whole

SPEED = Measure("speed", "tok/s", "tokens / second", "higher")
DELAY = Measure("delay", "ms", "milliseconds", "lower")


def report(*rounds: tuple[str, float, float | None], name: str = "test") -> Report:
    made = Report(name, "python -m shared.bench test", seed=7)
    made.show("t", {"speed": SPEED, "delay": DELAY})
    for row, speed, delay in rounds:
        made.measure("t", row, {"speed": speed, "delay": delay}, size=4)
    return made


def printed(content: Report, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    content.print(console)
    return console.export_text()


THREE = report(("a", 10, 1.0), ("b", 5, 4.0), ("a", 30, None), ("b", 20, 2.0), ("a", 20, 3.0))


def test_medians_and_spread() -> None:
    assert THREE.median("t", "a", "speed", size=4) == 20
    assert THREE.median("t", "a", "delay", size=4) == 2.0  # a round without a number is left out
    assert THREE.median("t", "a", "speed", size=5) is None
    assert THREE.median("t", "a", "nothing", size=4) is None
    row = THREE.rows()[0]
    assert (row["table"], row["name"], row["params"]) == ("t", "a", {"size": 4})
    assert row["values"]["speed"] == {"median": 20, "min": 10, "max": 30, "rounds": [10, 30, 20]}


def test_ratio_is_taken_within_rounds() -> None:
    # 10 / 5 and 30 / 20: the median is 1.75; of medians it would be 20 / 12.5.
    assert THREE.ratio("t", "a", "b", "speed", size=4) == pytest.approx(1.75)
    assert THREE.ratio("t", "a", "nobody", "speed", size=4) is None


@pytest.mark.parametrize(
    ("value", "at_least", "holds"), [(2.0, True, True), (1.9, True, False), (2.1, False, False)]
)
def test_claims(value: float, at_least: bool, holds: bool) -> None:
    assert Claim("x", value, 2.0, at_least).holds is holds


def test_what_could_not_be_measured_is_not_claimed() -> None:
    made = report()
    made.claim("x", None, 1, at_least=True)
    assert made.claims == []


def test_tables_show_medians_formulas_and_claims() -> None:
    made = report(("a", 10, 1.0), ("a", 12, 1.0), ("b", 1234.5, 0.01))
    made.claim("a is fast", 11.0, 10, at_least=True)
    made.claim("b is slow", 11.0, 10, at_least=False)
    made.notes.append("a [note]")
    made.failures.append("rows differ")
    text = printed(made)
    assert "11.0 ±1.00" in text and "1,234" in text and "0.01" in text
    assert "speed = tokens / second" in text
    assert " yes  a is fast: 11.00 (≥ 10)" in text
    assert "  NO  b is slow: 11.00 (≤ 10)" in text
    assert "a [note]" in text and "FAILED  rows differ" in text


def test_a_narrow_terminal_gets_more_tables_and_no_column_is_cut() -> None:
    made = report(("a row with a name", 10, 1.0))
    text = printed(made, width=34)
    assert text.count("a row with a name") == 2
    assert "…" not in text and "speed" in text and "delay" in text


def test_pack() -> None:
    assert results.pack([5, 5, 5], 10) == [[0, 1], [2]]
    assert results.pack([50, 5], 10) == [[0], [1]]
    assert results.pack([], 10) == [[]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.123, "0.12"),
        (9.99, "9.99"),
        (9.999, "10.0"),
        (42.25, "42.2"),
        (1234.5, "1,234"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_file_says_how_it_was_made_and_names_no_machine(tmp_path: Path) -> None:
    made = report(("a", 10, 1.0))
    made.series["x"] = {"times": [1, 2, 3]}
    path = made.save(tmp_path / "new")
    assert path.name == "test.json"
    assert not list(path.parent.glob("*.part"))
    content = load(path)
    assert content["seed"] == 7 and content["complete"] is False
    assert content["columns"]["speed"]["formula"] == "tokens / second"
    assert content["rows"][0]["values"]["delay"]["rounds"] == [1.0]
    assert set(content["machine"]) == {"cpu", "cores", "threads", "memory_gib", "gpu", "system"}
    assert content["versions"]["torch"] and content["versions"]["python"]
    text = path.read_text()
    assert socket.gethostname() not in text and str(Path.home()) not in text
    assert str(tmp_path) not in text
    # A line for each row: two results can be diffed.
    assert any(line.startswith('  {"table": "t", "name": "a"') for line in text.splitlines())


def test_a_number_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    made = report(("a", float("nan"), 1.0))
    with pytest.raises(ValueError, match="[Nn]a[Nn]|JSON"):
        made.save(tmp_path)
    assert not (tmp_path / "test.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"format": "x"}', '{"format": "mini-vllm-bench"}'])
def test_load_refuses_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="x.json"):
        load(path)


def test_commit_is_known_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.git_commit() is None


# --- compare ----------------------------------------------------------------------------------


def compared(one: Report, other: Report, folder: Path) -> str:
    paths = [made.save(folder / str(i)) for i, made in enumerate((one, other))]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    args = argparse.Namespace(one=paths[0], other=paths[1])
    assert compare.main(args, console) == 0
    return console.export_text()


def test_compare_prints_ratios_and_what_differs(tmp_path: Path) -> None:
    one = report(("a", 10, 1.0), ("only one", 1, 1))
    other = report(("a", 25, 1.0), ("only other", 1, 1))
    one.workloads["chat"] = {"checksum": "1"}
    other.workloads["chat"] = {"checksum": "2"}
    other.seed = 8
    text = compared(one, other, tmp_path)
    line = next(line for line in text.splitlines() if line.startswith(" a, size 4"))
    assert line.split()[-2:] == ["2.50", "1.00"]
    assert "workload chat differs" in text and "seed differs: A has 7, B has 8" in text
    assert "only" not in text


@pytest.mark.parametrize(
    ("mine", "theirs", "colour"),
    [
        ([10, 11], [20, 21], "green"),
        ([20, 21], [10, 11], "red"),
        ([10, 20], [15, 25], None),  # the ranges overlap
        ([10], [20], None),  # one round has no spread
    ],
)
def test_compare_colours_only_what_is_beyond_the_spread(
    mine: list[float], theirs: list[float], colour: str | None
) -> None:
    rows = [report(*(("a", v, 1.0) for v in values)).rows()[0] for values in (mine, theirs)]
    cell = compare.cell(rows[0], rows[1], "speed", {"better": "higher"})
    assert ("[green]" in cell, "[red]" in cell) == (colour == "green", colour == "red")


def test_compare_refuses_results_without_a_common_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row in common"):
        compared(report(("a", 1, 1)), report(("b", 1, 1)), tmp_path)


# --- options ----------------------------------------------------------------------------------


def test_numbers_out_of_range_are_refused_with_the_range() -> None:
    assert whole(1, 5)("5") == 5
    assert number(0, 1)("0.5") == 0.5
    for parse, text, says in (
        (whole(1, 5), "6", "from 1 to 5, got '6'"),
        (whole(1, 5), "x", "from 1 to 5, got 'x'"),
        (number(0, 1), "nan", "from 0 to 1, got 'nan'"),
        (number(0, 1), "-1", "from 0 to 1, got '-1'"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=says):
            parse(text)


def test_command_names_no_folder() -> None:
    argv = ["stall", "--out", "/home/me/x", "--text=/home/me/book.txt", "--model", "~/models/m"]
    assert clean_command(argv) == "python -m shared.bench stall --text=book.txt --model m"
    assert clean_command(["x", "--out=/home/me"]) == "python -m shared.bench x"
    assert base_name("owner/model") == "owner/model"
    assert base_name("C:\\models\\m") == "m"


# --- agreement --------------------------------------------------------------------------------


def row(**tokens: list[int]) -> list[RequestOutput]:
    return [
        RequestOutput(name, [1, 2], ids, "", "", True, "length", RequestMetrics(0.0))
        for name, ids in tokens.items()
    ]


class Gaps:
    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.asked: list[tuple[list[int], int, int]] = []

    def __call__(self, token_ids: Any, one: int, other: int) -> float:
        self.asked.append((list(token_ids), one, other))
        return self.gap


def test_rows_that_agree_ask_for_no_gap() -> None:
    gaps = Gaps(1.0)
    agreement = Agreement(gaps, 1e-3)
    assert agreement.check("one", row(a=[5, 6], b=[7])) == ([], [])
    assert agreement.check("two", row(a=[5, 6], b=[7])) == ([], [])
    assert gaps.asked == []


def test_a_difference_beyond_rounding_fails() -> None:
    gaps = Gaps(0.5)
    agreement = Agreement(gaps, 1e-3)
    agreement.check("one", row(a=[5, 6, 7]))
    failures, ties = agreement.check("two", row(a=[5, 8, 9]))
    assert failures == ["two differs from one at token 1 of a: logit gap 0.5, over 0.001"]
    assert ties == []
    # Only the first difference counts, after what both had in common; and it is computed once.
    agreement.check("three", row(a=[5, 8, 9]))
    assert gaps.asked == [([1, 2, 5], 6, 8)]


def test_a_near_tie_is_reported_and_passes() -> None:
    agreement = Agreement(Gaps(2e-4), 1e-3)
    agreement.check("one", row(a=[5, 6]))
    failures, ties = agreement.check("two", row(a=[4, 6]))
    assert failures == []
    assert ties == ["two differs from one at token 0 of a: a tie, logit gap 0.0002"]


def test_another_number_of_tokens_fails() -> None:
    agreement = Agreement(Gaps(0.0), 1e-3)
    agreement.check("one", row(a=[5, 6]))
    failures, _ = agreement.check("two", row(a=[5]))
    assert failures == ["two differs from one at token 1 of a: 2 and 1 tokens"]


def test_turns_after_a_tie_are_not_compared() -> None:
    agreement = Agreement(Gaps(0.5), 1e-3)
    agreement.check("one", row(a=[5, 6]))
    other = row(a=[7, 8])
    other[0].prompt_token_ids = [1, 9]
    assert agreement.check("two", other) == ([], [])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([2], [1], 0)],
)
def test_first_difference(one: list[int], other: list[int], expected: int | None) -> None:
    assert first_difference(one, other) == expected


def test_json_is_plain() -> None:
    assert json.loads(results.layout({"a": [], "b": {}, "c": [{"x": 1}], "d": {"y": [1]}})) == {
        **{"a": [], "b": {}},
        **{"c": [{"x": 1}], "d": {"y": [1]}},
    }
