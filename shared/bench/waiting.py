"""Median decode step by how threads wait, alone and beside other programs.

Every setting is measured in a process of its own, since the OpenMP library reads it when torch is
loaded. In each round all settings have their turn, each under all conditions: alone, beside one
busy loop per core, beside a second engine with the same setting, and beside three programs that
multiply matrices on all cores and wait as torch does by default.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shared import waiting
from shared.measure.metrics import Measure
from shared.programs.options import whole

from .options import Parser, base_name, sizes
from .results import Report
from .session import Session

FULL = {"rounds": 3, "steps": 30, "seconds": 6.0, "streams": (1, 4, 16)}
QUICK = {"rounds": 1, "steps": 10, "seconds": 2.0, "streams": (1, 4)}
ALONE, LOOPS, ENGINE, OPENMP = CONDITIONS = (
    "alone",
    "beside a busy loop per core",
    "beside a second engine",
    "beside three OpenMP programs",
)
DEFAULT, OURS = "default", "ours"
LOOP = "while True: pass"
MULTIPLY = """
import sys, torch
x, weight = torch.randn(16, 576), torch.randn(1536, 576)
sys.stdin.readline()
while True:
    torch.nn.functional.linear(x, weight)
"""


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument(
        "--spins",
        type=whole(0, 10**9),
        nargs="*",
        default=[1000, 10000],
        help="more values of GOMP_SPINCOUNT (default 1000 10000)",
    )
    parser.add_argument("--libiomp", metavar="FILE", help="also preload this libiomp5.so")


def settings(spins: Sequence[int], libiomp: str | None) -> dict[str, dict[str, str]]:
    """Each row's name and what it has in its environment about waiting."""
    rows = {
        # This is the default of a library that torch on Linux does not have: nothing is changed,
        # but the user seems to have said something, so `shared` says nothing.
        DEFAULT: {"KMP_BLOCKTIME": "200"},
        OURS: waiting.SETTINGS,
        "passive": {"OMP_WAIT_POLICY": "passive"},
        **{f"GOMP_SPINCOUNT={n}": {"GOMP_SPINCOUNT": str(n)} for n in spins},
    }
    if libiomp:
        rows["libiomp, 1 ms"] = {"LD_PRELOAD": libiomp, "KMP_BLOCKTIME": "1"}
    return rows


def run(session: Session) -> None:
    """All settings in turn, each under all conditions."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    columns = {
        f"step_{n}": Measure(
            f"step {n}", "ms", "median time of a step that decodes so many streams", "lower"
        )
        for n in size["streams"]
    }
    for condition in CONDITIONS:
        report.show(condition, columns)
    rows = settings(args.spins, args.libiomp)
    for name in session.turns(list(rows), args.rounds or size["rounds"]):
        with worker(args, rows[name]) as engine, worker(args, rows[name]) as second:
            facts = ask(engine, {"facts": True})
            report.model = {"name": base_name(args.model), **facts}
            ask(second, {"facts": True})
            for condition in CONDITIONS:
                with company(condition, second):
                    asked = {key: size[key] for key in ("streams", "steps", "seconds")}
                    report.measure(condition, name, ask(engine, asked))


def conclude(report: Report) -> None:
    """What is wanted of our setting, beside what was measured."""
    longest = list(report.columns)[-1]
    report.claim(
        "alone, ours / default", report.ratio(ALONE, OURS, DEFAULT, longest), 1.03, at_least=False
    )
    alone = report.median(ALONE, DEFAULT, longest)
    for condition, limit in ((LOOPS, 2.5), (ENGINE, 1.6), (OPENMP, 10.0)):
        ours = report.median(condition, OURS, longest)
        if ours and alone:
            report.claim(f"{condition}, ours / default alone", ours / alone, limit, at_least=False)


@contextmanager
def company(condition: str, second: subprocess.Popen[str]) -> Iterator[None]:
    """Let others use the cores meanwhile.

    The `second` worker is told to go on for ever under one condition, and killed at its end.
    """
    others: list[subprocess.Popen[str]] = []
    try:
        if condition == LOOPS:
            others = [start(LOOP, {}) for _ in range(cores())]
        elif condition == ENGINE:
            others = [second]
            tell(second, {"forever": True})
        elif condition == OPENMP:
            others = [start(MULTIPLY, {}) for _ in range(3)]
            for other in others:
                tell(other, {})  # they have loaded torch by the time that they read it
            time.sleep(4)
        yield
    finally:
        for other in others:
            end(other)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(code: str, environ: dict[str, str], *argv: str) -> subprocess.Popen[str]:
    """A Python process with `environ` as all that is said about waiting."""
    clean = {name: value for name, value in os.environ.items() if name not in waiting.OF_THE_USER}
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env=clean | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that `start` started, and take leave of it."""
    if process.returncode is None:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


@contextmanager
def worker(args: Any, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process with an engine of stage 04 that does what `ask` asks, and ends afterwards."""
    code = "import sys; from shared.bench import waiting; waiting.serve(*sys.argv[1:])"
    process = start(code, environ, args.model, args.device, args.dtype)
    try:
        yield process
    finally:
        end(process)


def tell(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
    """Send a line."""
    assert process.stdin
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def ask(process: subprocess.Popen[str], what: dict[str, Any]) -> dict[str, Any]:
    """Send a line and wait for the answer.

    Raises RuntimeError if the process has ended.
    """
    assert process.stdout
    with suppress(BrokenPipeError):
        tell(process, what)
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("an engine in a process of its own could not be started, or has ended")
    return json.loads(line)


def serve(model: str, device: str, dtype: str) -> None:
    """In the worker: an engine, and an answer for each line of standard input."""
    from shared import load_stage

    engine = load_stage(4).LLMEngine(model, device=device, dtype=dtype, num_blocks=400)
    decode(engine, 1, 8, 60)  # kernels are compiled, memory is touched
    shape = engine.model_runner.shape
    facts = {"dtype": str(shape.dtype).removeprefix("torch."), "device": shape.device.type}
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = facts
        while asked.get("forever"):
            decode(engine, 4, 100, 60)
        if "streams" in asked:
            answer = {
                f"step_{n}": decode(engine, n, asked["steps"], asked["seconds"])
                for n in asked["streams"]
            }
        print(json.dumps(answer), flush=True)


def decode(engine: Any, num_streams: int, steps: int, seconds: float) -> float:
    """Median milliseconds of the steps that decode `num_streams` sequences and nothing else.

    Ends after so many of them, or after so many seconds, but not before the fourth.
    """
    from shared import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    ids = [engine.add_request([5 + i] * 8, params) for i in range(num_streams)]
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 4 or (len(times) < steps and time.perf_counter() - begun < seconds):
        before = time.perf_counter()
        outputs = engine.step()
        taken = time.perf_counter() - before
        if len(outputs) == engine.trace.steps[-1].num_tokens == num_streams:
            times.append(1000 * taken)
    for request_id in ids:
        engine.abort_request(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.median(times[1:])
