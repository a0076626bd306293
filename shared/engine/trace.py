"""What every step of an engine did and when: the one record that all pictures are made from.

Plots, notebooks, the site's viewer and the export for chrome://tracing and ui.perfetto.dev read
this and nothing else. Knows nothing of tensors, models, or of how a scheduler decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import files

FORMAT = "mini-vllm-trace"
VERSION = 1


@dataclass
class StepRecord:
    """One step of an engine.

    Attributes:
        index: number of the step, from 0.
        start: seconds of `time.perf_counter`; in a saved file, seconds since its first step.
        end: likewise.
        slices: (request_id, start_pos, num_tokens) for each slice that was computed.
        sampled: ids of the requests that got a token.
        preempted: ids of the requests that lost their blocks while this step was scheduled.
        num_free_blocks: as the step ran: after scheduling, and before finished requests gave their
            blocks back; so are the next three.
        num_waiting: requests that hold no blocks.
        num_running: requests that hold blocks.
        num_prefilling: those of them whose prompt is in prefill.
        block_tables: request id to block table as the step ran, if the trace asks for them.
    """

    index: int
    start: float
    end: float
    slices: list[tuple[str, int, int]]
    sampled: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    num_free_blocks: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_prefilling: int = 0
    block_tables: dict[str, list[int]] | None = None

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(num_tokens for _, _, num_tokens in self.slices)


class Trace:
    """The steps of one engine, oldest first.

    Args:
        max_steps: keep only the newest ones; None keeps all.
        record_blocks: asks the engine to put a copy of every block table into each record.
    """

    def __init__(self, max_steps: int | None = None, record_blocks: bool = False):
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise ValueError(f"max_steps must be an integer of 1 or more, got {max_steps!r}")
        self.max_steps = max_steps
        self.record_blocks = record_blocks
        self.steps: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Take the next step. Raises ValueError if it starts before the last one ended."""
        if not record.start <= record.end:
            raise ValueError(
                f"step {record.index} ends at {record.end}, before its start at {record.start}"
            )
        if self.steps and record.start < self.steps[-1].end:
            raise ValueError(
                f"step {record.index} starts at {record.start}, before the end of step "
                f"{self.steps[-1].index} at {self.steps[-1].end}"
            )
        self.steps.append(record)
        if self.max_steps is not None and len(self.steps) > self.max_steps:
            del self.steps[0]

    def save(self, path: str | Path) -> None:
        """Write all steps as JSON, with times from 0."""
        origin = self._origin()
        steps = []
        for record in self.steps:
            step = asdict(record)
            step["start"] = _since(origin, record.start)
            step["end"] = _since(origin, record.end)
            steps.append(step)
        _write(path, {"format": FORMAT, "version": VERSION, "steps": steps})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError if it is something else."""
        content = files.load_json(path, FORMAT, VERSION)
        trace = cls()
        try:
            for step in content["steps"]:
                step["slices"] = [(str(i), int(at), int(n)) for i, at, n in step["slices"]]
                trace.add(StepRecord(**step))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has a step that is none: {error}") from error
        trace.record_blocks = any(step.block_tables is not None for step in trace.steps)
        return trace

    def phases(self) -> Iterator[tuple[StepRecord, list[str]]]:
        """Each step with "prefill" or "decode" for each of its slices.

        The number of tokens does not tell: a prompt's last chunk may be one token, and so may
        what a prefix cache leaves to compute. A slice is a decode if it is one token and goes on
        where the request's last sampled token stands. (Where `max_steps` dropped a request's
        beginning, its first slice counts as prefill.)
        """
        decodes_from: dict[str, int] = {}
        for record in self.steps:
            for request_id in record.preempted:
                decodes_from.pop(request_id, None)
            sampled = set(record.sampled)
            phases = []
            for request_id, start_pos, num_tokens in record.slices:
                is_decode = num_tokens == 1 and decodes_from.get(request_id) == start_pos
                phases.append("decode" if is_decode else "prefill")
                if request_id in sampled:
                    decodes_from[request_id] = start_pos + num_tokens
            yield record, phases

    def save_chrome(self, path: str | Path) -> None:
        """Write `to_chrome` as JSON, for chrome://tracing or ui.perfetto.dev."""
        _write(path, self.to_chrome())

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's trace-event format, times in microseconds from 0.

        One track with all steps, one track per request with a slice for each of its steps, named
        "prefill" or "decode", and counters for free blocks and for the queues.
        Source: "Trace Event Format", the Chromium project's document of that name.
        """
        engine, requests = 1, 2
        events: list[dict[str, Any]] = []

        def add(ph: str, name: str, pid: int, tid: int, args: dict[str, Any], **more: Any) -> None:
            events.append({"ph": ph, "name": name, "pid": pid, "tid": tid, "args": args, **more})

        def name_track(kind: str, pid: int, tid: int, name: str) -> None:
            add("M", kind, pid, tid, {"name": name}, ts=0)

        name_track("process_name", engine, 0, "engine")
        name_track("thread_name", engine, 0, "steps")
        name_track("process_name", requests, 0, "requests")
        tracks: dict[str, int] = {}
        origin = self._origin()
        for record, phases in self.phases():
            # 1. The step, and how the queues stood in it.
            ts = round((record.start - origin) * 1e6, 3)
            dur = round((record.end - origin) * 1e6 - ts, 3)
            args: dict[str, Any] = {
                "num_tokens": record.num_tokens,
                "num_slices": len(record.slices),
                "preempted": record.preempted,
            }
            add("X", f"step {record.index}", engine, 0, args, ts=ts, dur=dur)
            running = {"running": record.num_running, "prefilling": record.num_prefilling}
            add("C", "free blocks", engine, 0, {"free": record.num_free_blocks}, ts=ts)
            add("C", "waiting", engine, 0, {"waiting": record.num_waiting}, ts=ts)
            add("C", "running", engine, 0, running, ts=ts)
            # 2. Its slices, each on its request's track.
            sampled = set(record.sampled)
            for (request_id, start_pos, num_tokens), phase in zip(
                record.slices, phases, strict=True
            ):
                if request_id not in tracks:
                    tracks[request_id] = len(tracks) + 1
                    name_track("thread_name", requests, tracks[request_id], request_id)
                args = {
                    "step": record.index,
                    "start_pos": start_pos,
                    "num_tokens": num_tokens,
                    "sampled": request_id in sampled,
                }
                add("X", phase, requests, tracks[request_id], args, ts=ts, dur=dur)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _origin(self) -> float:
        return self.steps[0].start if self.steps else 0.0


def _since(origin: float, time: float) -> float:
    return round(time - origin, 9)


def _write(path: str | Path, content: dict[str, Any]) -> None:
    files.save(path, json.dumps(content) + "\n")
