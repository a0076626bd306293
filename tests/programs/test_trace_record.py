"""Recording for the trace viewer: a file says what the engine's own records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared import SamplingParams, load_stage
from shared.measure.episode import DOCUMENT, Arrival
from shared.record.__main__ import AGAIN, Event, events, load, main, pools, record, save


def arrivals() -> list[Arrival]:
    long, short = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (32, 16))
    chats = [Arrival(n, n, [*range(9, 18), i], long, 2 * (i > 0)) for i, n in enumerate("ABCD")]
    return [*chats, Arrival(DOCUMENT, "", list(range(50, 110)), short, after=4)]


@pytest.mark.parametrize("traffic", ["example", "crowded"])
@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_file_says_what_happened(tiny: Any, tmp_path: Path, stage: int, traffic: str) -> None:
    options = {"max_prefill_chunk_size": 8} if stage == 4 else {}
    blocks = 44 if traffic == "crowded" else 70
    engine = load_stage(stage).LLMEngine(model=tiny, block_size=4, num_blocks=blocks, **options)
    content = {"format": "mini-vllm-replay", "version": 1, "num_blocks": blocks}
    content |= record(engine, events(arrivals(), traffic))
    save(tmp_path / "run.json", content)
    assert load(tmp_path / "run.json") == content

    requests, steps = content["requests"], content["steps"]
    names = [request["id"] for request in requests]
    assert names == [*"ABCD", DOCUMENT, AGAIN][: 5 + (traffic == "crowded")]
    for request in requests:
        assert request["reason"] == (
            "abort" if traffic == "crowded" and request["id"] == DOCUMENT else "length"
        )
        assert 0 <= request["arrived"] < request["ended"]
    assert len(steps) == len(engine.trace.steps)
    for step, pool, one in zip(steps, pools(content), engine.trace.steps, strict=True):
        assert [(names[r], start, n) for r, start, n in step["slices"]] == one.slices
        assert [names[r] for r, _ in step.get("sampled", [])] == one.sampled
        assert [names[r] for r in step.get("preempted", [])] == one.preempted
        assert {names[r]: table for r, table in pool.tables.items()} == {
            name: table for name, table in one.block_tables.items() if table
        }
        assert len(step.get("waiting", [])) == one.num_waiting
        assert len(step.get("running", [])) == one.num_running
        assert len(step.get("prefilling", [])) == one.num_prefilling
        assert step["end"] - step["start"] == pytest.approx(one.duration, abs=2e-6)
    if stage >= 3:
        assert len(pool.findable) == engine.block_manager.num_cached_blocks > 0
    for r, request in enumerate(requests):
        pieces = [piece for step in steps for who, piece in step.get("sampled", []) if who == r]
        if request["reason"] == "length":
            assert len(pieces) == request["max_tokens"]
    if traffic == "crowded":
        assert any(step.get("preempted") for step in steps), "the pool was not small enough"


def test_an_event_comes_when_its_request_has_so_many_tokens(tiny: Any) -> None:
    engine = load_stage(1).LLMEngine(model=tiny, block_size=4, num_blocks=64)
    first, second = arrivals()[:2]
    content = record(engine, [Event("A", 0, first), Event("A", 3, second)])
    tokens = [len(step["slices"]) for step in content["steps"][:4]]
    assert tokens == [1, 1, 1, 1] and content["steps"][3]["slices"][0][0] == 1, (
        "B comes after three tokens of A, and its prompt is the fourth step"
    )


def test_an_unknown_recording_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["record", "example-05"])
    assert "there is no recording 'example-05'; there are example-01, " in capsys.readouterr().err
