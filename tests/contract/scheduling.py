"""Who is computed when: blocks, seats and tokens are budgets, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from .helpers import (
    MakeEngine,
    check_reference,
    collect,
    describe,
    drain,
    expect,
    greedy,
    last_steps,
    make_prompt,
    preempted,
    unfinished,
)


def test_S6_a_step_with_nothing_to_do(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expect(engine.step(), [], "the outputs of a step of an engine without requests.")
    expect(engine.trace.steps, [], "records of a step that computed nothing.")
    expect(
        engine.has_unfinished_requests(), False, "unfinished work of an engine without requests."
    )


def test_one_token_for_each_request_and_step(make_engine: MakeEngine) -> None:
    """Short prompts that all fit: every step from the first on gives each of them a token."""
    engine = make_engine()
    ids = [engine.add_request(make_prompt(n), greedy(5)) for n in (2, 5, 9)]
    for n in range(1, 6):
        outputs = engine.step()
        came = [(output.request_id, len(output.token_ids), output.finished) for output in outputs]
        wanted = [(request_id, n, n == 5) for request_id in ids]
        what = f"request, number of tokens, and whether it is finished, in outputs of step {n - 1}."
        expect(came, wanted, what, engine)


def test_a_request_joins_those_that_run(make_engine: MakeEngine, tiny: Any) -> None:
    """Continuous batching: a request that arrives later starts at once and is batched with them."""
    engine = make_engine()
    early = engine.add_request(make_prompt(9), greedy(20))
    outputs: dict[str, list] = {}
    for _ in range(5):
        collect(engine.step(), outputs)
    late = engine.add_request(make_prompt(6), greedy(6))
    collect(engine.step(), outputs)
    collect(engine.step(), outputs)
    assert late in outputs, f"two steps after it came, {late!r} has no token:\n{last_steps(engine)}"
    drain(engine, outputs)
    assert any({i for i, _, _ in step.slices} == {early, late} for step in engine.trace.steps), (
        "the two requests were never computed in one step"
    )
    check_reference(outputs[early][-1], tiny, 20, engine)
    check_reference(outputs[late][-1], tiny, 6, engine)


def test_first_come_first_served(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    ids = [engine.add_request(make_prompt(6, seed=n), greedy(3 + n % 2)) for n in range(6)]
    assert list(drain(engine)) == ids, "the first tokens did not come in the order of arrival"


def test_nobody_overtakes_the_head_of_the_queue(make_engine: MakeEngine, tiny: Any) -> None:
    """A short prompt would fit beside the first, a long one before it does not: the short waits."""
    engine = make_engine(num_blocks=7)
    lengths, num_tokens = (12, 20, 2), 6
    ids = [engine.add_request(make_prompt(n), greedy(num_tokens)) for n in lengths]
    outputs = drain(engine)
    started: dict[str, int] = {}
    for step in engine.trace.steps:
        for request_id, _, _ in step.slices:
            started.setdefault(request_id, step.index)
    assert started[ids[1]] <= started[ids[2]], (
        f"{ids[2]!r} came last and started in step {started[ids[2]]}, before {ids[1]!r} in step "
        f"{started[ids[1]]}: short requests could keep a long one waiting for ever"
    )
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, num_tokens, engine)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_B10_blocks_are_taken_when_they_are_needed(make_engine: MakeEngine, length: int) -> None:
    """Each step holds exactly the blocks that its keys and values fill, to the last one begun."""
    engine = make_engine()
    engine.trace.record_blocks = True
    request_id = engine.add_request(make_prompt(length), greedy(10))
    drain(engine)
    for step in engine.trace.steps:
        [(_, start_pos, num_tokens)] = step.slices
        num_needed = -(-(start_pos + num_tokens) // 4)
        held = step.block_tables[request_id]
        assert len(held) == num_needed, (
            f"{describe(step)}: {start_pos + num_tokens} tokens in blocks of 4 need {num_needed} "
            f"blocks, the block table is {held}"
        )
        free = engine.block_manager.num_blocks - num_needed
        expect(step.num_free_blocks, free, f"{describe(step)}: free blocks.", engine)
    what = "the last slice (request, start_pos, num_tokens); the last token is never written."
    expect(step.slices, [(request_id, length + 8, 1)], what, engine)


@pytest.mark.parametrize("num_blocks", [7, 8, 9, 10])
def test_S7_preemption_changes_no_token(
    make_engine: MakeEngine, tiny: Any, num_blocks: int
) -> None:
    """Two requests of 17 slots each: below 10 blocks of 4 the second has to give way."""
    engine = make_engine(num_blocks=num_blocks)
    ids = [engine.add_request(make_prompt(9, seed=n), greedy(9)) for n in range(2)]
    outputs = drain(engine)
    if num_blocks == 10:
        assert not preempted(engine), "10 blocks are enough for both, yet one was preempted"
    else:
        assert preempted(engine), f"{num_blocks} blocks hold both? {last_steps(engine)}"
        assert set(preempted(engine)) == {ids[1]}, (
            f"{preempted(engine)} lost their blocks; it must be the one that came last, {ids[1]!r}"
        )
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 9, engine)
        numbers = [len(output.token_ids) for output in outputs[request_id]]
        assert numbers == list(range(1, 10)), f"{request_id!r} streamed {numbers} tokens: a gap"
        text = "".join(output.new_text for output in outputs[request_id])
        assert text == outputs[request_id][-1].text, "the streamed text has a gap or a repeat"


def test_S7_preempted_more_than_once(make_engine: MakeEngine, tiny: Any) -> None:
    """Four long outputs in a pool for one and a half: whoever comes last gives way, again."""
    engine = make_engine(num_blocks=9)
    ids = [engine.add_request(make_prompt(3, seed=n), greedy(20)) for n in range(4)]
    outputs = drain(engine)
    lost = preempted(engine)
    assert max(map(lost.count, ids)) >= 2, f"nobody was preempted twice: {lost}"
    assert ids[0] not in lost, "the oldest request lost its blocks: nothing is sure to advance then"
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 20, engine)


def test_S7_a_preempted_request_keeps_its_place(make_engine: MakeEngine, tiny: Any) -> None:
    """It comes back before a request that arrived later, and has not begun."""
    engine = make_engine(num_blocks=7, max_num_seqs=2)
    ids = [engine.add_request(make_prompt(9, seed=n), greedy(9)) for n in range(3)]
    outputs: dict[str, list] = {}
    for _ in unfinished(engine, most=100):
        if preempted(engine):
            break
        collect(engine.step(), outputs)
    expect(preempted(engine), [ids[1]], "who lost its blocks: the one that came last.", engine)
    assert ids[2] not in outputs, (
        f"{ids[2]!r} ran while both seats were taken: {last_steps(engine)}"
    )
    num_steps = len(engine.trace.steps)
    drain(engine, outputs)
    later = [
        request_id for step in engine.trace.steps[num_steps:] for request_id, _, _ in step.slices
    ]
    assert later.index(ids[1]) < later.index(ids[2]), (
        f"{ids[1]!r} lost its blocks and then had to wait for {ids[2]!r}, which came after it"
    )
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 9, engine)


@pytest.mark.parametrize("budget", [2, 3])
def test_S5_as_many_decodes_as_the_token_budget(
    make_engine: MakeEngine, tiny: Any, budget: int
) -> None:
    """Three requests decode, a fourth waits; the budget is less than, or just, the three."""
    engine = make_engine(max_num_batched_tokens=budget)
    ids = [engine.add_request(make_prompt(2, seed=n), greedy(6)) for n in range(4)]
    outputs = drain(engine)
    for step in engine.trace.steps:
        assert step.num_tokens <= budget, f"{describe(step)}: more than {budget} tokens"
    assert len(engine.trace.steps) <= 4 * (2 + 6 - 1), "some steps computed nothing"
    for request_id in ids:
        check_reference(outputs[request_id][-1], tiny, 6, engine)


def test_S8_seats(make_engine: MakeEngine, tiny: Any) -> None:
    """At most `max_num_seqs` sequences hold blocks; a free seat is taken in the next step."""
    engine = make_engine(max_num_seqs=2)
    engine.trace.record_blocks = True
    ids = [engine.add_request(make_prompt(5, seed=n), greedy(2 + n)) for n in range(5)]
    ended: dict[str, int] = {}  # request -> number of steps when it ended
    outputs: dict[str, list] = {}
    for _ in unfinished(engine):
        collect(engine.step(), outputs)
        for request_id, seen in outputs.items():
            if seen[-1].finished:
                ended.setdefault(request_id, len(engine.trace.steps))
    started: dict[str, int] = {}
    for n, step in enumerate(engine.trace.steps):
        holders = [request_id for request_id, table in step.block_tables.items() if table]
        assert len(holders) <= 2, f"{describe(step)}: {holders} hold blocks, max_num_seqs is 2"
        for request_id, _, _ in step.slices:
            started.setdefault(request_id, n)
    expect(sorted(started), sorted(ids), "which requests were computed at all.", engine)
    for request_id, next_id in zip(ids, ids[2:], strict=False):
        assert started[next_id] <= max(ended[request_id], 1), (
            f"{request_id!r} left its seat before step {ended[request_id]}, {next_id!r} started "
            f"only in step {started[next_id]}"
        )
    for n, request_id in enumerate(ids):
        check_reference(outputs[request_id][-1], tiny, 2 + n, engine)
