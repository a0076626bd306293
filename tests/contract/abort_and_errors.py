"""However a request ends, it ends once, its blocks come back, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import reference_tokens

from .helpers import (
    MakeEngine,
    check_idle,
    check_reference,
    collect,
    drain,
    expect,
    failing,
    greedy,
    last_steps,
    make_prompt,
    preempted,
    run,
)


def check_aborted(output: Any, tiny: Any, num_outputs: int) -> None:
    """Assert that a request ended as an aborted one does, with the tokens it had got."""
    assert output.finished and output.finish_reason == "abort", f"aborted, but it ended: {output}"
    wanted = reference_tokens(tiny[0], output.prompt_token_ids, max(num_outputs, 1))
    expect(
        output.token_ids,
        wanted[:num_outputs],
        f"the tokens of request {output.request_id!r}, aborted after {num_outputs} outputs.",
    )
    assert output.metrics.finish_time is not None, f"{output.request_id!r} has no finish_time"


@pytest.mark.parametrize("state", ["added", "waiting", "running", "preempted"])
def test_A1_abort_in_every_state(make_engine: MakeEngine, tiny: Any, state: str) -> None:
    """Two requests; the second is aborted, and the first does not notice."""
    pool = 7 if state == "preempted" else 64
    engine = make_engine(num_blocks=pool, max_num_seqs=1 if state == "waiting" else 8)
    first, second = (engine.add_request(make_prompt(9, seed=n), greedy(9)) for n in range(2))
    outputs: dict[str, list] = {}
    if state == "waiting":
        collect(engine.step(), outputs)
    elif state == "running":
        for _ in range(4):
            collect(engine.step(), outputs)
    elif state == "preempted":
        while not preempted(engine) and engine.has_unfinished_requests():
            collect(engine.step(), outputs)
        expect(preempted(engine), [second], "who lost its blocks: the one that came last.", engine)
    got = len(outputs.get(second, []))
    expect(
        got > 0,
        state in ("running", "preempted"),
        f"whether request {second!r} has put something out while it is {state}.",
        engine,
    )

    free = engine.block_manager.num_free_blocks
    expect(engine.abort_request(second), True, f"abort_request({second!r}), which is {state}.")
    expect(
        engine.block_manager.num_free_blocks - free,
        3 if state == "running" else 0,
        f"blocks that came back when {second!r} was aborted, {state}: those that it held, at once "
        "and not with a later step.",
        engine,
    )
    expect(engine.has_unfinished_requests(), True, f"unfinished work; {first!r} goes on.", engine)
    drain(engine, outputs)
    finished = [o.finished for o in outputs[second]]
    expect(finished, [False] * got + [True], f"`finished` in the outputs of {second!r}.", engine)
    check_aborted(outputs[second][-1], tiny, got)
    check_reference(outputs[first][-1], tiny, 9, engine)


def test_A1_abort_of_the_only_request(make_engine: MakeEngine, tiny: Any) -> None:
    """Its last output still has to be fetched, so the engine is not done yet."""
    engine = make_engine()
    request_id = engine.add_request(make_prompt(9), greedy(9))
    engine.step()
    engine.abort_request(request_id)
    assert engine.has_unfinished_requests(), "the last output is not delivered yet"
    num_steps = len(engine.trace.steps)
    outputs = engine.step()
    expect([o.request_id for o in outputs], [request_id], "whose outputs the next step returns.")
    check_aborted(outputs[0], tiny, 1)
    assert len(engine.trace.steps) == num_steps, "there was nothing left to compute"
    check_idle(engine)


def test_A1_the_room_of_an_aborted_request_is_used(make_engine: MakeEngine, tiny: Any) -> None:
    """A pool for one: the second request waits for blocks, and starts when the first is aborted."""
    engine = make_engine(num_blocks=5)
    first, second = (engine.add_request(make_prompt(12, seed=n), greedy(4)) for n in range(2))
    outputs: dict[str, list] = {}
    collect(engine.step(), outputs)
    assert second not in outputs, (
        f"5 blocks of 4 hold both requests of 16 tokens? {second!r} has started:\n"
        f"{last_steps(engine)}"
    )
    engine.abort_request(first)
    collect(engine.step(), outputs)
    assert second in outputs, f"blocks are free, yet it waits:\n{last_steps(engine)}"
    drain(engine, outputs)
    check_reference(outputs[second][-1], tiny, 4, engine)


def test_A2_abort_what_is_not_there(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    expect(engine.abort_request("nobody"), False, "abort_request of an id that nobody has.")
    request_id = engine.add_request(make_prompt(5), greedy(4))
    beside = engine.add_request(make_prompt(6), greedy(8))
    engine.step()
    expect(engine.abort_request(request_id), True, f"abort_request({request_id!r}), running.")
    free = engine.block_manager.num_free_blocks
    assert engine.abort_request(request_id) is False, "it was aborted a moment ago"
    assert engine.block_manager.num_free_blocks == free, "blocks were freed twice"
    outputs = drain(engine)
    expect(engine.abort_request(request_id), False, f"abort_request({request_id!r}), long gone.")
    assert engine.abort_request(beside) is False, "it has finished"
    check_reference(outputs[beside][-1], tiny, 8, engine)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_A3_a_failing_step_ends_its_own_requests_only(
    make_engine: MakeEngine, tiny: Any, after: int
) -> None:
    """The forward raises between two layers; those who were not in it go on as if nothing were."""
    engine = make_engine(max_num_seqs=2)
    ids = [engine.add_request(make_prompt(6, seed=n), greedy(3 + 4 * (n > 0))) for n in range(4)]
    with failing(tiny[0], RuntimeError("out of memory"), after):
        outputs = drain(engine)
    reasons = {request_id: outputs[request_id][-1].finish_reason for request_id in ids}
    ended = [request_id for request_id in ids if reasons[request_id] == "error"]
    if after < 3:
        assert ended == ids[:2], f"both requests of the failing step end with it: {reasons}"
    else:
        assert ids[2] in ended and len(ended) <= 2, (
            f"it was the first step of {ids[2]!r}: {reasons}"
        )
    for n, request_id in enumerate(ids):
        output = outputs[request_id][-1]
        if reasons[request_id] == "error":
            wanted = reference_tokens(tiny[0], output.prompt_token_ids, 7)
            wanted = wanted[: len(output.token_ids)]
            expect(output.token_ids, wanted, f"what {request_id!r} got before it failed.", engine)
        else:
            check_reference(output, tiny, 3 + 4 * (n > 0), engine)


def test_A3_after_a_failing_step_the_same_requests_work(make_engine: MakeEngine, tiny: Any) -> None:
    """Nothing of the half-written blocks is ever used again (B3)."""
    engine = make_engine(num_blocks=8)
    prompts = [make_prompt(9, seed=n) for n in range(2)]
    with failing(tiny[0], RuntimeError("a kernel failed")):
        reasons = [output.finish_reason for output in run(engine, prompts, greedy(4))]
    expect(reasons, ["error"] * 2, "how two requests end whose first forward raised.", engine)
    check_idle(engine)
    for output in run(engine, prompts, greedy(4)):
        check_reference(output, tiny, 4, engine)
        assert output.metrics.num_cached_tokens == 0, "a block was found that was never computed"


def test_A3_logits_that_are_no_numbers(make_engine: MakeEngine, tiny: Any) -> None:
    """NaN from the model ends the request with an error, not with a token."""
    engine = make_engine()

    def spoil(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * float("nan")
        return output

    handle = tiny[0].register_forward_hook(spoil)
    try:
        [output] = run(engine, [make_prompt(5)], greedy(3))
    finally:
        handle.remove()
    ended = (output.finish_reason, output.token_ids)
    expect(ended, ("error", []), "reason and tokens of a request whose logits were NaN.", engine)


@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_is_interrupted_can_be_made_again(
    make_engine: MakeEngine, tiny: Any, after: int
) -> None:
    """Ctrl-C in the middle of a forward loses nothing: the next step goes on."""
    engine = make_engine()
    ids = [engine.add_request(make_prompt(n), greedy(6)) for n in (9, 5)]
    outputs: dict[str, list] = {}
    with failing(tiny[0], KeyboardInterrupt(), after):
        for _ in range(after):
            collect(engine.step(), outputs)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    drain(engine, outputs)
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 6, engine)


def test_interrupted_generate_leaves_nothing_behind(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    other = engine.add_request(make_prompt(7), greedy(8))
    with failing(tiny[0], KeyboardInterrupt(), after=3), pytest.raises(KeyboardInterrupt):
        engine.generate([make_prompt(9), make_prompt(5)], greedy(6), use_tqdm=False)
    outputs = drain(engine)
    assert list(outputs) == [other], f"requests of the interrupted generate() live on: {outputs}"
    check_reference(outputs[other][-1], tiny, 8, engine)
