"""Stages with a prefix cache, as whole engines: `from tests.contract.prefix_cache import *`.

What is found, and that nothing else changes: the tokens of every request are those it gets cold.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from shared import SamplingParams
from tests.reference import reference_tokens

from .helpers import (
    check_idle,
    check_tokens,
    collect,
    describe,
    drain,
    expect,
    failing,
    greedy,
    make_prompt,
    run,
)


def cold(make_engine: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The same request alone, on a fresh engine without a cache."""
    engine = make_engine(enable_prefix_caching=False)
    return run(engine, [prompt], greedy(max_tokens))[0].token_ids


def check_hit(output: Any, num_tokens: int, why: str, engine: Any) -> None:
    """Assert how many prompt tokens of a request were found in the cache."""
    expect(
        output.metrics.num_cached_tokens,
        num_tokens,
        f"num_cached_tokens of request {output.request_id!r}, {len(output.prompt_token_ids)} "
        f"prompt tokens: {why}.",
        engine,
    )


@pytest.mark.parametrize("length", [4, 8])
def test_B1_full_hit_on_a_block_boundary(make_engine: Any, length: int) -> None:
    engine = make_engine()
    prompt = list(range(10, 10 + length))
    other = [99, 98, 97]
    expected = cold(make_engine, prompt, 6)
    check_tokens(run(engine, [prompt], greedy(6))[0], expected, engine)
    again, beside = run(engine, [prompt, other], greedy(6))
    check_tokens(again, expected, engine)
    check_tokens(beside, cold(make_engine, other, 6), engine)
    check_hit(again, length - 4, "all is cached, and its last token is computed anyway", engine)


@pytest.mark.parametrize("length", [4, 8])
def test_B1_full_hit_beside_its_reader(make_engine: Any, length: int) -> None:
    """The same prompt comes again while the first still decodes."""
    engine = make_engine()
    prompt = list(range(10, 10 + length))
    expected = cold(make_engine, prompt, 12)
    ids, outputs = [], {}  # type: list[str], dict[str, list]
    for num_tokens in (12, 6):
        ids.append(engine.add_request(prompt, greedy(num_tokens)))
        for _ in range(3):
            collect(engine.step(), outputs)
    assert any(len(step.slices) == 2 for step in engine.trace.steps), "they never ran together"
    drain(engine, outputs)
    first, again = (outputs[request_id][-1] for request_id in ids)
    check_tokens(first, expected, engine)
    check_tokens(again, expected[:6], engine)
    check_hit(again, length - 4, "all is cached, and its last token is computed anyway", engine)


@pytest.mark.parametrize("length", [4, 8])
def test_B1_a_cached_block_is_not_written_again(make_engine: Any, length: int) -> None:
    """A mark in the cached blocks is still there when the same prompt has been computed again."""
    engine = make_engine()
    engine.trace.record_blocks = True
    prompt = list(range(10, 10 + length))
    run(engine, [prompt], greedy(2))
    [table] = engine.trace.steps[0].block_tables.values()
    blocks, pool = table[: length // 4], engine.model_runner.kv_cache.pool
    pool[:, :, blocks] = 7.0
    [again] = run(engine, [prompt], greedy(2))
    check_hit(again, length - 4, "all is cached, and its last token is computed anyway", engine)
    assert (pool[:, :, blocks] == 7.0).all(), (
        f"one of the blocks {blocks}, which others may be reading, was written again"
    )


@pytest.mark.parametrize("scheduled", [False, True])
def test_B3_an_aborted_twin_is_not_found(make_engine: Any, tiny: Any, scheduled: bool) -> None:
    """Aborted before its first step, and after one that was interrupted in the forward."""
    engine = make_engine()
    prompt = list(range(10, 19))
    request_id = engine.add_request(prompt, greedy(3))
    if scheduled:
        with failing(tiny.model, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            engine.step()
    held = 64 - engine.block_manager.num_free_blocks
    expect(held, 3 * scheduled, "blocks of a request of 9 tokens that waits, or was scheduled.")
    expect(engine.abort_request(request_id), True, f"abort_request({request_id!r}).")
    output = run(engine, [prompt], greedy(3))[0]
    check_hit(output, 0, "its twin was aborted before it was computed", engine)
    check_tokens(output, cold(make_engine, prompt, 3), engine)


def test_B3_a_failed_forward_publishes_nothing(make_engine: Any, tiny: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 19))
    with failing(tiny.model, RuntimeError("no luck")):
        [failed] = run(engine, [prompt], greedy(3))
    expect(failed.finish_reason, "error", "how a request ends whose forward raised.", engine)
    output = run(engine, [prompt], greedy(3))[0]
    check_hit(output, 0, "the forward of its twin failed, so its blocks are half written", engine)
    check_tokens(output, cold(make_engine, prompt, 3), engine)


def test_B4_twins_and_a_relative(make_engine: Any) -> None:
    engine = make_engine()
    twin, relative = list(range(10, 19)), [*range(10, 14), 3, 3, 3, 3, 3]
    for output in run(engine, [twin, twin, relative], greedy(9)):
        check_tokens(output, cold(make_engine, output.prompt_token_ids, 9), engine)
    [again] = run(engine, [twin], greedy(9))
    check_hit(again, 8, "both full blocks of its prompt are cached", engine)


def test_a_block_is_found_behind_each_of_two_prefixes(make_engine: Any) -> None:
    """A hash covers all that comes before: equal first and last blocks are not enough."""
    engine = make_engine()
    first, last = list(range(10, 14)), list(range(30, 34))
    for middle in ([1, 2, 3, 4], [5, 6, 7, 8]):
        prompt = [*first, *middle, *last, 9]
        run(engine, [prompt], greedy(1))
        again = run(engine, [prompt], greedy(1))[0]
        check_hit(again, 12, f"it was served before; its second block is {middle}", engine)


def test_B11_a_preempted_request_finds_its_own_blocks(make_engine: Any) -> None:
    engine = make_engine(num_blocks=9)
    prompts = [list(range(10, 19)), list(range(30, 39))]
    outputs = run(engine, prompts, greedy(9))
    steps = engine.trace.steps
    lost = next((step for step in steps if step.preempted), None)
    assert lost, "9 blocks of 4 hold both requests of 18 tokens? Nobody was preempted."
    for output in outputs:
        check_tokens(output, cold(make_engine, output.prompt_token_ids, 9), engine)
        check_hit(output, 0, "finding its own blocks again is no hit", engine)
    restart = next(
        (start_pos, num_tokens)
        for step in steps[lost.index :]
        for request_id, start_pos, num_tokens in step.slices
        if request_id == lost.preempted[0]
    )
    expect(
        restart,
        (16, 1),
        f"start_pos and num_tokens of the slice with which {lost.preempted[0]!r} goes on. It was "
        f"preempted in {describe(lost)}. Its four full blocks, of prompt and output, were still "
        "there, so only the token behind them is computed.",
        engine,
    )


def test_A1_abort_of_one_that_shares(make_engine: Any) -> None:
    """Two requests hold the same two blocks; whichever is aborted, the other keeps them."""
    base = list(range(10, 18))
    for aborted in (0, 1):
        engine = make_engine()
        ids, outputs = [], {}  # type: list[str], dict[str, list]
        for own in ([1], [2, 3]):
            ids.append(engine.add_request([*base, *own], greedy(8)))
            collect(engine.step(), outputs)
        free = engine.block_manager.num_free_blocks
        expect(free, 60, "free blocks of 64: two are shared, and each has one more.", engine)
        expect(engine.abort_request(ids[aborted]), True, f"abort_request({ids[aborted]!r}).")
        free = engine.block_manager.num_free_blocks
        expect(free, 61, f"free blocks of 64 when {ids[aborted]!r} was aborted: its own.", engine)
        drain(engine, outputs)
        expect(outputs[ids[aborted]][-1].finish_reason, "abort", "the reason of the aborted one.")
        other = outputs[ids[1 - aborted]][-1]
        check_tokens(other, cold(make_engine, other.prompt_token_ids, 8), engine)


def test_B12_the_budget_is_charged_after_the_lookup(make_engine: Any) -> None:
    """Two prompts of 12 tokens, 8 of them cached, share a step of at most 12 tokens."""
    engine = make_engine(max_num_batched_tokens=12)
    base = list(range(10, 18))
    run(engine, [[*base, 1]], greedy(1))
    steps = len(engine.trace.steps)
    run(engine, [[*base, 2, 2, 2, 2], [*base, 3, 3, 3, 3]], greedy(1))
    expect(
        [s[1:] for s in engine.trace.steps[steps].slices],
        [(8, 4), (8, 4)],
        f"slices (start_pos, num_tokens) of step {steps}, budget 12, two prompts of 12 tokens of "
        "which 8 are cached: only what is computed counts, so both fit.",
        engine,
    )


def test_hits_are_counted_once(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 22))
    run(engine, [prompt], greedy(2))
    output = run(engine, [prompt], greedy(2))[0]
    stats = engine.stats()
    check_hit(output, 8, "two of its three blocks; the last token is computed anyway", engine)
    counts = (stats["prompt_tokens"], stats["hit_tokens"])
    expect(counts, (24, 8), "prompt_tokens and hit_tokens in stats() after the same prompt twice.")
    assert stats["cached_blocks"] > 0, f"nothing is findable after two requests: {stats}"
    reset = engine.reset_prefix_cache()
    expect(reset, stats["cached_blocks"], "what reset_prefix_cache returns: all findable blocks.")
    expect(engine.stats()["cached_blocks"], 0, "findable blocks after the reset.")
    expect(engine.stats()["evictions"], 0, "evictions: nothing was taken for another request.")
    again = run(engine, [prompt], greedy(2))[0]
    check_hit(again, 0, "the cache was reset", engine)
    check_tokens(again, output.token_ids, engine)


def test_salted_requests_share_with_their_own_only(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 22))
    for salt, wanted in (("a", 0), ("b", 0), ("a", 8)):
        request_id = engine.add_request(prompt, greedy(1), cache_salt=salt)
        outputs = [o for _ in range(3) for o in engine.step() if o.request_id == request_id]
        check_hit(outputs[-1], wanted, f"cache_salt {salt!r}, after 'a', 'b' so far", engine)


@pytest.mark.parametrize("salt", [None, 5, b"a", ["a"], "\ud800"])
def test_a_salt_that_cannot_be_hashed(make_engine: Any, salt: Any) -> None:
    engine = make_engine()
    with pytest.raises(ValueError if isinstance(salt, str) else TypeError, match="cache_salt"):
        engine.add_request(list(range(10, 22)), greedy(1), cache_salt=salt)
    check_idle(engine)


def test_caching_can_be_switched_off(make_engine: Any) -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = list(range(10, 22))
    run(engine, [prompt], greedy(2))
    [again] = run(engine, [prompt], greedy(2))
    check_hit(again, 0, "enable_prefix_caching is False", engine)
    expect(engine.stats()["cached_blocks"], 0, "findable blocks with enable_prefix_caching=False.")


def chat(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    """The prompt of a chat: what each role said."""
    turns = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_next_turn_of_a_chat_hits_the_answer(make_engine: Any, tiny: Any) -> None:
    """Generated tokens are cached as they fill blocks; a real chat template frames them."""
    engine = make_engine()
    first = chat(tiny[1], ("user", "Say something long."))
    answer = run(engine, [first], greedy(21))[0]
    # The second turn as token ids: text that a random model invents may tokenise differently.
    second = [*first, *answer.token_ids, *chat(tiny[1], ("user", "Go on."))]
    output = run(engine, [second], greedy(3))[0]
    in_cache = len(first) + 20  # the last generated token was never an input
    why = f"full blocks of the {in_cache} tokens that the first turn left, its answer included"
    check_hit(output, in_cache // 4 * 4, why, engine)
    check_tokens(output, cold(make_engine, second, 3), engine)


@pytest.mark.model
def test_the_next_turn_hits_on_a_real_model(stage: ModuleType, smollm2: Any) -> None:
    """The same with SmolLM2's template and its own words."""
    engine = stage.LLMEngine(model=smollm2, num_blocks=128)
    question = ("user", "Name three colours, one per line.")
    first = chat(smollm2[1], question)
    answer = engine.generate([first], SamplingParams(temperature=0, max_tokens=40), False)[0]
    second = chat(smollm2[1], question, ("assistant", answer.text), ("user", "And three animals?"))
    output = run(engine, [second], greedy(4))[0]
    assert output.metrics.num_cached_tokens > len(first), "only the question was found again"
    fresh = stage.LLMEngine(model=smollm2, num_blocks=128, enable_prefix_caching=False)
    [wanted] = run(fresh, [second], greedy(4))
    check_tokens(output, wanted.token_ids, engine)


def test_engine_config_names_the_option(stage: ModuleType) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching must be a bool, got 'yes'"):
        stage.EngineConfig(enable_prefix_caching="yes")


# Hashes that collide: all, most, from the third block of a chain on, and as chance has it.
COLLISIONS = {
    "constant": lambda parent, tokens: b"same",
    "1 bit": lambda parent, tokens: bytes([sum(tokens) % 2]),
    "2 bits": lambda parent, tokens: bytes([(sum(tokens) + sum(parent)) % 4]),
    "from the third block on": lambda parent, tokens: parent[:2] + bytes(tokens[:1]),
    "by position": lambda parent, tokens: bytes([len(parent) % 3]) * (len(parent) % 3 + 1),
}


@pytest.mark.parametrize("collision", COLLISIONS)
def test_B9_colliding_hashes_change_no_token(
    make_engine: Any, tiny: Any, stage: ModuleType, monkeypatch: pytest.MonkeyPatch, collision: str
) -> None:
    """Whatever collides, and wherever in a chain: every request has the tokens it has alone."""
    manager = importlib.import_module(f"{stage.__name__}.block_manager")
    if not hasattr(manager, "hash_block"):
        pytest.skip("block_manager.py has no function hash_block to replace")
    contents: dict[bytes, set] = {}

    def hash_block(parent: bytes, tokens: list[int]) -> bytes:
        name = COLLISIONS[collision](parent, [token % 251 for token in tokens])
        contents.setdefault(name, set()).add(tuple(tokens))
        return name

    monkeypatch.setattr(manager, "hash_block", hash_block)
    engine = make_engine(num_blocks=24, max_num_seqs=3)
    start = make_prompt(8, seed=1)
    lengths = [4, 5, 8, 9, 12, 13, 16, 17]
    prompts = [make_prompt(n, seed=n) for n in lengths]
    prompts += [start + make_prompt(n, seed=n) for n in (1, 4, 5, 9)]
    prompts += prompts[2:6]
    for prompt, output in zip(prompts, run(engine, prompts, greedy(6)), strict=True):
        check_tokens(output, reference_tokens(tiny[0], prompt, 6), engine)
    assert max(map(len, contents.values())) > 1, "no two blocks had the same hash"
    check_idle(engine)
