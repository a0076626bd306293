"""The course's running example, run: every number of it on the site comes from here.

Four chats with a common system prompt are streaming; a long document arrives. The stages' own
schedulers and block managers run it without a model: tokens are made up, time is counted in steps
and in tokens computed. So nothing here is a measurement, and everything is exact.

Knows only the bookkeeping modules of stages (`sequence`, `block_manager`, `scheduler`, `config`),
which need no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from shared.measure.example import (
    BEFORE_DOCUMENT,
    BETWEEN_CHATS,
    CHATS,
    DOCUMENT_TOKENS,
    SYSTEM_TOKENS,
)
from tools.site.sources import ROOT, stage_folder

BLOCK_SIZE = 16
NUM_BLOCKS = 128
CHUNK_SIZE = 256
DOCUMENT = "doc"
# The step before which each one comes: one token a step.
ARRIVALS = {name: i * BETWEEN_CHATS for i, name in enumerate(CHATS)}
ARRIVALS[DOCUMENT] = ARRIVALS["D"] + BEFORE_DOCUMENT
MAX_TOKENS = {"A": 40, "B": 40, "C": 40, "D": 40, DOCUMENT: 8}
OPTIONS = {
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
}


@cache
def rooms(number: int) -> SimpleNamespace:
    """The bookkeeping modules of a stage, imported without its package, which would load torch."""
    folder = stage_folder(number)
    name = f"bookkeeping_of_{folder.name}"
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    names = ("config", "sequence", "block_manager", "scheduler")
    return SimpleNamespace(**{room: importlib.import_module(f"{name}.{room}") for room in names})


@dataclass
class Step:
    """One step as it ran: after scheduling, before finished sequences gave their blocks back.

    slices: (name, start_pos, num_tokens).
    tables, cached, states: of every sequence that is not finished; `cached` after the step.
    """

    index: int
    slices: list[tuple[str, int, int]]
    sampled: list[str]
    preempted: list[str]
    num_free_blocks: int
    waiting: list[str]
    tables: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(num_tokens for _, _, num_tokens in self.slices)

    def tokens_of(self, name: str) -> int:
        """Those of one sequence; 0 if it has no slice."""
        return sum(n for who, _, n in self.slices if who == name)

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return len({block for table in self.tables.values() for block in table})


class Bookkeeper:
    """A stage without a model: its scheduler, its block manager, and made-up tokens."""

    def __init__(self, stage: int, **options: Any) -> None:
        self.rooms = rooms(stage)
        options = {**OPTIONS, **options}
        if stage == 4:
            options = {"max_prefill_chunk_size": CHUNK_SIZE, **options}
        self.config = self.rooms.config.EngineConfig(**options)
        self.block_manager = self.rooms.block_manager.BlockManager(
            self.config.num_blocks, self.config.block_size
        )
        self.scheduler = self.rooms.scheduler.Scheduler(self.config, self.block_manager)
        self.sequences: dict[str, Any] = {}
        self.steps: list[Step] = []

    def add(self, name: str, token_ids: Iterable[int], max_tokens: int, **more: Any) -> Any:
        """Queue a request as an engine does; returns its `Sequence`. `more` are its fields."""
        token_ids = list(token_ids)
        max_tokens = self.scheduler.check(len(token_ids), max_tokens)
        sequence = self.rooms.sequence.Sequence(name, token_ids, max_tokens, **more)
        self.sequences[name] = sequence
        self.scheduler.add(sequence)
        return sequence

    def finish(self, name: str, reason: str) -> None:
        """End a sequence, in whatever state it is; its blocks come back."""
        self.scheduler.finish(self.sequences.pop(name), reason)

    def step(self) -> Step:
        """Schedule, pretend to compute, commit, and end what has its last token."""
        batch = self.scheduler.schedule()
        step = Step(
            index=len(self.steps),
            slices=[(s.sequence.request_id, s.start_pos, s.num_tokens) for s in batch.slices],
            sampled=[sequence.request_id for sequence in batch.sampling],
            preempted=[sequence.request_id for sequence in batch.preempted],
            num_free_blocks=self.block_manager.num_free_blocks,
            waiting=[sequence.request_id for sequence in self.scheduler.waiting],
        )
        self.scheduler.commit(batch, [_made_up(s) for s in batch.sampling])
        for name, sequence in self.sequences.items():
            step.tables[name] = list(sequence.block_table)
            step.cached[name] = sequence.cached_token_count
            step.states[name] = sequence.status.value
        for sequence in batch.sampling:
            if sequence.num_tokens - sequence.num_prompt_tokens >= sequence.max_tokens:
                self.finish(sequence.request_id, "length")
        self.steps.append(step)
        return step

    def arrive(self, index: int) -> None:
        """Add what comes before step `index` of the running example."""
        for name, when in ARRIVALS.items():
            if when == index:
                self.add(name, prompt(name), MAX_TOKENS[name])

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_unfinished():
            self.step()


def _made_up(sequence: Any) -> int:
    """A token that no other sequence and no prompt has."""
    return 1_000_000 + 1_000 * ord(sequence.request_id[0]) + sequence.num_tokens


def prompt(name: str) -> list[int]:
    """Token ids of a prompt of the example: the system prompt, then its own."""
    length = DOCUMENT_TOKENS if name == DOCUMENT else CHATS[name]
    own = 10_000 * (1 + list(ARRIVALS).index(name))
    return list(range(SYSTEM_TOKENS)) + list(range(own, own + length - SYSTEM_TOKENS))


@cache
def run(stage: int, **options: Any) -> list[Step]:
    """All steps of the running example on one stage."""
    keeper = Bookkeeper(stage, **options)
    for index in range(max(ARRIVALS.values()) + 1):
        keeper.arrive(index)
        keeper.step()
    keeper.drain()
    return keeper.steps


def before_document(stage: int) -> Step:
    """The last step before the document arrives."""
    return run(stage)[ARRIVALS[DOCUMENT] - 1]


# --- numbers for the text ---------------------------------------------------------------------


def tokens_between(steps: list[Step], name: str) -> list[int]:
    """Tokens computed between two tokens of `name`, the second one's step included."""
    gaps, since = [], None
    for step in steps:
        if since is not None:
            since += step.num_tokens
        if name in step.sampled:
            if since is not None:
                gaps.append(since)
            since = 0
    return gaps


def chunks(steps: list[Step], name: str) -> list[tuple[int, int, int]]:
    """(step, start_pos, num_tokens) of each slice that computes the prompt of `name`."""
    found = []
    for step in steps:
        for who, start_pos, num_tokens in step.slices:
            if who == name:
                found.append((step.index, start_pos, num_tokens))
        if name in step.sampled:
            return found
    return found


@cache
def facts() -> dict[str, Any]:
    """Numbers of the running example, by the name under which the pages use them."""
    one, three, four = run(1), run(3), run(4)
    before = before_document(1)
    held = sum(before.cached.values())
    slots = BLOCK_SIZE * before.num_held
    doc_chunks = chunks(four, DOCUMENT)
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "num_slots": NUM_BLOCKS * BLOCK_SIZE,
        "chunk_size": CHUNK_SIZE,
        "system_tokens": SYSTEM_TOKENS,
        "doc_tokens": DOCUMENT_TOKENS,
        "doc_blocks": -(-DOCUMENT_TOKENS // BLOCK_SIZE),
        "before_tokens": held,
        "before_slots": slots,
        "before_blocks": before.num_held,
        "before_waste": f"{100 * (1 - held / slots):.0f} %",
        "doc_step_1": max(tokens_between(one, "A")),
        "doc_step_3": max(tokens_between(three, "A")),
        "doc_step_4": max(tokens_between(four, "A")),
        "doc_hit": doc_chunks[0][1],
        "doc_rest": DOCUMENT_TOKENS - doc_chunks[0][1],
        "doc_chunks": len(doc_chunks),
        "doc_last_chunk": doc_chunks[-1][2],
    }
