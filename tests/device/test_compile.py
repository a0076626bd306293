"""No kernel is compiled while requests wait: all that serving needs is there when an engine is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared import SamplingParams, load_stage
from shared.models import load_model
from shared.models.tiny import build_random_model, tiny_config

from . import Device

NUM_STEPS = 200


def serve_mixed_traffic(engine: Any, num_steps: int) -> int:
    """Prompts of all lengths that come and go, so that batches of all shapes are computed."""
    choose = random.Random(0)
    shapes = set()
    for n in range(num_steps):
        if choose.random() < 0.3 or not engine.has_unfinished_requests():
            prompt = choose.choices(range(3, 500), k=choose.choice((1, 2, 7, 16, 33, 90)))
            params = SamplingParams(max_tokens=choose.randint(1, 9), temperature=0)
            engine.add_request(prompt, params, request_id=f"r{n}")
        engine.step()
        shapes.add(tuple(num for _, _, num in engine.trace.steps[-1].slices))
    return len(shapes)


@pytest.mark.parametrize(
    ("number", "enforce_eager", "num_steps"), [(2, True, 30), (3, False, 30), (4, True, NUM_STEPS)]
)
def test_nothing_is_compiled_after_construction(
    device: Device, number: int, enforce_eager: bool, num_steps: int
) -> None:
    """What Triton compiles follows from types, constants, and what is a multiple of 16."""
    pair = load_model("tiny", device="cuda", dtype="float16")
    options = {"max_num_seqs": 6, "num_blocks": 40, "enforce_eager": enforce_eager}
    if number == 4:
        options["max_prefill_chunk_size"] = 24
    engine = load_stage(number).LLMEngine(pair, **options)
    known, launches = set(device.specialisations), len(device.launches)
    assert serve_mixed_traffic(engine, num_steps) >= 5, "the same shapes again and again"
    assert len(device.launches) > launches
    new = [place for key, place in device.specialisations.items() if key not in known]
    assert not new, f"{len(known)} were compiled before, and these later: {new}"


def test_rows_whose_strides_are_no_multiples_of_16(device: Device) -> None:
    """With heads of 24 the stride between them is one in every second batch."""
    model = build_random_model(tiny_config("llama", head_dim=24), device="cuda")
    engine = load_stage(2).LLMEngine((model, None), max_num_seqs=6, num_blocks=40)
    known = set(device.specialisations)
    serve_mixed_traffic(engine, 20)
    assert set(device.specialisations) == known
