"""Who computes what in the next step.

Decides with three budgets: tokens of one step, sequences that hold blocks, free blocks. Knows no
tensor and no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .block_manager import BlockManager
from .config import EngineConfig
from .sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class Slice:
    """Tokens `start_pos .. end_pos` of one sequence, to compute now. A decode is a slice of one."""

    sequence: Sequence
    start_pos: int
    num_tokens: int

    @property
    def end_pos(self) -> int:
        """Position behind its last token."""
        return self.start_pos + self.num_tokens


Batch = dict[Sequence, Slice]  # while it is being put together


@dataclass
class ScheduledBatch:
    """What one step computes. Empty when there is nothing to do.

    Attributes:
        slices: at most one per sequence: decodes, prompts under way, new prompts.
        sampling: the sequences that get a token: those whose slice ends at their last known token.
        preempted: sequences that lost their blocks to make this batch possible.
    """

    slices: list[Slice]
    preempted: list[Sequence] = field(default_factory=list)
    sampling: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = [s.sequence for s in self.slices if s.end_pos == s.sequence.num_tokens]

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(s.num_tokens for s in self.slices)


class Scheduler:
    """First come, first served; decodes before prompts, prompts in chunks.

    Invariant: `running` (PREFILLING and RUNNING) followed by `waiting` is in arrival order. The
    oldest request is therefore never the one that has to give blocks up, so it always advances,
    and so in the end do all.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        assert config.max_model_len is not None
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_decodes = int(config.max_num_batched_tokens * (config.max_decode_share or 1))
        self.max_prefill_chunk_size = config.max_prefill_chunk_size or config.max_num_batched_tokens
        self.reserve_full_prompt = config.reserve_full_prompt
        self.step_time: Any = None  # the engine's model of step times, if there is a target
        self.num_steps = 0
        # Each running sequence decodes a token a step, so more seats than tokens would be idle.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.enable_prefix_caching = config.enable_prefix_caching
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def check(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the `max_tokens` to use, for None all the room that is left.

        Raises ValueError for what could never finish. The last generated token is never written to
        the cache, so it needs no slot.
        """
        num_slots = self.block_manager.num_blocks * self.block_manager.block_size
        room = min(self.max_model_len, num_slots + 1) - num_prompt_tokens
        if room < (max_tokens or 1):
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens or 1} to generate do not fit: "
                f"max_model_len is {self.max_model_len}, the KV cache has {num_slots} slots"
            )
        return max_tokens or room

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `check` let through."""
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch:
        """Choose the slices of the next step and allocate the blocks they write to.

        Apart from preemption nothing else changes until `commit`: a step that is given up half-way
        can be scheduled again.
        """
        batch: Batch = {}
        preempted: list[Sequence] = []
        self.num_steps += 1

        # 1. Decodes first: no prompt may keep a stream waiting.
        for sequence in self._choose_decodes():
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted a moment ago
            start_pos = sequence.cached_token_count
            if self._make_room(sequence, start_pos + 1, batch, preempted):
                batch[sequence] = Slice(sequence, start_pos, 1)
            else:
                preempted.append(self._preempt_youngest())

        # 2. Prompts under way before new ones: they hold blocks and have shown nothing for it yet.
        for sequence in [s for s in self.running if s.status is SequenceStatus.PREFILLING]:
            start_pos = sequence.cached_token_count
            num_tokens = self._chunk_len(sequence, start_pos, batch)
            if num_tokens == 0 or sequence.status is not SequenceStatus.PREFILLING:
                break  # the budget is spent; or it was preempted, and so were all behind it
            if not self._make_room(sequence, start_pos + num_tokens, batch, preempted):
                # Nobody younger may take the blocks that it waits for.
                return ScheduledBatch(list(batch.values()), preempted)
            batch[sequence] = Slice(sequence, start_pos, num_tokens)

        # 3. New prompts, unless blocks are so short that somebody had to give some back.
        while self.waiting and not preempted and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            prefix = self.block_manager.find_prefix(sequence)
            start_pos = len(prefix) * self.block_manager.block_size
            num_tokens = self._chunk_len(sequence, start_pos, batch)
            end_pos = sequence.num_tokens if self.reserve_full_prompt else start_pos + num_tokens
            if num_tokens == 0 or not self.block_manager.can_allocate(sequence, end_pos, prefix):
                break
            self.block_manager.allocate(sequence, end_pos, prefix)
            if sequence.num_hit_tokens is None:  # finding its own blocks again is no hit
                sequence.num_hit_tokens = start_pos
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.PREFILLING
            batch[sequence] = Slice(sequence, start_pos, num_tokens)
        return ScheduledBatch(list(batch.values()), preempted)

    def _choose_decodes(self) -> list[Sequence]:
        """The RUNNING sequences that decode now: all of them, unless prompts wait for their share.

        Under `max_decode_share` those go first whose newest token is oldest.
        """
        decodes = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        if self.waiting or len(decodes) < len(self.running):
            decodes = sorted(decodes, key=lambda s: s.last_step)[: max(1, self.max_num_decodes)]
        return decodes

    def _chunk_len(self, sequence: Sequence, start_pos: int, batch: Batch) -> int:
        """How many tokens of `sequence` to compute from `start_pos` on, beside those of `batch`."""
        budget = self.max_num_batched_tokens - sum(s.num_tokens for s in batch.values())
        chunk_len = min(sequence.num_tokens - start_pos, self.max_prefill_chunk_size, budget)
        if self.step_time is None or chunk_len == 0:
            return chunk_len
        return self.step_time.longest_chunk(batch.values(), start_pos, chunk_len)

    # Invariant: blocks flow from the youngest to the oldest, whatever their states are.
    #
    #     running   | older: keep theirs | asks now | younger: may have to give up |
    def _make_room(
        self, sequence: Sequence, num_tokens: int, batch: Batch, preempted: list[Sequence]
    ) -> bool:
        """Grow its table to `num_tokens` tokens; False if no younger one is left to take from."""
        while not self.block_manager.can_allocate(sequence, num_tokens):
            if self.running[-1] is sequence:
                return False
            preempted.append(self._preempt_youngest())
            batch.pop(preempted[-1], None)  # it may have its slice already
        self.block_manager.allocate(sequence, num_tokens)
        return True

    def _preempt_youngest(self) -> Sequence:
        """Take the blocks of the running sequence that arrived last; it keeps its tokens."""
        sequence = self.running.pop()
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        return sequence

    def commit(self, batch: ScheduledBatch, token_ids: Iterable[int]) -> None:
        """Record that `batch` was computed, and the tokens sampled for `batch.sampling`."""
        for s in batch.slices:
            s.sequence.cached_token_count = s.end_pos
            if self.enable_prefix_caching:  # only now: an unwritten block must not be found
                self.block_manager.publish(s.sequence, s.start_pos)
        for sequence, token_id in zip(batch.sampling, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.status = SequenceStatus.RUNNING
            sequence.last_step = self.num_steps

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in whatever state it is; its blocks come back at once."""
        queue = self.waiting if sequence.status is SequenceStatus.WAITING else self.running
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
