"""Which blocks of the KV cache are free, and which sequences hold the others.

Knows block ids and token ids, but no tensors and no model.
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
    """Cache slots of the tokens `start_pos..start_pos + num_tokens` of one sequence.

    Here and everywhere, a range `start..end` excludes its end. `t` is the token's index in the
    whole sequence, never in its slice: a slice may begin in the middle of a block.

        t              0  1  2  3 | 4  5  6  7 | 8  9          block_size 4, block_table [7, 2, 5]
        slot          28 29 30 31 | 8  9 10 11 |20 21
    """
    return [
        block_table[t // block_size] * block_size + t % block_size
        for t in range(start_pos, start_pos + num_tokens)
    ]


def hash_block(parent_hash: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block: its tokens and, since K and V depend on them, all tokens before it."""
    return hashlib.sha256(b"block" + parent_hash + array("q", token_ids).tobytes()).digest()


class Content(NamedTuple):
    """What a published block holds, in full, because two contents may have the same hash."""

    content_hash: bytes
    parent: int | None  # the block of the tokens before these, published as well
    token_ids: list[int]


Prefix = tuple[int, ...]  # published blocks that together hold the beginning of a sequence


class BlockManager:
    """Allocates the `num_blocks` blocks of a pool, `block_size` token slots each.

    Invariants: a block is free when its reference count, the number of tables that hold it, is 0.
    The parent of a published block is published too, because children are reused before parents.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._reuse_order = OrderedDict.fromkeys(range(num_blocks))  # the free blocks, next first
        self._ref_counts = [0] * num_blocks
        self._contents: dict[int, Content] = {}  # of the published blocks
        self._blocks: dict[bytes, int] = {}  # content hash -> the one block that holds it

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._reuse_order)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, whether they are held or free."""
        return len(self._contents)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens; used for admission and for allocation alike."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Published blocks that hold the beginning of `sequence`, up to the first miss.

        They are not held yet. The last token is never covered: its logits must be computed.
        """
        prefix: list[int] = []
        for i in range((sequence.num_tokens - 1) // self.block_size):
            content = self._content(sequence, i, prefix)
            block = self._blocks.get(content.content_hash)
            if block is None or self._contents[block] != content:
                break
            prefix.append(block)
        return tuple(prefix)

    def can_allocate(self, sequence: Sequence, num_tokens: int, prefix: Prefix = ()) -> bool:
        """Whether `sequence`'s table could grow to hold its first `num_tokens` tokens."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table) - len(prefix)
        # A free block of the prefix is about to be held, so it is not available as a new one.
        free_in_prefix = [block for block in prefix if block in self._reuse_order]
        return missing <= self.num_free_blocks - len(free_in_prefix)

    # Invariant: allocation only appends. Blocks that already hold K and V keep their place.
    #
    #     block_table   | unchanged             | appended here                  |
    #     tokens        0..cached_token_count   cached_token_count..num_tokens
    def allocate(self, sequence: Sequence, num_tokens: int, prefix: Prefix = ()) -> None:
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
            block = next(iter(self._reuse_order))
            if block in self._contents:
                self._forget(block)
                self.num_evictions += 1
            self._hold(block)
            sequence.block_table.append(block)

    # Invariant: the table releases all its blocks and is empty afterwards.
    def free(self, sequence: Sequence) -> None:
        """Free all blocks of `sequence`, tail first.

        Raises RuntimeError if its table has a block that is already free.
        """
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        sequence.cached_token_count = 0

    # Invariant: what is published is in the cache, and no content is published twice.
    #
    #     block_table   | published before  | published here                 | not full
    #     tokens        0..start_pos        start_pos..cached_token_count
    def publish(self, sequence: Sequence, start_pos: int) -> None:
        """After a step, make the blocks findable that its slice from `start_pos` on has filled."""
        table, size = sequence.block_table, self.block_size
        for i in range(start_pos // size, sequence.cached_token_count // size):
            content = self._content(sequence, i, table)
            block = self._blocks.get(content.content_hash)
            if content.parent is not None and content.parent not in self._contents:
                return  # behind a private block: no lookup could find it
            if block is None:  # new
                self._blocks[content.content_hash] = table[i]
                self._contents[table[i]] = content
            elif self._contents[block] != content:  # equal hashes of different contents
                return
            elif block != table[i]:  # a twin, computed in the same step: share the published one
                self._hold(block)
                self._release(table[i])
                table[i] = block

    def reset_prefix_cache(self) -> int:
        """Forget the content of the free blocks; return how many of them had any."""
        cached = [block for block in self._reuse_order if block in self._contents]
        for block in cached:
            self._forget(block)
        return len(cached)

    def _content(self, sequence: Sequence, i: int, blocks: list[int]) -> Content:
        """Content of full block `i` of `sequence`, given the blocks before it."""
        hashes, size = sequence.block_hashes, self.block_size
        for n in range(len(hashes), i + 1):  # each hash is computed once
            salt_hash = hashlib.sha256(b"salt" + sequence.cache_salt.encode()).digest()
            token_ids = sequence.token_ids[n * size : (n + 1) * size]
            hashes.append(hash_block(hashes[-1] if n else salt_hash, token_ids))
        token_ids = sequence.token_ids[i * size : (i + 1) * size]
        return Content(hashes[i], blocks[i - 1] if i else None, token_ids)

    def _forget(self, block: int) -> None:
        del self._blocks[self._contents.pop(block).content_hash]

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._reuse_order.pop(block, None)

    def _release(self, block: int) -> None:
        if not self._ref_counts[block]:
            raise RuntimeError(f"block {block} is already free")
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            self._reuse_order[block] = None  # reused last, if its content can be found
            if block not in self._contents:
                self._reuse_order.move_to_end(block, last=False)  # otherwise first
