"""The pool takes what is free on the card, and leaves room for the graphs."""

from __future__ import annotations

import pytest

from shared import load_stage
from shared.engine.memory import bytes_per_block
from shared.models import load_model
from tests.contract.helpers import greedy, make_prompt, run

from . import Device


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_card_that_others_use(device: Device, number: int) -> None:
    """Seven eighths of it are taken: the engine fits into the rest, graphs and all, and works."""
    device.taken = 7 * device.total_memory // 8
    pair = load_model("tiny", device="cuda", dtype="float32")
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 1100}
    free = device.total_memory - device.taken - device.allocated
    # As if the model's context were much longer: what all sequences could fill is no limit.
    engine = load_stage(number).LLMEngine(pair, block_size=2**15, **options)
    pool = engine.block_manager.num_blocks * bytes_per_block(engine.model_runner.shape, 2**15)
    assert pool <= 0.9 * free < device.total_memory
    [output] = run(engine, [make_prompt(5)], greedy(3))
    assert output.finish_reason == "length"
    assert device.replays == (2 if number > 1 else 0)


def test_a_card_that_is_full(device: Device) -> None:
    pair = load_model("tiny", device="cuda", dtype="float32")
    device.taken = device.total_memory - device.allocated - 2**20
    with pytest.raises((ValueError, RuntimeError), match="no memory for one block|out of memory"):
        load_stage(2).LLMEngine(pair, max_num_seqs=2, block_size=2**12)
