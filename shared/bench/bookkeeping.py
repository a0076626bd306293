"""What the bookkeeping costs by itself: schedulers and block managers, without any model.

A step of 256 decodes is scheduled and committed with no and with 10,000 requests waiting: it
may not matter how many wait. A million tokens go through the block manager of stage 03, in pools of
1,000 to 1,000,000 blocks: it may not matter how large the pool is.

It is one thread that never waits, so its CPU time is measured: what else runs does not count.
As in `timeit`, Python's garbage collector is off meanwhile: how often it comes, and for how long,
depends on what else lives in the process.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shared import load_stage
from shared.measure import metrics
from shared.measure.metrics import Measure
from shared.programs.options import whole

from .options import Parser, add_stages, sizes
from .results import Report
from .session import Session

SCHEDULER = "scheduler"
BLOCKS = "block manager"
US = 1e6  # microseconds in a second
BLOCK_SIZE = 16
SEQUENCE_BLOCKS = 64  # of each sequence that goes through the block manager
STEP = {
    f"step_{q}": Measure(
        f"step {q}", "µs", "CPU time of schedule() + commit() of one decode step", "lower"
    )
    for q in ("p50", "p99", "max")
}
BLOCK = {
    "new": Measure(
        "new",
        "µs/block",
        "CPU time of find_prefix + allocate + publish + free per block, nothing found",
        "lower",
    ),
    "found": Measure(
        "found",
        "µs/block",
        "CPU time of find_prefix + allocate + free per block, everything found",
        "lower",
    ),
}
FULL = {"rounds": 3, "steps": 200, "waiting": 10_000, "tokens": 1_000_000}
QUICK = {"rounds": 1, "steps": 50, "waiting": 2_000, "tokens": 100_000}
POOLS = (1_000, 10_000, 100_000, 1_000_000)


def add_options(parser: Parser) -> None:
    """Its own options."""
    add_stages(parser, [1, 2, 3, 4])
    parser.add_argument("--running", type=whole(1, 4096), default=256)
    parser.add_argument("--waiting", type=whole(1, 1_000_000), help="default 10000")


def run(session: Session) -> None:
    """Both tables, stages and pools in turn."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    rounds, waiting = args.rounds or size["rounds"], args.waiting or size["waiting"]
    report.settings |= {"running": args.running, "steps": size["steps"], "waiting": waiting}
    report.show(SCHEDULER, STEP)
    names = [f"stage {stage:02d}" for stage in args.stages]
    for name in session.turns(names, rounds):
        for num_waiting in (0, waiting):
            seconds = scheduler_steps(
                load_stage(int(name[-2:])), args.running, num_waiting, size["steps"], args.seed
            )
            values = metrics.quantiles("step", seconds, US)
            report.measure(SCHEDULER, name, values, waiting=num_waiting)
    block_manager(session, rounds, size["tokens"])


def scheduler_steps(
    stage: ModuleType, num_running: int, num_waiting: int, num_steps: int, seed: int
) -> list[float]:
    """Seconds of each of `num_steps` decode steps.

    The token ids are random: nothing is found in a cache. Blocks suffice for all that runs.
    """
    rng = random.Random(seed)
    prompt_len = 64
    config = stage.config.EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_running * (-(-(prompt_len + num_steps + 8) // BLOCK_SIZE) + 1),
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=1 << 20,
    )
    manager = stage.block_manager.BlockManager(config.num_blocks, config.block_size)
    scheduler = stage.scheduler.Scheduler(config, manager)

    def add(count: int, first: int) -> None:
        for i in range(count):
            prompt = [rng.randrange(50_000) for _ in range(prompt_len)]
            scheduler.add(stage.sequence.Sequence(f"{first + i}", prompt, 1 << 19))

    # 1. All sequences that fit into the batch are prefilled.
    add(num_running, 0)
    while True:
        batch = scheduler.schedule()
        scheduler.commit(batch, [rng.randrange(50_000) for _ in batch.sampling])
        if sum(s.num_tokens for s in batch.slices) == len(batch.sampling) == num_running:
            break
    # 2. The others keep waiting.
    add(num_waiting, num_running)
    tokens = [[rng.randrange(50_000) for _ in range(num_running)] for _ in range(num_steps)]
    seconds = []
    with no_garbage_collection():
        for step_tokens in tokens:
            start = time.thread_time()
            batch = scheduler.schedule()
            scheduler.commit(batch, step_tokens)
            seconds.append(time.thread_time() - start)
            assert len(batch.slices) == num_running and not batch.preempted
    return seconds


def block_manager(session: Session, rounds: int, num_tokens: int) -> None:
    """The table of stage 03's block manager, for pools of all sizes."""
    report = session.report
    report.show(BLOCKS, BLOCK)
    stage = load_stage(3)
    prompts = token_lists(num_tokens, session.args.seed)
    for name in session.turns([f"{pool:,} blocks" for pool in POOLS], rounds):
        num_blocks = int(name.split()[0].replace(",", ""))
        report.measure(BLOCKS, "stage 03", block_costs(stage, num_blocks, prompts), pool=num_blocks)


def token_lists(num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of `SEQUENCE_BLOCKS` full blocks and one token, `num_tokens` in all, none alike."""
    rng = random.Random(seed)
    length = SEQUENCE_BLOCKS * BLOCK_SIZE + 1
    return [[rng.randrange(50_000) for _ in range(length)] for _ in range(-(-num_tokens // length))]


def block_costs(
    stage: ModuleType, num_blocks: int, prompts: Sequence[list[int]]
) -> dict[str, float | None]:
    """Microseconds per block: for new content, and for content that is found."""
    manager = stage.block_manager.BlockManager(num_blocks, BLOCK_SIZE)

    def visit(sequence: Any, publish: bool) -> int:
        """A sequence comes, is computed, and goes; returns how many blocks were found."""
        prefix = manager.find_prefix(sequence)
        manager.allocate(sequence, sequence.num_tokens, prefix)
        if publish:
            sequence.cached_token_count = sequence.num_tokens
            manager.publish(sequence, 0)
        manager.free(sequence)
        return len(prefix)

    def timed(chosen: Sequence[list[int]], publish: bool) -> float:
        sequences = [stage.sequence.Sequence(str(i), p, 1) for i, p in enumerate(chosen)]
        with no_garbage_collection():
            start = time.thread_time()
            found = sum(visit(sequence, publish) for sequence in sequences)
            seconds = time.thread_time() - start
        assert found == (0 if publish else SEQUENCE_BLOCKS * len(chosen)), found
        return US * seconds / (SEQUENCE_BLOCKS * len(chosen))

    # Only the newest are still there in a small pool; half of it, so that none is lost meanwhile.
    newest = max(1, min(len(prompts), num_blocks // 2 // SEQUENCE_BLOCKS))
    return {"new": timed(prompts, True), "found": timed(prompts[-newest:], False)}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not again before the end."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""
    waiting = report.settings["waiting"]
    for row in [row for row in report.rows() if row["params"] == {"waiting": waiting}]:
        name = row["name"]
        step = report.median(SCHEDULER, name, "step_p50", waiting=waiting)
        alone = report.median(SCHEDULER, name, "step_p50", waiting=0)
        report.claim(f"{name}: µs a step, {waiting:,} waiting", step, 1000, at_least=False)
        if step and alone:
            text = f"{name}: a step with {waiting:,} waiting / with none"
            report.claim(text, step / alone, 1.2, at_least=False)
    conclude_blocks(report)


def conclude_blocks(report: Report) -> None:
    """The same for the block manager alone, which `prefix` measures, too."""
    pools = [row["params"]["pool"] for row in report.rows() if row["table"] == BLOCKS]
    costs = [report.median(BLOCKS, "stage 03", "new", pool=pool) for pool in pools]
    if costs and costs[0] and costs[-1]:
        report.claim("µs per block, worst pool", max(filter(None, costs)), 10, at_least=False)
        text = f"µs per block, pool of {pools[-1]:,} / {pools[0]:,}"
        report.claim(text, costs[-1] / costs[0], 2, at_least=False)
