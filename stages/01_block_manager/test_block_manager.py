"""The free list and the block tables, without a model."""

from __future__ import annotations

import random

import pytest

from .block_manager import BlockManager, slot_mapping
from .sequence import Sequence


def make_sequence(num_tokens: int = 10) -> Sequence:
    return Sequence("a", [1] * num_tokens, max_tokens=10)


@pytest.mark.parametrize(
    ("start_pos", "num_tokens", "slots"),
    [
        (0, 10, [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]),
        (3, 2, [31, 8]),
        (9, 1, [21]),
        (4, 0, []),
    ],
)
def test_slots_go_by_the_position_in_the_whole_sequence(
    start_pos: int, num_tokens: int, slots: list[int]
) -> None:
    assert slot_mapping([7, 2, 5], start_pos, num_tokens, block_size=4) == slots


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_a_number_of_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, block_size=4).num_blocks_for(num_tokens) == num_blocks


def test_a_table_grows_only_when_it_must() -> None:
    manager, sequence = BlockManager(8, block_size=4), make_sequence()
    tables = []
    for num_tokens in (3, 4, 5, 5, 8, 12):
        manager.allocate(sequence, num_tokens)
        tables.append(list(sequence.block_table))
    assert [len(table) for table in tables] == [1, 1, 2, 2, 2, 3]
    assert all(tables[-1][: len(table)] == table for table in tables), "a block changed its place"
    assert manager.num_free_blocks == 5


def test_S2_an_allocation_that_does_not_fit_changes_nothing() -> None:
    manager, sequence = BlockManager(2, block_size=4), make_sequence()
    manager.allocate(sequence, 4)
    assert manager.can_allocate(sequence, 8) and not manager.can_allocate(sequence, 9)
    with pytest.raises(RuntimeError, match="9 tokens"):
        manager.allocate(sequence, 9)
    assert (len(sequence.block_table), manager.num_free_blocks) == (1, 1)


def test_freeing_gives_all_blocks_back_and_forgets_what_they_held() -> None:
    manager, sequence = BlockManager(3, block_size=4), make_sequence()
    manager.allocate(sequence, 9)
    sequence.cached_token_count = 9
    manager.free(sequence)
    assert (sequence.block_table, sequence.cached_token_count) == ([], 0)
    assert manager.num_free_blocks == 3
    manager.free(sequence)
    assert manager.num_free_blocks == 3, "a sequence without blocks gave some back"


def test_B8_a_block_is_not_freed_twice() -> None:
    manager, sequence, copy = BlockManager(3, block_size=4), make_sequence(), make_sequence()
    manager.allocate(sequence, 9)
    copy.block_table = list(sequence.block_table)
    manager.free(sequence)
    with pytest.raises(RuntimeError, match="already free"):
        manager.free(copy)
    assert manager.num_free_blocks == 3


def test_B8_every_block_is_free_or_in_one_table() -> None:
    """A thousand random allocations and frees; then the pool hands out each block exactly once."""
    choose = random.Random(0)
    manager = BlockManager(20, block_size=3)
    sequences = [make_sequence() for _ in range(5)]
    for _ in range(1000):
        sequence = choose.choice(sequences)
        num_tokens = choose.randint(1, 24)
        if choose.random() < 0.3:
            manager.free(sequence)
        elif manager.can_allocate(sequence, num_tokens):
            manager.allocate(sequence, num_tokens)
        held = [block for s in sequences for block in s.block_table]
        assert len(set(held)) == len(held), f"a block is in two tables: {held}"
        assert len(held) + manager.num_free_blocks == 20
    for sequence in sequences:
        manager.free(sequence)
    manager.allocate(sequences[0], 60)
    assert sorted(sequences[0].block_table) == list(range(20))
