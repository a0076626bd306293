"""Which blocks of the KV cache are free, and which sequences hold the others.

Knows block ids and token ids, but no tensors and no model.
"""

from __future__ import annotations

from collections import deque

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


class BlockManager:
    """Allocates the `num_blocks` blocks of a pool, `block_size` token slots each.

    Invariant: before and after each method, every block is either free or in exactly one block
    table, once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._held: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens; used for admission and for allocation alike."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `sequence`'s table could grow to hold its first `num_tokens` tokens."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        return missing <= self.num_free_blocks

    # Invariant: allocation only appends. Blocks that already hold K and V keep their place.
    #
    #     block_table   | unchanged             | appended here                  |
    #     tokens        0..cached_token_count   cached_token_count..num_tokens
    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Grow `sequence.block_table` to hold its first `num_tokens` tokens.

        Raises RuntimeError, and changes nothing, if too few blocks are free.
        """
        if not self.can_allocate(sequence, num_tokens):
            raise RuntimeError(f"{sequence}: {num_tokens} tokens, {self.num_free_blocks} blocks")
        while len(sequence.block_table) < self.num_blocks_for(num_tokens):
            block = self._free.popleft()
            self._held.add(block)
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

    def _release(self, block: int) -> None:
        if block not in self._held:
            raise RuntimeError(f"block {block} is already free")
        self._held.remove(block)
        self._free.append(block)
