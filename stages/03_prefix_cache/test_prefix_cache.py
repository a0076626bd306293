"""The prefix cache: what is found, what is not, what is thrown away first.

Here the block manager alone. Whole engines are in `tests/contract/prefix_cache.py`, since stage 04
must pass those tests as well.
"""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.contract.helpers import expect
from tests.contract.prefix_cache import *  # noqa: F403


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

    def finds(self, token_ids: list[int], num_blocks: int, why: str) -> None:
        """Assert how many blocks a lookup finds."""
        found = self.manager.find_prefix(self.new(token_ids))
        expect(len(found), num_blocks, f"blocks that find_prefix finds for {token_ids}: {why}.")

    def hits(self, token_ids: list[int], num_tokens: int, why: str, cache_salt: str = "") -> None:
        """Assert how many tokens of a prompt are found, and live its whole life."""
        hit = self.run(token_ids, cache_salt)
        expect(hit, num_tokens, f"tokens found in the cache for {token_ids}: {why}.")

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
    p.hits([1, 2, 3, 4, 5, 6, 7, 8], 0, "nothing is cached yet")
    p.hits([1, 2, 3, 4, 5, 6, 7, 8], 4, "its last token must be computed, so block 1 is no hit")
    p.hits([1, 2, 3, 4], 0, "its only block holds its last token")
    p.hits([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, "both full blocks are cached, and one token is left")


def test_B2_a_reused_block_loses_its_hash(pool: Any) -> None:
    p = pool(2)
    p.run([1, 2, 3, 4, 5])
    p.run([9, 9, 9, 9, 8, 8, 8, 8])
    expect(p.manager.num_evictions, 1, "evictions: both blocks of the pool were needed again.")
    p.hits([1, 2, 3, 4, 5], 0, "its block was handed out again and holds other tokens now")


def test_B3_nothing_is_found_before_it_is_written(pool: Any) -> None:
    p = pool(8)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = p.new(tokens)
    p.admit(first)
    p.finds(tokens, 0, "another request has blocks for these tokens, but has not computed them")
    p.manager.free(first)
    p.finds(tokens, 0, "that request ended before its forward ran: nothing was ever written")


def test_B3_a_partly_filled_block_is_not_published(pool: Any) -> None:
    p = pool(8)
    first, twin = p.new([1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5, 6]
    p.admit(first)
    first.cached_token_count = 3  # a chunk of three
    p.manager.publish(first, 0)
    p.finds(twin, 0, "3 of the 4 tokens of the block are computed")
    first.cached_token_count = 6
    p.manager.publish(first, 3)
    p.finds(twin, 1, "6 tokens are computed: block 0 is full, block 1 is not")


def test_twins_computed_in_one_step_share_one_block(pool: Any) -> None:
    """B4: no content stands in the pool twice, so evicting one cannot hide the other."""
    p = pool(8)
    a, b = p.new([1, 2, 3, 4, 5]), p.new([1, 2, 3, 4, 6])
    p.admit(a), p.admit(b)
    assert a.block_table[0] != b.block_table[0], (
        f"before the step the tables are {a.block_table} and {b.block_table}: nothing is computed "
        "yet, so nothing may be shared"
    )
    p.compute(a), p.compute(b)
    tables = f"the tables after the step: {a.block_table}, {b.block_table}"
    expect(a.block_table[0], b.block_table[0], f"block 0 of the twins; {tables}.")
    expect(p.manager.num_free_blocks, 8 - 3, f"free blocks of 8, one block is shared; {tables}.")
    expect(p.manager.num_cached_blocks, 1, "findable blocks: one content, one block.")
    p.manager.free(a)
    p.hits([1, 2, 3, 4, 7], 4, "one twin has ended, the other still holds the block")
    p.manager.free(b)
    expect(p.manager.num_free_blocks, 8, "free blocks when both twins have ended.")


def test_B5_a_hit_block_is_not_handed_out_as_a_fresh_one(pool: Any) -> None:
    """Three blocks, the one that is hit among the free ones: room for two new ones, not three."""
    p = pool(3)
    p.run([1, 2, 3, 4, 5])
    long = p.new([1, 2, 3, 4, *range(50, 60)])
    prefix = p.manager.find_prefix(long)
    expect(len(prefix), 1, "blocks found for 'long', which begins with a cached block.")
    for num_tokens, wanted in ((14, False), (12, True)):
        expect(
            p.manager.can_allocate(long, num_tokens, prefix),
            wanted,
            f"can_allocate for {num_tokens} tokens, {-(-num_tokens // 4)} blocks, in a pool of 3. "
            "The block that is hit is free now and will be held: it cannot be handed out as well.",
        )
    p.manager.allocate(long, 12, prefix)
    expect(len(set(long.block_table)), 3, f"different blocks in the table {long.block_table}.")
    p.manager.free(long)


def test_B5_a_hit_block_that_is_held_takes_no_free_one(pool: Any) -> None:
    """Four blocks, two of them held by a request that goes on: the other two are free for all."""
    p = pool(4)
    first = p.new([1, 2, 3, 4, 5])
    p.admit(first), p.compute(first)
    second = p.new([1, 2, 3, 4, *range(50, 58)])
    prefix = p.manager.find_prefix(second)
    expect(prefix, tuple(first.block_table[:1]), "the blocks found for 'second'.")
    for num_tokens, wanted in ((12, True), (13, False)):
        expect(
            p.manager.can_allocate(second, num_tokens, prefix),
            wanted,
            f"can_allocate for {num_tokens} tokens. One block is shared, and two of 4 are free.",
        )


def test_a_failed_attempt_changes_nothing(pool: Any) -> None:
    """Neither a lookup nor a refused allocation may touch counts or the order of eviction."""
    p = pool(3)
    cached = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    p.run(cached)
    long = p.new([1, 2, 3, 4, 5, 6, 7, 8, *range(50, 60)])
    prefix = p.manager.find_prefix(long)
    expect(len(prefix), 2, "blocks found for a prompt that begins with 8 cached tokens.")
    with pytest.raises(RuntimeError):
        p.manager.allocate(long, 18, prefix)
    after = (p.manager.num_free_blocks, p.manager.num_cached_blocks, p.manager.num_evictions)
    expect(after, (3, 2, 0), "free, findable, evicted blocks after an allocation that was refused.")
    left = (long.block_table, long.cached_token_count)
    expect(left, ([], 0), "block table and cached_token_count of the one that was refused.")
    p.run([70, 71, 72, 73, 74])
    p.hits(cached, 4, "two blocks were needed: the empty one, and then the tail of the prefix")


def test_B6_a_chain_is_evicted_from_its_tail(pool: Any) -> None:
    p = pool(4)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])  # three full blocks, one partial
    p.run([50, 51, 52, 53, 54])  # takes the partial one first, then the chain's tail
    expect(p.manager.num_evictions, 1, "evictions: two blocks were needed, one had no content.")
    p.hits(
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
        8,
        "one of its three blocks was evicted. If that is the last one, the first two are found; "
        "without the first, nothing behind it can be",
    )


def test_B7_blocks_without_content_are_reused_first(pool: Any) -> None:
    p = pool(3)
    p.run([1, 2, 3, 4, 5])  # one full, one partial
    for token_id in range(60, 70):  # one block each, so that every block's turn would come
        p.run([token_id])
    expect(p.manager.num_evictions, 0, "evictions: there were always blocks without content.")
    p.hits([1, 2, 3, 4, 5], 4, "nobody needed its block")


def test_least_recently_used_goes_first(pool: Any) -> None:
    p = pool(3)
    p.run([1, 1, 1, 1, 9])
    p.run([2, 2, 2, 2, 9])
    p.run([1, 1, 1, 1, 9])  # used again: now [2, 2, 2, 2] is the oldest
    p.run([70, 71, 72, 73, 74])
    expect(p.manager.num_evictions, 1, "evictions: two blocks were needed, one had no content.")
    p.hits([1, 1, 1, 1, 9], 4, "it was used later than the other content, which had to go")


def test_B8_freeing_twice_raises(pool: Any) -> None:
    p = pool(4)
    sequence = p.new([1, 2, 3, 4, 5])
    p.admit(sequence), p.compute(sequence)
    table = list(sequence.block_table)
    p.manager.free(sequence)
    left = (sequence.block_table, sequence.cached_token_count)
    expect(left, ([], 0), "block table and cached_token_count of a sequence that was freed.")
    p.manager.free(sequence)  # an empty table: nothing to do
    sequence.block_table = table
    with pytest.raises(RuntimeError):
        p.manager.free(sequence)
    expect(p.manager.num_free_blocks, 4, "free blocks of 4 after a block was freed twice.")
    whole = p.new(list(range(16)))
    p.admit(whole)
    expect(sorted(whole.block_table), [0, 1, 2, 3], "a table with the whole pool.")


def test_B9_salts_never_share(pool: Any) -> None:
    p = pool(16)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for salt, hit in [("a", 0), ("b", 0), ("", 0), ("a", 8), ("b", 8)]:
        p.hits(tokens, hit, f"salt {salt!r}; only requests of one salt share", salt)


def test_B9_equal_tokens_under_another_parent_do_not_hit(pool: Any) -> None:
    p = pool(16)
    p.run([1, 1, 1, 1, 5, 5, 5, 5, 9])
    why = "the tokens 5, 5, 5, 5 are cached behind 1, 1, 1, 1, and K and V depend on all before"
    p.hits([2, 2, 2, 2, 5, 5, 5, 5, 9], 0, why)
    p.hits([5, 5, 5, 5, 9], 0, why)


def test_B9_a_constant_hash_is_harmless(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal hashes prove nothing: tokens and parent are compared on every hit."""
    p = pool(16)
    if not hasattr(p.module, "hash_block"):
        pytest.skip("block_manager.py has no function hash_block that could be made constant")
    monkeypatch.setattr(p.module, "hash_block", lambda parent_hash, token_ids: b"same")
    why = "all hashes are equal; what a block holds decides"
    p.run([1, 1, 1, 1, 5, 5, 5, 5, 9])
    p.hits([2, 2, 2, 2, 5, 5, 5, 5, 9], 0, why)
    p.hits([1, 1, 1, 1, 6, 6, 6, 6, 9], 4, f"{why}: the first content may still be found")
    held = p.new([3, 3, 3, 3, 4, 4, 4, 4, 9])
    p.admit(held), p.compute(held)
    expect(len(set(held.block_table)), 3, f"different blocks in the table {held.block_table}.")
    p.manager.free(held)
    expect(p.manager.num_free_blocks, 16, "free blocks when nothing runs.")


def test_B9_nothing_is_published_behind_a_private_block(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent is named by its block, so it must be published as long as its child is.

    The first blocks of `a` and `b` have the same hash, so that of `b` stays private. It is reused
    for `c`. If the second block of `b` were published, it would be taken for a child of `c`.
    """
    p = pool(8)
    if not hasattr(p.module, "hash_block"):
        pytest.skip("block_manager.py has no function hash_block to replace")

    def hash_block(parent_hash: bytes, token_ids: list[int]) -> bytes:
        return bytes([token_ids[0] % 2] if len(parent_hash) == 32 else token_ids)

    monkeypatch.setattr(p.module, "hash_block", hash_block)
    a, b = p.new([1, 1, 1, 1, 9]), p.new([3, 3, 3, 3, 5, 5, 5, 5, 9])
    p.admit(a), p.compute(a), p.admit(b)
    for start_pos, end_pos in ((0, 4), (4, 9)):  # in two steps
        b.cached_token_count = end_pos
        p.manager.publish(b, start_pos)
    expect(p.manager.num_cached_blocks, 1, "findable blocks: that of 'a', none of 'b'.")
    private = b.block_table[0]
    p.manager.free(b)
    c = p.new([2, 2, 2, 2, 9])
    p.admit(c), p.compute(c)
    expect(c.block_table[0], private, "the first block of 'c': the private block of 'b' again.")
    p.finds([2, 2, 2, 2, 5, 5, 5, 5, 9], 1, "5, 5, 5, 5 was computed behind 3, 3, 3, 3")


def test_B9_a_hash_is_of_whole_token_ids_and_of_all_tokens_before(stage: ModuleType) -> None:
    """Vocabularies are larger than 16 bits: ids that differ by 2**16 are different tokens."""
    manager = importlib.import_module(f"{stage.__name__}.block_manager")
    for parent in (b"", b"parent"):
        ids = [7, 7 + 2**8, 7 + 2**16, 7 + 2**17, 7 + 2**31]
        hashes = {manager.hash_block(parent, [1, token, 3]) for token in ids}
        assert len(hashes) == len(ids), f"{len(ids)} contents have {len(hashes)} hashes"
    assert manager.hash_block(b"", [1, 2]) != manager.hash_block(b"", [2, 1])
    assert manager.hash_block(b"", [1, 2]) != manager.hash_block(b"parent", [1, 2])


def test_a_chain_is_hashed_once(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting request is looked up at every step; its hashes are not computed at every step."""
    p = pool(16)
    if not hasattr(p.module, "hash_block"):
        pytest.skip("block_manager.py has no function hash_block whose calls could be counted")
    p.run(list(range(1, 14)))
    calls = []
    real = p.module.hash_block
    monkeypatch.setattr(p.module, "hash_block", lambda *a: (calls.append(a), real(*a))[1])
    sequence = p.new(list(range(1, 14)))
    for _ in range(5):
        expect(len(p.manager.find_prefix(sequence)), 3, "blocks found for 13 cached tokens.")
    expect(len(calls), 3, "calls of hash_block in five lookups of a request with 3 full blocks.")


def test_reset_forgets_what_nobody_holds(pool: Any) -> None:
    p = pool(8)
    p.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    held = p.new([7, 7, 7, 7, 8])
    p.admit(held), p.compute(held)
    expect(p.manager.num_cached_blocks, 3, "findable blocks: two free ones and one that is held.")
    expect(p.manager.reset_prefix_cache(), 2, "what reset_prefix_cache returns: the free ones.")
    p.finds([1, 2, 3, 4, 5], 0, "its block was free when the cache was reset")
    p.finds([7, 7, 7, 7, 8], 1, "its block was held when the cache was reset")
    p.manager.free(held)
    expect(p.manager.num_free_blocks, 8, "free blocks when nothing runs.")


def test_random_lives_keep_the_invariants(pool: Any) -> None:
    """What is found holds the very tokens that are looked for, and the counts agree with tables."""
    rng = random.Random(0)
    p = pool(10, 2)
    live: list[Any] = []
    written: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    hits = 0
    for turn in range(4000):
        if live and rng.random() < 0.45:
            p.manager.free(live.pop(rng.randrange(len(live))))
        else:
            sequence = p.new([rng.randrange(2) for _ in range(rng.randrange(1, 9))])
            prefix = p.manager.find_prefix(sequence)
            for i, block in enumerate(prefix):
                expect(
                    written.get(block),
                    tuple(sequence.token_ids[: 2 * (i + 1)]),
                    f"turn {turn}: what block {block} holds, found as block {i} of {sequence}.",
                )
            if not p.manager.can_allocate(sequence, sequence.num_tokens, prefix):
                continue
            hits += p.admit(sequence)
            live.append(sequence)
            for block in sequence.block_table[len(prefix) :]:
                written[block] = ()
            if rng.random() < 0.8:
                p.compute(sequence)
                for i, block in enumerate(sequence.block_table[: sequence.num_tokens // 2]):
                    written[block] = tuple(sequence.token_ids[: 2 * (i + 1)])
        held = set()
        for sequence in live:
            table = sequence.block_table
            assert len(set(table)) == len(table), f"turn {turn}: a block twice in {table}"
            held |= set(table)
        expect(
            p.manager.num_free_blocks,
            10 - len(held),
            f"turn {turn}: free blocks of 10; the tables are {[s.block_table for s in live]}.",
        )
    assert hits > 0 and p.manager.num_evictions > 0, "nothing was found, or nothing evicted"


def test_lookup_does_not_depend_on_the_pool(pool: Any) -> None:
    """O(1) per block: handing out and taking back never scans the pool."""
    lines = {}
    for num_blocks in (64, 4096):
        p, count = pool(num_blocks), 0

        def trace(frame: Any, event: str, arg: Any, file: str = p.module.__file__) -> Any:
            nonlocal count
            count += event == "line" and frame.f_code.co_filename == file
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for i in range(30):
                p.run([i, 1, 2, 3, 4, 5, 6, 7, 8])
        finally:
            sys.settrace(before)
        lines[num_blocks] = count
    assert lines[4096] <= 1.2 * lines[64], (
        f"expected as much work in a large pool as in a small one; lines of block_manager.py that "
        f"30 short lives ran, by blocks in the pool: {lines}"
    )
