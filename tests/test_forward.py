"""What reaches the model: one row of tokens, and no cache but ours."""

from __future__ import annotations

from typing import Any

import pytest

from shared import SamplingParams, load_stage


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_one_row_and_no_second_cache(tiny: Any, number: int) -> None:
    model, _ = tiny
    engine = load_stage(number).LLMEngine(tiny, num_blocks=64, block_size=4)
    calls: list[dict] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, inputs: calls.append(inputs), with_kwargs=True
    )
    try:
        engine.generate(
            [[1, 2, 3], [4, 5, 6, 7, 8]], SamplingParams(max_tokens=3, temperature=0), False
        )
    finally:
        hook.remove()
    for step, inputs in zip(engine.trace.steps, calls, strict=True):
        shapes = [tuple(inputs[name].shape) for name in ("input_ids", "position_ids")]
        assert shapes == [(1, step.num_tokens)] * 2
        assert inputs["logits_to_keep"].shape == (len(step.sampled),)
        assert inputs["use_cache"] is False, "transformers would keep keys and values as well"
    assert calls
