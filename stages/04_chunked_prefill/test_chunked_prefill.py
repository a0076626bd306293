"""Chunked prefill: the same tokens, in other steps; nobody waits for a long prompt."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shared import SamplingParams
from tests.contract.helpers import (
    check_reference,
    check_tokens,
    collect,
    describe,
    drain,
    expect,
    failing,
    graphed,
    greedy,
    last_steps,
    poison_cache,
    preempted,
    run,
    unfinished,
)
from tests.oracle import OracleModel
from tests.reference import reference_tokens


def prompt_of(length: int, first: int = 10) -> list[int]:
    return [(first + 7 * i) % 200 + 5 for i in range(length)]


def slices_of(engine: Any, request_id: str) -> list[tuple[int, int]]:
    """`(start_pos, num_tokens)` of every slice that was computed for a request."""
    steps = engine.trace.steps
    return [s[1:] for step in steps for s in step.slices if s[0] == request_id]


def check_chunks(engine: Any, output: Any, chunk: int) -> None:
    """Assert that a prompt of which nothing was cached was computed in chunks of `chunk`."""
    length = len(output.prompt_token_ids)
    found = [s for s in slices_of(engine, output.request_id) if s[0] < length]
    expect(
        found,
        [(start, min(chunk, length - start)) for start in range(0, length, chunk)],
        f"the chunks (start_pos, num_tokens) of request {output.request_id!r}, {length} prompt "
        f"tokens, max_prefill_chunk_size {chunk}.",
        engine,
    )


def run_all(engine: Any) -> dict[str, Any]:
    """Step until idle; the last output of each request."""
    return {request_id: outputs[-1] for request_id, outputs in drain(engine).items()}


# ---------------------------------------------------------------- where a chunk's tokens go


def test_C3_positions_come_from_the_whole_sequence(make_engine: Any, tiny: Any) -> None:
    """Prompt 10, chunk 4: the model is given the positions 0..3, then 4..7, then 8 and 9."""
    engine = make_engine(max_prefill_chunk_size=4)
    positions = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions.append(kwargs["position_ids"][0].tolist())

    handle = tiny.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        engine.add_request(prompt_of(10), greedy(1), request_id="a")
        run_all(engine)
    finally:
        handle.remove()
    # A step that fails leaves no record; what is wrong then is not the positions' fault.
    for step, came in zip(engine.trace.steps, positions, strict=False):
        [(_, start_pos, num_tokens)] = step.slices
        expect(
            came,
            list(range(start_pos, start_pos + num_tokens)),
            f"{describe(step)}: the positions of this chunk. They are the tokens' indices in the "
            "whole sequence; they do not restart at 0 with each chunk.",
        )


@pytest.mark.parametrize("chunk", [3, 4, 5])
def test_C3_slots_come_from_the_whole_sequence(stage: ModuleType, chunk: int) -> None:
    """The memory oracle looks at every read of a chunked prompt, in blocks of 4."""
    oracle = OracleModel()
    engine = stage.LLMEngine(
        model=(oracle, None),
        block_size=4,
        num_blocks=16,
        max_prefill_chunk_size=chunk,
        max_num_batched_tokens=24,
    )
    poison_cache(engine)
    oracle.reset()
    engine.add_request(prompt_of(13), greedy(4), request_id="a")
    for _ in unfinished(engine):
        engine.step()
        assert not oracle.faults, (
            f"{last_steps(engine, 1)}: expected that each token reads all tokens before it and "
            f"itself, each where it was written; but {'; '.join(oracle.faults[:3])}.\n"
            "Are the slots of a chunk taken from the index in the whole sequence? Token t lies at "
            "block_table[t // block_size] * block_size + t % block_size. Counted from the chunk's "
            "beginning, chunk 1 overwrites chunk 0. And does the context end with the chunk?"
        )


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_C2_every_length_around_every_chunk_size(make_engine: Any, tiny: Any, chunk: int) -> None:
    """Prompts of 1, c-1, c, c+1, 2c-1, 2c, 2c+1 tokens, blocks of 4: equal to generate()."""
    lengths = {1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1} - {0}
    prompts = [prompt_of(n, first=n) for n in sorted(lengths)]
    engine = make_engine(max_prefill_chunk_size=chunk)
    poison_cache(engine)
    outputs = run(engine, prompts, greedy(5))
    for output in outputs:
        check_reference(output, tiny, 5, engine)
        check_chunks(engine, output, chunk)


@pytest.mark.parametrize("reserve", [False, True])
def test_C1_chunks_see_no_further_than_their_own_end(
    make_engine: Any, tiny: Any, reserve: bool
) -> None:
    """Prompt 10, chunk 4: contexts 4, 8, 10, over a pool that is NaN wherever nobody wrote.

    First the oracle, since a real model often gives the same tokens in spite of a wrong context.
    """
    oracle = OracleModel()
    options = {"max_prefill_chunk_size": 4, "reserve_full_prompt": reserve}
    engine = make_engine(model=(oracle, None), max_num_batched_tokens=24, **options)
    poison_cache(engine)
    oracle.reset()
    engine.add_request(prompt_of(10), greedy(6))
    for _ in unfinished(engine):
        engine.step()
        assert not oracle.faults, f"{last_steps(engine, 1)}: {'; '.join(oracle.faults[:3])}"
    expect(oracle.step_rows, [4, 4, 2, 1, 1, 1, 1, 1], "tokens that each step computed.", engine)

    engine = make_engine(**options)
    poison_cache(engine)
    output = run(engine, [prompt_of(10)], greedy(6))[0]
    check_chunks(engine, output, 4)
    check_reference(output, tiny, 6, engine)


@pytest.mark.parametrize("chunk", [1000, 344])
def test_C3_a_chunk_that_ends_inside_a_block(tiny: Any, stage: ModuleType, chunk: int) -> None:
    """Blocks of 16, chunks of 1,000: the second chunk goes on in block 62 at offset 8."""
    length = 1010
    assert chunk % 16 == 8 and chunk < length, "the test's own numbers are wrong"
    engine = stage.LLMEngine(model=tiny, block_size=16, num_blocks=80, max_prefill_chunk_size=chunk)
    poison_cache(engine)
    output = run(engine, [prompt_of(length)], greedy(4))[0]
    check_chunks(engine, output, chunk)
    check_reference(output, tiny, 4, engine)


# ---------------------------------------------------------------- the same tokens


def test_C4_sampling_is_not_touched_by_chunks(make_engine: Any) -> None:
    """Seed 1, temperature 1, prompt 12: the same text for chunks of 4, 5 and 12."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    tokens = {}
    for chunk in (12, 4, 5):
        engine = make_engine(max_prefill_chunk_size=chunk)
        output = run(engine, [prompt_of(12)], params)[0]
        check_chunks(engine, output, chunk)
        tokens[chunk] = output.token_ids
        expect(
            tokens[chunk],
            tokens[12],
            f"the tokens of request {output.request_id!r} with chunks of {chunk}, as with its "
            "prompt in one piece: its random generator moves once for each sampled token, and only "
            "the last chunk samples.",
            engine,
        )


def test_C4_intermediate_chunks_put_nothing_out(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    engine.add_request(prompt_of(12), greedy(2), request_id="a")
    for index, (span, wanted) in enumerate([("0..4", 0), ("4..8", 0), ("8..12", 1)]):
        expect(
            [output.request_id for output in engine.step()],
            ["a"] * wanted,
            f"whose outputs step {index} returned; it computes tokens {span} of the 12 of request "
            "'a'. Only the chunk that reaches the prompt's end samples a token; one in the middle "
            "samples nothing and puts nothing out.",
            engine,
        )
        expect(
            engine.trace.steps[-1].sampled,
            ["a"] * wanted,
            f"who was sampled in step {index}, with tokens {span} of 12.",
            engine,
        )
    run_all(engine)


def test_C9_five_chunks_of_three_requests_at_once(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=3, max_num_batched_tokens=10)
    prompts = [prompt_of(14, 1), prompt_of(15, 2), prompt_of(13, 3)]
    outputs = run(engine, prompts, greedy(8))
    for output in outputs:
        check_chunks(engine, output, 3)
        check_reference(output, tiny, 8, engine)
    most = max(len(step.slices) for step in engine.trace.steps)
    expect(most, 3, "most slices in one step; chunks of three prompts fit into 10 tokens.", engine)


@pytest.mark.parametrize("chunk", [3, 4, 5])
def test_B4_twins_and_a_relative_in_chunks(make_engine: Any, tiny: Any, chunk: int) -> None:
    """Looked up before anything is computed, they share blocks only once these are full."""
    engine = make_engine(max_prefill_chunk_size=chunk)
    engine.trace.record_blocks = True
    twin = prompt_of(13)
    prompts = [twin, twin, [*twin[:4], *prompt_of(9, 90)]]
    outputs = run(engine, prompts, greedy(9))
    for output in outputs:
        check_chunks(engine, output, chunk)
        check_reference(output, tiny, 9, engine)
    prefilled = next(step for step in engine.trace.steps if step.sampled)
    first, second, relative = prefilled.block_tables.values()
    shared = (len({*first} & {*second}), len({*first} & {*relative}))
    expect(shared, (3, 1), f"blocks that the first has in common with the others: {prefilled}.")
    [again] = run(engine, [twin], greedy(9))
    expect(again.metrics.num_cached_tokens, 12, "tokens found when the twins have ended.", engine)
    check_reference(again, tiny, 9, engine)


@pytest.mark.parametrize(
    "options", [{}, {"max_prefill_chunk_size": 3}, {"reserve_full_prompt": True}]
)
def test_mixed_company_hits_and_preemption(make_engine: Any, tiny: Any, options: dict) -> None:
    """Everything at once, in a pool that is too small: still what each would get alone."""
    base = prompt_of(9)
    prompts = [[*base, *prompt_of(n, 90 + n)] for n in (1, 4, 7, 2, 9)] + [prompt_of(13, 50)]
    engine = make_engine(
        num_blocks=14,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        **{"max_prefill_chunk_size": 5, **options},
    )
    outputs = run(engine, prompts, greedy(14))
    for output in outputs:
        check_reference(output, tiny, 14, engine)
    stats = engine.stats()
    assert stats["preemptions"] > 0, f"14 blocks hold four of these? {last_steps(engine)}"
    assert stats["hit_tokens"] > 0, f"five prompts share 9 tokens, and none was found: {stats}"
    assert any(len({n > 1 for _, _, n in step.slices}) == 2 for step in engine.trace.steps), (
        "expected a step with a decode and a chunk; prompts and decodes were never computed "
        f"together:\n{last_steps(engine, 10)}"
    )


# ---------------------------------------------------------------- slices, budgets, order


def test_C5_three_chunks_of_four(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    output = run(engine, [prompt_of(12)], greedy(1))[0]
    expect(
        slices_of(engine, output.request_id),
        [(0, 4), (4, 4), (8, 4)],
        f"the slices (start_pos, num_tokens) of request {output.request_id!r}, 12 prompt tokens "
        "in chunks of 4.",
        engine,
    )


def test_C5_chunks_cover_what_the_cache_does_not(stage: ModuleType) -> None:
    """12,000 tokens, 8,000 of them cached, chunks of 1,000: exactly four (no model needed)."""
    scheduler = make_scheduler(stage, num_blocks=1600, block_size=16, max_prefill_chunk_size=1000)
    base = list(range(8000))
    first = new_sequence(stage, "first", base)
    scheduler.add(first)
    advance(scheduler, until_running=first)
    scheduler.finish(first, "length")
    long = new_sequence(stage, "long", [*base, *range(8000, 12000)])
    scheduler.add(long)
    expect(
        [slices["long"] for slices in advance(scheduler, until_running=long)],
        [(8000, 1000), (9000, 1000), (10000, 1000), (11000, 1000)],
        "the slices of 'long', whose first 8,000 tokens are in the prefix cache: the lookup comes "
        "first, what it did not find is cut.",
    )
    expect(long.num_hit_tokens, 8000, "num_hit_tokens of 'long'.")


def test_B3_a_chunk_publishes_full_blocks_only(make_engine: Any) -> None:
    """Chunk 3, blocks of 4: after one chunk block 0 is 3/4 full and must not be found."""
    engine = make_engine(max_prefill_chunk_size=3, max_num_batched_tokens=3)
    engine.add_request(prompt_of(9), greedy(1))
    for tokens, wanted in [(3, 0), (6, 1), (9, 2)]:
        engine.step()
        expect(
            engine.stats()["cached_blocks"],
            wanted,
            f"findable blocks after {tokens} tokens in blocks of 4: full ones, after each chunk.",
            engine,
        )


def test_C6_a_lone_half_done_prompt_is_unfinished_work(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    request_id = engine.add_request(prompt_of(12), greedy(1))
    engine.step()
    what = f"request {request_id!r} after its first chunk, 4 of 12 tokens"
    expect(engine.progress(request_id)["state"], "prefilling", f"the state of {what}.", engine)
    expect(
        engine.has_unfinished_requests(), True, f"has_unfinished_requests() with {what}.", engine
    )


def test_progress_tells_the_inside_from_the_outside(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    request_id = engine.add_request(prompt_of(10), greedy(3))
    fields = ("state", "prefilled_tokens", "prompt_tokens", "generated_tokens", "blocks_held")
    for num_steps, wanted in enumerate(
        [
            ("waiting", 0, 10, 0, 0),
            ("prefilling", 4, 10, 0, 1),
            ("prefilling", 8, 10, 0, 2),
            ("running", 10, 10, 1, 3),
        ]
    ):
        if num_steps:
            engine.step()
        progress = engine.progress(request_id)
        expect(
            dict(zip(fields, (progress[name] for name in fields), strict=True)),
            dict(zip(fields, wanted, strict=True)),
            f"progress({request_id!r}) after {num_steps} steps, chunks of 4, blocks of 4.",
            engine,
        )
    assert progress["seconds"] > 0, "no time has passed since the request arrived"
    stats = engine.stats()
    expect((stats["prefilling"], stats["running"]), (0, 1), "prefilling and running in stats().")
    run_all(engine)
    expect(engine.progress(request_id), None, "progress of a request that has ended.", engine)


def test_blocks_are_allocated_chunk_by_chunk_or_all_at_once(make_engine: Any) -> None:
    for reserve, wanted in ((False, [1, 2, 3]), (True, [4, 4, 4])):
        engine = make_engine(max_prefill_chunk_size=4, reserve_full_prompt=reserve)
        engine.add_request(prompt_of(16), greedy(1))
        held = []
        for _ in range(3):
            engine.step()
            held.append(64 - engine.block_manager.num_free_blocks)
        expect(
            held,
            wanted,
            f"blocks held after 1, 2, 3 chunks of 4 tokens, blocks of 4, prompt of 16, with "
            f"reserve_full_prompt={reserve}.",
            engine,
        )


def test_S4_a_short_prompt_overtakes_and_streams_go_on(make_engine: Any) -> None:
    """Ten chunks of a long prompt; a 2-token prompt behind it starts early; decodes never pause."""
    engine = make_engine(max_prefill_chunk_size=4, max_num_batched_tokens=8)
    engine.add_request(prompt_of(3), greedy(40), request_id="stream")
    engine.step()
    engine.add_request(prompt_of(40, 2), greedy(1), request_id="long")
    engine.add_request([5, 6], greedy(1), request_id="short")
    run_all(engine)
    steps = engine.trace.steps[1:]
    first_token = {
        name: next(s.index for s in steps if name in s.sampled) for name in ("long", "short")
    }
    during = [step for step in steps if step.index <= first_token["long"]]
    for step in during:
        assert "stream" in step.sampled, (
            f"{describe(step)}: expected a token of 'stream' in every step of the long prompt; it "
            f"was left out, and {step.sampled} were sampled. Decodes are scheduled first."
        )
    expect(len(during), 10, "steps of the long prompt: 40 tokens in chunks of 4.", engine)
    assert first_token["short"] < first_token["long"], (
        f"expected the first token of 'short' before that of 'long'; they came in the steps "
        f"{first_token}. What the long prompt's chunk leaves of the budget is for others."
    )


def test_between_two_tokens_never_more_than_the_budget(make_engine: Any) -> None:
    """With prompts arriving all the time."""
    engine = make_engine(max_prefill_chunk_size=6, max_num_batched_tokens=10)
    for i in range(12):
        engine.add_request(prompt_of(5 + 3 * i, i), greedy(10))
        engine.step()
    run_all(engine)
    for step in engine.trace.steps:
        assert step.num_tokens <= 10, (
            f"{describe(step)}: {step.num_tokens} tokens, max_num_batched_tokens is 10. Decodes "
            "and chunks share one budget."
        )


def test_S3_partial_prefills_fill_the_pool(make_engine: Any, tiny: Any) -> None:
    """N=6, two prompts of 16 in chunks of 4: the oldest takes blocks from the youngest."""
    engine = make_engine(num_blocks=6, max_prefill_chunk_size=4, max_num_batched_tokens=8)
    prompts = [prompt_of(16, 1), prompt_of(16, 2)]
    outputs = run(engine, prompts, greedy(4))
    lost = [step.preempted for step in engine.trace.steps if step.preempted]
    expect(
        lost[:1],
        [[outputs[1].request_id]],
        "who lost its blocks first. Both prompts are half done and the pool is full: the youngest "
        "gives, the oldest never does.",
        engine,
    )
    for output in outputs:
        check_reference(output, tiny, 4, engine)


def test_a_half_done_prompt_takes_blocks_from_a_younger_stream(stage: ModuleType) -> None:
    """The oldest advances in every step, even if it is a prompt and the younger one decodes."""
    scheduler = make_scheduler(
        stage, num_blocks=4, block_size=4, max_prefill_chunk_size=4, max_num_batched_tokens=8
    )
    old, young = (
        new_sequence(stage, "old", list(range(13))),
        new_sequence(stage, "young", [1, 2, 3]),
    )
    scheduler.add(old), scheduler.add(young)
    for index, (span, victims) in enumerate(
        [((0, 4), []), ((4, 4), []), ((8, 4), ["young"]), ((12, 1), [])]
    ):
        batch = scheduler.schedule()
        slices = {s.sequence.request_id: (s.start_pos, s.num_tokens) for s in batch.slices}
        expect(
            slices.get("old"),
            span,
            f"step {index}: the slice of 'old', the oldest, a prompt of 13 in chunks of 4. It "
            f"advances in every step. All slices: {slices}",
        )
        expect(
            [s.request_id for s in batch.preempted],
            victims,
            f"step {index}: who is preempted. The pool has 4 blocks; 'young' decodes and gives its "
            "block to 'old' when that needs a fourth.",
        )
        assert not (victims and "young" in slices), (
            f"step {index}: 'young' was preempted, and its slice is still in the batch: {slices}"
        )
        scheduler.commit(batch, [1] * len(batch.sampling))
    expect((young.status.value, young.block_table), ("waiting", []), "'young' afterwards.")


def test_a_half_done_prompt_takes_blocks_from_two_streams(stage: ModuleType) -> None:
    """Both have their slices in the batch already; neither may stay there without its blocks."""
    scheduler = make_scheduler(
        stage, num_blocks=4, block_size=4, max_prefill_chunk_size=8, max_num_batched_tokens=16
    )
    for name, length in (("old", 16), ("young", 3), ("youngest", 3)):
        scheduler.add(new_sequence(stage, name, list(range(length))))
    advance(scheduler)
    batch = scheduler.schedule()
    expect(
        (
            [s.request_id for s in batch.preempted],
            {s.sequence.request_id: (s.start_pos, s.num_tokens) for s in batch.slices},
        ),
        (["youngest", "young"], {"old": (8, 8)}),
        "who is preempted, and the slices. The pool has 4 blocks; 'old' holds two and needs two "
        "more for its second chunk of 8, and each of the others decodes and holds one.",
    )


def test_a_preempted_slice_gives_its_budget_back(stage: ModuleType) -> None:
    """A stream has its slice and then loses its blocks: its token is the next prompt's to use."""
    scheduler = make_scheduler(stage, num_blocks=3, block_size=8, max_prefill_chunk_size=4)
    scheduler.add(new_sequence(stage, "old", [1] * 20))
    advance(scheduler)
    for name, length in (("middle", 8), ("young", 1)):
        scheduler.add(new_sequence(stage, name, [length] * length))
    advance(scheduler)  # a block each
    scheduler.max_num_batched_tokens = 8
    batch = scheduler.schedule()
    expect(
        (
            [s.request_id for s in batch.preempted],
            {s.sequence.request_id: (s.start_pos, s.num_tokens) for s in batch.slices},
        ),
        (["young"], {"old": (8, 4), "middle": (4, 4)}),
        "who is preempted, and the slices. The budget is 8: two chunks of 4, since the decode of "
        "'young' is not computed.",
    )


def test_nobody_is_admitted_while_blocks_are_taken_back(stage: ModuleType) -> None:
    """The one that gave its blocks is first in line: it would take them right back."""
    scheduler = make_scheduler(
        stage, num_blocks=4, block_size=4, max_prefill_chunk_size=4, enable_prefix_caching=False
    )
    old, young = new_sequence(stage, "old", [1] * 7), new_sequence(stage, "young", [2] * 7)
    scheduler.add(old), scheduler.add(young)
    while old.cached_token_count < 8:
        advance(scheduler)
    batch = scheduler.schedule()
    expect(
        ([s.request_id for s in batch.preempted], [s.sequence.request_id for s in batch.slices]),
        (["young"], ["old"]),
        "who is preempted and who is computed. Both hold two full blocks of a pool of four; 'old' "
        "needs a third. The block that is left over would hold a chunk of 'young', or of any other "
        "prompt.",
    )
    expect((young.status.value, young.block_table), ("waiting", []), "'young' afterwards.")


def test_S5_the_budget_is_all_decodes(make_engine: Any, tiny: Any) -> None:
    """Budget 2 with three requests, and budget equal to the number of decodes: nobody is lost."""
    for budget in (2, 3):
        engine = make_engine(max_num_batched_tokens=budget)
        prompts = [prompt_of(3, 1), prompt_of(2, 2), prompt_of(4, 3), prompt_of(1, 4)]
        outputs = run(engine, prompts, greedy(6))
        most = max(step.num_tokens for step in engine.trace.steps)
        expect(most, budget, "most tokens in one step, the budget with four requests.", engine)
        for step, after in zip(engine.trace.steps, engine.trace.steps[1:], strict=False):
            ended = {o.request_id for o in outputs if o.metrics.token_times[-1] <= step.end}
            left_out = {*step.sampled} - ended - {*after.sampled}
            assert not left_out, (
                f"{describe(after)}: {left_out} had a token in the step before, and none in this "
                f"one. Decodes are scheduled first, and the budget of {budget} is enough for them."
            )
        for output in outputs:
            check_reference(output, tiny, 6, engine)


def test_decode_share_leaves_room_for_prompts(stage: ModuleType) -> None:
    """Share 0.5 of 8 tokens: four of seven streams decode, in turn, while a prompt is under way."""
    options = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 8}
    scheduler = make_scheduler(stage, max_decode_share=0.5, **options)
    streams = [f"s{i}" for i in range(7)]
    for i, name in enumerate(streams):
        scheduler.add(new_sequence(stage, name, [i]))
    first, second = advance(scheduler), advance(scheduler)
    expect(len(second[0]), 7, f"decodes while no prompt waits: the cap is off. {first}, {second}")
    scheduler.add(new_sequence(stage, "long", list(range(20))))
    turns: dict[str, list[int]] = {name: [] for name in streams}
    for step in range(5):
        [slices] = advance(scheduler)
        expect(
            sorted(n for _, n in slices.values()),
            [1, 1, 1, 1, 4],
            f"tokens per slice in step {step} of the prompt 'long', budget 8, max_decode_share "
            f"0.5: four decodes and a chunk of four. The slices: {slices}",
        )
        for name in slices:
            if name != "long":
                turns[name].append(step)
    gaps = [b - a for steps in turns.values() for a, b in zip(steps, steps[1:], strict=False)]
    expect(max(gaps), 2, f"longest wait of a stream, in steps: they take turns. Steps: {turns}")


def test_a_first_token_counts_as_a_turn(stage: ModuleType) -> None:
    """One stream decodes a step: the one whose newest token is oldest, however it came by it."""
    scheduler = make_scheduler(
        stage,
        num_blocks=64,
        block_size=4,
        max_num_batched_tokens=4,
        max_prefill_chunk_size=2,
        max_decode_share=0.25,
    )
    for name in ("a", "b"):
        scheduler.add(new_sequence(stage, name, [1]))
    advance(scheduler)
    scheduler.add(new_sequence(stage, "long", list(range(40))))
    turns = []
    for step in range(5):
        turns.append([name for name in advance(scheduler)[0] if name != "long"])
        if step == 0:
            scheduler.add(new_sequence(stage, "new", [1]))
    expect(
        [*turns[:3], sorted(turns[3] + turns[4])],
        [["a"], ["b", "new"], ["a"], ["b", "new"]],
        "who got a token in step 0, 1, 2, and in 3 or 4. 'new' has its first from its prompt, in "
        "step 1; the newest token of 'a' is from step 0.",
    )


def test_a_share_goes_on_behind_a_victim(stage: ModuleType) -> None:
    """The turns are not in arrival order: behind a preempted stream there may be an older one."""
    scheduler = make_scheduler(
        stage,
        num_blocks=5,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=12,
        max_decode_share=0.25,
    )
    for i, length in enumerate([1, 1, 1, 4, 1]):
        scheduler.add(new_sequence(stage, f"s{i}", [i] * length))
    advance(scheduler)
    scheduler.add(new_sequence(stage, "waiting", [9]))
    advance(scheduler)
    batch = scheduler.schedule()
    expect(
        ([s.request_id for s in batch.preempted], [s.sequence.request_id for s in batch.slices]),
        (["s4"], ["s3", "s0", "s1"]),
        "who is preempted and who decodes. It is the turn of s3, s4, s0 and s1, in this order, and "
        "three may decode; each of five streams holds one block of a pool of five, and s3 needs a "
        "second.",
    )


def test_a_share_never_leaves_a_step_empty(make_engine: Any, tiny: Any) -> None:
    """The only stream whose turn it is has to give up its blocks: the next one decodes instead."""
    engine = make_engine(
        num_blocks=5,
        max_num_batched_tokens=8,
        max_decode_share=0.01,
        enable_prefix_caching=False,
    )
    prompts = [prompt_of(4, 1), prompt_of(3, 2), prompt_of(18, 3)]
    lengths = [17, 17, 2]
    for prompt, length in zip(prompts, lengths, strict=True):
        engine.add_request(prompt, greedy(length))
    outputs: dict[str, list] = {}
    for _ in unfinished(engine):
        before = engine.stats()["steps"]
        collect(engine.step(), outputs)
        expect(engine.stats()["steps"], before + 1, "steps that computed something", engine)
    for output, length in zip(outputs.values(), lengths, strict=True):
        check_reference(output[-1], tiny, length, engine)
    in_trace = preempted(engine)
    assert in_trace and len(in_trace) == engine.stats()["preemptions"]


def test_nobody_is_admitted_while_an_older_prompt_waits_for_a_block(stage: ModuleType) -> None:
    """The free block is too little for the older prompt; a short new one must not take it."""
    scheduler = make_scheduler(
        stage, num_blocks=5, block_size=4, max_prefill_chunk_size=8, enable_prefix_caching=False
    )
    first, second = new_sequence(stage, "first", [1] * 8), new_sequence(stage, "second", [2] * 16)
    scheduler.add(first), scheduler.add(second)
    advance(scheduler)  # two blocks each
    new = new_sequence(stage, "new", [3] * 2)
    scheduler.add(new)
    [slices] = advance(scheduler)  # `first` takes the last block; nothing is left for `second`
    expect(slices, {"first": (8, 1)}, "the slices while `second` waits for blocks.")
    scheduler.finish(first, "abort")
    scheduler.block_manager.allocate(blocker := new_sequence(stage, "blocker", [9]), 8)
    [slices] = advance(scheduler)  # one block is free, `second` needs two
    expect((slices, new.block_table), ({}, []), "one block is free, and `second` needs two.")
    scheduler.block_manager.free(blocker)
    [slices] = advance(scheduler)
    expect(slices, {"second": (8, 8), "new": (0, 2)}, "the slices when there is room for both.")


@pytest.mark.parametrize("prompts", [[300, 300], [40] * 12], ids=["long", "short"])
def test_by_default_a_step_is_about_one_chunk(make_engine: Any, prompts: list[int]) -> None:
    """Several long prompts, or many short ones: a stream waits for one chunk's worth of tokens."""
    engine = make_engine(num_blocks=400, max_num_seqs=16)
    engine.add_request(prompt_of(3), greedy(40))
    engine.step()
    for seed, length in enumerate(prompts, 1):
        engine.add_request(prompt_of(length, seed), greedy(2))
    drain(engine)
    config = engine.config
    expect(config.max_num_batched_tokens, 128 + 16, "the budget: a chunk and 16 decodes.")
    steps = engine.trace.steps[1:]
    sizes = [step.num_tokens for step in steps if step.num_tokens > len(step.slices)]
    assert len(sizes) > 2 and max(sizes) == 144, f"tokens of the steps with prompts: {sizes}"


def test_an_odd_share_still_decodes(stage: ModuleType) -> None:
    scheduler = make_scheduler(
        stage, num_blocks=64, block_size=4, max_num_batched_tokens=4, max_decode_share=0.01
    )
    scheduler.add(new_sequence(stage, "one", [1]))
    scheduler.add(new_sequence(stage, "two", list(range(12))))
    advance(scheduler)
    [slices] = advance(scheduler)
    expect(sorted(slices), ["one", "two"], "who is computed: a share below one token is one token.")


# ---------------------------------------------------------------- states


def test_the_state_machine(stage: ModuleType) -> None:
    """WAITING to PREFILLING to PREFILLING to RUNNING, and WAITING straight to RUNNING."""
    scheduler = make_scheduler(stage, num_blocks=64, block_size=4, max_prefill_chunk_size=4)
    long, short = new_sequence(stage, "long", list(range(10))), new_sequence(stage, "short", [1, 2])
    scheduler.add(long), scheduler.add(short)
    for num_steps, wanted in enumerate(
        [
            ("waiting", "waiting", 0),
            ("prefilling", "running", 4),
            ("prefilling", "running", 8),
            ("running", "running", 10),
            ("running", "running", 10),
        ]
    ):
        if num_steps:
            advance(scheduler)
        expect(
            (long.status.value, short.status.value, long.prefilled_token_count),
            wanted,
            f"after {num_steps} steps, chunks of 4: the state of 'long' (10 prompt tokens), the "
            "state of 'short' (2), and prefilled_token_count of 'long'.",
        )
    expect(long.cached_token_count, 11, "cached_token_count of 'long' after its first decode.")
    expect(
        long.token_ids[long.num_prompt_tokens :], [1, 1], "tokens of 'long' after its first decode."
    )
    scheduler.finish(long, "stop")
    ended = (long.status.value, long.finish_reason, long.block_table)
    expect(ended, ("finished", "stop", []), "state, reason and block table of 'long', finished.")


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_A1_abort_in_every_state(make_engine: Any, num_steps: int) -> None:
    """Waiting, after chunk 1, after chunk 2 (with a shared prefix), running."""
    engine = make_engine(max_prefill_chunk_size=4)
    base = prompt_of(4)
    run(engine, [[*base, 1]], greedy(1))
    request_id = engine.add_request([*base, *prompt_of(9, 77)], greedy(9))
    for _ in range(num_steps):
        engine.step()
    state = engine.progress(request_id)["state"]
    wanted = ["waiting", "prefilling", "prefilling", "running", "running"][num_steps]
    what = (
        f"request {request_id!r}, 13 prompt tokens of which 4 are cached, after {num_steps} steps"
    )
    expect(state, wanted, f"the state of {what} in chunks of 4.", engine)
    held = engine.progress(request_id)["blocks_held"]
    what = f"{what}, aborted while {state.upper()} with {held} blocks"
    expect(engine.abort_request(request_id), True, f"abort_request of {what}.", engine)
    expect(
        engine.block_manager.num_free_blocks,
        64,
        f"free blocks of 64, right after the abort. {what}: its blocks come back at once, in "
        "whatever state it is. A clean-up that looks at RUNNING sequences only forgets one that is "
        "PREFILLING.",
        engine,
    )
    expect(engine.abort_request(request_id), False, f"a second abort_request of {what}.", engine)
    outputs = [(o.finish_reason, o.finished) for o in engine.step()]
    expect(outputs, [("abort", True)], f"the outputs after the abort of {what}.", engine)
    expect(engine.has_unfinished_requests(), False, "unfinished work after the abort.", engine)


def test_C7_one_token_and_an_eos_after_chunks(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    engine.add_request(prompt_of(3), greedy(12), request_id="stream")
    engine.step()
    engine.add_request(prompt_of(11, 5), greedy(1), request_id="one")
    first = reference_tokens(tiny.model, prompt_of(12, 6), 1)[0]
    stops = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[first])
    engine.add_request(prompt_of(12, 6), stops, request_id="eos")
    last = run_all(engine)
    check_reference(last["one"], tiny, 1, engine)
    check_tokens(last["eos"], [first], engine, "stop")
    check_reference(last["stream"], tiny, 12, engine)
    check_chunks(engine, last["eos"], 4)


def test_A3_a_failing_chunk_takes_its_batch_only(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4, max_num_seqs=2)
    for name in ("first", "second"):
        engine.add_request(prompt_of(10, len(name)), greedy(4), request_id=name)
    engine.add_request(prompt_of(10, 9), greedy(4), request_id="later")
    engine.step()
    with failing(tiny.model, RuntimeError("no luck")):
        ended = {o.request_id: o.finish_reason for o in engine.step()}
    expect(
        ended,
        {"first": "error", "second": "error"},
        "the outputs of a step whose forward raised, in the second chunks of 'first' and 'second': "
        "exactly the requests of that step end.",
        engine,
    )
    expect(engine.block_manager.num_free_blocks, 64, "free blocks of 64 after that: all.", engine)
    last = run_all(engine)
    expect(sorted(last), ["later"], "whose outputs come after that.", engine)
    check_reference(last["later"], tiny, 4, engine)


def test_S8_half_done_prompts_take_seats(make_engine: Any) -> None:
    engine = make_engine(max_num_seqs=2, max_prefill_chunk_size=2, max_num_batched_tokens=8)
    engine.trace.record_blocks = True
    for i in range(4):
        engine.add_request(prompt_of(7, i), greedy(3))
    run_all(engine)
    for step in engine.trace.steps:
        holders = [name for name, table in step.block_tables.items() if table]
        assert len(holders) <= 2, (
            f"{describe(step)}: {holders} hold blocks, max_num_seqs is 2. A prompt that is half "
            "done takes a seat, though it decodes nothing yet."
        )
    most = max(step.num_prefilling for step in engine.trace.steps)
    expect(most, 2, "most PREFILLING sequences in one step (num_prefilling).", engine)


# ---------------------------------------------------------------- by hand, and by time


def test_run_prefill_chunk_by_hand(tiny: Any, stage: ModuleType) -> None:
    """Chunk by chunk, logits only from the last."""
    engine = stage.LLMEngine(model=tiny, block_size=4, num_blocks=8)
    prompt = prompt_of(10)
    sequence = new_sequence(stage, "by hand", prompt)
    for start_pos in (0, 4, 8):
        chunk = prompt[start_pos : start_pos + 4]
        engine.block_manager.allocate(sequence, start_pos + len(chunk))
        logits = engine.model_runner.run_prefill_chunk(sequence, chunk, start_pos)
        sequence.cached_token_count = start_pos + len(chunk)
        where = f"chunk {start_pos}..{start_pos + len(chunk)} of a prompt of 10"
        expect(logits is None, start_pos < 8, f"{where}: whether there are no logits.")
    expect(tuple(logits.shape), (tiny.model.config.vocab_size,), f"{where}: shape of the logits.")
    likeliest = int(torch.argmax(logits))
    expect(likeliest, reference_tokens(tiny.model, prompt, 1)[0], f"{where}: the likeliest token.")
    for tokens in (prompt[:4], []):
        with pytest.raises(ValueError):
            engine.model_runner.run_prefill_chunk(sequence, tokens, 4)
            pytest.fail(
                f"expected a ValueError for the tokens {tokens} at 4: the prompt has {prompt[4:8]} "
                "there, and a chunk has at least one token."
            )


def test_K6_a_chunk_of_one_token_is_no_decode(
    make_engine: Any, tiny: Any, stage: ModuleType
) -> None:
    """It has one row, like a decode, but samples nothing: no decode graph may compute it."""
    engine = make_engine(attention_backend="gather", max_prefill_chunk_size=1, max_num_seqs=4)
    graphs = graphed(stage, engine)
    replay, num_replayed = graphs.replay, []
    graphs.replay = lambda inputs: (
        num_replayed.append(len(engine.trace.steps)),
        replay(inputs),
    )[1]
    outputs = run(engine, [prompt_of(3, 1), prompt_of(6, 2)], greedy(8))
    for output in outputs:
        check_chunks(engine, output, 1)
        check_reference(output, tiny, 8, engine)
    sampling = [step.index for step in engine.trace.steps if len(step.sampled) == len(step.slices)]
    expect(num_replayed, sampling, "steps that a graph computed: those in which each row samples.")
    assert 0 < len(sampling) < len(engine.trace.steps), "all steps were of one kind"


def test_target_step_ms_shortens_late_chunks(stage: ModuleType) -> None:
    """Time = 1 ms + 10 us a token + 2 ns a token of context; the target is 5 ms a step."""
    from shared.engine.step_time import StepTimeModel, work

    scheduler = make_scheduler(stage, num_blocks=600, block_size=16, max_prefill_chunk_size=512)
    scheduler.step_time = StepTimeModel(target=5e-3)
    stream, long = (
        new_sequence(stage, "stream", [1]),
        new_sequence(stage, "long", list(range(6000))),
    )
    scheduler.add(stream)
    times, chunks = [], []
    for step in range(400):
        if step == 10:
            scheduler.add(long)
        batch = scheduler.schedule()
        _, tokens, context = work(batch.slices)
        times.append(1e-3 + 1e-5 * tokens + 2e-9 * context)
        chunks += [s.num_tokens for s in batch.slices if s.sequence is long]
        scheduler.step_time.observe(batch.slices, times[-1])
        scheduler.commit(batch, [1] * len(batch.sampling))
        if long.status.value == "running":
            break
    expect(long.status.value, "running", f"the state of 'long' after 400 steps; chunks {chunks}.")
    slowest = max(times) * 1e3
    assert slowest <= 5 * 1.01, f"the target is 5 ms, and a step took {slowest:.2f} ms: {chunks}"
    learnt = chunks.index(max(chunks))
    assert chunks[-2] < 0.6 * chunks[learnt], (
        f"expected shorter chunks late in the prompt, where each token has more context: {chunks}"
    )
    fastest = min(times[20:-1]) * 1e3
    assert fastest > 4, f"the target is 5 ms, and a step took {fastest:.2f} ms: not used up"


def test_a_longer_chunk_may_leave_nothing_for_the_next(stage: ModuleType) -> None:
    """The model learns that more is possible: the older prompt takes all, and no slice is empty."""
    scheduler = make_scheduler(stage, num_blocks=64, block_size=4, max_num_batched_tokens=8)
    for name in ("older", "younger"):
        scheduler.add(new_sequence(stage, name, list(range(20))))
    scheduler.step_time = SimpleNamespace(longest_chunk=lambda slices, start, limit: min(limit, 4))
    first = advance(scheduler)
    scheduler.step_time.longest_chunk = lambda slices, start, limit: limit
    expect(
        first + advance(scheduler),
        [{"older": (0, 4), "younger": (0, 4)}, {"older": (4, 8)}],
        "the slices of two steps, budget 8, in which the model of step times allows 4, then all.",
    )


def test_target_step_ms_lets_the_engine_learn(make_engine: Any) -> None:
    """A target that no step reaches: chunks double, since every step was shown to the model."""
    engine = make_engine(target_step_ms=1e6, max_prefill_chunk_size=64)
    [output] = run(engine, [prompt_of(150)], greedy(1))
    expect(
        slices_of(engine, output.request_id),
        [(0, 16), (16, 32), (48, 64), (112, 38)],
        "the slices of a prompt of 150 with a target of 1,000 s. `StepTimeModel.longest_chunk` "
        "gives 16 at first and then at most twice the longest slice that it was shown. Only 16 "
        "each time: the engine does not `observe` its steps. 64 at once: the scheduler has no "
        "`step_time`.",
        engine,
    )


def test_chunk_size_unless_told_otherwise(make_engine: Any) -> None:
    engine = make_engine()
    [output] = run(engine, [prompt_of(150)], greedy(1))
    expect(
        slices_of(engine, output.request_id),
        [(0, 128), (128, 22)],
        "the slices of a prompt of 150 on a CPU; max_prefill_chunk_size is None, which is 128.",
        engine,
    )


# ---------------------------------------------------------------- helpers


def make_scheduler(stage: ModuleType, num_blocks: int, block_size: int, **options: Any) -> Any:
    """A scheduler without an engine."""
    options = {"max_model_len": 1_000_000, "max_num_batched_tokens": 8192, **options}
    config = stage.EngineConfig(block_size=block_size, num_blocks=num_blocks, **options)
    modules = [
        importlib.import_module(f"{stage.__name__}.{name}")
        for name in ("scheduler", "block_manager")
    ]
    return modules[0].Scheduler(config, modules[1].BlockManager(num_blocks, block_size))


def advance(scheduler: Any, until_running: Any = None) -> list[dict[str, tuple[int, int]]]:
    """Schedule and commit a step, or steps until a sequence is RUNNING, at most 100.

    Returns, for each step, `(start_pos, num_tokens)` by request.
    """
    steps = []
    for _ in range(100 if until_running else 1):
        batch = scheduler.schedule()
        scheduler.commit(batch, [1] * len(batch.sampling))
        steps.append({s.sequence.request_id: (s.start_pos, s.num_tokens) for s in batch.slices})
        if until_running is None or until_running.status.value == "running":
            return steps
    raise AssertionError(
        f"{until_running} is not RUNNING after 100 steps; the last slices: {steps[-3:]}"
    )


def new_sequence(stage: ModuleType, request_id: str, token_ids: list[int]) -> Any:
    module = importlib.import_module(f"{stage.__name__}.sequence")
    return module.Sequence(request_id, token_ids, 100)
