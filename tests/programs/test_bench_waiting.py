"""The benchmark of how threads wait: its rows, and one of them measured for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared import load_stage, waiting
from shared.bench import __main__ as program
from shared.bench import waiting as bench
from shared.bench.results import Report
from shared.measure.results import load


def test_each_row_says_how_to_wait_and_none_is_said_twice() -> None:
    rows = bench.settings([1000, 7], "/lib/libiomp5.so")
    assert rows[bench.OURS] == waiting.SETTINGS
    assert rows["GOMP_SPINCOUNT=7"] == {"GOMP_SPINCOUNT": "7"}
    assert len({str(row) for row in rows.values()}) == len(rows) == 6
    for row in rows.values():  # or `shared` would add its own
        assert any(name in waiting.OF_THE_USER for name in row)


def test_only_steps_that_decode_all_streams_count(tiny: Any) -> None:
    engine = load_stage(4).LLMEngine(tiny, num_blocks=64)
    assert bench.decode(engine, 3, steps=5, seconds=60) > 0
    decodes = [s for s in engine.trace.steps if s.num_tokens == len(s.slices) == 3]
    assert len(decodes) == 5 and not engine.has_unfinished_requests()
    bench.decode(engine, 2, steps=50, seconds=0)
    assert len([s for s in engine.trace.steps if s.num_tokens == len(s.slices) == 2]) == 4


def test_what_is_claimed_compares_with_default_alone() -> None:
    report = Report("waiting")
    report.columns["step_4"] = bench.Measure("4 streams", "ms", "", "lower")
    for condition, default, ours in zip(
        bench.CONDITIONS, (50, 120, 100, 1000), (51, 100, 90, 600), strict=True
    ):
        report.measure(condition, bench.DEFAULT, {"step_4": default})
        report.measure(condition, bench.OURS, {"step_4": ours})
    bench.conclude(report)
    values = [(claim.value, claim.limit, claim.holds) for claim in report.claims]
    assert values == [(1.02, 1.03, True), (2, 2.5, True), (1.8, 1.6, False), (12, 10, False)]


@pytest.mark.slow
def test_a_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "settings", lambda *args: {"passive": {"OMP_WAIT_POLICY": "passive"}}
    )
    monkeypatch.setattr(bench, "CONDITIONS", (bench.ALONE, bench.ENGINE))
    assert program.main(["waiting", "--quick", "--model", "tiny", "--out", str(tmp_path)]) == 0
    content = load(tmp_path / "waiting.json")
    assert content["complete"] and content["model"]["name"] == "tiny"
    assert [row["table"] for row in content["rows"]] == [*bench.CONDITIONS]
    for row in content["rows"]:
        assert row["name"] == "passive" and set(row["values"]) == {"step_1", "step_4"}
        assert all(value["median"] > 0 for value in row["values"].values())


def test_a_model_that_cannot_be_loaded_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "worker", dead)
    assert program.main(["waiting", "--quick", "--out", str(tmp_path)]) == 1
    assert "could not be started, or has ended" in capsys.readouterr().err


def dead(args: Any, environ: dict[str, str]) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def process() -> Any:
        child = bench.start("raise SystemExit", environ)
        yield child
        bench.end(child)

    return process()
