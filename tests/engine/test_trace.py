"""The step trace: what is kept, what a file says, and an export that a viewer accepts."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from shared import SamplingParams, load_stage
from shared.engine.trace import StepRecord, Trace

# Two prompts of 5 and 4 tokens. "long" is chunked by 3, and its last chunk is one token; it is
# preempted in step 4 and computed again. "short" decodes beside it.
STEPS = [
    {"slices": [("long", 0, 3)], "sampled": []},
    {"slices": [("long", 3, 1), ("short", 0, 4)], "sampled": ["short"]},
    {"slices": [("short", 4, 1), ("long", 4, 1)], "sampled": ["short", "long"]},
    {"slices": [("short", 5, 1), ("long", 5, 1)], "sampled": ["short", "long"]},
    {"slices": [("short", 6, 1)], "sampled": ["short"], "preempted": ["long"]},
    {"slices": [("long", 0, 6)], "sampled": []},
    {"slices": [("long", 6, 1)], "sampled": ["long"]},
    {"slices": [("long", 7, 1)], "sampled": ["long"]},
]


def make_trace(**options) -> Trace:
    trace = Trace(**options)
    for index, step in enumerate(STEPS):
        trace.add(
            StepRecord(
                index=index,
                start=1000.0 + 0.010 * index,
                end=1000.0 + 0.010 * index + 0.008,
                num_free_blocks=20 - index,
                num_waiting=index % 2,
                num_running=2,
                num_prefilling=1,
                **step,
            )
        )
    return trace


# --------------------------------------------------------------------------------------------- kept


def test_only_the_newest_are_kept():
    trace = make_trace(max_steps=3)
    assert [step.index for step in trace.steps] == [5, 6, 7]


@pytest.mark.parametrize("max_steps", [0, -1])
def test_max_steps_below_1_is_refused(max_steps):
    with pytest.raises(ValueError, match=f"max_steps must be .* 1 or more, got {max_steps}"):
        Trace(max_steps=max_steps)


def test_a_step_that_ends_before_it_starts_is_refused():
    trace = Trace()
    with pytest.raises(ValueError, match="step 3 ends at 1.5, before its start at 2.0"):
        trace.add(StepRecord(index=3, start=2.0, end=1.5, slices=[]))
    assert trace.steps == []


def test_a_step_that_starts_before_the_one_before_it_is_refused():
    trace = make_trace()
    with pytest.raises(ValueError, match="step 8 starts at 999.0, before the end"):
        trace.add(StepRecord(index=8, start=999.0, end=1001.0, slices=[]))
    assert len(trace.steps) == 8


def test_what_a_step_says():
    step = make_trace().steps[1]
    assert step.duration == pytest.approx(0.008)
    assert step.num_tokens == 5


# --------------------------------------------------------------------------------------------- file


def test_save_and_load(tmp_path):
    trace = make_trace()
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert len(loaded.steps) == len(trace.steps)
    for saved, step in zip(trace.steps, loaded.steps, strict=True):
        # Times start at 0; all else is as it was, tuples included.
        assert step.start == pytest.approx(saved.start - 1000.0, abs=1e-9)
        assert step.end == pytest.approx(saved.end - 1000.0, abs=1e-9)
        saved.start, saved.end = step.start, step.end
        assert step == saved
    assert loaded.steps[0].start == 0.0
    assert loaded.record_blocks is False


def test_a_loaded_trace_can_be_saved_again(tmp_path):
    make_trace().save(tmp_path / "a.json")
    Trace.load(tmp_path / "a.json").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_times_start_at_0_when_the_first_steps_are_gone(tmp_path):
    make_trace(max_steps=2).save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").steps[0].start == 0.0


def test_block_tables_survive(tmp_path):
    trace = Trace(record_blocks=True)
    trace.add(StepRecord(0, 1.0, 2.0, [("a", 0, 3)], block_tables={"a": [4, 2]}))
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded.steps[0].block_tables == {"a": [4, 2]}
    assert loaded.record_blocks is True


def test_an_empty_trace(tmp_path):
    Trace().save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").steps == []
    assert [e["ph"] for e in Trace().to_chrome()["traceEvents"]] == ["M", "M", "M"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "is not a mini-vllm-trace file"),
        ("{}", "is not a mini-vllm-trace file"),
        ('{"traceEvents": []}', "is not a mini-vllm-trace file"),
        ('{"format": "mini-vllm-trace", "version": 99, "steps": []}', "has version 99, expected 1"),
    ],
)
def test_another_file_is_refused(tmp_path, content, message):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Trace.load(tmp_path / "trace.json")


# ------------------------------------------------------------------------------------------- export


def events_of(trace: Trace, phase: str) -> list[dict]:
    return [event for event in trace.to_chrome()["traceEvents"] if event["ph"] == phase]


def test_export_is_valid(tmp_path):
    make_trace().save_chrome(tmp_path / "chrome.json")
    content = json.loads((tmp_path / "chrome.json").read_text())
    assert content == make_trace().to_chrome()
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "C", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] > 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    assert min(e["ts"] for e in content["traceEvents"] if e["ph"] != "M") == 0


def test_export_has_an_event_for_each_slice_and_each_step():
    trace = make_trace()
    tracks = Counter((event["pid"], event["tid"]) for event in events_of(trace, "X"))
    num_slices = Counter(request_id for step in STEPS for request_id, _, _ in step["slices"])
    # One track for the steps, and one for each request in the order in which they came.
    assert tracks == {(1, 0): len(STEPS), (2, 1): num_slices["long"], (2, 2): num_slices["short"]}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events_of(trace, "M")}
    assert names[(2, 1)] == "long" and names[(2, 2)] == "short"


def test_export_is_monotone_and_nothing_overlaps():
    by_track: dict[tuple, list[dict]] = {}
    for event in events_of(make_trace(), "X"):
        by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_track.values():
        for earlier, later in zip(events, events[1:], strict=False):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]


def test_export_times_are_microseconds():
    second_step = events_of(make_trace(), "X")[2]
    assert second_step["name"] == "step 1"
    assert (second_step["ts"], second_step["dur"]) == (pytest.approx(10_000), pytest.approx(8_000))


def test_export_tells_prefill_from_decode():
    trace = make_trace()
    named = [
        (e["args"]["step"], e["tid"], e["name"]) for e in events_of(trace, "X") if e["pid"] == 2
    ]
    assert [(step, name) for step, tid, name in named if tid == 1] == [
        (0, "prefill"),
        (1, "prefill"),  # a chunk of one token
        (2, "prefill"),  # the last chunk, also one token, which gives the first token
        (3, "decode"),
        (5, "prefill"),  # after the preemption
        (6, "prefill"),
        (7, "decode"),
    ]
    assert [name for _, tid, name in named if tid == 2] == ["prefill", "decode", "decode", "decode"]


def test_export_of_a_second_request_with_the_same_id():
    trace = Trace()
    for index, piece in enumerate([("a", 0, 4), ("a", 4, 1), ("a", 0, 1), ("a", 1, 1)]):
        trace.add(StepRecord(index, index, index + 1, [piece], sampled=["a"]))
    names = [event["name"] for event in events_of(trace, "X") if event["pid"] == 2]
    assert names == ["prefill", "decode", "prefill", "decode"]


def test_export_of_a_preempted_request_that_starts_where_it_left():
    """With a prefix cache, a preempted request may come back with one token to compute."""
    trace = Trace()
    trace.add(StepRecord(0, 0.0, 1.0, [("a", 0, 4)], sampled=["a"]))
    trace.add(StepRecord(1, 1.0, 2.0, [("a", 4, 1)], sampled=["a"], preempted=["a"]))
    names = [event["name"] for event in events_of(trace, "X") if event["pid"] == 2]
    assert names == ["prefill", "prefill"]


def test_export_args_and_counters():
    trace = make_trace()
    slices = [event["args"] for event in events_of(trace, "X") if event["pid"] == 2]
    assert slices[1] == {"step": 1, "start_pos": 3, "num_tokens": 1, "sampled": False}
    assert slices[2] == {"step": 1, "start_pos": 0, "num_tokens": 4, "sampled": True}
    steps = [event["args"] for event in events_of(trace, "X") if event["pid"] == 1]
    assert steps[1] == {"num_tokens": 5, "num_slices": 2, "preempted": []}
    assert steps[4]["preempted"] == ["long"]
    counters: dict[str, list] = {}
    for event in events_of(trace, "C"):
        counters.setdefault(event["name"], []).append(event["args"])
    assert counters["free blocks"] == [{"free": 20 - index} for index in range(8)]
    assert counters["waiting"] == [{"waiting": index % 2} for index in range(8)]
    assert counters["running"] == [{"running": 2, "prefilling": 1}] * 8


def test_a_busy_engine_logs_its_load(tiny, caplog, monkeypatch):
    """One line for every ten seconds with steps, with the rates of these seconds."""
    engine = load_stage(1).LLMEngine(tiny, block_size=4, num_blocks=20)
    now = 0.0

    def a_second_later():
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr("time.perf_counter", a_second_later)
    caplog.set_level("INFO", logger="shared.engine.base")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.generate([[5] * 10, [6] * 10], params, use_tqdm=False)
    lines = [r.getMessage() for r in caplog.records if r.name == "shared.engine.base"]
    assert len(lines) == 2, lines
    first, second = lines
    assert "2 running, 0 waiting" in first and "0 prompt tokens/s in" in second
    assert float(first.split(" tokens/s out")[0].split()[-1]) > 0
    engine.log_interval = float("inf")
    engine.generate([[5] * 10], params, use_tqdm=False)
    assert len([r for r in caplog.records if r.name == "shared.engine.base"]) == 2
