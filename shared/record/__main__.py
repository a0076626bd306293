"""Recordings for the site's trace viewer: the running example, served for real and kept in full.

`python -m shared.record record` serves it with SmolLM2 on a small pool, once for each stage and
chunk size, and writes one JSON file each. Knows engines by their public face, except that it looks
into the block manager for the blocks that can be found again: no count tells which those are.

A file is an object:

    format, version   "mini-vllm-replay", 1
    traffic           "example" or "crowded", see `events`
    stage, chunk_size numbers; chunk_size is null before stage 04
    block_size, num_blocks
    model, machine, date
    requests          in order of arrival: id, prompt_tokens, max_tokens, hit_tokens (found in the
                      prefix cache), arrived, ended, reason
    steps             in order; lists that would be empty are left out

Times are seconds since the first request arrived. A request is named by its index in `requests`.
A step, as it ran (after scheduling, before those that ended gave their blocks back):

    start, end
    slices            [request, start_pos, num_tokens] for each slice that was computed
    sampled           [request, new text] for each that got a token
    preempted         requests that lost their blocks to make this step possible
    waiting           requests without blocks, first come first
    running           requests that hold blocks, in order of arrival
    prefilling        those of them whose prompt is not done after this step
    tables            [request, keep, blocks] for each table that changed: its first `keep` entries
                      stay, `blocks` follow
    free              number of free blocks, cached ones included
    published         blocks that can be found in the prefix cache from this step on
    forgotten         blocks that no longer can
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from shared.engine import files
from shared.engine.outputs import RequestOutput
from shared.engine.trace import StepRecord, Trace
from shared.measure.episode import Arrival, build_arrivals, has, warm_up
from shared.measure.example import DOCUMENT_TOKENS
from shared.measure.machine import machine_facts
from shared.programs.program import Parser, finish
from shared.stages import load_stage

FORMAT = "mini-vllm-replay"
VERSION = 1
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "assets" / "traces"
MAX_BYTES = 300_000

BLOCK_SIZE = 16
NUM_BLOCKS = {"example": 140, "crowded": 108}
MAX_TOKENS = 72  # of each chat
AGAIN = "document again"
TITLES = {"smollm2": "SmolLM2-135M-Instruct"}

# What is recorded: traffic, stage, chunk size.
RECORDINGS = {
    "example-01": ("example", 1, None),
    "example-02": ("example", 2, None),
    "example-03": ("example", 3, None),
    "example-04-64": ("example", 4, 64),
    "example-04-256": ("example", 4, 256),
    "example-04-512": ("example", 4, 512),
    "crowded-03": ("crowded", 3, None),
    "crowded-04-128": ("crowded", 4, 128),
}


class Event(NamedTuple):
    """What a user does as soon as request `who` has `num_tokens` tokens, or has ended."""

    who: str
    num_tokens: int
    arrival: Arrival | None = None
    abort: str | None = None


def events(arrivals: Sequence[Arrival], traffic: str) -> list[Event]:
    """The running example ("example"), or that with second thoughts ("crowded").

    In the second one the user closes the document's window after four more tokens of chat D, and
    two tokens later asks the same again, in a pool that is too small for everything.
    """
    found = [
        Event(before.name, arrival.after, arrival)
        for before, arrival in zip([arrivals[0], *arrivals], arrivals, strict=False)
    ]
    if traffic == "crowded":
        document, num_tokens = found[-1].arrival, found[-1].num_tokens
        assert document
        found.append(Event(found[-1].who, num_tokens + 4, abort=document.name))
        found.append(Event(found[-1].who, num_tokens + 6, replace(document, name=AGAIN)))
    return found


class Recorder(Trace):
    """A trace that keeps, beside each step's record, how the queues and the pool stood."""

    def __init__(self, engine: Any) -> None:
        super().__init__(record_blocks=True)
        self.engine = engine
        self.snapshots: list[dict[str, Any]] = []

    def add(self, record: StepRecord) -> None:
        """Take the next step, while the engine still stands as it ran."""
        super().add(record)
        scheduler, manager = self.engine.scheduler, self.engine.block_manager
        running = [(s.request_id, s.status.value) for s in scheduler.running]
        self.snapshots.append(
            {
                "waiting": [s.request_id for s in scheduler.waiting],
                "running": [name for name, _ in running],
                "prefilling": [name for name, state in running if state == "prefilling"],
                "findable": set(getattr(manager, "_contents", ())),
            }
        )


def record(engine: Any, events: Sequence[Event]) -> dict[str, Any]:
    """Serve `events` and return `requests` and `steps` as they stand in a file.

    Raises RuntimeError if a request failed.
    """
    recorder = engine.trace = Recorder(engine)
    due = deque(events)
    outputs: dict[str, RequestOutput] = {}
    texts: list[dict[str, str]] = []  # what each step added to whose text
    arrived: dict[str, Arrival] = {}
    origin = time.perf_counter()
    while due or engine.has_unfinished_requests():
        while due and (not outputs or has(outputs.get(due[0].who), due[0].num_tokens)):
            event = due.popleft()
            if event.abort:
                engine.abort_request(event.abort)
            if event.arrival:
                arrived[event.arrival.name] = event.arrival
                arrival = event.arrival
                engine.add_request(arrival.prompt_token_ids, arrival.params, arrival.name)
                if not outputs:
                    break
        news, num_steps = engine.step(), len(texts)
        outputs |= {output.request_id: output for output in news}
        texts += [{o.request_id: o.new_text for o in news}] * (len(recorder.steps) - num_steps)
        if any(output.finish_reason == "error" for output in news):
            raise RuntimeError(f"step {num_steps} failed")
    names = {name: index for index, name in enumerate(arrived)}
    requests = [
        {
            "id": name,
            "prompt_tokens": len(arrival.prompt_token_ids),
            "max_tokens": arrival.max_tokens,
            "hit_tokens": outputs[name].metrics.num_cached_tokens,
            "arrived": _since(origin, outputs[name].metrics.arrival_time),
            "ended": _since(origin, outputs[name].metrics.finish_time),
            "reason": outputs[name].finish_reason,
        }
        for name, arrival in arrived.items()
    ]
    return {"requests": requests, "steps": list(_steps(recorder, texts, names, origin))}


def _since(origin: float, moment: float | None) -> float:
    assert moment is not None
    return round(moment - origin, 6)


def _steps(
    recorder: Recorder, texts: list[dict[str, str]], names: dict[str, int], origin: float
) -> Iterator[dict[str, Any]]:
    """Each step as it stands in a file: what changed in the tables, not the tables."""
    tables: dict[str, list[int]] = {}
    findable: set[int] = set()
    for one, now, new_text in zip(recorder.steps, recorder.snapshots, texts, strict=True):
        assert one.block_tables is not None
        step: dict[str, Any] = {
            "start": _since(origin, one.start),
            "end": _since(origin, one.end),
            "slices": [[names[name], *span] for name, *span in one.slices],
            "sampled": [[names[name], new_text.get(name, "")] for name in one.sampled],
            "preempted": [names[name] for name in one.preempted],
            "tables": [
                [names[name], *_difference(tables.get(name, []), one.block_tables.get(name, []))]
                for name in {**tables, **one.block_tables}
                if tables.get(name, []) != one.block_tables.get(name, [])
            ],
            "free": one.num_free_blocks,
            "published": sorted(now["findable"] - findable),
            "forgotten": sorted(findable - now["findable"]),
        }
        for queue in ("waiting", "running", "prefilling"):
            step[queue] = [names[name] for name in now[queue]]
        tables, findable = one.block_tables, now["findable"]
        yield {key: value for key, value in step.items() if value != []}


def _difference(before: list[int], now: list[int]) -> tuple[int, list[int]]:
    keep = 0
    while keep < min(len(before), len(now)) and before[keep] == now[keep]:
        keep += 1
    return keep, now[keep:]


class Pool(NamedTuple):
    """The pool in one step: block tables by request, and the blocks that can be found."""

    tables: dict[int, list[int]]
    findable: set[int]


def pools(content: dict[str, Any]) -> Iterator[Pool]:
    """The pool in each step of a file's content.

    Raises ValueError if in some step held and free blocks are not the whole pool.
    """
    tables: dict[int, list[int]] = {}
    findable: set[int] = set()
    for index, step in enumerate(content["steps"]):
        for name, keep, blocks in step.get("tables", []):
            tables[name] = tables.get(name, [])[:keep] + blocks
        findable |= set(step.get("published", []))
        findable -= set(step.get("forgotten", []))
        held = {block for table in tables.values() for block in table}
        if len(held) + step["free"] != content["num_blocks"]:
            raise ValueError(
                f"step {index}: {len(held)} blocks held and {step['free']} free are not the "
                f"{content['num_blocks']} of the pool"
            )
        yield Pool({name: list(t) for name, t in tables.items() if t}, set(findable))


def load(path: str | Path) -> dict[str, Any]:
    """Read a file. Raises ValueError if it is something else, or if its pools do not add up."""
    content = files.load_json(path, FORMAT, VERSION)
    try:
        for _ in pools(content):
            pass
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a step that is none: {error!r}") from error
    return content


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file, a line for each step. Raises ValueError if it is not fit for the site."""
    for _ in pools(content):
        pass
    rest = {key: value for key, value in content.items() if key != "steps"}
    steps = ",\n".join(json.dumps(s, separators=(",", ":")) for s in content["steps"])
    text = f'{json.dumps(rest, indent=1)[:-2]},\n "steps": [\n{steps}\n]}}\n'
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{path}: {len(text.encode()):,} bytes, allowed are {MAX_BYTES:,}")
    files.save(path, text)


def make_engine(model: Any, traffic: str, stage: int, chunk_size: int | None) -> Any:
    """The engine of a recording: a small pool, and a budget that a whole prompt fits."""
    options: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS[traffic],
        "max_num_batched_tokens": 2048,
    }
    if chunk_size:
        options["max_prefill_chunk_size"] = chunk_size
    return load_stage(stage).LLMEngine(model, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Record; return the exit code."""
    parser = Parser(
        prog="python -m shared.record",
        description="Record the running example for the site's trace viewer, in real time on "
        "this machine. Nothing else should run beside it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record", help="serve the example and write what happened")
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which, of {', '.join(RECORDINGS)}; all if none is given",
    )
    command.add_argument("--model", default="smollm2", help="a name, a hub name or a folder")
    command.add_argument("--out", type=Path, default=FOLDER, help="folder (docs/assets/traces)")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in RECORDINGS:
            parser.error(f"there is no recording {name!r}; there are {', '.join(RECORDINGS)}")
    return finish(lambda: record_all(args))


def record_all(args: argparse.Namespace) -> int:
    """Record what the command line says; returns 0."""
    args.out.mkdir(parents=True, exist_ok=True)

    from shared.models import load_model

    print(f"loading {args.model} ...", flush=True)
    model = load_model(args.model, device="cpu", dtype="float32")
    arrivals = build_arrivals(model.tokenizer, DOCUMENT_TOKENS, MAX_TOKENS)
    for name in args.names or RECORDINGS:
        traffic, stage, chunk_size = RECORDINGS[name]
        # What warms up leaves its pool in disorder, so another engine is recorded.
        warm_up(make_engine(model, traffic, stage, chunk_size), arrivals, chunk_size or 256)
        engine = make_engine(model, traffic, stage, chunk_size)
        recorded = record(engine, events(arrivals, traffic))
        content = {
            "format": FORMAT,
            "version": VERSION,
            "traffic": traffic,
            "stage": stage,
            "chunk_size": chunk_size,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS[traffic],
            "model": f"{TITLES.get(args.model, args.model)}, float32",
            "machine": {key: machine_facts()[key] for key in ("cpu", "cores")},
            "date": date.today().isoformat(),
            **recorded,
        }
        path = args.out / f"{name}.json"
        save(path, content)
        seconds = recorded["steps"][-1]["end"]
        size = path.stat().st_size
        print(f"{path}: {len(recorded['steps'])} steps, {seconds:.1f} s, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
