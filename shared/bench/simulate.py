"""What the simulator predicts: first what can be measured here, then what no laptop can.

(a) The episode of `stall`, predicted and measured. The step times are fitted to other traffic: in
the same process, on engines of the same options, three streams and prompts of at most two thirds of
the long one's length, one after another. No step of the predicted runs is in the fit.

(b) to (e) use the roofline of a GPU and a model's shape (`shared.measure.roofline`), with stages 03
and 04: (b) many streams and one long prompt; (c) hours of traffic on one GPU; (d) a fleet of
replicas whose requests share documents, by router; (e) goodput by arrival rate.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

from shared import RequestOutput
from shared.engine.trace import StepRecord
from shared.measure import metrics, workloads
from shared.measure.fleet import prefix_aware, round_robin, run_fleet
from shared.measure.metrics import MEASURES, Measure
from shared.measure.roofline import GPUS, ModelSize, Roofline
from shared.measure.runner import Run, run_engine
from shared.measure.simulator import Fitted, SimulatedEngine, StepTime
from shared.measure.workloads import Passages, Workload, WorkloadRequest
from shared.programs.options import number, whole

from . import goodput, rows, stall
from .options import Parser, sizes
from .results import Report
from .session import Session

PREDICTION = "(a) predicted and measured"
STREAMS = "(b) streams and a long prompt"
HOURS = "(c) hours of traffic"
FLEET = "(d) a fleet"
CURVE, HIGHEST = "(e) goodput", "(e) highest rate"
ERROR_LIMIT = 15  # percent
MAX_MODEL_LEN = 131_072
LATENCY = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_max", "output_tok_s")
PREDICTED = {
    "measured": Measure("measured", "ms", "median over the rounds"),
    "predicted": Measure("predicted", "ms", "simulated with step times fitted to other traffic"),
    "error": Measure("error", "%", "predicted / measured - 1"),
}
NUMBERS = {"gap_max": "longest gap", "long_ttft": "long TTFT", "total_s": "total time"}
SIMULATED = {
    "hours": Measure("simulated", "h", "first arrival -> last token, in the simulated world"),
    "wall": Measure("took", "s", "time of this machine, one core", "lower"),
}
FULL: dict[str, Any] = {
    **{"rounds": 2, "long_prompt_tokens": 3072, "stream_tokens": 112},
    **{"streams": 128, "prompt": 8192, "hours_requests": 100_000, "hours_rate": 12.0},
    **{"fleet_requests": 12_000, "fleet_rate": 192.0, "documents": 1024},
    **{"curve_requests": 500, "rates": [0.03, 0.1, 0.3, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0]},
}
QUICK: dict[str, Any] = {
    **{"rounds": 1, "long_prompt_tokens": 1024, "stream_tokens": 48},
    **{"hours_requests": 5_000, "fleet_requests": 1000, "documents": 64},
    **{"curve_requests": 100, "rates": [0.1, 1.0, 8.0, 16.0]},
}
CURVE_TRAFFIC: dict[str, Any] = {
    "prompt_tokens": (512, 1.2, 8192),
    "output_tokens": (128, 0.8, 512),
}
CHUNKS = (4096, 2048, 512)


def add_options(parser: Parser) -> None:
    """Its own options."""
    names = ("a", "b", "c", "d", "e")
    parser.add_argument("--parts", nargs="+", choices=names, default=list(names))
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h100", help="of (b) to (e)")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", help="of (b) to (e), see shared/models/configs"
    )
    parser.add_argument("--streams", type=whole(1, 4096), help="of (b), default 128")
    parser.add_argument("--prompt", type=whole(64, 100_000), help="of (b), tokens, default 8192")
    parser.add_argument("--replicas", type=whole(1, 256), default=16, help="of (d), default 16")
    parser.add_argument("--requests", type=whole(10, 1_000_000), help="of (c), default 100,000")
    limit = number(0.01, 1e6)
    parser.add_argument("--ttft-ms", type=limit, default=1000, help="limit of (e), default 1000")
    parser.add_argument("--itl-ms", type=limit, default=30, help="limit of (e), default 30")


def run(session: Session) -> None:
    """The parts that were asked for."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    roofline = Roofline(GPUS[args.gpu], ModelSize.named(args.shape))
    if {"b", "c", "d", "e"} & {*args.parts}:
        num_blocks = roofline.num_blocks(16)  # which refuses a model that does not fit
        report.settings |= {"gpu": roofline.gpu.name, "shape": args.shape, "num_blocks": num_blocks}
        report.notes.append(
            f"(b) to (e) are simulated: {args.shape} in 16 bits on {roofline.gpu.name}, "
            f"{roofline.gpu.flops / 1e12:.0f} TFLOP/s and {roofline.gpu.bandwidth / 1e12:.2f} TB/s "
            f"by the data sheet, of which {100 * roofline.flop_share:.0f} % and "
            f"{100 * roofline.byte_share:.0f} % are assumed to be reached, and "
            f"{roofline.overhead * metrics.MS:g} ms of overhead in each step; {num_blocks} blocks."
        )
    if "a" in args.parts:
        prediction(session, size)
    for part, function in {"b": streams, "c": hours, "d": fleet, "e": curve}.items():
        if part in args.parts:
            function(session, size, roofline)


# --- (a) --------------------------------------------------------------------------------------


def prediction(session: Session, size: dict[str, Any]) -> None:
    """Other traffic and the episode in turn; then the episode once more, without a model."""
    args, report = session.args, session.report
    episode = workloads.long_prompt(
        session.text(),
        args.seed,
        long_prompt_tokens=size["long_prompt_tokens"],
        stream_tokens=size["stream_tokens"],
    )
    other = calibration(session.text(), args.seed + 1, size["long_prompt_tokens"])
    report.workloads |= {"long_prompt": episode.summary(), "calibration": other.summary()}
    report.show(PREDICTION, PREDICTED)

    # 1. Measure.
    engines = {
        rows.STAGES[3]: stall.make(session, 3, episode),
        rows.STAGES[4]: stall.make(session, 4, episode, max_prefill_chunk_size=256),
    }
    seen: list[StepRecord] = []
    measured: dict[str, Run] = {}
    names = [*(f"calibration, {name}" for name in engines), *engines]
    for name in session.turns(names, args.rounds or size["rounds"]):
        result = stall.episode(
            engines[name.removeprefix("calibration, ")], other if "," in name else episode
        )
        if name in engines:
            measured[name] = result
            for what, value in in_ms(result).items():
                report.measure(PREDICTION, name, {"measured": value}, number=what)
        else:
            seen += result.steps

    # 2. Predict.
    fitted = Fitted.to(seen)
    a, b, c, d = fitted.coefficients
    report.notes.append(
        f"(a) step time = {a * 1e3:.2f} ms + {b * 1e6:.0f} us x tokens + {c * 1e9:.0f} ns x prompt "
        f"tokens x context + {d * 1e9:.0f} ns x decode contexts, from {len(seen)} steps of others."
    )
    differing = 0
    for name, engine in engines.items():
        result = simulate(
            4 if name == rows.STAGES[4] else 3, fitted, episode, **dataclasses.asdict(engine.config)
        )
        report.series[f"{name}, predicted"] = stall.series(result)
        report.series[name] = stall.series(measured[name])
        pairs = zip(result.steps, measured[name].steps, strict=False)
        differing += abs(len(result.steps) - len(measured[name].steps))
        differing += sum(one.slices != other.slices for one, other in pairs)
        for what, value in in_ms(result).items():
            found = report.median(PREDICTION, name, "measured", number=what)
            error = 100 * (value / found - 1) if found else None
            values = {"predicted": value, "error": error}
            report.measure(PREDICTION, name, values, number=what)
    report.settings["steps scheduled otherwise than predicted"] = differing


def calibration(token_ids: list[int], seed: int, long_prompt_tokens: int) -> Workload:
    """Three streams, and five prompts of other lengths than the predicted one, none longer."""
    passages = Passages(token_ids, seed)
    streams = [WorkloadRequest(f"stream-{i}", passages.take(40), 60) for i in range(3)]
    requests = [*streams]
    for share in (24, 3, 10, 1.5, 6):
        last = requests[-1].request_id
        first = last == streams[-1].request_id
        prompt = passages.take(max(2, int(long_prompt_tokens / share)))
        name = f"prompt-{len(requests) - len(streams)}"
        requests.append(
            WorkloadRequest(name, prompt, 4, after=last, after_tokens=4 if first else None)
        )
    return Workload("calibration", tuple(requests))


def in_ms(result: Run) -> dict[str, float]:
    """The numbers that are predicted, in milliseconds."""
    values = stall.measure(result)
    values["total_s"] = (values["total_s"] or 0.0) * metrics.MS
    return {title: values[key] or 0.0 for key, title in NUMBERS.items()}


# --- (b) to (e) -------------------------------------------------------------------------------


def simulate(stage: int, step_time: StepTime, workload: Workload, **options: Any) -> Run:
    """Serve a workload on a simulated engine."""
    engine = SimulatedEngine(stage, step_time, **options)
    engine.trace.max_steps = None
    engine.trace.record_blocks = True
    return run_engine(engine, workload, clock=engine.clock, sleep=engine.sleep)


def options_of(roofline: Roofline, stage: int, chunk_size: int = 512) -> dict[str, Any]:
    """An engine as one would set it up for that GPU."""
    options: dict[str, Any] = {
        **{"num_blocks": roofline.num_blocks(16), "max_model_len": MAX_MODEL_LEN},
        **{"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    }
    return options | ({"max_prefill_chunk_size": chunk_size} if stage == 4 else {})


def random_text(seed: int, num_tokens: int = 200_000) -> list[int]:
    """Token ids to cut prompts from: without a model only their number and sameness matter."""
    return random.Random(seed).choices(range(100_000), k=num_tokens)


def streams(session: Session, size: dict[str, Any], roofline: Roofline) -> None:
    """(b): stage 03 computes the prompt in one step; stage 04 by its budget and smaller chunks."""
    args, report = session.args, session.report
    left_out = ("over_target", "gap_p99")
    report.show(STREAMS, {key: m for key, m in stall.OWN.items() if key not in left_out})
    workload = workloads.long_prompt(
        random_text(args.seed),
        args.seed,
        num_streams=args.streams or size["streams"],
        stream_prompt_tokens=512,
        stream_tokens=600,
        long_prompt_tokens=args.prompt or size["prompt"],
    )
    report.workloads[STREAMS] = workload.summary()
    longest = max(8192, *workload.lengths().values())
    plan = [(3, longest), *((4, chunk) for chunk in CHUNKS)]
    for stage, chunk in session.track(plan, [f"(b) stage {stage:02d}, {c}" for stage, c in plan]):
        options = options_of(roofline, stage, chunk) | {
            "max_num_seqs": len(workload.requests),
            "max_num_batched_tokens": longest if stage == 3 else CHUNKS[0],
        }
        result = simulate(stage, roofline, workload, **options)
        cut = "whole prompt" if stage == 3 else f"{chunk:,}"
        report.measure(STREAMS, rows.STAGES[stage], stall.measure(result), chunk=cut)


def hours(session: Session, size: dict[str, Any], roofline: Roofline) -> None:
    """(c): so many requests that their 99th percentile means something, with stage 04."""
    args, report = session.args, session.report
    report.show(HOURS, SIMULATED | {key: MEASURES[key] for key in LATENCY})
    num_requests = args.requests or size["hours_requests"]
    for name in session.track([rows.STAGES[4]], [f"(c) {num_requests} requests"]):
        workload = workloads.mixed(
            *(random_text(args.seed, 1_000_000), args.seed, num_requests, size["hours_rate"]),
            prompt_tokens=(256, 1.0, 4096),
            output_tokens=(32, 0.8, 256),
        )
        report.workloads[HOURS] = workload.summary()
        start = time.perf_counter()
        outputs = run_fleet([SimulatedEngine(4, roofline, **options_of(roofline, 4))], workload)
        wall = time.perf_counter() - start
        values = latency(outputs) | {"hours": metrics.span(outputs) / 3600, "wall": wall}
        report.measure(HOURS, name, values, requests=num_requests)


def latency(outputs: list[RequestOutput]) -> dict[str, float | None]:
    """What is reported of any simulated traffic."""
    return {**metrics.latency(outputs), **metrics.throughput(outputs), **metrics.hit_rate(outputs)}


def fleet(session: Session, size: dict[str, Any], roofline: Roofline) -> None:
    """(d): each question has one of many documents before it; a replica cannot keep them all."""
    args, report = session.args, session.report
    report.show(FLEET, ("hit_rate", "ttft_p50", "ttft_p99", "itl_p99", "output_tok_s"))
    workload = questions(
        args.seed,
        num_requests=size["fleet_requests"],
        num_documents=size["documents"],
        rate=size["fleet_rate"] * args.replicas / 16,
    )
    report.workloads[FLEET] = workload.summary()
    routes = {"round robin": round_robin, "prefix-aware": prefix_aware}
    for name in session.track(list(routes), [f"(d) {name}" for name in routes]):
        options = options_of(roofline, 4)
        engines = [SimulatedEngine(4, roofline, **options) for _ in range(args.replicas)]
        outputs = run_fleet(engines, workload, routes[name]())
        report.measure(FLEET, name, latency(outputs), replicas=args.replicas)


def questions(seed: int, num_requests: int, num_documents: int, rate: float) -> Workload:
    """Questions at random times, each about one of the documents, all equally likely."""
    passages = Passages(random_text(seed, 1_000_000), seed)
    documents = [passages.take(2048) for _ in range(num_documents)]
    now, requests = 0.0, []
    for i in range(num_requests):
        now += passages.rng.expovariate(rate)
        prompt = passages.rng.choice(documents) + passages.take(32)
        requests.append(WorkloadRequest(f"question-{i}", prompt, 64, now))
    return Workload("questions", tuple(requests))


def curve(session: Session, size: dict[str, Any], roofline: Roofline) -> None:
    """(e): arrival rates swept, as `goodput` does on the real engine."""
    args, report = session.args, session.report
    report.show(CURVE, goodput.OWN)
    limits = {"ttft": args.ttft_ms / metrics.MS, "itl": args.itl_ms / metrics.MS}
    goodput.tell_limits(report, limits, "(e) limits")
    rates, names = size["rates"], [rows.STAGES[stage] for stage in (3, 4)]
    text = random_text(args.seed)
    plan = [(rate, stage) for rate in rates for stage in (3, 4)]
    for rate, stage in session.track(plan, [f"(e) stage {s:02d}, {rate:g}/s" for rate, s in plan]):
        workload = workloads.mixed(
            *(text, args.seed, size["curve_requests"], rate), **CURVE_TRAFFIC
        )
        outputs = run_fleet(
            [SimulatedEngine(stage, roofline, **options_of(roofline, stage))], workload
        )
        values = goodput.values(outputs, limits)
        report.measure(CURVE, rows.STAGES[stage], values, rate=rate)
    goodput.best(report, CURVE, HIGHEST, names, rates)


def conclude(report: Report) -> None:
    """How far the predictions are off, and what the simulator was made for."""
    errors = [
        abs(error)
        for row in report.rows()
        if row["table"] == PREDICTION and "error" in row["values"]
        for error in row["values"]["error"]["rounds"]
    ]
    text = "largest error of a prediction, %"
    report.claim(text, max(errors, default=None), ERROR_LIMIT, at_least=False)
    different = report.settings.get("steps scheduled otherwise than predicted")
    report.claim("steps scheduled otherwise than predicted", different, 0, at_least=False)
    for row in report.rows():
        if row["table"] == HOURS:
            wall = row["values"]["wall"]["median"]
            text = f"seconds for {row['params']['requests']:,} requests"
            report.claim(text, wall, 300, at_least=False)
    ratio = report.ratio(HIGHEST, rows.STAGES[4], rows.STAGES[3], "highest_rate")
    report.claim("simulated: highest rate, 04 / 03", ratio, 1, at_least=True)
