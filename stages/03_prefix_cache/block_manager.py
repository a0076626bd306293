"""Which blocks of the KV cache are free, which sequences hold the others, what they contain.

Knows block ids, counts, and token ids for what the blocks hold: no tensor, no model.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import NamedTuple

from .sequence import Sequence


def slot_mapping(
    block_table: list[int], start_pos: int, num_tokens: int, block_size: int
) -> list[int]:
    """Cache slots of the tokens `start_pos .. start_pos + num_tokens` of one sequence.

    The index `t` counts from the start of the whole sequence, never from the start of a slice: a
    slice may begin in the middle of a block, and the token before it lies right in front of it.

        t              0  1  2  3 | 4  5  6  7 | 8  9          block_size 4, block_table [7, 2, 5]
        slot          28 29 30 31 | 8  9 10 11 |20 21
    """
    return [
        block_table[t // block_size] * block_size + t % block_size
        for t in range(start_pos, start_pos + num_tokens)
    ]


def hash_block(parent_hash: bytes, token_ids: list[int]) -> bytes:
    """Name of a full block's content: its tokens and, since K and V depend on them, all before."""
    return hashlib.sha256(b"block" + parent_hash + array("q", token_ids).tobytes()).digest()


class Content(NamedTuple):
    """What a published block holds, in full: equal hashes alone prove nothing."""

    content_hash: bytes
    parent: int | None  # the block of the tokens before, published as well
    token_ids: list[int]


class BlockManager:
    """Hands out the `num_blocks` blocks of a pool, `block_size` token slots each.

    Invariants: a block is free while no table holds it, which its reference count tells. `_free` is
    in the order of reuse: no content first, then least recently used, a child before its parent;
    so the parent of a published block is published, too.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._contents: dict[int, Content] = {}  # of the published blocks
        self._blocks: dict[bytes, int] = {}  # content hash -> the one block that holds it

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, held or free."""
        return len(self._contents)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens. The one formula, at the door and ever after."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> tuple[int, ...]:
        """Published blocks that hold the beginning of `sequence`, up to the first miss.

        Changes nothing. The last token is never covered: someone must compute its logits.
        """
        prefix: list[int] = []
        for i in range((sequence.num_tokens - 1) // self.block_size):
            content = self._content(sequence, i, prefix)
            block = self._blocks.get(content.content_hash)
            if block is None or self._contents[block] != content:
                break
            prefix.append(block)
        return tuple(prefix)

    def can_allocate(self, sequence: Sequence, num_tokens: int, prefix: tuple = ()) -> bool:
        """Whether `sequence`'s table could grow to hold its first `num_tokens` tokens."""
        # A free block of the prefix is about to be held, so it cannot be handed out as well.
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(prefix)
        return missing + sum(block in self._free for block in prefix) <= self.num_free_blocks

    # Invariant: allocation only appends. Blocks that hold K and V already keep their place:
    #
    #     block_table   | held already         | appended here         |
    #     tokens        0 .. cached_token_count          .. num_tokens
    def allocate(self, sequence: Sequence, num_tokens: int, prefix: tuple = ()) -> None:
        """Share `prefix`, then grow `block_table` to hold the sequence's first `num_tokens` tokens.

        Raises RuntimeError, and changes nothing, if too few blocks are free.
        """
        if not self.can_allocate(sequence, num_tokens, prefix):
            raise RuntimeError(f"{sequence}: {num_tokens} tokens, {self.num_free_blocks} blocks")
        for block in prefix:
            self._hold(block)
            sequence.block_table.append(block)
            sequence.cached_token_count += self.block_size
        while len(sequence.block_table) < self.num_blocks_for(num_tokens):
            block = next(iter(self._free))
            if block in self._contents:
                self._forget(block)
                self.num_evictions += 1
            self._hold(block)
            sequence.block_table.append(block)

    # Invariant: the blocks of one table come back together, and the table is empty afterwards,
    # so a second call finds nothing to free.
    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of `sequence`, tail first. What they hold can still be found.

        Raises RuntimeError if its table names a block that is free already.
        """
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        sequence.cached_token_count = 0

    # Invariant: what is published is in the cache, and no content is published twice. Twins that
    # were computed in one step share one block afterwards.
    #
    #     block_table   | published already    | published here        | not full
    #     tokens        0 ..           start_pos  ..  cached_token_count
    def publish(self, sequence: Sequence, start_pos: int) -> None:
        """Make the blocks findable that a step from `start_pos` on has filled. Call it after."""
        table, size = sequence.block_table, self.block_size
        for i in range(start_pos // size, sequence.cached_token_count // size):
            content = self._content(sequence, i, table)
            if content.parent is not None and content.parent not in self._contents:
                return
            twin = self._blocks.setdefault(content.content_hash, table[i])
            if self._contents.setdefault(twin, content) != content:
                return  # two contents of one hash: what follows in this chain stays private
            if twin != table[i]:
                self._hold(twin)
                self._release(table[i])
                table[i] = twin

    def reset_prefix_cache(self) -> int:
        """Forget what the free blocks hold; return how many of them held something."""
        cached = [block for block in self._free if block in self._contents]
        for block in cached:
            self._forget(block)
        return len(cached)

    def _content(self, sequence: Sequence, i: int, blocks: list[int]) -> Content:
        """Content of the full block `i` of `sequence`; the block before it is `blocks[i - 1]`."""
        hashes = sequence.block_hashes
        token_ids = sequence.token_ids[i * self.block_size : (i + 1) * self.block_size]
        if i == len(hashes):  # each is computed once in a sequence's life
            salt_hash = hashlib.sha256(b"salt" + sequence.cache_salt.encode()).digest()
            hashes.append(hash_block(hashes[-1] if i else salt_hash, token_ids))
        return Content(hashes[i], blocks[i - 1] if i else None, token_ids)

    def _forget(self, block: int) -> None:
        del self._blocks[self._contents.pop(block).content_hash]

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._free.pop(block, None)

    def _release(self, block: int) -> None:
        if not self._ref_counts[block]:
            raise RuntimeError(f"block {block} is free already")
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            self._free[block] = None
            if block not in self._contents:
                self._free.move_to_end(block, last=False)
