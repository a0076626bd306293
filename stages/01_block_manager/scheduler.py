"""Decides what the next step computes.

There are three budgets: tokens of one step, sequences that hold blocks, free blocks. Knows no
tensors and no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .config import EngineConfig
from .sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class Slice:
    """Tokens `start_pos..end_pos` of one sequence, to compute now. A decode is a slice of one."""

    sequence: Sequence
    start_pos: int
    num_tokens: int

    @property
    def end_pos(self) -> int:
        """The position after its last token."""
        return self.start_pos + self.num_tokens


@dataclass
class ScheduledBatch:
    """What one step computes. Empty when there is nothing to do.

    Attributes:
        slices: at most one per sequence, in arrival order.
        sampling: the sequences that get a token, because their slice ends at their last known one.
        preempted: sequences that lost their blocks so that this batch fits.
    """

    slices: list[Slice]
    preempted: list[Sequence] = field(default_factory=list)
    sampling: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = [s.sequence for s in self.slices if s.end_pos == s.sequence.num_tokens]


class Scheduler:
    """First come, first served, whole prompts before decodes.

    Invariant: `running` followed by `waiting` is in arrival order. So the oldest request is never
    preempted for another one: it always advances, and therefore every request finishes.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        assert config.max_model_len is not None
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A running sequence decodes one token per step, so more sequences than tokens would idle.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def check(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return `max_tokens`; if it is None, as many tokens as there is room for.

        Raises ValueError if the request could never finish. The last generated token is never
        written to the cache, so it needs no slot.
        """
        num_slots = self.block_manager.num_blocks * self.block_manager.block_size
        room = min(self.max_model_len, num_slots + 1) - num_prompt_tokens
        if num_prompt_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        if room < (max_tokens or 1):
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens or 1} to generate do not fit: "
                f"max_model_len is {self.max_model_len}, the KV cache has {num_slots} slots"
            )
        return max_tokens or room

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `check` has accepted."""
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch:
        """Choose the slices of the next step and allocate the blocks they write to.

        Sequences are admitted and preempted here. What the slices compute counts only after
        `commit`: until then their tokens are neither cached nor findable.
        """
        prefills = self._schedule_prefills()
        if prefills:
            return ScheduledBatch(prefills)
        return self._schedule_decodes()

    # Invariant: no request is admitted before the head of `waiting`. If short requests could pass
    # a long one that does not fit yet, it might wait forever.
    def _schedule_prefills(self) -> list[Slice]:
        slices: list[Slice] = []
        budget = self.max_num_batched_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = sequence.num_tokens
            # A preempted sequence may outgrow the budget. It is recomputed in a step of its own.
            if num_tokens > budget and slices:
                break
            if not self.block_manager.can_allocate(sequence, num_tokens):
                break
            self.block_manager.allocate(sequence, num_tokens)
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            slices.append(Slice(sequence, 0, num_tokens))
            budget -= num_tokens
        return slices

    # Invariant: a sequence takes blocks only from younger ones, the youngest first.
    #
    #     running   | have their slot | needs one | may be preempted |
    #     index     0..i              i           i + 1..len(running)
    def _schedule_decodes(self) -> ScheduledBatch:
        slices: list[Slice] = []
        preempted: list[Sequence] = []
        while len(slices) < len(self.running):
            sequence = self.running[len(slices)]
            start_pos = sequence.cached_token_count
            if self.block_manager.can_allocate(sequence, start_pos + 1):
                self.block_manager.allocate(sequence, start_pos + 1)
                slices.append(Slice(sequence, start_pos, 1))
            else:
                preempted.append(self._preempt_youngest())
        return ScheduledBatch(slices, preempted)

    def _preempt_youngest(self) -> Sequence:
        """Free the blocks of the running sequence that arrived last. It keeps its tokens."""
        sequence = self.running.pop()
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        return sequence

    def commit(self, batch: ScheduledBatch, token_ids: Iterable[int]) -> None:
        """Record that `batch` was computed, and the tokens sampled for `batch.sampling`."""
        for s in batch.slices:
            s.sequence.cached_token_count = s.end_pos
        for sequence, token_id in zip(batch.sampling, token_ids, strict=True):
            sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, whatever its state. Its blocks are free at once."""
        queue = self.waiting if sequence.status is SequenceStatus.WAITING else self.running
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
