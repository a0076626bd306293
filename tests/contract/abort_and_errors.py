"""However a request ends, it ends once, its blocks come back, and nobody else notices."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import pytest
import torch

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
    unfinished,
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
        for _ in unfinished(engine, most=100):
            if preempted(engine):
                break
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


def test_A3_a_failing_step_counts_whom_it_preempted(make_engine: MakeEngine, tiny: Any) -> None:
    """The step that takes the blocks of the younger request fails: it is counted all the same."""
    engine = make_engine(num_blocks=7)
    ids = [engine.add_request(make_prompt(9, seed=n), greedy(9)) for n in range(2)]
    for _ in range(4):
        engine.step()
    expect(engine.stats()["preemptions"], 0, "preemptions while 7 blocks hold both.", engine)
    with failing(tiny[0], RuntimeError("out of memory")):
        ended = [(o.request_id, o.finish_reason) for o in engine.step()]
    expect(ended, [(ids[0], "error")], "who ended with the step: the older one ran alone.", engine)
    expect(engine.stats()["preemptions"], 1, "preemptions, that of the failed step too.", engine)
    check_reference(drain(engine)[ids[1]][-1], tiny, 9, engine)


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


def test_A3_a_tokenizer_that_fails_ends_its_own_request_only(
    make_engine: MakeEngine, tiny: Any
) -> None:
    """The text of one request's third token cannot be had; the one behind it loses no token."""
    engine = make_engine()
    prompts = [make_prompt(6, seed=n) for n in range(3)]
    bad = reference_tokens(tiny[0], prompts[1], 3)[2]

    class Failing:
        """Decodes as the real tokenizer does, all tokens but one."""

        def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
            if bad in token_ids:
                raise RuntimeError(f"no piece for token {bad}")
            return str(tiny[1].decode(token_ids, skip_special_tokens=skip_special_tokens))

    engine.tokenizer = Failing()
    ids = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    outputs = drain(engine)
    ended = [outputs[request_id][-1].finish_reason for request_id in ids]
    expect(ended, ["length", "error", "length"], "how the three end.", engine)
    for request_id in (ids[0], ids[2]):
        check_reference(outputs[request_id][-1], tiny, 6, engine)
    check_idle(engine)


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


# Where in a step an abort may come from another thread, or from the garbage collector. Of each:
# the object of the engine and its method before which it comes; None is after the step's last one.
MOMENTS = {
    "before schedule": ("scheduler", "schedule"),
    "in the forward": ("model_runner", "_forward"),
    "in the sampler": ("sampler", "sample"),
    "in commit": ("scheduler", "commit"),
    "in the record": ("trace", "add"),
    "in hand-out": (None, "_deliver"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("member", [0, 1, 2])
def test_A1_an_abort_during_a_step_waits_for_its_end(
    make_engine: MakeEngine, tiny: Any, moment: str, member: int
) -> None:
    """The request still gets that step's token, and nobody else notices."""
    engine = make_engine(max_num_seqs=2)  # the third request is waiting
    ids = [engine.add_request(make_prompt(5 + n, seed=n), greedy(6)) for n in range(3)]
    outputs: dict[str, list] = {}
    collect(engine.step(), outputs)
    collect(engine.step(), outputs)
    place, method = MOMENTS[moment]
    owner = engine if place is None else getattr(engine, place)
    original, answers = getattr(owner, method), []

    def with_abort(*args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append(engine.abort_request(ids[member]))
            answers.append(engine.abort_request(ids[member]))
        return original(*args, **kwargs)

    setattr(owner, method, with_abort)
    collect(engine.step(), outputs)
    expect(answers, [True, False], f"answers of abort_request {moment}, once and again.")
    delattr(owner, method)
    got = 3 if member < 2 else 0  # tokens
    assert outputs[ids[member]][-1].finished, f"{ids[member]!r} lives on after the step"
    check_aborted(outputs[ids[member]][-1], tiny, got)
    drain(engine, outputs)
    for n, request_id in enumerate(ids):
        if n != member:
            check_reference(outputs[request_id][-1], tiny, 6, engine)
    check_idle(engine)


def test_A1_streams_that_the_garbage_collector_closes(make_engine: MakeEngine, tiny: Any) -> None:
    """Forgotten iterators in reference cycles, collected in the middle of steps."""
    engine = make_engine()
    forwards = 0

    def collect_garbage(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        gc.collect()

    gc.collect()
    gc.freeze()  # only what is made from here on is looked through, in every step
    handle = tiny[0].model.layers[0].register_forward_pre_hook(collect_garbage)
    try:
        for n in range(3):
            cycle: list = [engine.stream(make_prompt(7, seed=n), greedy(9))]
            next(cycle[0])
            cycle.append(cycle)
            del cycle
            [output] = run(engine, [make_prompt(9, seed=n)], greedy(5))
            check_reference(output, tiny, 5, engine)
            check_idle(engine)
    finally:
        handle.remove()
        gc.unfreeze()
    assert forwards > 0


def test_several_threads_share_an_engine(make_engine: MakeEngine, tiny: Any) -> None:
    """generate(), streams and aborts from four threads at once: each gets its own tokens."""
    engine, failures, results = make_engine(), [], {}

    def work(n: int) -> None:
        try:
            for i in range(4):
                prompt = make_prompt(4 + n, seed=10 * n + i)
                if n % 2:
                    [output] = engine.generate([prompt], greedy(8), use_tqdm=False)
                    results[n, i] = output
                else:
                    engine.stream(make_prompt(9, seed=i), greedy(30)).close()
                    *_, results[n, i] = engine.stream(prompt, greedy(8))
        except BaseException as error:  # noqa: B036
            failures.append(error)

    in_threads(work, 4)
    assert not failures, failures
    expect(len(results), 16, "answers of four threads.")
    for output in results.values():
        check_reference(output, tiny, 8, engine)
    assert any(len(step.slices) > 1 for step in engine.trace.steps), "no two requests met"
    check_idle(engine)


def test_engines_in_two_threads_share_a_model(make_engine: MakeEngine, tiny: Any) -> None:
    engines, results = [make_engine(), make_engine(block_size=8)], {}
    prompts = [make_prompt(4 + n, seed=n) for n in range(4)]

    def work(n: int) -> None:
        results[n] = engines[n].generate(prompts, greedy(10), use_tqdm=False)

    in_threads(work, 2)
    expect(sorted(results), [0, 1], "the threads that came to their end.")
    for n, outputs in results.items():
        for output in outputs:
            check_reference(output, tiny, 10, engines[n])


def in_threads(work: Any, count: int) -> None:
    """Run `work(0)`, `work(1)` and so on at the same time, switching often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    finally:
        sys.setswitchinterval(before)


def test_a_fork_is_refused(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(
        RuntimeError, match=f"in process {pid}, from which process {pid + 1} was forked"
    ):
        engine.generate([make_prompt(4)], greedy(2), use_tqdm=False)


def test_generate_of_the_model_works_after_and_beside_an_engine(
    make_engine: MakeEngine, tiny: Any
) -> None:
    """The engine leaves the model as it found it."""
    model, prompt = tiny[0], make_prompt(6)
    before = model.config._attn_implementation
    batch = torch.tensor([[0] * 3 + prompt[:3], prompt])
    mask = torch.tensor([[0] * 3 + [1] * 3, [1] * 6])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(batch, attention_mask=mask, **options).tolist()
    engine = make_engine()
    stream = engine.stream(prompt, greedy(8))
    next(stream)
    expect(model.config._attn_implementation, before, "the model's attention after a step.")
    expect(model.generate(batch, attention_mask=mask, **options).tolist(), wanted, "generate().")
    *_, last = stream
    expect(last.token_ids, wanted[1][6:], "the engine's tokens, beside those of generate().")


def test_A1_an_abort_from_another_thread_does_not_wait_for_the_step(
    make_engine: MakeEngine, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    ids = [engine.add_request(make_prompt(5 + n), greedy(6)) for n in range(2)]
    outputs: dict[str, list] = {}
    collect(engine.step(), outputs)
    forward, threads = engine.model_runner.run, []

    def run_and_abort(batch: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=engine.abort_request, args=[ids[0]]))
            threads[0].start()
            threads[0].join(timeout=60)
            assert not threads[0].is_alive(), "abort_request waits for the step"
        return forward(batch)

    monkeypatch.setattr(engine.model_runner, "run", run_and_abort)
    collect(engine.step(), outputs)
    check_aborted(outputs[ids[0]][-1], tiny, 2)
    drain(engine, outputs)
    check_reference(outputs[ids[1]][-1], tiny, 6, engine)


def test_a_request_from_another_thread_does_not_wait_for_a_step(
    make_engine: MakeEngine, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    first = engine.add_request(make_prompt(5), greedy(4))
    forward, added = engine.model_runner.run, []

    def run_and_add(batch: Any) -> Any:
        if not added:
            add = lambda: added.append(engine.add_request(make_prompt(6), greedy(4)))  # noqa: E731
            thread = threading.Thread(target=add)
            thread.start()
            thread.join(timeout=60)
            assert added, "add_request waits for the step"
        return forward(batch)

    monkeypatch.setattr(engine.model_runner, "run", run_and_add)
    outputs = drain(engine)
    for request_id in (first, added[0]):
        check_reference(outputs[request_id][-1], tiny, 4, engine)


def test_a_step_within_a_step_is_refused(make_engine: MakeEngine, tiny: Any) -> None:
    """It would wait for itself."""
    engine = make_engine()
    said = []

    def step(*_: Any) -> None:
        if not said:
            with pytest.raises(RuntimeError) as error:
                engine.step()
            said.append(str(error.value))

    handle = tiny[0].model.layers[0].register_forward_pre_hook(step)
    try:
        [output] = run(engine, [make_prompt(5)], greedy(3))
    finally:
        handle.remove()
    assert "a step was started during a step" in said[0]
    check_reference(output, tiny, 3, engine)
