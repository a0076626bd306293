"""The programs: every benchmark once on the tiny model, and how each ends."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shared import SamplingParams, load_stage
from shared.bench import __main__ as program
from shared.bench import attention, bookkeeping, ladder, prefix, rows, stall
from shared.bench.results import Report
from shared.bench.session import Session, fresh
from shared.engine.model_shape import ModelShape
from shared.measure.results import load

SMALL: dict[str, list[str]] = {
    "ladder": ["--requests", "2", "--rounds", "2", "--concurrency", "8"],
    "throughput": ["--requests", "2", "--stages", "1", "3"],
    "stall": ["--long-prompt", "100", "--target-ms", "5000", "--chunk-size", "32"],
    "prefix": ["--questions", "3", "--prefix-tokens", "64", "--own-tokens", "8", "--rounds", "1"],
    "sweeps": [
        *("--long-prompt", "100", "--chunk", "16", "64", "--block", "4", "16"),
        *("--pool", "1", "100"),
    ],
    "attention": ["--contexts", "33", "--batches", "1", "2", "--rounds", "2"],
    "bookkeeping": ["--running", "8", "--waiting", "20"],
}


def run(name: str, *options: str, out: Path) -> tuple[int, dict[str, Any]]:
    argv = [name, "--quick", "--model", "tiny", "--out", str(out), *options]
    code = program.main(argv)
    path = out / f"{name}.json"
    return code, load(path) if path.exists() else {}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick sizes are for a real model; here seconds count."""
    monkeypatch.setattr(ladder, "QUICK", ladder.QUICK | {"max_tokens": 4, "document_tokens": 96})
    monkeypatch.setattr(stall, "QUICK", stall.QUICK | {"stream_tokens": 30})
    monkeypatch.setattr(attention, "POOL_BYTES", 1 << 16)
    monkeypatch.setattr(attention, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(bookkeeping, "POOLS", (200, 2_000))
    monkeypatch.setattr(bookkeeping, "QUICK", bookkeeping.QUICK | {"steps": 4, "tokens": 4_000})
    monkeypatch.setattr(prefix, "QUICK", prefix.QUICK | {"max_tokens": 4, "block_tokens": 4_000})
    small = {"step_batch": 2, "step_context": 40, "steps": 3}
    monkeypatch.setattr(attention, "QUICK", attention.QUICK | small)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_benchmark_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, content = run(name, *SMALL[name], out=tmp_path)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert content["complete"] and content["failures"] == []
    assert content["rows"] and all(row["values"] for row in content["rows"])
    assert all(claim["text"] for claim in content["claims"])
    assert f"written: {tmp_path / name}.json" in captured.out.replace("\n", "")
    assert f"] {name}: " in captured.err  # progress
    shown = {row["table"] for row in content["rows"]}
    assert all(table in captured.out for table in shown)
    CHECKS.get(name, lambda content: None)(content)


def names(content: dict[str, Any], table: str) -> list[str]:
    return [row["name"] for row in content["rows"] if row["table"] == table]


def value(content: dict[str, Any], name: str, column: str, **params: Any) -> Any:
    found = [r for r in content["rows"] if r["name"] == name and r["params"] == params]
    return found[-1]["values"][column]


def check_ladder(content: dict[str, Any]) -> None:
    assert names(content, "ladder") == list(rows.ROWS)
    assert len(value(content, rows.NAIVE, "ttft_p50")["rounds"]) == 1  # it is measured once
    assert len(value(content, "stage 01", "ttft_p50")["rounds"]) == 2
    assert value(content, "stage 03", "hit_rate")["median"] > 0
    assert value(content, "stage 02", "hit_rate")["median"] == 0
    assert value(content, rows.CACHED, "kv_waste")["median"] == 0
    unknown = next(row for row in content["rows"] if row["name"] == rows.PEER_BATCH)["values"]
    assert not {"kv_waste", "kv_peak", "hit_rate"} & unknown.keys()
    assert 0 < value(content, "stage 01", "kv_waste")["median"] < 100
    assert any("*" in note for note in content["notes"])
    assert content["workloads"]["example"]["num_requests"] == 3


def check_stall(content: dict[str, Any]) -> None:
    assert names(content, "stall") == ["stage 03", "stage 04", "stage 04, target"]
    by_budget = [row for row in content["rows"] if row["table"] == "stall by budget"]
    assert [(row["name"], row["params"]["budget"]) for row in by_budget] == [
        *(("two long prompts", "default"), ("two long prompts", "8,192")),
        *(("chat", "default"), ("chat", "8,192")),
    ]
    assert all(row["values"]["itl_max"]["median"] > 0 for row in by_budget)
    assert content["workloads"]["two long prompts"]["num_requests"] == 6
    series = content["series"]["stage 04"]
    long = series["requests"]["long"]
    assert long["arrival"] == 0 and long["prompt_tokens"] == 100
    assert len(series["requests"]) == 5 and series["steps"][0]["blocks"]
    assert value(content, "stage 04, target", "over_target")["median"] > 0
    assert content["settings"]["target_step_ms"] == 5000
    held = {
        name: [step["blocks"]["long"] for step in one["steps"] if "long" in step["blocks"]]
        for name, one in content["series"].items()
    }
    assert held["stage 04"][:4] == [2, 4, 6, 7] and held["stage 03"][0] == 7
    assert held["stage 04, reserved"][:4] == [7, 7, 7, 7]


def check_prefix(content: dict[str, Any]) -> None:
    found = [r for r in content["rows"] if r["table"].startswith("(a)")]
    hits = {r["name"]: r["values"].get("hit_rate") for r in found}
    assert hits["stage 03"]["rounds"] == [pytest.approx(100 * 64 / 72)] * 2
    assert hits["stage 03, first question"]["median"] == 0 == hits["stage 02"]["median"]
    assert hits["bare forward"] is None


def check_sweeps(content: dict[str, Any]) -> None:
    tables = [row["table"] for row in content["rows"]]
    assert all(tables.count(t) == 2 for t in ("chunk size", "block size", "pool size"))
    pools = [r["values"]["preemptions"]["median"] for r in content["rows"][-2:]]
    assert pools[1] == 0
    assert any("raised to the largest" in note for note in content["notes"])


def check_attention(content: dict[str, Any]) -> None:
    kernels = "decode attention of one layer"
    assert set(names(content, kernels)) == {
        *("gather", "numba", "contiguous", "contiguous, gqa", "numba, 1 thread")
    }
    assert names(content, "whole decode step") == ["stage 02", "stage 01"]


def check_bookkeeping(content: dict[str, Any]) -> None:
    assert names(content, "block manager") == ["stage 03"] * 2
    assert len(names(content, "scheduler")) == 8


CHECKS = {
    "ladder": check_ladder,
    "stall": check_stall,
    "prefix": check_prefix,
    "sweeps": check_sweeps,
    "attention": check_attention,
    "bookkeeping": check_bookkeeping,
}


# --- how they end -----------------------------------------------------------------------------


def test_without_a_name_it_lists_the_benchmarks(capsys: pytest.CaptureFixture) -> None:
    assert program.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in SMALL:
        assert any(line.split()[:1] == [name] and len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["stall", "--streams", "0"], "whole number from 1 to 64, got '0'"),
        (["stall", "--stages", "5"], "1, 2, 3, 4"),
        (["ladder", "--rounds", "many"], "whole number from 1 to 100"),
        (["ladder", "--workload", "mine"], "chat"),
        (["nothing"], "ladder"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(
    argv: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as error:
        program.main(argv)
    assert error.value.code == 2
    assert says in capsys.readouterr().err


def test_a_value_that_only_the_engine_can_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code, content = run("stall", "--long-prompt", "5000", out=tmp_path)
    assert code == 2 and content == {}
    assert "max_model_len is 1024" in capsys.readouterr().err


def fake(measure: Any) -> ModuleType:
    def conclude(report: Report) -> None:
        report.claim("rows", len(report.rows()), 1, at_least=True)

    return SimpleNamespace(run=measure, conclude=conclude)  # type: ignore[return-value]


def measure(module: ModuleType, out: Path) -> tuple[int, dict[str, Any]]:
    args = SimpleNamespace(name="fake", quick=True, seed=0, out=out)
    code = program.measure(module, args, program.Console(), "python -m shared.bench fake")  # type: ignore[arg-type]
    path = out / "fake.json"
    return code, load(path) if path.exists() else {}


def test_ctrl_c_keeps_what_is_measured(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        session.report.measure("t", "a", {"ttft_p50": 1.0})
        raise KeyboardInterrupt

    code, content = measure(fake(run), tmp_path)
    assert code == 130
    assert content["complete"] is False and len(content["rows"]) == 1
    assert content["claims"][0]["holds"]


def test_ctrl_c_before_anything_writes_nothing(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        raise KeyboardInterrupt

    assert measure(fake(run), tmp_path) == (130, {})


def test_rows_that_differ_fail_the_run(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        session.report.measure("t", "a", {"ttft_p50": 1.0})
        session.report.failures.append("a differs from b")

    code, content = measure(fake(run), tmp_path)
    assert code == 1 and content["failures"] == ["a differs from b"]


def test_turns_rotate_and_rounds_stay_together() -> None:
    session = Session(SimpleNamespace(), Report("x"))  # type: ignore[arg-type]
    assert list(session.turns(["a", "b", "c"], 3, only_once=["b"])) == [*"abc", *"ca", *"ca"]


def test_a_busy_engine_is_not_fresh(tiny: Any) -> None:
    engine = load_stage(3).LLMEngine(model=tiny, block_size=4, num_blocks=32)
    params = SamplingParams(max_tokens=4)
    engine.generate([[3] * 12], params, use_tqdm=False)
    assert engine.block_manager.num_cached_blocks > 0 and engine.trace.steps
    fresh(engine)
    assert engine.block_manager.num_cached_blocks == 0 and not engine.trace.steps
    engine.add_request([3] * 12, params)
    with pytest.raises(RuntimeError, match="unfinished"):
        fresh(engine)


# --- what the benchmarks rely on --------------------------------------------------------------


def test_attention_cases_hold_the_same_in_blocks_and_contiguously() -> None:
    shape = ModelShape(3, 6, 2, 16, 1024, 512, torch.float32, torch.device("cpu"))
    case = attention.Case(shape, context=21, batch=3, block_size=8, seed=0)
    assert case.num_bytes == 2 * 3 * 21 * 2 * 16 * 4
    for layer in range(case.num_layers):
        for pool, dense in zip(case.pools[layer], case.contiguous[layer], strict=True):
            for i, table in enumerate(case.block_tables):
                tokens = pool[table.long()].flatten(0, 1)[:21]
                assert torch.equal(tokens.transpose(0, 1), dense[i])
    dense = case.dense(1)
    assert torch.allclose(dense, case.dense_gqa(1), atol=1e-5)
    attention.check_alike({attention.DENSE: dense, "same": dense + 1e-6}, torch.float32)
    for wrong in (dense + 0.01, dense * float("nan")):
        with pytest.raises(RuntimeError, match="wrong is off"):
            attention.check_alike({attention.DENSE: dense, "wrong": wrong}, torch.float32)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_bookkeeping_steps_are_all_decode(number: int) -> None:
    seconds = bookkeeping.scheduler_steps(load_stage(number), 5, 30, num_steps=4, seed=0)
    assert len(seconds) == 4 and min(seconds) >= 0


@pytest.mark.parametrize("num_blocks", [130, 5_000])
def test_block_costs_find_everything_the_second_time(num_blocks: int) -> None:
    prompts = bookkeeping.token_lists(4_000, seed=0)
    costs = bookkeeping.block_costs(load_stage(3), num_blocks, prompts)
    assert len(prompts) == 4 and set(costs) == {"new", "found"}


def test_the_long_prompt_must_be_cold(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.measure import workloads

    text = [3 + (7 * i * i + i) % 499 for i in range(3000)]
    workload = workloads.long_prompt(text, 0, 2, 8, 12, long_prompt_tokens=90, after_tokens=2)
    engine = load_stage(3).LLMEngine(model=tiny, block_size=4, num_blocks=64)
    stall.episode(engine, workload)
    assert stall.episode(engine, workload).outputs[-1].metrics.num_cached_tokens == 0
    monkeypatch.setattr(stall, "fresh", lambda engine: None)
    with pytest.raises(RuntimeError, match="of the long prompt were in the prefix cache"):
        stall.episode(engine, workload)
