"""Greedy tokens are those of `generate()`, whatever company a request has (design invariant 5)."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from shared.models.tiny import build_tiny_model
from tests.reference import reference_tokens

from .helpers import (
    MakeEngine,
    check_idle,
    check_reference,
    collect,
    compare_with_generate,
    drain,
    expect,
    greedy,
    make_prompt,
    poison_cache,
    preempted,
    run,
)

LENGTHS = [1, 2, 4, 7, 16, 33]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_greedy_tokens_equal_generate(make_engine: MakeEngine, tiny: Any, block_size: int) -> None:
    engine = make_engine(block_size=block_size, num_blocks=6 + 240 // block_size)
    outputs = run(engine, [make_prompt(n) for n in LENGTHS], greedy(12))
    assert any(len(step.slices) == len(LENGTHS) for step in engine.trace.steps), "never batched"
    for output in outputs:
        check_reference(output, tiny, 12, engine)


def test_greedy_tokens_do_not_depend_on_who_comes_and_goes(
    make_engine: MakeEngine, tiny: Any
) -> None:
    """Arrivals, ends and aborts between any two steps, in a pool that is too small for all."""
    engine = make_engine(num_blocks=12, max_num_seqs=4)
    choose = random.Random(0)
    outputs: dict[str, list] = {}
    expected = {}
    for n in range(24):
        length, num_tokens = choose.choice(LENGTHS[:5]), choose.randint(1, 12)
        request_id = engine.add_request(make_prompt(length), greedy(num_tokens))
        expected[request_id] = num_tokens
        for _ in range(choose.randint(0, 4)):
            collect(engine.step(), outputs)
        if n % 6 == 5:
            engine.abort_request(request_id)
    drain(engine, outputs)
    assert preempted(engine), "the pool was not small enough: nobody was preempted"
    finished = [last[-1] for last in outputs.values() if last[-1].finish_reason == "length"]
    assert len(finished) >= 20, f"of 24 requests, 4 of them aborted, {len(finished)} finished"
    for output in finished:
        check_reference(output, tiny, expected[output.request_id], engine)


def test_B4_twins_in_one_batch(make_engine: MakeEngine, tiny: Any) -> None:
    """The same prompt twice, and a third that shares its first block only."""
    twin = make_prompt(9)
    engine = make_engine()
    for output in run(engine, [twin, twin, twin[:4] + make_prompt(5, seed=1)], greedy(8)):
        check_reference(output, tiny, 8, engine)


def test_text_prompts(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    text = "The quick brown fox"
    [by_text] = engine.generate(text, greedy(8), use_tqdm=False)
    [by_ids] = engine.generate([tiny[1].encode(text)], greedy(8), use_tqdm=False)
    ids = tiny[1].encode(text)
    for output in (by_text, by_ids):
        expect(output.prompt_token_ids, ids, f"prompt_token_ids of {output.request_id!r}.", engine)
    expect(by_text.token_ids, by_ids.token_ids, "tokens of the prompt as text, as by ids.", engine)
    decoded = tiny[1].decode(by_text.token_ids, skip_special_tokens=True)
    expect(by_text.text, decoded, f"the text of {by_text.request_id!r}.", engine)
    check_reference(by_text, tiny, 8, engine)


def test_engines_that_share_a_model(make_engine: MakeEngine, tiny: Any) -> None:
    """Two engines take turns on one model, and somebody else uses it in between."""
    engines = [make_engine(block_size=4), make_engine(block_size=16)]
    outputs: list[dict[str, list]] = [{}, {}]
    for n, engine in enumerate(engines):
        engine.add_request(make_prompt(7, seed=n), greedy(8))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, seen in zip(engines, outputs, strict=True):
            collect(engine.step(), seen)
        tiny[0].set_attn_implementation("sdpa")
    for engine, seen in zip(engines, outputs, strict=True):
        [[*_, last]] = seen.values()
        check_reference(last, tiny, 8, engine)


@pytest.mark.parametrize("scaling", [None, 1.0])
def test_the_model_says_how_its_scores_are_scaled(stage: ModuleType, scaling: float | None) -> None:
    """None is head_dim ** -0.5, which is what these models say themselves."""
    model, usual = build_tiny_model(), build_tiny_model()
    engine = stage.LLMEngine((model, None), block_size=4, num_blocks=64)
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling
    for output in run(engine, [make_prompt(n) for n in (5, 12)], greedy(8)):
        assert compare_with_generate(output, usual if scaling is None else model, 8) > 4
        is_usual = output.token_ids == reference_tokens(usual, output.prompt_token_ids, 8)
        assert is_usual == (scaling is None), "does the scaling not show?"


def test_B2_a_reused_block_has_lost_its_old_content(make_engine: MakeEngine, tiny: Any) -> None:
    """Two blocks: A uses both, X takes both, A again must find nothing of its own."""
    engine = make_engine(num_blocks=2)
    for seed in (0, 1, 0):
        [output] = run(engine, [make_prompt(5 if seed == 0 else 7, seed)], greedy(1))
        check_reference(output, tiny, 1, engine)
        assert output.metrics.num_cached_tokens == 0, (
            f"{output.metrics.num_cached_tokens} prompt tokens were taken from blocks that another "
            "request had overwritten"
        )


def test_B13_generate_again_on_one_engine(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    prompts = [make_prompt(n) for n in (7, 1, 16)]
    lengths = (6, 2, 4)  # the first ends last
    for _ in range(2):
        outputs = engine.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts, "not in input order"
        for output, num_tokens in zip(outputs, lengths, strict=True):
            check_reference(output, tiny, num_tokens, engine)
        check_idle(engine)
    expect(engine.generate([], use_tqdm=False), [], "generate() of no prompts.", engine)


def test_B13_an_id_may_be_used_again(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    for length in (5, 9):
        request_id = engine.add_request(make_prompt(length), greedy(4), request_id="again")
        expect(request_id, "again", "the id that add_request returns for request_id='again'.")
        [[*_, last]] = drain(engine).values()
        prompt = make_prompt(length)
        expect(last.prompt_token_ids, prompt, "the prompt of the later request 'again'.", engine)
        check_reference(last, tiny, 4, engine)


def test_K2_slots_that_were_never_written_do_not_matter(make_engine: MakeEngine, tiny: Any) -> None:
    """The cache is full of NaN; one read too many, even with weight zero, and the output is NaN."""
    engine = make_engine(num_blocks=24)
    poison_cache(engine)
    for output in run(engine, [make_prompt(n) for n in (1, 3, 4, 5, 7, 9)], greedy(9)):
        check_reference(output, tiny, 9, engine)


@pytest.mark.parametrize("length", [10, 22, 23])
def test_K5_up_to_the_last_position(make_engine: MakeEngine, tiny: Any, length: int) -> None:
    """Prompt and output fill `max_model_len` exactly."""
    engine = make_engine(max_model_len=24)
    beside = engine.add_request(make_prompt(3), greedy(20))
    filling = engine.add_request(make_prompt(length), greedy(24 - length))
    outputs = drain(engine)
    check_reference(outputs[filling][-1], tiny, 24 - length, engine)
    check_reference(outputs[beside][-1], tiny, 20, engine)


def test_K5_up_to_the_model_s_last_position(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(block_size=16, max_num_batched_tokens=1024)
    context = engine.config.max_model_len
    positions = tiny[0].config.max_position_embeddings
    expect(context, positions, "config.max_model_len, when the option is None.")
    [output] = run(engine, [make_prompt(context - 3)], greedy(3))
    check_reference(output, tiny, 3, engine)


@pytest.mark.model
def test_greedy_tokens_equal_generate_on_a_real_model(stage: ModuleType, smollm2: Any) -> None:
    """20 prompts at once, in a pool so small that requests are preempted."""
    num_tokens = 12
    engine = stage.LLMEngine(model=smollm2, block_size=4, num_blocks=32, max_num_seqs=8)
    outputs = run(engine, [smollm2.tokenizer.encode(text) for text in TEXTS], greedy(num_tokens))
    assert preempted(engine), "the pool was not small enough: nobody was preempted"
    compared = [compare_with_generate(output, smollm2.model, num_tokens) for output in outputs]
    assert sum(compared) >= 0.95 * num_tokens * len(TEXTS), f"too many near ties: {compared}"
    check_idle(engine)


TEXTS = """\
The capital of France is
Water boils at
Once upon a time there was a
The three primary colours are
def fibonacci(n):
To make a cup of tea, first
In 1969, people landed on the
The opposite of hot is
A triangle has three
Photosynthesis is the process by which
My favourite animal is the
The largest planet in our solar system is
Two plus two equals
Shakespeare wrote
The quick brown fox jumps over
Good morning, how are
One, two, three, four,
The river Nile flows through
Music is made of
If it rains tomorrow, we""".splitlines()
