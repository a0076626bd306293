"""Chunked prefill: the same tokens, in other steps; nobody waits for a long prompt."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from shared import SamplingParams
from tests.reference import reference_tokens


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompt_of(length: int, first: int = 10) -> list[int]:
    return [(first + 7 * i) % 200 + 5 for i in range(length)]


def slices_of(engine: Any, request_id: str) -> list[tuple[int, int]]:
    """`(start_pos, num_tokens)` of every slice that was computed for a request."""
    steps = engine.trace.steps
    return [s[1:] for step in steps for s in step.slices if s[0] == request_id]


def chunks_of(engine: Any, request_id: str, prompt_len: int) -> list[tuple[int, int]]:
    return [s for s in slices_of(engine, request_id) if s[0] < prompt_len]


def run(engine: Any) -> dict[str, Any]:
    """Step until idle; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    return last


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_C2_every_length_around_every_chunk_size(make_engine: Any, tiny: Any, chunk: int) -> None:
    """Prompts of 1, c-1, c, c+1, 2c-1, 2c, 2c+1 tokens, blocks of 4: equal to generate()."""
    lengths = {1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1} - {0}
    prompts = [prompt_of(n, first=n) for n in sorted(lengths)]
    engine = make_engine(max_prefill_chunk_size=chunk)
    engine.model_runner.kv_cache.pool.fill_(float("nan"))
    outputs = engine.generate(prompts, greedy(5), use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == reference_tokens(tiny.model, prompt, 5), (
            f"prompt of {len(prompt)}"
        )
    most = max(len(chunks_of(engine, o.request_id, len(o.prompt_token_ids))) for o in outputs)
    assert most == -(-(2 * chunk + 1) // chunk) == 3 or chunk == 1


def test_C1_chunks_see_no_further_than_their_own_end(make_engine: Any, tiny: Any) -> None:
    """Prompt 10, chunk 4: contexts 4, 8, 10, over a pool that is NaN wherever nobody wrote."""
    engine = make_engine(max_prefill_chunk_size=4)
    engine.model_runner.kv_cache.pool.fill_(float("nan"))
    prompt = prompt_of(10)
    output = engine.generate([prompt], greedy(6), use_tqdm=False)[0]
    assert chunks_of(engine, output.request_id, 10) == [(0, 4), (4, 4), (8, 2)]
    assert output.token_ids == reference_tokens(tiny.model, prompt, 6)


def test_C3_a_chunk_that_ends_inside_a_block(tiny: Any, stage: ModuleType) -> None:
    """Blocks of 16, chunks of 1,000: the second chunk goes on in block 62 at offset 8."""
    model, tokenizer = tiny
    context = model.config.max_position_embeddings
    length = min(2100, context - 8)
    chunk = 1000 if length > 2000 else length // 2 - length // 2 % 16 + 8
    assert chunk % 16 == 8
    engine = stage.LLMEngine(
        model=tiny, block_size=16, num_blocks=160, max_prefill_chunk_size=chunk
    )
    prompt = prompt_of(length)
    output = engine.generate([prompt], greedy(4), use_tqdm=False)[0]
    chunks = chunks_of(engine, output.request_id, length)
    assert len(chunks) == -(-length // chunk) >= 2 and chunks[1][0] % 16 == 8
    assert output.token_ids == reference_tokens(tiny.model, prompt, 4)


def test_C4_sampling_is_not_touched_by_chunks(make_engine: Any) -> None:
    """Seed 1, temperature 1, prompt 12: the same text for chunks of 4, 5 and 12."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    outputs, num_chunks = [], []
    for chunk in (4, 5, 12):
        engine = make_engine(max_prefill_chunk_size=chunk)
        outputs.append(engine.generate([prompt_of(12)], params, use_tqdm=False)[0])
        num_chunks.append(len(chunks_of(engine, outputs[-1].request_id, 12)))
    assert num_chunks == [3, 3, 1]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


def test_C4_intermediate_chunks_put_nothing_out(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    request_id = engine.add_request(prompt_of(12), greedy(2))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert [step.sampled for step in engine.trace.steps] == [[], [], [request_id], [request_id]]


def test_C9_five_chunks_of_three_requests_at_once(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=3, max_num_batched_tokens=10)
    prompts = [prompt_of(14, 1), prompt_of(15, 2), prompt_of(13, 3)]
    outputs = engine.generate(prompts, greedy(8), use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert len(chunks_of(engine, output.request_id, len(prompt))) >= 5
        assert output.token_ids == reference_tokens(tiny.model, prompt, 8)
    assert any(len(step.slices) == 3 for step in engine.trace.steps)


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
    outputs = engine.generate(prompts, greedy(14), use_tqdm=False)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["hit_tokens"] > 0
    assert any(len({n > 1 for _, _, n in step.slices}) == 2 for step in engine.trace.steps)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == reference_tokens(tiny.model, prompt, 14)


# ---------------------------------------------------------------- slices, budgets, order


def test_C5_three_chunks_of_four(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    output = engine.generate([prompt_of(12)], greedy(1), use_tqdm=False)[0]
    assert slices_of(engine, output.request_id) == [(0, 4), (4, 4), (8, 4)]


def test_C5_chunks_cover_what_the_cache_does_not(stage: ModuleType) -> None:
    """12,000 tokens, 8,000 of them cached, chunks of 1,000: exactly four (no model needed)."""
    scheduler = make_scheduler(stage, num_blocks=1600, block_size=16, max_prefill_chunk_size=1000)
    base = list(range(8000))
    first = new_sequence(stage, "first", base)
    scheduler.add(first)
    while first.status.value != "running":
        batch = scheduler.schedule()
        scheduler.commit(batch, [1] * len(batch.sampling))
    scheduler.finish(first, "length")
    long = new_sequence(stage, "long", [*base, *range(8000, 12000)])
    scheduler.add(long)
    slices = []
    while long.status.value != "running":
        batch = scheduler.schedule()
        slices += [(s.start_pos, s.num_tokens) for s in batch.slices]
        scheduler.commit(batch, [1] * len(batch.sampling))
    assert slices == [(8000, 1000), (9000, 1000), (10000, 1000), (11000, 1000)]
    assert long.num_hit_tokens == 8000


def test_B12_a_cached_prefix_leaves_the_budget_alone(make_engine: Any) -> None:
    """Budget 4, prompt of 12 with 8 cached: one step."""
    engine = make_engine(max_num_batched_tokens=4)
    base = prompt_of(8)
    engine.generate([[*base, 1]], greedy(1), use_tqdm=False)
    output = engine.generate([[*base, 7, 7, 7, 7]], greedy(1), use_tqdm=False)[0]
    assert slices_of(engine, output.request_id) == [(8, 4)]


def test_B3_a_chunk_publishes_full_blocks_only(make_engine: Any) -> None:
    """Chunk 3, blocks of 4: after one chunk block 0 is 3/4 full and must not be found."""
    engine = make_engine(max_prefill_chunk_size=3, max_num_batched_tokens=3)
    prompt = prompt_of(9)
    engine.add_request(prompt, greedy(1))
    engine.step()
    assert engine.stats()["cached_blocks"] == 0
    engine.step()
    assert engine.stats()["cached_blocks"] == 1


def test_C6_a_lone_half_done_prompt_is_unfinished_work(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    request_id = engine.add_request(prompt_of(12), greedy(1))
    engine.step()
    assert engine.progress(request_id)["state"] == "prefilling"
    assert engine.has_unfinished_requests()


def test_progress_tells_the_inside_from_the_outside(make_engine: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    request_id = engine.add_request(prompt_of(10), greedy(3))
    seen = [engine.progress(request_id)]
    for _ in range(3):
        engine.step()
        seen.append(engine.progress(request_id))
    fields = ("state", "prefilled_tokens", "prompt_tokens", "generated_tokens", "blocks_held")
    assert [tuple(p[name] for name in fields) for p in seen] == [
        ("waiting", 0, 10, 0, 0),
        ("prefilling", 4, 10, 0, 1),
        ("prefilling", 8, 10, 0, 2),
        ("running", 10, 10, 1, 3),
    ]
    assert 0 < seen[1]["seconds"] < seen[3]["seconds"]
    assert engine.stats()["prefilling"] == 0 and engine.stats()["running"] == 1
    run(engine)
    assert engine.progress(request_id) is None


def test_blocks_are_allocated_chunk_by_chunk_or_all_at_once(make_engine: Any) -> None:
    held = {}
    for reserve in (False, True):
        engine = make_engine(max_prefill_chunk_size=4, reserve_full_prompt=reserve)
        engine.add_request(prompt_of(16), greedy(1))
        held[reserve] = []
        for _ in range(3):
            engine.step()
            held[reserve].append(64 - engine.block_manager.num_free_blocks)
    assert held == {False: [1, 2, 3], True: [4, 4, 4]}


def test_S4_a_short_prompt_overtakes_and_streams_go_on(make_engine: Any) -> None:
    """Ten chunks of a long prompt; a 2-token prompt behind it starts early; decodes never pause."""
    engine = make_engine(max_prefill_chunk_size=4, max_num_batched_tokens=8)
    stream = engine.add_request(prompt_of(3), greedy(40))
    engine.step()
    long, short = (
        engine.add_request(prompt_of(40, 2), greedy(1)),
        engine.add_request([5, 6], greedy(1)),
    )
    run(engine)
    steps = engine.trace.steps[1:]
    first_token = {
        name: next(s.index for s in steps if name in s.sampled) for name in (long, short)
    }
    assert first_token[short] < first_token[long]
    during = [step for step in steps if step.index <= first_token[long]]
    assert len(during) == 10
    assert all(stream in step.sampled for step in during), "a stream missed a step"


def test_between_two_tokens_never_more_than_the_budget(make_engine: Any) -> None:
    """Design invariant 8, with prompts arriving all the time."""
    engine = make_engine(max_prefill_chunk_size=6, max_num_batched_tokens=10)
    for i in range(12):
        engine.add_request(prompt_of(5 + 3 * i, i), greedy(10))
        engine.step()
    run(engine)
    assert max(step.num_tokens for step in engine.trace.steps) <= 10
    assert sum(step.num_tokens for step in engine.trace.steps) > 12 * 10


def test_S3_partial_prefills_fill_the_pool(make_engine: Any, tiny: Any) -> None:
    """N=6, two prompts of 16 in chunks of 4: the oldest takes blocks from the youngest."""
    engine = make_engine(num_blocks=6, max_prefill_chunk_size=4, max_num_batched_tokens=8)
    prompts = [prompt_of(16, 1), prompt_of(16, 2)]
    outputs = engine.generate(prompts, greedy(4), use_tqdm=False)
    assert engine.stats()["preemptions"] > 0
    lost = next(step for step in engine.trace.steps if step.preempted)
    assert lost.preempted == [outputs[1].request_id], "the oldest must not be the one that pays"
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == reference_tokens(tiny.model, prompt, 4)


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
    advanced, preempted = [], []
    for _ in range(4):
        before = old.cached_token_count
        batch = scheduler.schedule()
        scheduler.commit(batch, [1] * len(batch.sampling))
        advanced.append(old.cached_token_count - before)
        preempted.append(batch.preempted)
    assert advanced == [4, 4, 4, 1]
    assert young.status.value == "waiting" and young.block_table == []
    assert preempted == [[], [], [young], []]
    assert [s.sequence for s in batch.slices] == [old], "the slice of one that gave way is gone"


def test_S5_the_budget_is_all_decodes(make_engine: Any, tiny: Any) -> None:
    """Budget 2 with three requests, and budget equal to the number of decodes: nobody is lost."""
    for budget in (2, 3):
        engine = make_engine(max_num_batched_tokens=budget)
        prompts = [prompt_of(3, 1), prompt_of(2, 2), prompt_of(4, 3), prompt_of(1, 4)]
        outputs = engine.generate(prompts, greedy(6), use_tqdm=False)
        assert max(step.num_tokens for step in engine.trace.steps) == budget
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.token_ids == reference_tokens(tiny.model, prompt, 6)


def test_decode_share_leaves_room_for_prompts(stage: ModuleType) -> None:
    """Share 0.5 of 8 tokens: four of seven streams decode, in turn, while a prompt is under way."""
    options = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 8}
    scheduler = make_scheduler(stage, max_decode_share=0.5, **options)
    streams = [new_sequence(stage, f"s{i}", [i]) for i in range(7)]
    for sequence in streams:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    scheduler.commit(batch, [1] * len(batch.sampling))
    batch = scheduler.schedule()
    assert len(batch.slices) == 7, "no prompt waits: the cap must not bite"
    scheduler.commit(batch, [1] * 7)
    scheduler.add(new_sequence(stage, "long", list(range(20))))
    tokens, turns = [], {sequence.request_id: [] for sequence in streams}
    for step in range(5):
        batch = scheduler.schedule()
        tokens.append([s.num_tokens for s in batch.slices])
        for s in batch.slices[:4]:
            turns[s.sequence.request_id].append(step)
        scheduler.commit(batch, [1] * len(batch.sampling))
    assert tokens == [[1, 1, 1, 1, 4]] * 5
    gaps = [b - a for steps in turns.values() for a, b in zip(steps, steps[1:], strict=False)]
    assert sum(map(len, turns.values())) == 20 and max(gaps) == 2, f"unfair turns: {turns}"


def test_an_odd_share_still_decodes(stage: ModuleType) -> None:
    scheduler = make_scheduler(
        stage, num_blocks=64, block_size=4, max_num_batched_tokens=4, max_decode_share=0.01
    )
    one, two = new_sequence(stage, "one", [1]), new_sequence(stage, "two", list(range(12)))
    scheduler.add(one), scheduler.add(two)
    batch = scheduler.schedule()
    scheduler.commit(batch, [1] * len(batch.sampling))
    batch = scheduler.schedule()
    assert [s.sequence for s in batch.slices] == [one, two]


# ---------------------------------------------------------------- states


def test_the_state_machine(stage: ModuleType) -> None:
    """WAITING to PREFILLING to PREFILLING to RUNNING, and WAITING straight to RUNNING."""
    scheduler = make_scheduler(stage, num_blocks=64, block_size=4, max_prefill_chunk_size=4)
    long, short = new_sequence(stage, "long", list(range(10))), new_sequence(stage, "short", [1, 2])
    scheduler.add(long), scheduler.add(short)
    states = [(long.status.value, short.status.value, long.prefilled_token_count)]
    for _ in range(4):
        batch = scheduler.schedule()
        scheduler.commit(batch, [1] * len(batch.sampling))
        states.append((long.status.value, short.status.value, long.prefilled_token_count))
    assert states == [
        ("waiting", "waiting", 0),
        ("prefilling", "running", 4),
        ("prefilling", "running", 8),
        ("running", "running", 10),
        ("running", "running", 10),
    ]
    assert long.cached_token_count == 11 and long.generated_token_ids == [1, 1]
    scheduler.finish(long, "stop")
    assert (long.status.value, long.finish_reason, long.block_table) == ("finished", "stop", [])


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_A1_abort_in_every_state(make_engine: Any, num_steps: int) -> None:
    """Waiting, after chunk 1, after chunk 2 (with a shared prefix), running."""
    engine = make_engine(max_prefill_chunk_size=4)
    base = prompt_of(4)
    engine.generate([[*base, 1]], greedy(1), use_tqdm=False)
    request_id = engine.add_request([*base, *prompt_of(9, 77)], greedy(9))
    for _ in range(num_steps):
        engine.step()
    state = engine.progress(request_id)["state"]
    assert state == ["waiting", "prefilling", "prefilling", "running", "running"][num_steps]
    assert engine.abort_request(request_id)
    assert not engine.abort_request(request_id)
    assert engine.block_manager.num_free_blocks == 64
    assert [(o.finish_reason, o.finished) for o in engine.step()] == [("abort", True)]
    assert not engine.has_unfinished_requests()


def test_C7_one_token_and_an_eos_after_chunks(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4)
    stream = engine.add_request(prompt_of(3), greedy(12))
    engine.step()
    one = engine.add_request(prompt_of(11, 5), greedy(1))
    first = reference_tokens(tiny.model, prompt_of(12, 6), 1)[0]
    eos = engine.add_request(
        prompt_of(12, 6), SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[first])
    )
    last = run(engine)
    assert last[one].finish_reason == "length" and len(last[one].token_ids) == 1
    assert last[eos].finish_reason == "stop" and last[eos].token_ids == [first]
    assert last[stream].token_ids == reference_tokens(tiny.model, prompt_of(3), 12)
    assert len(chunks_of(engine, eos, 12)) == 3
    assert engine.block_manager.num_free_blocks == 64


def test_A3_a_failing_chunk_takes_its_batch_only(make_engine: Any, tiny: Any) -> None:
    engine = make_engine(max_prefill_chunk_size=4, max_num_seqs=2)
    doomed = [engine.add_request(prompt_of(10, i), greedy(4)) for i in range(2)]
    saved = engine.add_request(prompt_of(10, 9), greedy(4))
    engine.step()
    real = engine.model_runner.run

    def fail(batch: Any) -> Any:
        engine.model_runner.run = real
        raise RuntimeError("no luck")

    engine.model_runner.run = fail
    assert [o.finish_reason for o in engine.step()] == ["error", "error"]
    assert engine.block_manager.num_free_blocks == 64
    last = run(engine)
    assert doomed[0] not in last
    assert last[saved].token_ids == reference_tokens(tiny.model, prompt_of(10, 9), 4)


def test_S8_half_done_prompts_take_seats(make_engine: Any) -> None:
    engine = make_engine(max_num_seqs=2, max_prefill_chunk_size=2, max_num_batched_tokens=8)
    engine.trace.record_blocks = True
    for i in range(4):
        engine.add_request(prompt_of(7, i), greedy(3))
    run(engine)
    holders = [sum(bool(t) for t in step.block_tables.values()) for step in engine.trace.steps]
    assert max(holders) == 2
    assert any(step.num_prefilling == 2 for step in engine.trace.steps)


# ---------------------------------------------------------------- by hand, and by time


def test_run_prefill_chunk_by_hand(make_engine: Any, tiny: Any, stage: ModuleType) -> None:
    """The article's entry: chunk by chunk, logits only from the last."""
    engine = make_engine()
    prompt = prompt_of(10)
    sequence = new_sequence(stage, "by hand", prompt)
    results = []
    for start_pos in (0, 4, 8):
        chunk = prompt[start_pos : start_pos + 4]
        engine.block_manager.allocate(sequence, start_pos + len(chunk))
        results.append(engine.model_runner.run_prefill_chunk(sequence, chunk, start_pos))
        sequence.cached_token_count = start_pos + len(chunk)
    assert results[0] is None and results[1] is None
    assert results[2].shape == (engine.model_runner.shape.vocab_size,)
    assert int(torch.argmax(results[2])) == reference_tokens(tiny.model, prompt, 1)[0]
    with pytest.raises(ValueError, match="do not stand at 4..8"):
        engine.model_runner.run_prefill_chunk(sequence, prompt[:4], 4)
    with pytest.raises(ValueError, match="do not stand at 4..4"):
        engine.model_runner.run_prefill_chunk(sequence, [], 4)
    engine.block_manager.free(sequence)


def test_target_step_ms_shortens_late_chunks(stage: ModuleType) -> None:
    """Time = 1 ms + 10 us a token + 2 ns a token of context; the target is 5 ms a step."""
    from shared.step_time import StepTimeModel, work

    scheduler = make_scheduler(
        stage, num_blocks=600, block_size=16, max_prefill_chunk_size=512, target_step_ms=5.0
    )
    scheduler.step_time = StepTimeModel()
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
    assert long.status.value == "running"
    assert max(times) <= 5e-3 * 1.01, f"a step took {max(times) * 1e3:.2f} ms"
    learnt = chunks.index(max(chunks))
    assert chunks[-2] < 0.6 * chunks[learnt], f"late chunks must be shorter: {chunks}"
    assert min(times[20:-1]) > 4e-3, "the target must be used, not only kept"


# ---------------------------------------------------------------- helpers


def make_scheduler(stage: ModuleType, num_blocks: int, block_size: int, **options: Any) -> Any:
    """A scheduler without an engine."""
    config = stage.EngineConfig(
        block_size=block_size, num_blocks=num_blocks, max_model_len=1_000_000, **options
    )
    modules = [
        importlib.import_module(f"{stage.__name__}.{name}")
        for name in ("scheduler", "block_manager")
    ]
    return modules[0].Scheduler(config, modules[1].BlockManager(num_blocks, block_size))


def new_sequence(stage: ModuleType, request_id: str, token_ids: list[int]) -> Any:
    module = importlib.import_module(f"{stage.__name__}.sequence")
    return module.Sequence(request_id, token_ids, 100)
