"""The rows of the ladder: ways to serve the same workload, from naive to stage 04.

Knows how to run each row and what to take down of it; `ladder` and `throughput` choose rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from shared.measure import baselines, metrics
from shared.measure.agreement import NEAR_TIE, Agreement
from shared.measure.runner import (
    Run,
    run_engine,
    run_generate_batch,
    run_one_by_one,
    run_static_batches,
)
from shared.measure.workloads import Workload

from .session import Session, fresh

NAIVE = "naive, no KV cache"
CACHED = "generate, one by one"
PADDED = "padded batch"
PEER_BATCH = "generate_batch*"
PEER_PADDED = "padded batch*"
STAGES = {stage: f"stage {stage:02d}" for stage in (1, 2, 3, 4)}
ROWS = (NAIVE, CACHED, PADDED, *STAGES.values(), PEER_BATCH, PEER_PADDED)
PEER_NOTE = (
    "rows with * run the stock model as transformers loads it; all others share one model whose "
    "linear layers are packed where that helps (float32 on the CPU)."
)

Runner = Callable[[], Run]


def runners(
    session: Session, workload: Workload, names: Iterable[str], concurrency: int | None = None
) -> dict[str, Runner]:
    """A function for each row that serves `workload` once, warmed up.

    The KV cache of `generate_batch` is not inspected: waste, peak and hit rate stay blank.
    """
    made = {name: _runner(session, workload, name, concurrency) for name in names}
    for name in made:
        if name not in STAGES.values():  # engines are warmed up when they are made
            _warm_up(session, name)
    return made


def _runner(session: Session, workload: Workload, name: str, concurrency: int | None) -> Runner:
    if name in STAGES.values():
        stage = next(stage for stage, title in STAGES.items() if title == name)
        engine = session.engine(stage, **engine_options(workload))
        return functools.partial(serve, engine, workload, concurrency)
    model = (session.stock_model() if name.endswith("*") else session.model()).model
    if name == NAIVE:
        generate = functools.partial(baselines.generate_naive, model)
        return functools.partial(run_one_by_one, generate, workload, concurrency, has_cache=False)
    if name == CACHED:
        generate = functools.partial(baselines.generate_cached, model)
        return functools.partial(run_one_by_one, generate, workload, concurrency)
    if name in (PADDED, PEER_PADDED):
        generate_all = functools.partial(baselines.generate_padded, model)
        return functools.partial(run_static_batches, generate_all, workload, concurrency)
    assert name == PEER_BATCH, name
    return functools.partial(run_generate_batch, model, workload, concurrency)


def engine_options(workload: Workload, block_size: int = 16) -> dict[str, int]:
    """Room for the whole workload, so that no row is slowed down by preemption."""
    longest = max(workload.lengths().values())
    return {
        "block_size": block_size,
        "num_blocks": workload.num_blocks(block_size) + 1,
        "max_num_seqs": max(64, len(workload.requests)),
        "max_num_batched_tokens": max(8192, longest),
    }


def serve(engine: Any, workload: Workload, concurrency: int | None = None) -> Run:
    """Serve `workload` once with a cold engine, whose use of memory is taken down."""
    fresh(engine)
    run = run_engine(engine, workload, concurrency)
    run.use = metrics.kv_use(run.steps, engine.config.block_size)
    return run


def _warm_up(session: Session, name: str) -> None:
    """A first call pays for what later ones do not: threads, oneDNN's choices, lazy imports."""
    model = (session.stock_model() if name.endswith("*") else session.model()).model
    if name == NAIVE:
        baselines.generate_naive(model, [3] * 16, 2)
    elif name != PEER_BATCH:  # which warms itself up before it takes a request
        baselines.generate_padded(model, [[3] * 16, [4] * 24], [3, 3])


def values(run: Run, bytes_per_token: int) -> dict[str, float | None]:
    """One round's numbers of any row."""
    cache: dict[str, float | None] = {}
    if run.use is not None:  # there is a KV cache, and one can look into it
        cache = {**metrics.kv_memory(run.use, bytes_per_token), **metrics.hit_rate(run.outputs)}
    return {
        **metrics.latency(run.outputs),
        **metrics.throughput(run.outputs),
        **cache,
        **metrics.longest_stall(run.outputs),
        "span_s": metrics.span(run.outputs),
    }


def agreement(session: Session) -> Agreement:
    """A check of all rows' tokens, with ties judged by the model that our rows share."""
    gap = functools.partial(baselines.logit_gap, session.model().model)
    return Agreement(gap, NEAR_TIE[session.report.model["dtype"]])


def measure(
    session: Session,
    table: str,
    workload: Workload,
    names: list[str],
    rounds: int,
    once: Collection[str] = (),
    concurrency: int | None = None,
) -> None:
    """Run all rows in turn and report their numbers, and where their tokens differ.

    Args:
        names: of `ROWS`.
        once: those that are measured in the first round only.
        concurrency: of a closed loop; None is open loop, see `runner`.
    """
    report = session.report
    made = runners(session, workload, names, concurrency)
    agree = agreement(session)
    notes: dict[str, None] = {}
    for name in session.turns(names, rounds, once):
        run = made[name]()
        report.measure(table, name, values(run, session.bytes_per_token()))
        failures, ties = agree.check(name, run.outputs)
        report.failures += [failure for failure in failures if failure not in report.failures]
        notes.update(dict.fromkeys(ties))
    report.notes += notes
