"""Who is computed in which step, without a model: the tests play the model's part.

The rules that a whole engine shows are in `tests/contract/scheduling.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from .block_manager import BlockManager
from .config import EngineConfig
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus


def make_scheduler(num_blocks: int = 64, **options: int) -> Scheduler:
    config = EngineConfig(
        **{"block_size": 4, "num_blocks": num_blocks, "max_model_len": 64, **options}
    )
    return Scheduler(config, BlockManager(num_blocks, config.block_size))


def add(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    """Queue one sequence for each prompt length, named a, b, ..."""
    sequences = [Sequence("abcdefgh"[n], [1] * length, 20) for n, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Schedule and commit one step; return its slices as (id, start_pos, num_tokens)."""
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch.sampling))
    return [(s.sequence.request_id, s.start_pos, s.num_tokens) for s in batch.slices]


def test_the_life_of_a_token() -> None:
    """The newest token is never in the cache: it is the next decode's input."""
    scheduler = make_scheduler()
    [sequence] = add(scheduler, 9)
    assert sequence.status.value == "waiting"
    assert step(scheduler) == [("a", 0, 9)]
    assert sequence.status.value == "running"
    assert (sequence.cached_token_count, sequence.token_ids) == (9, [*[1] * 9, 7])
    assert step(scheduler) == [("a", 9, 1)]
    assert (sequence.cached_token_count, sequence.token_ids) == (10, [*[1] * 9, 7, 7])


def test_nothing_is_cached_before_the_commit() -> None:
    scheduler = make_scheduler()
    [sequence] = add(scheduler, 9)
    batch = scheduler.schedule()
    assert (sequence.cached_token_count, sequence.num_tokens) == (0, 9)
    assert (batch.slices[0].end_pos, batch.sampling, len(sequence.block_table)) == (
        9,
        [sequence],
        3,
    )
    scheduler.commit(batch, [7])
    assert (sequence.cached_token_count, sequence.num_tokens) == (9, 10)


def test_the_commit_wants_a_token_for_each_that_sampled() -> None:
    scheduler = make_scheduler()
    add(scheduler, 9, 3)
    with pytest.raises(ValueError):
        scheduler.commit(scheduler.schedule(), [7])


def test_nobody_gives_blocks_up_while_the_last_slot_is_free() -> None:
    scheduler = make_scheduler(num_blocks=2)
    add(scheduler, 3, 3)
    step(scheduler)
    batch = scheduler.schedule()
    assert ([s.end_pos for s in batch.slices], batch.preempted) == ([4, 4], [])


def test_S7_the_youngest_gives_its_blocks_to_the_oldest() -> None:
    """7 blocks, two prompts of 9: at the 13th token of both there is one block left for two."""
    scheduler = make_scheduler(num_blocks=7)
    a, b = add(scheduler, 9, 9)
    for _ in range(4):
        step(scheduler)
    batch = scheduler.schedule()
    assert [s.sequence for s in batch.slices] == [a]
    assert batch.preempted == [b]
    assert (b.status, b.block_table, b.cached_token_count) == (SequenceStatus.WAITING, [], 0)
    assert b.token_ids[9:] == [7] * 4, "what it has generated is kept"
    assert list(scheduler.waiting) == [b]


def test_S7_a_preempted_sequence_is_computed_again_with_its_output() -> None:
    scheduler = make_scheduler(num_blocks=7)
    a, b = add(scheduler, 9, 9)
    for _ in range(5):
        step(scheduler)
    scheduler.finish(a, "length")
    assert step(scheduler) == [("b", 0, 13)]
    assert step(scheduler) == [("b", 13, 1)]


def test_S7_one_may_preempt_itself() -> None:
    """The youngest asks, nothing is free: it gives way, the others' slices stand."""
    scheduler = make_scheduler(num_blocks=3)
    a, b = add(scheduler, 7, 4)
    step(scheduler)
    batch = scheduler.schedule()
    assert [s.sequence for s in batch.slices] == [a]
    assert (batch.preempted, list(scheduler.waiting)) == ([b], [b])


def test_S7_preempted_ones_stay_in_the_order_of_arrival() -> None:
    """Four sequences of one block each, and none free: the two oldest take those of the others."""
    scheduler = make_scheduler(num_blocks=4)
    a, b, c, d = add(scheduler, 4, 4, 4, 4)
    e = Sequence("e", [1], 5)
    scheduler.add(e)
    step(scheduler)
    batch = scheduler.schedule()
    assert [s.sequence for s in batch.slices] == [a, b]
    assert batch.preempted == [d, c]
    assert [*scheduler.running, *scheduler.waiting] == [a, b, c, d, e]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_A1_a_sequence_may_end_in_any_state(state: str) -> None:
    scheduler = make_scheduler(num_blocks=7)
    a, b = add(scheduler, 9, 9)
    for _ in range({"waiting": 0, "running": 2, "preempted": 5}[state]):
        step(scheduler)
    assert bool(b.block_table) == (state == "running")
    scheduler.finish(b, "abort")
    assert (b.status, b.finish_reason, b.block_table) == (SequenceStatus.FINISHED, "abort", [])
    assert [s.sequence for s in scheduler.schedule().slices] == [a]
    scheduler.finish(a, "abort")
    assert scheduler.block_manager.num_free_blocks == 7 and not scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "result"),
    [
        (15, None, 2),
        (15, 2, 2),
        (15, 3, "15 prompt tokens and 3 to generate"),
        (16, None, 1),
        (16, 1, 1),
        (17, None, "16 slots"),
        (17, 1, "16 slots"),
        (18, 1, "max_num_batched_tokens is 17"),
    ],
)
def test_S1_what_the_door_lets_in(
    num_prompt_tokens: int, max_tokens: int | None, result: int | str
) -> None:
    """16 slots: the last token is never written, so prompt and output may be 17 together."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=17)
    if isinstance(result, int):
        assert scheduler.check(num_prompt_tokens, max_tokens) == result
    else:
        with pytest.raises(ValueError, match=result):
            scheduler.check(num_prompt_tokens, max_tokens)


def test_what_has_outgrown_the_budget_is_computed_again_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    a, b = add(scheduler, 2, 8)
    while b.num_tokens < 11:
        step(scheduler)
    scheduler._preempt_youngest(), scheduler._preempt_youngest()
    assert step(scheduler) == [("a", 0, 5)], "11 tokens beside these 5 would be twice the budget"
    assert step(scheduler) == [("b", 0, 11)]


def test_a_step_that_was_given_up_is_scheduled_again() -> None:
    scheduler = make_scheduler()
    [a] = add(scheduler, 3)
    scheduler.schedule()
    assert a.num_tokens == 3
    slices = [step(scheduler) for _ in range(4)]
    assert a.token_ids[3:4] == [7], slices
    assert sum(num_tokens for [(_, _, num_tokens)] in slices) == a.cached_token_count


def test_a_step_does_not_look_at_all_who_wait() -> None:
    """Its work is bounded by the seats, not by the queue."""
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 3, 3)
    step(scheduler)

    scheduler.waiting = NotToBeWalked(Sequence(str(n), [1], 5) for n in range(1000))
    assert [request_id for request_id, _, _ in step(scheduler)] == ["a", "b"]


class NotToBeWalked(deque):
    def __iter__(self) -> Iterator[Sequence]:
        raise AssertionError("the queue of waiting requests was walked through")
