"""Faults that only a prefix cache or chunks can have: the random schedules must see each."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from shared import load_stage
from tests.contract.memory import run_schedules

NUM_SCHEDULES = 300
SALTS = {"cache_salt": ["", "", "a"]}
CHUNKS = {"max_prefill_chunk_size": [1, 2, 3, 5]}
CACHING, CHUNKING = load_stage(3), load_stage(4)


def module(stage: ModuleType, name: str) -> Any:
    return import_module(f"{stage.__name__}.{name}")


def must_fail(
    stage: ModuleType, match: str, options: Any, request_options: Any = SALTS, length: int = 70
) -> None:
    with pytest.raises(AssertionError, match=match):
        run_schedules(stage, NUM_SCHEDULES, options, request_options, length, reduce=False)


def test_right_engines_pass() -> None:
    assert run_schedules(CACHING, 20, {}, SALTS)["length"] > 20
    assert run_schedules(CHUNKING, 20, CHUNKS, SALTS)["length"] > 20


def test_publishing_before_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails has then published blocks that nobody wrote."""
    scheduler = module(CACHING, "scheduler").Scheduler
    schedule = scheduler.schedule

    def too_early(self: Any) -> Any:
        batch = schedule(self)
        for s in batch.slices:
            before, s.sequence.cached_token_count = s.sequence.cached_token_count, s.end_pos
            self.block_manager.publish(s.sequence, s.start_pos)
            s.sequence.cached_token_count = before
        return batch

    monkeypatch.setattr(scheduler, "schedule", too_early)
    must_fail(CACHING, "never written|another prefix|holds|should hold", {})


def test_eviction_forgets_the_map_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is handed out again is still found under its old content."""
    manager = module(CACHING, "block_manager").BlockManager
    monkeypatch.setattr(manager, "_forget", lambda self, block: None)
    must_fail(CACHING, "does not read|also reads|never written|another prefix", {}, {}, length=250)


def test_slots_from_the_index_in_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are right, so only a chunk behind another one shows it."""
    runner = module(CHUNKING, "model_runner")
    slot_mapping = runner.slot_mapping

    def from_zero(table: list[int], start: int, n: int, block_size: int) -> list[int]:
        return slot_mapping(table, start if n == 1 else 0, n, block_size)

    monkeypatch.setattr(runner, "slot_mapping", from_zero)
    must_fail(CHUNKING, "never written|should hold|holds|does not read|also reads", CHUNKS)


def test_an_intermediate_chunk_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice asks for logits and gets a token, the prompt being done or not."""
    batch = module(CHUNKING, "scheduler").ScheduledBatch

    def everyone(self: Any) -> None:
        self.sampling = [s.sequence for s in self.slices]

    monkeypatch.setattr(batch, "__post_init__", everyone)
    run = module(CHUNKING, "model_runner").ModelRunner.run

    def all_rows(self: Any, batch: Any) -> Any:
        prepare = self._prepare
        self._prepare = lambda slices: {
            **(inputs := prepare(slices)),
            "logits_to_keep": (inputs["attn_metadata"].query_start_loc[1:] - 1).long(),
        }
        try:
            return run(self, batch)
        finally:
            self._prepare = prepare

    monkeypatch.setattr(module(CHUNKING, "model_runner").ModelRunner, "run", all_rows)
    must_fail(CHUNKING, "sampled in the wrong place|logits", CHUNKS)


def test_abort_forgets_prefilling(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = module(CHUNKING, "scheduler").Scheduler
    status = module(CHUNKING, "sequence").SequenceStatus
    finish = scheduler.finish

    def forgetful(self: Any, sequence: Any, reason: str) -> None:
        if reason == "abort" and sequence.status is status.PREFILLING:
            self.running.remove(sequence)
            return
        finish(self, sequence, reason)

    monkeypatch.setattr(scheduler, "finish", forgetful)
    must_fail(CHUNKING, "the pool has|blocks are free|deadlock", CHUNKS)


def test_B6_lookup_stops_at_the_first_miss() -> None:
    """Whole engines evict a child before its parent, so only the block manager alone can show it:
    what is found behind a miss would be attended to at the wrong position."""
    manager = module(CACHING, "block_manager").BlockManager(num_blocks=8, block_size=4)
    chain = module(CACHING, "sequence").Sequence("chain", list(range(9)), max_tokens=1)
    manager.allocate(chain, 9)
    chain.cached_token_count = 9
    manager.publish(chain, 0)
    assert manager.find_prefix(chain) == tuple(chain.block_table[:2])
    manager._forget(chain.block_table[0])
    assert manager.find_prefix(chain) == ()


def test_hash_block_is_where_tests_look_for_it() -> None:
    """A reader's stage may do without it, and two tests of the contract skip themselves then."""
    assert callable(module(CACHING, "block_manager").hash_block)
