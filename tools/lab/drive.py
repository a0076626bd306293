"""Runs a stage's own bookkeeping without a model, checks it after every step, and records it.

The sources of a stage come as text, so the same code runs in a page (Pyodide), on edited files and
on planted faults. In place of a model there is a memory that remembers which token was written to
which slot. `ModelRunner._prepare` is taken from the stage's file: it lays out slots and contexts.

Knows no browser and no file. Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

ROOMS = ("config", "sequence", "block_manager", "scheduler")
FILES = ("scheduler.py", "block_manager.py", "sequence.py", "config.py", "model_runner.py")
MAX_STEPS = 3000
MAX_MODEL_LEN = 1_000_000

# Made-up costs of a step, those of chapter 4: a constant, a token, a token that a token attends to.
COSTS = (2e-3, 20e-6, 5e-9)


def step_seconds(slices: Any) -> float:
    """Seconds of a step at the made-up costs."""
    constant, per_token, per_pair = COSTS
    tokens = sum(s.num_tokens for s in slices)
    pairs = sum(s.num_tokens * (s.start_pos + (s.num_tokens + 1) / 2) for s in slices)
    return constant + per_token * tokens + per_pair * pairs


class KnownStepTime:
    """Stands in for the engine's fitted model of step times: here the costs are known."""

    def __init__(self, target: float) -> None:
        self.target = target

    def longest_chunk(self, slices: Any, start_pos: int, limit: int) -> int:
        """Largest chunk, at least 1 token, that keeps a step within the target."""
        slices, low, high = list(slices), 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            chunk = SimpleNamespace(start_pos=start_pos, num_tokens=middle)
            if step_seconds([*slices, chunk]) <= self.target:
                low = middle
            else:
                high = middle - 1
        return low


class Rows(list):
    """As much of a tensor as `_prepare` needs."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return self[index[0]][index[1]]
        return super().__getitem__(index)


class CodeError(Exception):
    """An exception in a stage's file, with the place in it."""

    def __init__(self, error: BaseException, files: Mapping[str, str]) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.file, self.line = None, None
        if isinstance(error, SyntaxError) and error.filename in files:
            self.file, self.line = error.filename, error.lineno
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename in files:
                self.file, self.line = frame.filename, frame.lineno


def load(files: Mapping[str, str], name: str = "lab_stage") -> SimpleNamespace:
    """A stage's bookkeeping modules, made from their texts, and its `_prepare`.

    Raises CodeError if a text is no Python or fails when it is run.
    """
    package = ModuleType(name)
    package.__path__ = []
    sys.modules[name] = package
    rooms: dict[str, Any] = {}
    try:
        for room in ROOMS:
            module = ModuleType(f"{name}.{room}")
            module.__package__ = name
            sys.modules[module.__name__] = module
            exec(compile(files[f"{room}.py"], f"{room}.py", "exec"), module.__dict__)
            rooms[room] = module
        rooms["prepare"] = _prepare(files["model_runner.py"], rooms["block_manager"].slot_mapping)
    except Exception as error:
        raise CodeError(error, files) from error
    return SimpleNamespace(**rooms)


def _prepare(source: str, slot_mapping: Any) -> Any:
    """`ModelRunner._prepare` alone; the rest of its file needs a model."""
    tree = ast.parse(source, "model_runner.py")
    [runner] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ModelRunner"]
    [method] = [n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "_prepare"]
    method.returns = None
    for argument in method.args.args:
        argument.annotation = None
    scope: dict[str, Any] = {
        "slot_mapping": slot_mapping,
        "accumulate": accumulate,
        "AttentionMetadata": SimpleNamespace,
        "torch": SimpleNamespace(int32=None, long=None),
    }
    exec(compile(ast.Module([method], []), "model_runner.py", "exec"), scope)
    return scope["_prepare"]


class Lab:
    """One run: a setting (see `run`), a stage's files, and everything that happened so far."""

    def __init__(self, setting: Mapping[str, Any], files: Mapping[str, str]) -> None:
        self.files = files
        self.stage = int(setting["stage"])
        self.rooms = load(files)
        options = {key: value for key, value in setting["options"].items() if value is not None}
        target = options.pop("target_step_ms", None)
        self.target_step_ms = target
        if self.stage >= 4 and not options.get("max_num_batched_tokens"):  # as the engine does
            chunk = options.setdefault("max_prefill_chunk_size", 256)
            options["max_num_batched_tokens"] = chunk + options.get("max_num_seqs", 64)
        known = self.rooms.config.EngineConfig.__dataclass_fields__
        options = {key: value for key, value in options.items() if key in known}
        self.config = self.rooms.config.EngineConfig(max_model_len=MAX_MODEL_LEN, **options)
        with self._blamed():
            self.block_manager = self.rooms.block_manager.BlockManager(
                self.config.num_blocks, self.config.block_size
            )
            self.scheduler = self.rooms.scheduler.Scheduler(self.config, self.block_manager)
        if target and self.stage >= 4:
            self.scheduler.step_time = KnownStepTime(target / 1000)
        self.runner = SimpleNamespace(
            config=self.config, kv_cache=None, kernels=None, _tensor=lambda rows, _=None: Rows(rows)
        )
        self.requests = sorted(setting["requests"], key=lambda one: one["arrival"])
        self.facts: list[dict[str, Any]] = []  # of the requests that were accepted
        self.refused: list[dict[str, str]] = []
        self.sequences: list[Any] = []
        self.pending = list(self.requests)
        self.step_index = 0
        self.now = 0.0
        self.steps: list[dict[str, Any]] = []
        self.broken: list[dict[str, Any]] = []
        # What the memory holds: slot -> (position, hash of the prefix up to this token).
        self.memory: dict[int, tuple[int, int]] = {}
        self._prefixes: dict[int, list[int]] = {}
        self._tables: list[list[int]] = []
        self._published: set[int] = set()
        self._was_right: set[tuple[int, bytes]] = set()

    # --- the run ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Arrivals, one step, and what ends; False when all is over or nothing moves."""
        if not self._live() and self.pending:
            self.step_index = max(self.step_index, self.pending[0]["arrival"])
        self._arrive()
        if not self._live() or len(self.steps) >= MAX_STEPS:
            return bool(self.pending)
        with self._blamed():
            batch = self.scheduler.schedule()
        self._after_schedule(batch)
        if not batch.slices:
            if self.pending:
                self.step_index = max(self.step_index + 1, self.pending[0]["arrival"])
                return True
            if not batch.preempted:
                key = "youngest" if self.stage >= 4 else "finishes"
                self._break(key, "requests wait, nothing runs, and no step changes that")
                return False
        self._compute(batch)
        sampled = [self.sequences.index(sequence) for sequence in batch.sampling]
        start, self.now = self.now, self.now + step_seconds(batch.slices)
        tokens = [1_000_000 * (r + 1) + self.sequences[r].num_tokens for r in sampled]
        with self._blamed():
            self.scheduler.commit(batch, tokens)
        self._record(batch, sampled, start)
        for sequence in batch.sampling:
            if sequence.num_tokens - sequence.num_prompt_tokens >= sequence.max_tokens:
                self._finish(self.sequences.index(sequence), "length")
        self._after_step()
        self.step_index += 1
        return True

    def _live(self) -> bool:
        return bool(self.scheduler.has_unfinished())

    def _arrive(self) -> None:
        while self.pending and self.pending[0]["arrival"] <= self.step_index:
            one = self.pending.pop(0)
            try:
                with self._blamed(ValueError):
                    max_tokens = self.scheduler.check(one["prompt"], one["max_tokens"])
            except ValueError as error:
                self.refused.append({"id": one["id"], "why": str(error)})
                continue
            shared = min(one.get("shared", 0), one["prompt"])
            own = 10_000 * (1 + len(self.sequences))
            tokens = [*range(shared), *range(own, own + one["prompt"] - shared)]
            sequence = self.rooms.sequence.Sequence(one["id"], tokens, max_tokens)
            self.sequences.append(sequence)
            self._tables.append([])
            self.facts.append(
                {
                    "id": one["id"],
                    "prompt_tokens": one["prompt"],
                    "max_tokens": max_tokens,
                    "hit_tokens": 0,
                    "arrived": self.now,
                    "ended": None,
                    "reason": None,
                }
            )
            self.scheduler.add(sequence)
        for r, fact in enumerate(self.facts):  # those whose users close the window now
            [one] = [one for one in self.requests if one["id"] == fact["id"]]
            if one.get("abort") is not None and fact["reason"] is None:
                if one["abort"] <= self.step_index:
                    self._finish(r, "abort")

    def _finish(self, r: int, reason: str) -> None:
        sequence = self.sequences[r]
        with self._blamed():
            self.scheduler.finish(sequence, reason)
        self.facts[r] |= {"ended": self.now, "reason": reason}
        if sequence.block_table:
            blocks = len(sequence.block_table)
            self._break("ends", f"{sequence.request_id} ended ({reason}) and kept {blocks} blocks")

    def _record(self, batch: Any, sampled: list[int], start: float) -> None:
        index = {id(sequence): r for r, sequence in enumerate(self.sequences)}
        status = [sequence.status.value for sequence in self.sequences]
        tables = []
        for r, sequence in enumerate(self.sequences):
            before, now = self._tables[r], list(sequence.block_table)
            if before != now:
                pairs = zip(before, now, strict=False)
                keep = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                keep = min(len(before), len(now)) if keep is None else keep
                tables.append([r, keep, now[keep:]])
                self._tables[r] = now
        published = set(getattr(self.block_manager, "_contents", ()))
        for sequence, fact in zip(self.sequences, self.facts, strict=True):
            fact["hit_tokens"] = getattr(sequence, "num_hit_tokens", 0) or 0
        self.steps.append(
            {
                "start": start,
                "end": self.now,
                "slices": [
                    [index[id(s.sequence)], s.start_pos, s.num_tokens] for s in batch.slices
                ],
                "sampled": [[r, ""] for r in sampled],
                "preempted": [index[id(sequence)] for sequence in batch.preempted],
                "waiting": [index[id(sequence)] for sequence in self.scheduler.waiting],
                "running": [index[id(sequence)] for sequence in self.scheduler.running],
                "prefilling": [r for r, state in enumerate(status) if state == "prefilling"],
                "tables": tables,
                "free": self.block_manager.num_free_blocks,
                "published": sorted(published - self._published),
                "forgotten": sorted(self._published - published),
                "step": self.step_index,
            }
        )
        self._published = published

    def _blamed(self, *passed: type[BaseException]) -> Any:
        return _Blamed(self.files, passed)

    # --- the memory ---------------------------------------------------------------------------

    def _prefix(self, sequence: Any, position: int) -> int:
        """Hash of all tokens up to this position."""
        hashes = self._prefixes.setdefault(id(sequence), [])
        while len(hashes) <= position:
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, sequence.token_ids[len(hashes)])))
        return hashes[position]

    def _compute(self, batch: Any) -> None:
        """Write what the step writes, read what it reads, and see whether that is right."""
        if not batch.slices or any(s.num_tokens < 1 for s in batch.slices):
            return
        with self._blamed():
            prepared = self.rooms.prepare(self.runner, batch.slices)
        metadata, size = prepared["attn_metadata"], self.config.block_size
        slots = list(metadata.slots)
        row = 0
        for s in batch.slices:
            table, name = s.sequence.block_table, s.sequence.request_id
            for position in range(s.start_pos, s.end_pos):
                right = table[position // size] * size + position % size
                if slots[row] != right:
                    self._break(
                        "slot",
                        f"token {position} of {name} belongs into slot {right} and was written "
                        f"to {slots[row]}",
                    )
                self.memory[slots[row]] = position, self._prefix(s.sequence, position)
                row += 1
        for s, context_len in zip(batch.slices, metadata.context_lens, strict=False):
            table, name = s.sequence.block_table, s.sequence.request_id
            if context_len != s.end_pos:
                key = "past" if self.stage >= 4 else "behind"
                self._break(
                    key,
                    f"the slice of {name} ends at {s.end_pos}, and its attention reads up to "
                    f"{context_len}",
                )
            for position in range(min(context_len, s.end_pos)):
                slot = table[position // size] * size + position % size
                if self.memory.get(slot) != (position, self._prefix(s.sequence, position)):
                    found = "what another wrote" if slot in self.memory else "nothing"
                    self._break(
                        "reads", f"{name} reads token {position} in slot {slot} and finds {found}"
                    )
                    break
        rows = len(prepared["logits_to_keep"])
        if rows != len(batch.sampling):
            self._break("samples", f"{rows} rows of logits for {len(batch.sampling)} tokens")

    # --- what must hold -----------------------------------------------------------------------

    def _break(self, key: str, what: str) -> None:
        if key not in {one["key"] for one in self.broken}:
            self.broken.append({"key": key, "step": len(self.steps), "what": what})

    def _after_schedule(self, batch: Any) -> None:
        rank = {id(sequence): r for r, sequence in enumerate(self.sequences)}
        # 1. Who gave blocks up.
        for gone in batch.preempted:
            for kept in self.scheduler.running:
                if rank[id(kept)] > rank[id(gone)]:
                    key = "youngest" if self.stage >= 4 else "order"
                    names = f"{gone.request_id} gave its blocks up, and {kept.request_id}"
                    self._break(key, f"{names}, which is younger, kept its own")
        # 2. Three budgets.
        tokens = sum(max(0, s.num_tokens) for s in batch.slices)
        if self.stage >= 4 and tokens > self.config.max_num_batched_tokens:
            most = self.config.max_num_batched_tokens
            self._break("budget", f"a step of {tokens} tokens, the budget is {most}")
        if len(self.scheduler.running) > self.config.max_num_seqs:
            running, most = len(self.scheduler.running), self.config.max_num_seqs
            self._break("seat", f"{running} sequences hold blocks, max_num_seqs is {most}")
        for s in batch.slices:
            if s.num_tokens < 1:
                key = "one" if self.stage >= 3 else "reads"
                self._break(key, f"a slice of {s.num_tokens} tokens of {s.sequence.request_id}")
            need = self.block_manager.num_blocks_for(s.end_pos)
            have = len(s.sequence.block_table)
            reserved = getattr(self.config, "reserve_full_prompt", False)
            if have < need or (have > need and not reserved):
                self._break(
                    "table",
                    f"{s.sequence.request_id} has {have} blocks and needs {need} up to token "
                    f"{s.end_pos}",
                )
        self._check_pool()

    def _after_step(self) -> None:
        self._check_pool()
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        rank = {id(sequence): r for r, sequence in enumerate(self.sequences)}
        order = [rank[id(sequence)] for sequence in queue]
        if order != sorted(order):
            names = ", ".join(sequence.request_id for sequence in queue)
            self._break("order", f"the queues are {names}")
        if not self._live() and self.block_manager.num_free_blocks != self.config.num_blocks:
            lost = self.config.num_blocks - self.block_manager.num_free_blocks
            self._break("ends", f"nothing runs, and {lost} blocks are not free")

    def _check_pool(self) -> None:
        manager, size = self.block_manager, self.config.block_size
        holders: Counter[int] = Counter()
        for sequence in self.sequences:
            twice = len(sequence.block_table) - len(set(sequence.block_table))
            if twice:
                self._break("owner", f"{sequence.request_id} has a block twice in its table")
            holders.update(sequence.block_table)
        # The free blocks, in the order of reuse; stages 01 and 02 have a plain queue.
        free = set(manager._reuse_order if self.stage >= 3 else manager._free)
        if self.stage < 3:
            for block, count in holders.items():
                if count > 1 or block in free:
                    self._break("owner", f"block {block} is in {count} tables")
        else:
            for block in range(self.config.num_blocks):
                if manager._ref_counts[block] != holders[block] or (
                    (block in free) != (not holders[block])
                ):
                    count = manager._ref_counts[block]
                    self._break(
                        "refs", f"block {block} is in {holders[block]} tables and counts {count}"
                    )
                    break
        contents = getattr(manager, "_contents", {})
        for block, content in contents.items():
            if content.parent is not None and content.parent not in contents:
                self._break("parent", f"block {block} is published and {content.parent} is not")
            if len(content.token_ids) != size:
                self._break("full", f"block {block} was published with {len(content.token_ids)}")
            name = (block, content.content_hash)
            if self._holds(block, content, contents):
                self._was_right.add(name)
            elif name in self._was_right:
                self._break("name", f"block {block} is found under a name of what it held before")
            else:
                self._break("published", f"block {block} can be found and was not written yet")
        if len({content.content_hash for content in contents.values()}) < len(contents):
            self._break("twice", "two blocks are published with one content")

    def _holds(self, block: int, content: Any, contents: Mapping[int, Any]) -> bool:
        """Whether the memory of a block is what its name says."""
        size = self.config.block_size
        before = 0
        start = 0
        if content.parent is not None:
            last = self.memory.get(content.parent * size + size - 1)
            if last is None:
                return False
            start, before = last[0] + 1, last[1]
        for offset, token_id in enumerate(content.token_ids):
            before = hash((before, token_id))
            if self.memory.get(block * size + offset) != (start + offset, before):
                return False
        return True


class _Blamed:
    """Turns an exception in a stage's code into a CodeError."""

    def __init__(self, files: Mapping[str, str], passed: tuple[type[BaseException], ...]) -> None:
        self.files, self.passed = files, passed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, self.passed):
            raise CodeError(error, self.files) from error


def run(setting: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Run a setting to its end.

    Args:
        setting: "stage", "options" (of `EngineConfig`; what a stage does not know is left out), and
            "requests": each with "id", "arrival" (a step), "prompt", "max_tokens" and, if it has
            them, "shared" (its first tokens, which all have) and "abort" (a step).
        files: the stage's sources by name, at least `FILES`.

    Returns:
        "recording" as `shared.record` describes it, "broken" (invariants with their first step),
        "refused" requests and "error", None or what was raised with file and line.
    """
    result: dict[str, Any] = {"recording": None, "broken": [], "refused": [], "error": None}
    try:
        lab = Lab(setting, files)
    except CodeError as error:
        where = {"message": str(error), "file": error.file, "line": error.line, "step": 0}
        return result | {"error": where}
    except ValueError as error:  # an option that will not do
        return result | {"error": {"message": str(error), "file": None, "line": None, "step": 0}}
    try:
        while lab.advance():
            pass
        if len(lab.steps) >= MAX_STEPS:
            message = f"stopped after {MAX_STEPS:,} steps"
            result["error"] = {"message": message, "file": None, "line": None, "step": MAX_STEPS}
    except CodeError as error:
        where = {"message": str(error), "file": error.file, "line": error.line}
        result["error"] = where | {"step": len(lab.steps)}
    for fact in lab.facts:
        if fact["reason"] is None:
            fact |= {"reason": "error", "ended": lab.now}
    if lab.steps:
        chunk = getattr(lab.scheduler, "max_prefill_chunk_size", None)
        result["recording"] = {
            "stage": lab.stage,
            "chunk_size": chunk,
            "block_size": lab.config.block_size,
            "num_blocks": lab.config.num_blocks,
            "requests": lab.facts,
            "steps": lab.steps,
        }
    return result | {"broken": lab.broken, "refused": lab.refused}
