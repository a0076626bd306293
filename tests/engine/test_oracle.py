"""The oracle and its schedules must see faults: two engines that are wrong, and a right one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from importlib import import_module
from typing import Any

import pytest

from shared import load_stage
from tests.contract.helpers import greedy
from tests.contract.memory import run_schedules
from tests.oracle import OracleModel, expected_output

STAGE = load_stage(1)


def test_a_right_engine_passes() -> None:
    seen = run_schedules(STAGE, 20)
    assert seen["tokens"] > 500 and seen["length"] > 20, seen


def test_it_sees_that_free_forgets_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = import_module(f"{STAGE.__name__}.block_manager").BlockManager
    free = manager.free

    def forgetful(self: Any, sequence: Any) -> None:
        del sequence.block_table[:1]
        free(self, sequence)

    monkeypatch.setattr(manager, "free", forgetful)
    with pytest.raises(AssertionError, match="the pool has|blocks are free"):
        run_schedules(STAGE, 50, reduce=False)


def test_it_sees_slots_from_the_index_in_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = import_module(f"{STAGE.__name__}.model_runner")
    slot_mapping = runner.slot_mapping

    def from_zero(block_table: Any, start_pos: int, num_tokens: int, block_size: int) -> Items[int]:
        return slot_mapping(block_table, 0, num_tokens, block_size)

    monkeypatch.setattr(runner, "slot_mapping", from_zero)
    with pytest.raises(AssertionError, match="never written"):
        run_schedules(STAGE, 50, reduce=False)


def test_it_sees_keys_and_values_of_another_prefix() -> None:
    """The right tokens in the right slots, computed from something else.

    A prefix cache that takes a block for its own tokens, whatever stood before them, is so wrong.
    """
    oracle = OracleModel()
    engine = STAGE.LLMEngine(model=(oracle, None), block_size=4, num_blocks=8)
    oracle.reset()
    engine.add_request([5, 6, 7, 8, 9, 10], greedy(4))
    engine.step()
    engine.step()
    assert oracle.step_rows == [6, 1] and not oracle.faults
    engine.model_runner.kv_cache.pool[1, 1] += 1  # the values of the second layer
    engine.step()
    assert len(oracle.faults) == 1 and "after another prefix" in oracle.faults[0], oracle.faults


def test_the_oracle_answers_what_is_expected() -> None:
    engine = STAGE.LLMEngine(model=(OracleModel(), None), block_size=4, num_blocks=8)
    prompt = [5, 6, 7, 8, 9]
    [output] = engine.generate(prompt, greedy(10), use_tqdm=False)
    assert output.token_ids == expected_output(prompt, 10)
    assert expected_output([5, 6], 4) != expected_output([6, 5], 4)
    assert len(set(expected_output(prompt, 10))) > 7, "a language that repeats itself hides faults"
