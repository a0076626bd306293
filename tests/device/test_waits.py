"""How often a decode step makes the host wait for the device: once, for the tokens.

While the host waits it launches nothing, and the device runs out of work.
"""

from __future__ import annotations

from typing import Any

import pytest

from shared import SamplingParams, load_stage
from shared.models import load_model

from . import Device

MIXED = {
    "seed": 5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.1,
    "logit_bias": {5: 2.0},
    "min_tokens": 30,
}
# Options of the requests in one batch, and how often its steps may wait.
BATCHES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "greedy": ([{"temperature": 0}] * 3, 1),
    "temperature": ([{}] * 3, 1),
    "seed": ([{"seed": 1}] * 3, 1),
    "top_k": ([{"top_k": 7}] * 3, 1),
    "top_p": ([{"top_p": 0.8}] * 3, 1),
    "min_p": ([{"min_p": 0.1}] * 3, 1),
    "penalties": ([{"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.1}] * 3, 1),
    "logit_bias": ([{"temperature": 0, "logit_bias": {5: 2.0}}] * 3, 1),
    "min_tokens": ([{"temperature": 0, "min_tokens": 30}] * 3, 1),
    "logprobs": ([{"temperature": 0, "logprobs": 3}] * 3, 2),
    "mixed": ([{"temperature": 0}, MIXED, MIXED | {"logprobs": 3}], 2),
}


def steps_that_wait(device: Device, engine: Any, batch: list[dict[str, Any]]) -> list[list[str]]:
    """What each of the first steps waits for: a prefill, then decodes."""
    ids = [
        engine.add_request([5, 6, 7 + i], SamplingParams(max_tokens=40, **options))
        for i, options in enumerate(batch)
    ]
    waits = []
    for _ in range(4):
        device.waits.clear()
        engine.step()
        waits.append(device.waits[:])
    for request_id in ids:
        engine.abort_request(request_id)
    engine.step()
    return waits


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_waits_of_a_step(device: Device, number: int) -> None:
    """Every option in every stage, in the first step of its requests, too."""
    pair = load_model("tiny", device="cuda", dtype="float32")
    engine = load_stage(number).LLMEngine(pair, max_num_seqs=4, num_blocks=64)
    for name, (batch, most) in BATCHES.items():
        for step, waits in enumerate(steps_that_wait(device, engine, batch)):
            told = "\n".join(waits)
            assert 1 <= len(waits) <= most, f"{name}, step {step}, {len(waits)} waits:\n{told}"


def test_a_step_that_samples_nothing_waits_for_its_end(device: Device) -> None:
    """A chunk of a prompt that goes on. Otherwise its time would be counted to a later step."""
    pair = load_model("tiny", device="cuda", dtype="float32")
    options = {"max_num_seqs": 2, "num_blocks": 16, "max_prefill_chunk_size": 4}
    engine = load_stage(4).LLMEngine(pair, **options)
    engine.add_request([*range(5, 19)], SamplingParams(max_tokens=3, temperature=0))
    waits = []
    while engine.has_unfinished_requests():
        device.waits.clear()
        engine.step()
        waits.append(len(device.waits))
    assert len(waits) == 6 and {*waits} == {1}, waits
