"""Workloads are the same on every run, and what their names say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shared.measure import workloads
from shared.measure.workloads import WORKLOADS, Passages

# Looks like a text in that no two places of it are alike for long.
TEXT = [(7 * i * i + i) % 4099 for i in range(6000)]

CHECKSUMS = {
    "chat": "aa18537e05586ede",
    "shared_prefix": "e670dbe33ab18d76",
    "long_prompt": "1816e9d44884e83c",
    "multi_turn": "fb767d65e89a23d3",
    "mixed": "672f92b922806327",
    "example": "30290bbd869fc746",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_checksum_is_stable(name: str) -> None:
    """On every machine and every Python: results of different places can be compared."""
    workload = WORKLOADS[name](TEXT, seed=0)
    assert workload.name == name
    assert workload.checksum[:16] == CHECKSUMS[name]
    assert WORKLOADS[name](TEXT, seed=1).checksum != workload.checksum


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": (1, 2, 4)},
        {"max_tokens": 9},
        {"arrival_time": 0.5},
        {"after_tokens": 3},
        {"continues": True},
        {"after": "b"},
    ],
)
def test_checksum_sees_every_field(change: dict) -> None:
    one = workloads.WorkloadRequest("a", (1, 2, 3), 8)
    other = dataclasses.replace(one, **change)
    checksums = {workloads.Workload("w", (r,)).checksum for r in (one, other)}
    assert len(checksums) == 2


def test_ids_are_unique_and_lengths_within_limits() -> None:
    workload = workloads.chat(TEXT, num_requests=40, prompt_tokens=(8, 16), max_tokens=5)
    assert len({r.request_id for r in workload.requests}) == 40
    lengths = [len(r.prompt_token_ids) for r in workload.requests]
    assert min(lengths) == 8 and max(lengths) == 16
    assert workload.summary()["output_tokens"] == 200


def test_no_two_cold_prompts_begin_alike() -> None:
    workload = workloads.chat(TEXT, num_requests=64)
    beginnings = {r.prompt_token_ids[:16] for r in workload.requests}
    assert len(beginnings) == 64


def test_passages_of_a_uniform_text_are_refused() -> None:
    passages = Passages([1] * 100, seed=0)
    passages.take(20)
    with pytest.raises(ValueError, match="too uniform"):
        passages.take(20)
    with pytest.raises(ValueError, match="101 tokens from a text of 100"):
        passages.take(101)


def test_shared_prefix_shares_the_prefix_and_nothing_else() -> None:
    workload = workloads.shared_prefix(TEXT, num_requests=3, prefix_tokens=100, own_tokens=20)
    prompts = [r.prompt_token_ids for r in workload.requests]
    assert len({p[:100] for p in prompts}) == 1
    assert len({p[100:] for p in prompts}) == 3
    assert [r.after for r in workload.requests] == [None, "question-0", "question-1"]


def test_long_prompt_comes_when_the_streams_run() -> None:
    workload = workloads.long_prompt(TEXT, num_streams=2, long_prompt_tokens=500, after_tokens=7)
    *streams, long = workload.requests
    assert len(streams) == 2 and all(r.after is None for r in streams)
    assert len(long.prompt_token_ids) == 500
    assert (long.after, long.after_tokens) == ("stream-1", 7)
    assert streams[0].max_tokens > 7  # or nobody would be streaming any more


def test_turns_of_a_conversation_grow() -> None:
    workload = workloads.multi_turn(TEXT, num_chats=2, num_turns=3, max_tokens=10)
    lengths = workload.lengths()
    own = {r.request_id: len(r.prompt_token_ids) for r in workload.requests}
    assert lengths["chat-1-turn-0"] == own["chat-1-turn-0"] + 10
    assert lengths["chat-1-turn-2"] == sum(own[f"chat-1-turn-{i}"] + 10 for i in range(3))
    assert all(r.continues == (r.after is not None) for r in workload.requests)


def test_num_blocks_rounds_up_each_request() -> None:
    requests = tuple(workloads.WorkloadRequest(str(n), (1,) * n, 1) for n in (3, 4, 8))
    assert workloads.Workload("w", requests).num_blocks(4) == 1 + 2 + 3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_mixed_arrives_at_its_rate_and_is_log_normal(burstiness: float) -> None:
    workload = workloads.mixed(
        TEXT, num_requests=3000, rate=5.0, burstiness=burstiness, prompt_tokens=(50, 0.5, 400)
    )
    times = [r.arrival_time for r in workload.requests]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 5, rel=0.1)
    assert spread / mean == pytest.approx(burstiness**-0.5, rel=0.1)  # of a gamma distribution
    lengths = sorted(len(r.prompt_token_ids) for r in workload.requests)
    assert lengths[1500] == pytest.approx(50, rel=0.1)
    assert lengths[2522] / lengths[1500] == pytest.approx(2.718**0.5, rel=0.15)  # one sigma up
    assert lengths[-1] <= 400


def test_mixed_refuses_a_rate_of_nothing() -> None:
    with pytest.raises(ValueError, match="above 0"):
        workloads.mixed(TEXT, rate=0)


def test_text_is_what_python_brings_along_or_a_file(tmp_path: Path) -> None:
    assert "assert_stmt" in workloads.read_text()
    path = tmp_path / "text.txt"
    path.write_text("Größe", encoding="utf-8")
    assert workloads.read_text(path) == "Größe"
    with pytest.raises(ValueError, match="nowhere"):
        workloads.read_text(tmp_path / "nowhere")
