"""The soak finds nothing in the stages, and finds what is put there: every kind of loss."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from shared import load_stage
from shared.bench import __main__ as program
from shared.bench import soak

REQUESTS = 250


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ROUND", 100)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_stage_loses_nothing(number: int, capsys: pytest.CaptureFixture) -> None:
    assert program.main(["soak", "--stages", str(number), "--requests", str(REQUESTS)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"stage 0{number}: {REQUESTS} requests in ")
    for what in ("length", "stop", "error", "refused", "abort", "in a step", "preemptions"):
        assert f" 0 {what}" not in line and what in line, f"it never came to {what!r}: {line}"


def test_a_model_that_computes(tiny: Any) -> None:
    said = soak.soak(load_stage(4), tiny, 40, seed=0, computes=True)
    assert said.startswith("40 requests in ")


def keep_a_block(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    free, calls = stage.block_manager.BlockManager.free, iter(range(10**6))

    def leaky(self: Any, sequence: Any) -> None:
        if next(calls) % 50 == 49 and len(sequence.block_table) > 1:
            sequence.block_table = sequence.block_table[1:]
        free(self, sequence)

    monkeypatch.setattr(stage.block_manager.BlockManager, "free", leaky)


def keep_requests(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, kept = stage.LLMEngine._finish, []

    def leaky(self: Any, request_id: str, *args: Any) -> None:
        kept.append(self._requests[request_id])
        finish(self, request_id, *args)

    monkeypatch.setattr(stage.LLMEngine, "_finish", leaky)


def keep_bytes(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, kept = stage.LLMEngine._finish, []

    def leaky(self: Any, *args: Any) -> None:
        kept.append(b"x" * (400 << 10))
        finish(self, *args)

    monkeypatch.setattr(stage.LLMEngine, "_finish", leaky)


def forget_a_request(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, and is never looked at again."""
    commit, calls = stage.scheduler.Scheduler.commit, iter(range(10**6))

    def leaky(self: Any, batch: Any, token_ids: Any) -> None:
        commit(self, batch, token_ids)
        if next(calls) % 50 == 49 and self.waiting:
            self.waiting.popleft()

    monkeypatch.setattr(stage.scheduler.Scheduler, "commit", leaky)


def swap_tokens(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_out = stage.LLMEngine._hand_out

    def swapped(self: Any, requests: Any, sampled: Any, now: float) -> None:
        hand_out(self, requests, sampled[::-1], now)

    monkeypatch.setattr(stage.LLMEngine, "_hand_out", swapped)


def end_as_error(stage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that nobody aborted, and of which no step failed."""
    finish, calls = stage.LLMEngine._finish, iter(range(10**6))

    def wrong(self: Any, request_id: str, reason: str, now: float) -> None:
        finish(self, request_id, "error" if next(calls) % 20 == 19 else reason, now)

    monkeypatch.setattr(stage.LLMEngine, "_finish", wrong)


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (keep_a_block, "blocks are free"),
        (keep_requests, "live on"),
        (keep_bytes, "MiB"),
        (forget_a_request, "stuck|not in deque"),
        (swap_tokens, "as its token"),
        (end_as_error, "ended with 'error'"),
    ],
)
def test_a_loss_is_found(
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[ModuleType, pytest.MonkeyPatch], None],
    says: str,
) -> None:
    lose(load_stage(4), monkeypatch)
    with pytest.raises(soak.Lost, match=says):
        soak.soak(load_stage(4), tiny, REQUESTS, seed=1, computes=False)


def test_a_loss_fails_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keep_a_block(load_stage(2), monkeypatch)
    assert program.main(["soak", "--stages", "2", "--requests", str(REQUESTS)]) == 1
    assert capsys.readouterr().out.startswith("stage 02: FAILED: ")
