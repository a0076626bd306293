"""The prefix cache: what is found, what is not, what is thrown away first."""

from __future__ import annotations

import importlib
import random
from types import ModuleType
from typing import Any

import pytest

from shared import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


# ---------------------------------------------------------------- block manager alone


class Pool:
    """A block manager and a shorthand for what an engine does with it."""

    def __init__(self, stage: ModuleType, num_blocks: int, block_size: int = 4) -> None:
        self.module = importlib.import_module(f"{stage.__name__}.block_manager")
        self.sequence = importlib.import_module(f"{stage.__name__}.sequence")
        self.manager = self.module.BlockManager(num_blocks, block_size)
        self.num_sequences = 0

    def new(self, token_ids: list[int], cache_salt: str = "") -> Any:
        self.num_sequences += 1
        return self.sequence.Sequence(f"s{self.num_sequences}", token_ids, 8, cache_salt)

    def admit(self, sequence: Any) -> int:
        """Look up and allocate the whole sequence; return how many tokens were hit."""
        prefix = self.manager.find_prefix(sequence)
        self.manager.allocate(sequence, sequence.num_tokens, prefix)
        return len(prefix) * self.manager.block_size

    def compute(self, sequence: Any) -> None:
        """What the step and its commit do: all tokens are in the cache, full blocks findable."""
        start_pos, sequence.cached_token_count = sequence.cached_token_count, sequence.num_tokens
        self.manager.publish(sequence, start_pos)

    def run(self, token_ids: list[int], cache_salt: str = "") -> int:
        """A whole life; returns the hit."""
        sequence = self.new(token_ids, cache_salt)
        hit = self.admit(sequence)
        self.compute(sequence)
        self.manager.free(sequence)
        return hit


@pytest.fixture
def pool(stage: ModuleType) -> Any:
    return lambda *args: Pool(stage, *args)


def test_a_full_hit_still_computes_a_token(pool: Any) -> None:
    """B1: 8 tokens in blocks of 4 hit one block only: someone must produce logits."""
    p = pool(8)
    assert p.run([1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert p.run([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert p.run([1, 2, 3, 4]) == 0
    assert p.run([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_B2_a_reused_block_loses_its_hash(pool: Any) -> None:
    p = pool(2)
    p.run([1, 2, 3, 4, 5])
    p.run([9, 9, 9, 9, 8, 8, 8, 8])
    assert p.manager.num_evictions == 1, "A's full block must have been reused for X"
    assert p.run([1, 2, 3, 4, 5]) == 0


def test_B3_nothing_is_found_before_it_is_written(pool: Any) -> None:
    p = pool(8)
    first = p.new([1, 2, 3, 4, 5, 6, 7, 8, 9])
    p.admit(first)
    assert p.manager.find_prefix(p.new([1, 2, 3, 4, 5, 6, 7, 8, 9])) == ()
    p.manager.free(first)  # aborted before its forward ran
    assert p.manager.find_prefix(p.new([1, 2, 3, 4, 5, 6, 7, 8, 9])) == ()


def test_B3_a_partly_filled_block_is_not_published(pool: Any) -> None:
    p = pool(8)
    first, twin = p.new([1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5, 6]
    p.admit(first)
    first.cached_token_count = 3  # a chunk of three
    p.manager.publish(first, 0)
    assert p.manager.find_prefix(p.new(twin)) == ()
    first.cached_token_count = 6
    p.manager.publish(first, 3)
    assert p.manager.find_prefix(p.new(twin)) == (first.block_table[0],)


def test_twins_computed_in_one_step_share_one_block(pool: Any) -> None:
    """B4: no content stands in the pool twice, so evicting one cannot hide the other."""
    p = pool(8)
    a, b = p.new([1, 2, 3, 4, 5]), p.new([1, 2, 3, 4, 6])
    p.admit(a), p.admit(b)
    assert a.block_table[0] != b.block_table[0]
    p.compute(a), p.compute(b)
    assert a.block_table[0] == b.block_table[0]
    assert p.manager.num_free_blocks == 8 - 3
    assert p.manager.num_cached_blocks == 1
    p.manager.free(a)
    assert p.run([1, 2, 3, 4, 7]) == 4
    p.manager.free(b)
    assert p.manager.num_free_blocks == 8


def test_B5_a_hit_block_is_not_handed_out_as_a_fresh_one(pool: Any) -> None:
    """Three blocks, the one that is hit among the free ones: room for two new ones, not three."""
    p = pool(3)
    p.run([1, 2, 3, 4, 5])
    long = p.new([1, 2, 3, 4, *range(50, 60)])
    prefix = p.manager.find_prefix(long)
    assert len(prefix) == 1
    assert not p.manager.can_allocate(long, 14, prefix)
    assert p.manager.can_allocate(long, 12, prefix)
    p.manager.allocate(long, 12, prefix)
    assert len(set(long.block_table)) == 3
    p.manager.free(long)


def test_a_failed_attempt_changes_nothing(pool: Any) -> None:
    """Neither a lookup nor a refused allocation may touch counts or the order of eviction."""
    p = pool(3)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    before = list(p.manager._free), list(p.manager._ref_counts), dict(p.manager._blocks)
    long = p.new([1, 2, 3, 4, 5, 6, 7, 8, *range(50, 60)])
    prefix = p.manager.find_prefix(long)
    assert len(prefix) == 2
    with pytest.raises(RuntimeError, match="18 tokens, 3 blocks"):
        p.manager.allocate(long, 18, prefix)
    assert (list(p.manager._free), list(p.manager._ref_counts), dict(p.manager._blocks)) == before
    assert long.block_table == [] and long.cached_token_count == 0


def test_B6_a_chain_is_evicted_from_its_tail(pool: Any) -> None:
    p = pool(4)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])  # three full blocks, one partial
    p.run([50, 51, 52, 53, 54])  # takes the partial one first, then the chain's tail
    assert p.manager.num_evictions == 1
    assert p.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]) == 8


def test_B6_lookup_stops_at_the_first_miss(pool: Any) -> None:
    p = pool(8)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    head = p.manager.find_prefix(p.new([1, 2, 3, 4, 5]))[0]
    p.manager._forget(head)
    assert p.manager.find_prefix(p.new([1, 2, 3, 4, 5, 6, 7, 8, 9])) == ()


def test_B7_blocks_without_content_are_reused_first(pool: Any) -> None:
    p = pool(3)
    p.run([1, 2, 3, 4, 5])  # one full, one partial
    p.run([60])
    p.run([61])
    assert p.manager.num_evictions == 0
    assert p.run([1, 2, 3, 4, 5]) == 4


def test_least_recently_used_goes_first(pool: Any) -> None:
    p = pool(3)
    p.run([1, 1, 1, 1, 9])
    p.run([2, 2, 2, 2, 9])
    p.run([1, 1, 1, 1, 9])  # used again: now [2, 2, 2, 2] is the oldest
    p.run([70, 71, 72, 73, 74])
    assert p.manager.num_evictions == 1
    assert p.run([1, 1, 1, 1, 9]) == 4


def test_B8_freeing_twice_raises(pool: Any) -> None:
    p = pool(4)
    sequence = p.new([1, 2, 3, 4, 5])
    p.admit(sequence)
    table = list(sequence.block_table)
    p.manager.free(sequence)
    p.manager.free(sequence)  # an empty table: nothing to do
    sequence.block_table = table
    with pytest.raises(RuntimeError, match="free already"):
        p.manager.free(sequence)
    assert p.manager.num_free_blocks == 4 == len(set(p.manager._free))
    assert p.manager._ref_counts == [0] * 4


def test_B9_salts_never_share(pool: Any) -> None:
    p = pool(16)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert p.run(tokens, "a") == 0
    assert p.run(tokens, "b") == 0
    assert p.run(tokens) == 0
    assert p.run(tokens, "a") == 8
    assert p.run(tokens, "b") == 8


def test_B9_equal_tokens_under_another_parent_do_not_hit(pool: Any) -> None:
    p = pool(16)
    p.run([1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert p.run([2, 2, 2, 2, 5, 5, 5, 5, 9]) == 0
    assert p.run([5, 5, 5, 5, 9]) == 0


def test_B9_a_constant_hash_is_harmless(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal hashes prove nothing: tokens and parent are compared on every hit."""
    p = pool(16)
    monkeypatch.setattr(p.module, "hash_block", lambda parent_hash, token_ids: b"same")
    p.run([1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert p.run([2, 2, 2, 2, 5, 5, 5, 5, 9]) == 0
    assert p.run([1, 1, 1, 1, 6, 6, 6, 6, 9]) == 4, "the first content may still be found"
    held = p.new([3, 3, 3, 3, 4, 4, 4, 4, 9])
    p.admit(held), p.compute(held)
    assert len(set(held.block_table)) == 3
    p.manager.free(held)
    assert p.manager.num_free_blocks == 16


def test_a_chain_is_hashed_once(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting request is looked up at every step; its hashes are not computed at every step."""
    p = pool(16)
    p.run(list(range(1, 14)))
    calls = []
    real = p.module.hash_block
    monkeypatch.setattr(p.module, "hash_block", lambda *a: (calls.append(a), real(*a))[1])
    sequence = p.new(list(range(1, 14)))
    for _ in range(5):
        assert len(p.manager.find_prefix(sequence)) == 3
    assert len(calls) == 3


def test_reset_forgets_what_nobody_holds(pool: Any) -> None:
    p = pool(8)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    held = p.new([7, 7, 7, 7, 8])
    p.admit(held), p.compute(held)
    assert p.manager.num_cached_blocks == 3
    assert p.manager.reset_prefix_cache() == 2
    assert p.manager.find_prefix(p.new([1, 2, 3, 4, 5])) == ()
    assert len(p.manager.find_prefix(p.new([7, 7, 7, 7, 8]))) == 1
    p.manager.free(held)
    assert p.manager.num_free_blocks == 8


def test_random_lives_keep_the_invariants(pool: Any) -> None:
    """Counts equal tables, a child precedes its parent in the free queue, maps agree."""
    rng = random.Random(0)
    p = pool(10, 2)
    live: list[Any] = []
    hits = 0
    for _ in range(4000):
        if live and rng.random() < 0.45:
            p.manager.free(live.pop(rng.randrange(len(live))))
        else:
            sequence = p.new([rng.randrange(2) for _ in range(rng.randrange(1, 9))])
            prefix = p.manager.find_prefix(sequence)
            if not p.manager.can_allocate(sequence, sequence.num_tokens, prefix):
                continue
            hits += p.admit(sequence)
            live.append(sequence)
            if rng.random() < 0.8:
                p.compute(sequence)
        check_invariants(p.manager, live)
    assert hits > 0 and p.manager.num_evictions > 0


def check_invariants(manager: Any, live: list[Any]) -> None:
    counts = [0] * manager.num_blocks
    for sequence in live:
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        for block in sequence.block_table:
            counts[block] += 1
    assert counts == manager._ref_counts
    free = list(manager._free)
    assert set(free) == {block for block, count in enumerate(counts) if count == 0}
    place = {block: i for i, block in enumerate(free)}
    without_content = [block not in manager._contents for block in free]
    assert without_content == sorted(without_content, reverse=True), "content goes last"
    assert {c.content_hash: b for b, c in manager._contents.items()} == manager._blocks
    for block, content in manager._contents.items():
        if content.parent is not None:
            assert content.parent in manager._contents, "a published block's parent is gone"
            if content.parent in place:
                assert place[block] < place[content.parent], "a parent goes before its child"


# ---------------------------------------------------------------- whole engines


def cold(make_engine: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The same request alone, on a fresh engine without a cache."""
    engine = make_engine(enable_prefix_caching=False)
    return engine.generate([prompt], greedy(max_tokens), use_tqdm=False)[0].token_ids


@pytest.mark.parametrize("length", [4, 8])
def test_B1_full_hit_on_a_block_boundary(make_engine: Any, length: int) -> None:
    engine = make_engine()
    prompt = list(range(10, 10 + length))
    other = [99, 98, 97]
    expected = cold(make_engine, prompt, 6)
    assert engine.generate([prompt], greedy(6), use_tqdm=False)[0].token_ids == expected
    again, beside = engine.generate([prompt, other], greedy(6), use_tqdm=False)
    assert again.token_ids == expected
    assert beside.token_ids == cold(make_engine, other, 6)
    assert again.metrics.num_cached_tokens == length - 4 < length


def test_B3_an_aborted_twin_is_not_found(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 19))
    engine.abort_request(engine.add_request(prompt, greedy(3)))
    output = engine.generate([prompt], greedy(3), use_tqdm=False)[0]
    assert output.metrics.num_cached_tokens == 0
    assert output.token_ids == cold(make_engine, prompt, 3)


def test_B3_a_failed_forward_publishes_nothing(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 19))
    run = engine.model_runner.run

    def fail(batch: Any) -> Any:
        engine.model_runner.run = run
        raise RuntimeError("no luck")

    engine.model_runner.run = fail
    assert engine.generate([prompt], greedy(3), use_tqdm=False)[0].finish_reason == "error"
    output = engine.generate([prompt], greedy(3), use_tqdm=False)[0]
    assert output.metrics.num_cached_tokens == 0
    assert output.token_ids == cold(make_engine, prompt, 3)


def test_B4_twins_and_a_relative(make_engine: Any) -> None:
    engine = make_engine()
    twin, relative = list(range(10, 19)), [*range(10, 14), 3, 3, 3, 3, 3]
    outputs = engine.generate([twin, twin, relative], greedy(9), use_tqdm=False)
    for output, prompt in zip(outputs, [twin, twin, relative], strict=True):
        assert output.token_ids == cold(make_engine, prompt, 9)
    assert engine.generate([twin], greedy(9), use_tqdm=False)[0].metrics.num_cached_tokens == 8


def test_B11_a_preempted_request_finds_its_own_blocks(make_engine: Any) -> None:
    engine = make_engine(num_blocks=9)
    prompts = [list(range(10, 19)), list(range(30, 39))]
    outputs = engine.generate(prompts, greedy(9), use_tqdm=False)
    assert engine.stats()["preemptions"] > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == cold(make_engine, prompt, 9)
        assert output.metrics.num_cached_tokens == 0, "its own blocks are no hit"
    steps = engine.trace.steps
    lost = next(step for step in steps if step.preempted)
    restart = next(
        start_pos
        for step in steps[lost.index :]
        for request_id, start_pos, _ in step.slices
        if request_id == lost.preempted[0]
    )
    assert restart >= 8, f"recomputed from {restart}, though its blocks were still there"


def test_the_budget_is_charged_after_the_lookup(make_engine: Any) -> None:
    """B12: two prompts of 12 tokens, 8 of them cached, share a step of at most 12 tokens."""
    engine = make_engine(max_num_batched_tokens=12)
    base = list(range(10, 18))
    engine.generate([[*base, 1]], greedy(1), use_tqdm=False)
    steps = len(engine.trace.steps)
    engine.generate([[*base, 2, 2, 2, 2], [*base, 3, 3, 3, 3]], greedy(1), use_tqdm=False)
    first = engine.trace.steps[steps]
    assert [s[1:] for s in first.slices] == [(8, 4), (8, 4)]


def test_hits_are_counted_once(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 22))
    engine.generate([prompt], greedy(2), use_tqdm=False)
    output = engine.generate([prompt], greedy(2), use_tqdm=False)[0]
    stats = engine.stats()
    assert output.metrics.num_cached_tokens == 8
    assert (stats["prompt_tokens"], stats["hit_tokens"]) == (24, 8)
    assert engine.reset_prefix_cache() == stats["cached_blocks"] > 0
    assert engine.stats()["cached_blocks"] == 0
    again = engine.generate([prompt], greedy(2), use_tqdm=False)[0]
    assert again.metrics.num_cached_tokens == 0
    assert again.token_ids == output.token_ids


def test_salted_requests_share_with_their_own_only(make_engine: Any) -> None:
    engine = make_engine()
    prompt = list(range(10, 22))
    hits = []
    for salt in ("a", "b", "a"):
        request_id = engine.add_request(prompt, greedy(1), cache_salt=salt)
        outputs = [o for _ in range(3) for o in engine.step() if o.request_id == request_id]
        hits.append(outputs[-1].metrics.num_cached_tokens)
    assert hits == [0, 0, 8]


def test_caching_can_be_switched_off(make_engine: Any) -> None:
    engine = make_engine(enable_prefix_caching=False)
    prompt = list(range(10, 22))
    engine.generate([prompt], greedy(2), use_tqdm=False)
    assert engine.generate([prompt], greedy(2), use_tqdm=False)[0].metrics.num_cached_tokens == 0
    assert engine.stats()["cached_blocks"] == 0


def test_the_next_turn_of_a_chat_hits_the_answer(make_engine: Any, tiny: Any) -> None:
    """Generated tokens are cached as they fill blocks; a real chat template frames them."""
    engine = make_engine()
    tokenizer = tiny[1]
    messages = [{"role": "user", "content": "Say something long."}]

    def prompt(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    first = prompt(messages)
    answer = engine.generate([first], greedy(21), use_tqdm=False)[0]
    # The second turn as token ids: text that a random model invents may tokenise differently.
    following = prompt([{"role": "user", "content": "Go on."}])
    second = [*first, *answer.token_ids, *following]
    output = engine.generate([second], greedy(3), use_tqdm=False)[0]
    in_cache = len(first) + 20  # the last generated token was never an input
    assert output.metrics.num_cached_tokens == in_cache // 4 * 4 > len(first)
    assert output.token_ids == cold(make_engine, second, 3)


@pytest.mark.model
def test_the_next_turn_hits_on_a_real_model(stage: ModuleType, smollm2: Any) -> None:
    """The same with SmolLM2's template and its own words."""
    tokenizer = smollm2[1]
    engine = stage.LLMEngine(model=smollm2, num_blocks=128)
    messages = [{"role": "user", "content": "Name three colours, one per line."}]

    def encode(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    first = encode(messages)
    answer = engine.generate([first], SamplingParams(temperature=0, max_tokens=40), False)[0]
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And three animals?"},
    ]
    output = engine.generate([encode(messages)], greedy(4), use_tqdm=False)[0]
    assert output.metrics.num_cached_tokens > len(first), "only the question was found again"
    fresh = stage.LLMEngine(model=smollm2, num_blocks=128, enable_prefix_caching=False)
    assert (
        fresh.generate([encode(messages)], greedy(4), use_tqdm=False)[0].token_ids
        == output.token_ids
    )


def test_lookup_does_not_depend_on_the_pool(pool: Any) -> None:
    """O(1) per block: handing out and taking back never scans the pool."""
    small, large = pool(64), pool(100_000)
    for p in (small, large):
        p.manager._free = Counting(p.manager._free)
    for p in (small, large):
        for i in range(50):
            p.run([i, 1, 2, 3, 4, 5, 6, 7, 8])
    assert large.manager._free.operations <= small.manager._free.operations + 50


class Counting:
    """Wraps the free queue and counts what is asked of it."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.operations = queue, 0

    def __getattr__(self, name: str) -> Any:
        self.operations += 1
        return getattr(self.queue, name)

    def __iter__(self) -> Any:
        for item in self.queue:
            self.operations += 1
            yield item

    def __len__(self) -> int:
        return len(self.queue)

    def __contains__(self, block: int) -> bool:
        self.operations += 1
        return block in self.queue

    def __setitem__(self, block: int, value: None) -> None:
        self.operations += 1
        self.queue[block] = value


def test_engine_config_names_the_option(stage: ModuleType) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching must be a bool, got 'yes'"):
        stage.EngineConfig(enable_prefix_caching="yes")
