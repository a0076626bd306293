"""Goodput: which requests count, and up to which rate enough of them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared import RequestOutput
from shared.bench import __main__ as program
from shared.bench import goodput, simulate
from shared.bench.results import Report
from shared.engine.outputs import RequestMetrics
from shared.measure.results import load
from shared.measure.simulator import SimulatedEngine
from shared.measure.workloads import Workload, WorkloadRequest

LIMITS = {"ttft": 1.0, "itl": 0.5}


def output(name: str, arrival: float, *times: float) -> RequestOutput:
    metrics = RequestMetrics(arrival, times[-1], list(times))
    return RequestOutput(name, [1, 2], [0] * len(times), "", "", True, "length", metrics)


def test_a_point_of_the_curve_by_hand() -> None:
    outputs = [
        output("in time", 0.0, 1.0, 1.5, 2.0),  # both at their limits
        output("first token late", 0.0, 1.25, 1.5),
        output("one gap too long", 2.0, 2.5, 3.25, 3.5),
        output("in time, too", 3.0, 3.5, 4.0),
    ]
    values = goodput.values(outputs, LIMITS)
    assert values["in_time"] == 50
    assert values["goodput"] == pytest.approx(2 / 4.0)  # from 0 to the last token at 4
    assert values["ttft_max"] == 1250 and values["itl_max"] == 750
    assert values["output_tok_s"] == pytest.approx(10 / 4.0)


@pytest.mark.parametrize(
    ("in_time", "highest"),
    [
        ({1.0: 100, 2.0: 99, 4.0: 98.9}, 2.0),
        ({4.0: 50, 1.0: 100, 2.0: 100}, 2.0),  # in whatever order
        ({1.0: 98, 2.0: 100}, None),  # lucky at 2
        ({1.0: 100, 2.0: 90, 4.0: 100}, 1.0),
        ({1.0: 100, 2.0: 100}, 2.0),
        ({}, None),
    ],
)
def test_the_highest_rate_is_the_last_before_one_fails(
    in_time: dict[float, float], highest: float | None
) -> None:
    assert goodput.highest_rate(in_time) == highest


def test_what_a_curve_says() -> None:
    report = Report("goodput")
    curve = {"one": {1.0: (0.9, 100), 2.0: (1.9, 99.5), 4.0: (1.2, 40)}}
    curve |= {"two": {1.0: (0.8, 90), 2.0: (0.7, 45), 4.0: (0.5, 20)}}
    curve |= {"three": {1.0: (1.0, 100), 2.0: (2.0, 100), 4.0: (3.9, 99)}}
    for name, points in curve.items():
        for rate, (value, share) in points.items():
            report.measure("curve", name, {"goodput": value, "in_time": share}, rate=rate)
    goodput.best(report, "curve", "highest", list(curve), [1.0, 2.0, 4.0])
    found = {
        name: tuple(report.median("highest", name, column) for column in goodput.BEST)
        for name in curve
    }
    assert found == {"one": (2.0, 1.9), "two": (0.0, 0.8), "three": (4.0, 3.9)}
    assert report.notes == [
        "curve, two: too late already at 1/s.",
        "curve, three: in time at all rates, so it may bear more.",
    ]


def test_unloaded_is_the_longest_prompt_by_itself() -> None:
    def seconds(slices: Any) -> float:
        return 0.5 + sum(s.num_tokens for s in slices)

    engine = SimulatedEngine(3, seconds, num_blocks=40, max_model_len=200)
    requests = [WorkloadRequest(str(n), tuple(range(n)), 1) for n in (4, 20, 7)]
    alone = goodput.unloaded(engine, Workload("w", tuple(requests)))
    assert alone == {"ttft": 20.5, "itl": 1.5}


def test_limits_are_told_in_milliseconds() -> None:
    report = Report("goodput")
    goodput.tell_limits(report, {"ttft": 0.5, "itl": 0.03})
    assert report.settings["limits"] == {"ttft_ms": 500.0, "itl_ms": 30.0}
    assert report.notes == ["limits: TTFT 500 ms, every ITL 30 ms."]


# --- the programs -----------------------------------------------------------------------------


def run(name: str, *options: str, out: Path) -> tuple[int, dict[str, Any]]:
    code = program.main([name, "--quick", "--model", "tiny", "--out", str(out), *options])
    path = out / f"{name}.json"
    return code, load(path) if path.exists() else {}


@pytest.mark.slow
def test_goodput_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = {"prompt_tokens": (20, 0.5, 60), "output_tokens": (6, 0.5, 20)}
    monkeypatch.setattr(goodput, "TRAFFIC", {"mixed": traffic})
    options = ("--rates", "20", "100", "--seconds", "0.1", "--itl-ms", "60000")
    code, content = run("goodput", *options, out=tmp_path)
    assert code == 0 and content["complete"]
    rows = [(r["table"], r["name"], r["params"]) for r in content["rows"]]
    assert rows == [
        *(
            ("goodput", name, {"rate": rate})
            for rate in (20, 100)
            for name in ("stage 03", "stage 04")
        ),
        ("highest rate", "stage 03", {}),
        ("highest rate", "stage 04", {}),
    ]
    assert content["settings"]["limits"]["itl_ms"] == 60_000
    assert [w["num_requests"] for w in content["workloads"].values()] == [goodput.FEWEST, 10]
    assert all(0 <= r["values"]["in_time"]["median"] <= 100 for r in content["rows"][:4])


@pytest.mark.slow
def test_simulate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **{"long_prompt_tokens": 100, "stream_tokens": 30, "streams": 3, "prompt": 9000},
        **{"hours_requests": 40, "fleet_requests": 40, "documents": 2, "fleet_rate": 50.0},
        **{"curve_requests": 20, "rates": [1.0, 200.0]},
    }
    monkeypatch.setattr(simulate, "QUICK", simulate.QUICK | small)
    code, content = run("simulate", "--replicas", "2", out=tmp_path)
    assert code == 0 and content["complete"]
    tables = [row["table"] for row in content["rows"]]
    counts = {table: tables.count(table) for table in dict.fromkeys(tables)}
    assert counts == {
        **{simulate.PREDICTION: 6, simulate.STREAMS: 4, simulate.HOURS: 1, simulate.FLEET: 2},
        **{simulate.CURVE: 4, simulate.HIGHEST: 2},
    }

    def value(table: str, name: str, column: str, **params: Any) -> float:
        (found,) = [
            r["values"][column]["median"]
            for r in content["rows"]
            if (r["table"], r["name"]) == (table, name) and params.items() <= r["params"].items()
        ]
        return found

    # (a) What is exact is the schedule; how well tiny steps are predicted is not for a test.
    assert content["settings"]["steps scheduled otherwise than predicted"] == 0
    for stage in ("stage 03", "stage 04"):
        measured, predicted = (
            value(simulate.PREDICTION, stage, column, number="total time")
            for column in ("measured", "predicted")
        )
        error = value(simulate.PREDICTION, stage, "error", number="total time")
        assert error == pytest.approx(100 * (predicted / measured - 1))
        steps = content["series"][stage]["steps"]
        simulated = content["series"][f"{stage}, predicted"]["steps"]
        assert [s["slices"] for s in steps] == [s["slices"] for s in simulated]
    # (b) No timing but arithmetic: the same on every machine.
    gaps = [value(simulate.STREAMS, "stage 04", "gap_max", chunk=c) for c in ("4,096", "512")]
    assert value(simulate.STREAMS, "stage 03", "gap_max") > gaps[0] > gaps[1]
    # (d) Two documents on two replicas: each is computed once if the router knows.
    hits = [
        value(simulate.FLEET, name, "hit_rate", replicas=2)
        for name in ("round robin", "prefix-aware")
    ]
    assert hits[0] < hits[1]
    assert any("simulated: llama-3.1-8b" in note for note in content["notes"])


def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("goodput", "--rates", "2", "1", out=tmp_path)[0] == 2
    assert "rates must grow, got 2 1" in capsys.readouterr().err
    assert run("simulate", "--gpu", "t4", "--parts", "b", out=tmp_path)[0] == 2
    assert "leave no room for a KV cache: T4 16 GB" in capsys.readouterr().err
    assert run("simulate", "--shape", "nothing", "--parts", "b", out=tmp_path)[0] == 2
    assert "no shape 'nothing'" in capsys.readouterr().err
    for wrong in (["--gpu", "b200"], ["--replicas", "0"], ["--itl-ms", "x"], ["--parts", "z"]):
        with pytest.raises(SystemExit):
            run("simulate", *wrong, out=tmp_path)
        assert wrong[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
