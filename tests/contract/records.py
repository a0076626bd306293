"""The trace, the counts and the times say what really happened."""

from __future__ import annotations

from typing import Any

from .helpers import MakeEngine, describe, drain, expect, greedy, make_prompt, preempted


def test_the_trace_tells_the_whole_story(make_engine: MakeEngine) -> None:
    """From its slices alone one can follow each request's tokens into the cache."""
    engine = make_engine(num_blocks=9, max_num_seqs=3)
    engine.trace.record_blocks = True
    ids = [engine.add_request(make_prompt(5 + n), greedy(10)) for n in range(4)]
    outputs = drain(engine)
    assert preempted(engine), "nobody was preempted; the hard part of the story is missing"

    cached = dict.fromkeys(ids, 0)  # tokens in the cache
    known = {request_id: 5 + n for n, request_id in enumerate(ids)}  # prompt and generated
    started: set[str] = set()
    for n, step in enumerate(engine.trace.steps):
        expect(step.index, n, f"the index of the {n}th record of the trace.", engine)
        assert step.num_tokens > 0, f"{describe(step)}: a step that computed nothing has a record"
        for request_id in step.preempted:
            cached[request_id] = 0
            started.discard(request_id)
        for request_id, start_pos, num_tokens in step.slices:
            if request_id in started:
                assert start_pos == cached[request_id], (
                    f"{describe(step)}: {request_id!r} goes on at {start_pos}, its cache holds "
                    f"{cached[request_id]} tokens"
                )
            started.add(request_id)
            cached[request_id] = start_pos + num_tokens
            reaches_end = cached[request_id] == known[request_id]
            assert (request_id in step.sampled) == reaches_end, (
                f"{describe(step)}: {request_id!r} has {known[request_id]} known tokens, sampled "
                f"was {step.sampled}: a token is due exactly when a slice reaches the last one"
            )
            known[request_id] += reaches_end
        held = {block for table in step.block_tables.values() for block in table}
        free = step.num_free_blocks
        expect(len(held) + free, 9, f"{describe(step)}: {len(held)} blocks held, {free} free.")
        missing = {request_id for request_id, _, _ in step.slices} - set(step.block_tables)
        assert not missing, f"{describe(step)}: {missing} have slices, but no block table"
    for n, request_id in enumerate(ids):
        expect(known[request_id], 5 + n + 10, f"tokens of {request_id!r}, by the trace.", engine)
        reason = outputs[request_id][-1].finish_reason
        expect(reason, "length", f"how {request_id!r} ended.", engine)


def test_queue_lengths(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for n in range(5):
        engine.add_request(make_prompt(4, seed=n), greedy(3))
    drain(engine)
    lengths = [(step.num_waiting, step.num_running) for step in engine.trace.steps]
    assert lengths[0] == (3, 2), f"(waiting, running) in the first step: {lengths[0]}"
    assert lengths[-1] == (0, 1), f"(waiting, running) in the last step: {lengths[-1]}"


def test_block_tables_are_recorded_only_if_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(make_prompt(4), greedy(3))
    drain(engine)
    for step in engine.trace.steps:
        expect(step.block_tables, None, f"{describe(step)}: block_tables; nobody asked for them.")


def test_times_are_those_of_the_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    ids = [engine.add_request(make_prompt(4 + n), greedy(4)) for n in range(3)]
    outputs = drain(engine)
    ends = [0.0] + [step.end for step in engine.trace.steps]
    for before, step in zip(ends, engine.trace.steps, strict=False):
        assert before <= step.start <= step.end, f"{describe(step)} overlaps the one before"
    for request_id in ids:
        for n, output in enumerate(outputs[request_id], 1):
            times = output.metrics.token_times
            expect(len(times), n, f"token_times of {request_id!r} in its output {n}.", engine)
            has_ended = output.metrics.finish_time is not None
            expect(has_ended, output.finished, f"whether output {n} has a finish_time.", engine)
        metrics = output.metrics
        steps = [step for step in engine.trace.steps if request_id in step.sampled]
        for time, step in zip(metrics.token_times, steps, strict=True):
            assert step.start <= time, f"{request_id!r} had a token of {describe(step)} before it"
        times = [metrics.arrival_time, *metrics.token_times, metrics.finish_time]
        assert times == sorted(times), f"{request_id!r}: times go backwards: {times}"
        ttft = metrics.token_times[0] - metrics.arrival_time
        expect(metrics.ttft, ttft, f"ttft of {request_id!r}, first token minus arrival.", engine)
        assert ttft > 0, f"{request_id!r}: its first token came {-ttft} s before it"


def test_stats_are_the_sums_of_the_trace(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=7)
    for n in range(2):
        engine.add_request(make_prompt(9, seed=n), greedy(9))
    engine.step()
    stats = engine.stats()
    counts = (stats["running"], stats["waiting"], stats["free_blocks"])
    expect(counts, (2, 0, 1), "running, waiting and free_blocks in stats() after a step.", engine)
    outputs = drain(engine)
    assert preempted(engine), "7 blocks of 4 hold both requests of 18 tokens? Nobody gave way."
    stats = engine.stats()
    expected: dict[str, Any] = {
        "steps": len(engine.trace.steps),
        "tokens": sum(step.num_tokens for step in engine.trace.steps),
        "generated": sum(len(o[-1].token_ids) for o in outputs.values()),
        "finished": 2,
        "preemptions": len(preempted(engine)),
        "running": 0,
        "waiting": 0,
        "num_blocks": 7,
        "free_blocks": 7,
    }
    found = {name: stats[name] for name in expected}
    expect(found, expected, "stats() when two requests have ended, beside the sums of the trace.")
