"""Eight broken engines: small changes of a stage's files, each of which breaks one invariant.

A fault is planted by the exact text that it replaces. If that text is gone or occurs
twice, planting fails, and the fault must be updated. Used by the page of broken engines and by
`make start ... FAULT=n`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One change of stage 04.

    Attributes:
        file: where it is planted.
        old, new: the text that it replaces, and by what.
        invariant: key of what it breaks, see `tools.lab.invariants`.
        why: told when the reader has found it.
        test: a test of the contract that fails with it.
        setting: what the page runs, as `tools.lab.drive.run` takes it.
    """

    file: str
    old: str
    new: str
    invariant: str
    symptom: str
    why: str
    test: str
    setting: Mapping[str, Any] = field(default_factory=dict)

    def plant(self, files: Mapping[str, str]) -> dict[str, str]:
        """The files with the fault in one of them. Raises ValueError if its text has changed."""
        source = files[self.file]
        if source.count(self.old) != 1:
            count = source.count(self.old)
            raise ValueError(
                f"fault {number_of(self)}: its text is {count} times in {self.file}, expected "
                f"once; update tools/lab/faults.py: {self.old!r}"
            )
        return {**files, self.file: source.replace(self.old, self.new)}

    def line(self, files: Mapping[str, str]) -> tuple[int, int]:
        """First and last line of the fault in the planted file, counted from 1."""
        planted = self.plant(files)[self.file]
        first = planted[: planted.index(self.new)].count("\n") + 1
        return first, first + self.new.rstrip("\n").count("\n")


def request(name: str, arrival: int, prompt: int, max_tokens: int, **more: int) -> dict[str, Any]:
    """A request of a setting."""
    return {"id": name, "arrival": arrival, "prompt": prompt, "max_tokens": max_tokens, **more}


def setting(*requests: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A setting of stage 04."""
    usual = {
        "block_size": 16,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_prefill_chunk_size": 64,
    }
    return {"stage": 4, "options": {**usual, **options}, "requests": list(requests)}


FAULTS = (
    Fault(
        file="block_manager.py",
        old="        block_table[t // block_size] * block_size + t % block_size\n",
        new="        block_table[t // block_size] * block_size + (t - start_pos) % block_size\n",
        invariant="slot",
        symptom="The first word of an answer to a short prompt is right, the next ones are "
        "strange, and long prompts seem forgotten.",
        why="The offset is counted from the start of the slice. A whole prompt starts at 0, so the "
        "two agree there. A chunk that begins inside of a block, and every decode, is written to "
        "the wrong offset.",
        test="test_C3_slots_come_from_the_whole_sequence",
        setting=setting(
            request("A", 0, 30, 12), request("document", 3, 200, 4), max_prefill_chunk_size=40
        ),
    ),
    Fault(
        file="scheduler.py",
        old="            sequence.status = SequenceStatus.PREFILLING\n",
        new="            sequence.status = SequenceStatus.PREFILLING\n"
        "            sequence.cached_token_count = start_pos + num_tokens\n"
        "            self.block_manager.publish(sequence, start_pos)\n",
        invariant="published",
        symptom="Two users send the same prompt in one step. When that step fails, later "
        "requests with the same prompt get an answer to something else.",
        why="Publishing happens in `schedule`, before anything is computed. If the step then "
        "fails, the block keeps its hash, but its content was never written.",
        test="test_B3_a_failed_forward_publishes_nothing",
        setting=setting(
            request("A", 0, 70, 8, shared=64),
            request("B", 0, 80, 8, shared=64),
            request("C", 4, 90, 8, shared=64),
        ),
    ),
    Fault(
        file="scheduler.py",
        old="        sequence = self.running.pop()\n",
        new="        sequence = max(self.running, key=lambda s: len(s.block_table))\n"
        "        self.running.remove(sequence)\n",
        invariant="youngest",
        symptom="With a small pool, long requests take forever: they are computed again and "
        "again, while short ones that came later finish first.",
        why="It preempts the request that holds most blocks, not the youngest. Two long requests "
        "can then preempt each other in turn, and no request is sure to advance.",
        test="test_S7_a_preempted_request_keeps_its_place",
        setting=setting(
            request("A", 0, 60, 60),
            request("B", 1, 20, 60),
            request("C", 2, 20, 60),
            num_blocks=12,
        ),
    ),
    Fault(
        file="scheduler.py",
        old="len(self.running) < self.max_num_seqs:\n",
        new="sum(\n"
        "            s.status is SequenceStatus.RUNNING for s in self.running\n"
        "        ) < self.max_num_seqs:\n",
        invariant="seat",
        symptom="Many documents arrive at once. All begin, the pool is full of half-done prompts, "
        "and the first token of each comes late.",
        why="Only RUNNING sequences are counted. PREFILLING ones hold blocks, too, so any number "
        "of prompts can be half done.",
        test="test_S8_half_done_prompts_take_seats",
        setting=setting(
            *(request(name, i, 150, 6) for i, name in enumerate("ABCDE")), max_num_seqs=2
        ),
    ),
    Fault(
        file="scheduler.py",
        old="        self.block_manager.free(sequence)\n"
        "        sequence.status = SequenceStatus.FINISHED\n",
        new="        if sequence.status is SequenceStatus.RUNNING:\n"
        "            self.block_manager.free(sequence)\n"
        "        sequence.status = SequenceStatus.FINISHED\n",
        invariant="ends",
        symptom="All is well for hours. But the pool shrinks a little whenever a user closes the "
        "window while a document is in prefill.",
        why="The clean-up only knows RUNNING. A PREFILLING sequence that is aborted keeps its "
        "blocks forever.",
        test="test_A1_abort_in_every_state",
        setting=setting(
            request("A", 0, 40, 30),
            request("document", 2, 400, 8, abort=5),
            request("B", 9, 60, 10),
        ),
    ),
    Fault(
        file="block_manager.py",
        old="                self._forget(block)\n                self.num_evictions += 1\n",
        new="                self.num_evictions += 1\n",
        invariant="name",
        symptom="After some hours a prompt that was asked before gets a fluent answer about "
        "something else. A restart helps.",
        why="A cached block is reused, but its old hash still leads to it. A request for "
        "the old content finds the new one.",
        test="test_B2_a_reused_block_has_lost_its_old_content",
        setting=setting(
            request("A", 0, 100, 4),
            request("B", 8, 160, 4),
            request("C", 18, 160, 4),
            num_blocks=14,
        ),
    ),
    Fault(
        file="model_runner.py",
        old="context_lens.append(s.end_pos)\n",
        new="context_lens.append(s.sequence.num_tokens)\n",
        invariant="past",
        symptom="Chats are fine. The answers about documents are noise, except for those that fit "
        "into one chunk.",
        why="The context of a chunk is taken to be the whole prompt. Its rows read slots that are "
        "not written yet, and their causal mask is shifted.",
        test="test_C1_chunks_see_no_further_than_their_own_end",
        setting=setting(request("A", 0, 50, 10), request("document", 2, 220, 4)),
    ),
    Fault(
        file="scheduler.py",
        old="self.max_num_batched_tokens - sum(s.num_tokens for s in slices)\n",
        new="self.max_num_batched_tokens - len(slices)\n",
        invariant="budget",
        symptom="One document at a time is no problem. When three arrive together, all streams "
        "become slow, although the budget is unchanged.",
        why="A slice is charged as one token, whatever its length is. That is right for decodes "
        "and wrong for chunks: a step can compute more tokens than the budget allows.",
        test="test_between_two_tokens_never_more_than_the_budget",
        setting=setting(
            request("A", 0, 20, 20),
            *(request(name, 3, 150, 4) for name in "BCD"),
            max_num_batched_tokens=96,
        ),
    ),
)


def number_of(fault: Fault) -> int:
    """A fault's number, from 1."""
    return next(i for i, one in enumerate(FAULTS, 1) if one is fault)
