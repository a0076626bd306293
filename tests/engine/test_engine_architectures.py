"""Whole engines on every architecture: the tokens are those of `generate()`."""

from __future__ import annotations

import pytest

from shared import load_stage
from shared.models.tiny import ARCHITECTURES, build_tiny_model
from tests.contract.helpers import (
    compare_with_generate,
    greedy,
    make_prompt,
    poison_cache,
    preempted,
    run,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate(arch: str) -> None:
    """Four prompts in a pool for two and a half, so that some are computed twice."""
    model = build_tiny_model(arch)
    engine = load_stage(1).LLMEngine(model=(model, None), block_size=4, num_blocks=10)
    poison_cache(engine)
    prompts = [make_prompt(length, seed=1) for length in (9, 1, 8, 5)]
    outputs = run(engine, prompts, greedy(8))
    assert preempted(engine), "the pool was not small enough: nobody was preempted"
    compared = [compare_with_generate(output, model, 8) for output in outputs]
    assert sum(compared) >= 30, f"too many near ties to say anything: {compared}"
    answers = {tuple(output.token_ids) for output in outputs}
    assert len(answers) == 4 and len(set().union(*answers)) > 8, (
        f"the model repeats itself; such outputs prove little: {answers}"
    )
