"""Decides what the next step computes.

There are three budgets: tokens of one step, sequences that hold blocks, free blocks. Knows no
tensors and no text.
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
        slices: at most one per sequence: decodes, prompts that have begun, new prompts.
        sampling: the sequences that get a token, because their slice ends at their last known one.
        preempted: sequences that lost their blocks so that this batch fits.
    """

    slices: list[Slice]
    preempted: list[Sequence] = field(default_factory=list)
    sampling: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = [s.sequence for s in self.slices if s.end_pos == s.sequence.num_tokens]


class Scheduler:
    """First come, first served; decodes before prompts, prompts in chunks.

    Invariant: `running` (PREFILLING and RUNNING) followed by `waiting` is in arrival order. So the
    oldest request is never preempted for another one: it always advances, and therefore every
    request finishes.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        assert config.max_model_len and config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_decodes = int(config.max_num_batched_tokens * (config.max_decode_share or 1))
        self.max_prefill_chunk_size = config.max_prefill_chunk_size or config.max_num_batched_tokens
        self.reserve_full_prompt = config.reserve_full_prompt
        self.step_time: Any = None  # the engine's StepTimeModel, if there is a target
        self.num_steps = 0
        # A running sequence decodes one token per step, so more sequences than tokens would idle.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.enable_prefix_caching = config.enable_prefix_caching
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
        self.num_steps += 1
        slices: list[Slice] = []
        running = self.running.copy()
        blocked = False

        # 1. Decodes first: no prompt may make a stream wait.
        decodes, most = self._choose_decodes()
        for sequence in decodes:
            if len(slices) < most and sequence.status is SequenceStatus.RUNNING:
                start_pos = sequence.cached_token_count
                if self._make_room(sequence, start_pos + 1):
                    slices.append(Slice(sequence, start_pos, 1))
                else:
                    self._preempt_youngest()  # which is `sequence` itself

        # 2. Prompts that have begun before new ones: they already hold blocks.
        for sequence in [s for s in running if s.status is SequenceStatus.PREFILLING]:
            start_pos = sequence.cached_token_count
            num_tokens = self._chunk_len(sequence, start_pos, slices)
            if num_tokens == 0 or sequence.status is not SequenceStatus.PREFILLING:
                break  # no budget is left; or it was preempted, and so were all after it
            if not self._make_room(sequence, start_pos + num_tokens):
                blocked = True  # it waits, and keeps the blocks it has
                break
            slices.append(Slice(sequence, start_pos, num_tokens))

        # 3. New prompts, unless blocks are short: they must not take those that older ones need.
        preempted = [s for s in reversed(running) if s.status is SequenceStatus.WAITING]
        while self.waiting and not (preempted or blocked) and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            prefix = self.block_manager.find_prefix(sequence)
            start_pos = len(prefix) * self.block_manager.block_size
            num_tokens = self._chunk_len(sequence, start_pos, slices)
            end_pos = sequence.num_tokens if self.reserve_full_prompt else start_pos + num_tokens
            if num_tokens == 0 or not self.block_manager.can_allocate(sequence, end_pos, prefix):
                break
            self.block_manager.allocate(sequence, end_pos, prefix)
            if sequence.num_hit_tokens is None:  # own blocks, found after preemption, are no hit
                sequence.num_hit_tokens = start_pos
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.PREFILLING
            slices.append(Slice(sequence, start_pos, num_tokens))
        return ScheduledBatch(_without_preempted(slices), preempted)

    def _choose_decodes(self) -> tuple[list[Sequence], int]:
        """The RUNNING sequences in order of priority, and how many of them may decode now.

        All may, unless prompts wait for their share; then the one with the oldest token goes first.
        """
        decodes = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        if self.waiting or len(decodes) < len(self.running):
            decodes.sort(key=lambda s: s.last_step)
            return decodes, max(1, self.max_num_decodes)
        return decodes, len(decodes)

    def _chunk_len(self, sequence: Sequence, start_pos: int, slices: list[Slice]) -> int:
        """How many tokens of `sequence` to compute from `start_pos` on, in addition to `slices`."""
        slices = _without_preempted(slices)
        budget = self.max_num_batched_tokens - sum(s.num_tokens for s in slices)
        chunk_len = min(sequence.num_tokens - start_pos, self.max_prefill_chunk_size, budget)
        if self.step_time is None or chunk_len == 0:
            return chunk_len
        return self.step_time.longest_chunk(slices, start_pos, chunk_len)

    # Invariant: a sequence takes blocks only from younger ones, the youngest first.
    #
    #     running   | older: keep blocks | needs some | younger: may be preempted |
    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow its table to `num_tokens` tokens; False if there is no younger one to preempt."""
        while not self.block_manager.can_allocate(sequence, num_tokens):
            if self.running[-1] is sequence:
                return False
            self._preempt_youngest()
        self.block_manager.allocate(sequence, num_tokens)
        return True

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
            if self.enable_prefix_caching:  # not earlier: its K and V are written only now
                self.block_manager.publish(s.sequence, s.start_pos)
        for sequence, token_id in zip(batch.sampling, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.status = SequenceStatus.RUNNING
            sequence.last_step = self.num_steps

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, whatever its state. Its blocks are free at once."""
        queue = self.waiting if sequence.status is SequenceStatus.WAITING else self.running
        queue.remove(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason


def _without_preempted(slices: list[Slice]) -> list[Slice]:
    """A sequence may be preempted after it got its slice."""
    return [s for s in slices if s.sequence.status is not SequenceStatus.WAITING]
