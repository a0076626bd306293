"""Stages 01 to 03 compute a prompt in one step: `from tests.contract.whole_prompts import *`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .helpers import (
    MakeEngine,
    check_reference,
    collect,
    describe,
    drain,
    expect,
    failing,
    greedy,
    make_prompt,
    preempted,
    run,
)
from .limits import refused


def test_C8_a_prompt_over_the_token_budget(make_engine: MakeEngine, tiny: Any) -> None:
    """It could not be computed in any step, so it is refused when it is added."""
    engine = make_engine(max_num_batched_tokens=8)
    refused(engine, make_prompt(9), greedy(1), 9, 8)
    [output] = run(engine, [make_prompt(8)], greedy(4))
    check_reference(output, tiny, 4, engine)


def test_a_prompt_is_one_slice(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=20)
    ids = [engine.add_request(make_prompt(n), greedy(3)) for n in (9, 12, 8)]
    drain(engine)
    for request_id, length in zip(ids, (9, 12, 8), strict=True):
        first = next(s for step in engine.trace.steps for s in step.slices if s[0] == request_id)
        assert first == (request_id, 0, length), f"the first slice is {first}, not the whole prompt"


def test_prompts_share_a_step_while_the_budget_lasts(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=20)
    ids = [engine.add_request(make_prompt(n), greedy(3)) for n in (9, 11, 1)]
    drain(engine)
    first, second = ([s[0] for s in step.slices] for step in engine.trace.steps[:2])
    assert first == ids[:2], f"9 and 11 tokens fit 20; the first step computed {first}"
    assert second == ids[2:], f"prompts go before decodes; the second step computed {second}"


def test_S7_a_preempted_request_may_have_outgrown_the_budget(
    make_engine: MakeEngine, tiny: Any, stage: ModuleType
) -> None:
    """What it has generated is computed again with its prompt, alone in a step if need be."""
    options = {"num_blocks": 7, "max_num_batched_tokens": 9}
    if hasattr(stage.EngineConfig, "enable_prefix_caching"):
        options["enable_prefix_caching"] = False  # or it would find most of what it has computed
    engine = make_engine(**options)
    ids = [engine.add_request(make_prompt(9, seed=n), greedy(9)) for n in range(2)]
    outputs = drain(engine)
    assert preempted(engine), "7 blocks of 4 hold both requests of 18 tokens? Nobody gave way."
    most = max(step.num_tokens for step in engine.trace.steps)
    assert most > 9, f"most tokens in a step: {most}; the preempted one has more than 9"
    for step in engine.trace.steps:
        assert step.num_tokens <= 9 or len(step.slices) == 1, f"{describe(step)}: budget 9"
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 9, engine)


def test_A3_a_failing_prefill_leaves_those_that_decode(make_engine: MakeEngine, tiny: Any) -> None:
    """A step of prompts has no decodes in it, so nothing of theirs is lost."""
    engine = make_engine()
    running = engine.add_request(make_prompt(5), greedy(6))
    outputs: dict[str, list] = {}
    collect(engine.step(), outputs)
    failed = engine.add_request(make_prompt(7), greedy(6))
    with failing(tiny[0], RuntimeError("a kernel failed")):
        drain(engine, outputs)
    reason = outputs[failed][-1].finish_reason
    expect(reason, "error", f"how {failed!r} ends, whose prefill raised.", engine)
    check_reference(outputs[running][-1], tiny, 6, engine)
