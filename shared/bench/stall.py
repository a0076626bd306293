"""Four streams, then a long cold prompt: how long does it keep the streams waiting?

Stages run in turn. Then stage 04 alone: two long prompts instead of one, and a burst of short ones,
with its default budget and with 8,192 tokens a step. With `--chunk-sizes`, stage 04 once for each
size: the longest gap falls and the long request's TTFT rises as chunks get smaller. With
`--target-ms`, also stage 04 in the mode that chooses each chunk for a step time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared import SamplingParams
from shared.measure import metrics, workloads
from shared.measure.metrics import Measure
from shared.measure.runner import Run, run_engine
from shared.programs.options import number, whole

from . import rows
from .options import Parser, add_stages, sizes
from .results import Report
from .session import Session, fresh

TABLE = "stall"
BUDGETS = "stall by budget"
SWEEP = "stall by chunk size"
RESERVED = "stage 04, reserved"  # with `reserve_full_prompt`: no row, only raw data for a picture
OWN = {
    "gap_max": Measure(
        "longest gap",
        "ms",
        "longest ITL of the streams that overlaps the long request's arrival .. first token",
        "lower",
    ),
    "gap_p99": Measure("gap p99", "ms", "99th percentile of the same gaps", "lower"),
    "gap_usual": Measure("usual gap", "ms", "median ITL of the streams before it came", "lower"),
    "stall_ratio": Measure("stall ratio", "x", "longest gap / usual gap", "lower"),
    "long_ttft": Measure("long TTFT", "ms", "TTFT of the long request", "lower"),
    "output_tok_s": metrics.MEASURES["output_tok_s"],
    "over_target": Measure("p99 / target", "x", "gap p99 / target_step_ms", "lower"),
}
WITHOUT_TARGET = {key: measure for key, measure in OWN.items() if key != "over_target"}
BY_BUDGET = ("itl_max", "itl_p50", "ttft_p50", "output_tok_s")
FULL = {
    **{"rounds": 3, "long_prompt_tokens": 3072, "stream_tokens": 112, "after_tokens": 16},
    **{"burst": 16, "burst_tokens": 32},
}
QUICK = {"rounds": 1, "stream_tokens": 48, "burst": 6, "burst_tokens": 8}


def add_options(parser: Parser) -> None:
    """Its own options."""
    add_stages(parser, [3, 4])
    parser.add_argument("--streams", type=whole(1, 64), default=4)
    parser.add_argument("--long-prompt", type=whole(64, 1_000_000), help="tokens, default 3072")
    parser.add_argument(
        "--chunk-size", type=whole(16, 8192), default=256, help="of stage 04, default 256"
    )
    parser.add_argument(
        "--chunk-sizes",
        type=whole(16, 8192),
        nargs="*",
        help="sweep stage 04 over these instead; without numbers 64 128 256 512 1024 2048",
    )
    parser.add_argument(
        "--target-ms",
        type=number(0, 60_000),
        help="step time that stage 04 aims at in a row of its own; 0, the default of a full run, "
        "is 3 times its usual gap",
    )


def run(session: Session) -> None:
    """The stages in turn, or stage 04 by chunk size."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    report.settings |= {"streams": args.streams, "chunk_size": args.chunk_size}
    workload = workloads.long_prompt(
        session.text(),
        args.seed,
        num_streams=args.streams,
        long_prompt_tokens=args.long_prompt or size["long_prompt_tokens"],
        stream_tokens=size["stream_tokens"],
        after_tokens=size["after_tokens"],
    )
    report.workloads["long_prompt"] = workload.summary()
    rounds = args.rounds or size["rounds"]
    if args.chunk_sizes is not None:
        chunk_sizes = args.chunk_sizes or [64, 128, 256, 512, 1024, 2048]
        sweep(session, SWEEP, workload, chunk_sizes, rounds)
        return

    # 1. One engine for each row, used again in each round.
    engines = {f"stage {stage:02d}": make(session, stage, workload) for stage in args.stages}
    target_ms = args.target_ms
    if target_ms is None and not args.quick and 4 in args.stages:
        target_ms = 0
    names = list(engines)
    if target_ms is not None:
        names.append("stage 04, target")
        target_ms = target_ms or 3 * usual_gap_ms(engines.get("stage 04"), session, workload)
        report.settings["target_step_ms"] = round(target_ms, 1)
        report.notes.append(
            f"stage 04, target: target_step_ms {target_ms:.1f}; its engine is made anew for each "
            "round, so it has hardly seen a step."
        )
    report.show(TABLE, OWN if target_ms is not None else WITHOUT_TARGET)

    if 4 in args.stages:
        engines[RESERVED] = make(session, 4, workload, reserve_full_prompt=True)
        names.append(RESERVED)

    # 2. In turn.
    for name in session.turns(names, rounds, only_once=[RESERVED]):
        engine = engines.get(name)
        if engine is None:
            engine = make(session, 4, workload, target_step_ms=target_ms)
        result = episode(engine, workload)
        if name != RESERVED:
            values = measure(result, target_ms if name.endswith("target") else None)
            report.measure(TABLE, name, values)
        report.series[name] = series(result)
    if 4 in args.stages:
        by_budget(session, two_documents(workload, session), rounds)
        burst = workloads.chat(
            session.text(), args.seed, size["burst"], max_tokens=size["burst_tokens"]
        )
        by_budget(session, burst, rounds)


def two_documents(workload: workloads.Workload, session: Session) -> workloads.Workload:
    """The episode with a second long prompt, which comes together with the first."""
    *streams, long = workload.requests
    passages = workloads.Passages(session.text(), session.args.seed + 1)
    second = replace(
        long,
        request_id="long-2",
        prompt_token_ids=passages.take(len(long.prompt_token_ids)),
    )
    return workloads.Workload("two long prompts", (*streams, long, second))


def by_budget(session: Session, workload: workloads.Workload, rounds: int) -> None:
    """Stage 04 with nothing set, and with so large a budget that each prompt gets a chunk."""
    report = session.report
    report.show(BUDGETS, BY_BUDGET)
    report.workloads[workload.name] = workload.summary()
    options = {k: v for k, v in rows.engine_options(workload).items() if "batched" not in k}
    engines = {
        "default": session.engine(4, **options),
        "8,192": session.engine(4, **options, max_num_batched_tokens=8192),
    }
    for name in session.turns(list(engines), rounds):
        fresh(engines[name])
        outputs = run_engine(engines[name], workload).outputs
        values = {**metrics.latency(outputs), **metrics.throughput(outputs)}
        report.measure(BUDGETS, workload.name, values, budget=name)


def make(session: Session, stage: int, workload: workloads.Workload, **options: Any) -> Any:
    """An engine with blocks for everything, so that nothing is preempted."""
    if "target_step_ms" in options:
        options["max_prefill_chunk_size"] = 8192  # only the target limits a chunk
    elif stage == 4 and "max_prefill_chunk_size" not in options:
        options["max_prefill_chunk_size"] = session.args.chunk_size
    return session.engine(stage, **rows.engine_options(workload), **options)


def episode(engine: Any, workload: workloads.Workload) -> Run:
    """Serve the workload once, with nothing in the prefix cache.

    Raises:
        RuntimeError: the long prompt was not cold, so its prefill was no prefill.
    """
    fresh(engine)
    result = run_engine(engine, workload)
    hit = result.outputs[-1].metrics.num_cached_tokens
    if hit:
        raise RuntimeError(f"{hit} tokens of the long prompt were in the prefix cache")
    return result


def usual_gap_ms(engine: Any, session: Session, workload: workloads.Workload) -> float:
    """The plain decode step of the streams alone: their median gap, in milliseconds."""
    engine = engine or make(session, 4, workload)
    prompts = [list(r.prompt_token_ids) for r in workload.requests[:-1]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    gaps = [gap for output in outputs for gap in output.metrics.itls[4:]]
    return (metrics.percentile(gaps, 50) or 0.0) * metrics.MS


def measure(result: Run, target_ms: float | None = None) -> dict[str, float | None]:
    """One row's numbers. The long request is the last one."""
    long = result.outputs[-1]
    stall = metrics.decode_stall(result.outputs, long.request_id)
    assert stall and long.metrics.ttft is not None  # it comes while the streams have tokens to go
    p99 = (metrics.percentile(stall.gaps, 99) or 0.0) * metrics.MS
    values = {
        "gap_max": stall.longest * metrics.MS,
        "gap_p99": p99,
        "gap_usual": stall.usual * metrics.MS if stall.usual else None,
        "stall_ratio": stall.ratio,
        "long_ttft": long.metrics.ttft * metrics.MS,
        "total_s": metrics.span(result.outputs),
        **metrics.latency(result.outputs[:-1]),
        **metrics.throughput(result.outputs),
        **metrics.hit_rate(result.outputs),
    }
    return values | ({"over_target": p99 / target_ms} if target_ms else {})


def series(result: Run) -> dict[str, Any]:
    """What pictures need of one run, in seconds after the long request's arrival."""
    origin = result.outputs[-1].metrics.arrival_time

    def since(time: float) -> float:
        return round(time - origin, 6)

    return {
        "requests": {
            output.request_id: {
                "arrival": since(output.metrics.arrival_time),
                "prompt_tokens": len(output.prompt_token_ids),
                "token_times": [since(t) for t in output.metrics.token_times],
            }
            for output in result.outputs
        },
        "steps": [
            {
                "start": since(step.start),
                "end": since(step.end),
                "slices": step.slices,
                "sampled": step.sampled,
                "free_blocks": step.num_free_blocks,
                "blocks": {name: len(table) for name, table in (step.block_tables or {}).items()},
            }
            for step in result.steps
        ],
    }


def sweep(
    session: Session, table: str, workload: workloads.Workload, chunk_sizes: list[int], rounds: int
) -> None:
    """Stage 04 at every chunk size."""
    report = session.report
    report.show(table, WITHOUT_TARGET)
    engines = {
        str(size): make(session, 4, workload, max_prefill_chunk_size=size) for size in chunk_sizes
    }
    for name in session.turns(list(engines), rounds):
        values = measure(episode(engines[name], workload))
        report.measure(table, "stage 04", values, chunk=int(name))


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""

    def ratio(one: str, other: str, column: str) -> float | None:
        return report.ratio(TABLE, one, other, column)

    one, other = "stage 04", "stage 03"
    report.claim("longest gap, 03 / 04", ratio(other, one, "gap_max"), 10, at_least=True)
    report.claim("the long TTFT, 04 / 03", ratio(one, other, "long_ttft"), 1.35, at_least=False)
    report.claim("output tok/s, 04 / 03", ratio(one, other, "output_tok_s"), 0.95, at_least=True)
    over = report.median(TABLE, "stage 04, target", "over_target")
    report.claim("gap p99 / target_step_ms", over, 1.25, at_least=False)
