"""How many requests per second are answered in time? Arrival rates swept, stages in turn.

A request is answered in time if its TTFT and every one of its gaps stay within limits. The highest
rate is the last one, from the lowest on, at which 99 % of the requests are; with fewer than 100
requests that is all of them. Requests arrive for as long at every rate, so that the higher ones are
no mere bursts: the same requests as at the rate below, closer together, and then more.

Limits that are not given are multiples of what the longest prompt gets alone in the first stage: 3
times its TTFT, which leaves room for a queue, and 10 times its plain decode step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shared import RequestOutput
from shared.measure import metrics, workloads
from shared.measure.metrics import MEASURES, Measure
from shared.measure.runner import params_of, run_engine
from shared.programs.options import number, whole

from . import rows
from .options import Parser, add_stages, sizes
from .results import Report
from .session import Session, fresh

CURVE, HIGHEST = "goodput", "highest rate"
SHARE = 0.99  # of the requests that must meet the limits
OWN = {
    "goodput": Measure(
        *("goodput", "req/s"),
        "requests with TTFT and every ITL within the limits / (last token of all - first arrival)",
        "higher",
    ),
    "in_time": Measure("in time", "%", "requests within the limits / requests", "higher"),
    **{key: MEASURES[key] for key in ("ttft_p50", "ttft_p99", "itl_p99", "itl_max")},
}
BEST = {
    "highest_rate": Measure(
        *("highest rate", "req/s"),
        "highest arrival rate, of those measured, up to which 99 % are within the limits",
        "higher",
    ),
    "best_goodput": Measure("best goodput", "req/s", "highest goodput at any rate", "higher"),
}
LIMITS = {"ttft": 3.0, "itl": 10.0}  # times the unloaded TTFT and decode step
# Median, sigma of the logarithm, and most tokens of a prompt and an answer.
TRAFFIC: dict[str, dict[str, Any]] = {
    "mixed": {"prompt_tokens": (128, 1.0, 1024), "output_tokens": (32, 0.7, 96)},
    "long_prompt": {"prompt_tokens": (256, 1.2, 2048), "output_tokens": (32, 0.7, 96)},
}
FULL: dict[str, Any] = {"rates": [0.5, 1.0, 2.0, 3.0, 4.0, 5.0], "seconds": 12}
QUICK: dict[str, Any] = {"rates": [1.0, 2.0, 4.0], "seconds": 5}
FEWEST = 8  # requests, at however low a rate


def add_options(parser: Parser) -> None:
    """Its own options."""
    add_stages(parser, [3, 4])
    parser.add_argument("--workload", choices=tuple(TRAFFIC), default="mixed")
    parser.add_argument(
        "--rates", type=number(0.001, 10_000), nargs="+", help="arrivals per second, lowest first"
    )
    parser.add_argument(
        "--seconds", type=number(0.1, 36_000), help="of arrivals at each rate, default 12"
    )
    parser.add_argument("--ttft-ms", type=number(0.01, 1e6), help="limit, default 3 x unloaded")
    parser.add_argument("--itl-ms", type=number(0.01, 1e6), help="limit, default 10 x unloaded")
    parser.add_argument(
        "--chunk-size", type=whole(16, 8192), default=64, help="of stage 04, default 64"
    )


def run(session: Session) -> None:
    """Requests and limits, then the rates upwards, stages in turn."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    rates = check_rates(args.rates or size["rates"])
    report.settings |= {"workload": args.workload, "chunk_size": args.chunk_size}

    # 1. Requests for each rate, and an engine for each stage.
    traffic = {}
    for rate in rates:
        num_requests = max(FEWEST, round(rate * (args.seconds or size["seconds"])))
        traffic[rate] = workloads.mixed(
            *(session.text(), args.seed, num_requests, rate), **TRAFFIC[args.workload]
        )
        report.workloads[f"{args.workload}, {rate:g}/s"] = traffic[rate].summary()
    options = rows.engine_options(traffic[rates[-1]])
    engines = {
        rows.STAGES[stage]: session.engine(
            stage, **options, **({"max_prefill_chunk_size": args.chunk_size} if stage == 4 else {})
        )
        for stage in args.stages
    }
    alone = unloaded(next(iter(engines.values())), traffic[rates[-1]])
    limits = {
        "ttft": args.ttft_ms / metrics.MS if args.ttft_ms else LIMITS["ttft"] * alone["ttft"],
        "itl": args.itl_ms / metrics.MS if args.itl_ms else LIMITS["itl"] * alone["itl"],
    }
    tell_limits(report, limits)

    # 2. Rates upwards, stages in turn.
    report.show(CURVE, OWN)
    plan = [(rate, name) for rate in rates for name in engines] * (args.rounds or 1)
    for rate, name in session.track(plan, [f"{name}, {rate:g}/s" for rate, name in plan]):
        fresh(engines[name])
        outputs = run_engine(engines[name], traffic[rate]).outputs
        report.measure(CURVE, name, values(outputs, limits), rate=rate)
    best(report, CURVE, HIGHEST, list(engines), rates)


def check_rates(rates: Sequence[float]) -> list[float]:
    """The rates, if each is above the one before. Raises ValueError if not."""
    if any(a >= b for a, b in pairwise(rates)):
        raise ValueError(f"rates must grow, got {' '.join(f'{rate:g}' for rate in rates)}")
    return list(rates)


def unloaded(engine: Any, workload: workloads.Workload) -> dict[str, float]:
    """TTFT and usual gap of the longest prompt by itself, in seconds."""
    longest = max(workload.requests, key=lambda request: len(request.prompt_token_ids))
    params = dataclasses.replace(params_of(longest), max_tokens=16)
    fresh(engine)
    (output,) = engine.generate([list(longest.prompt_token_ids)], params, use_tqdm=False)
    usual = metrics.percentile(output.metrics.itls, 50)
    assert output.metrics.ttft is not None and usual is not None
    return {"ttft": output.metrics.ttft, "itl": usual}


def tell_limits(report: Report, limits: Mapping[str, float], what: str = "limits") -> None:
    """Put the limits, in seconds, into the settings and the notes."""
    ttft, itl = (round(limits[key] * metrics.MS, 1) for key in ("ttft", "itl"))
    report.settings[what] = {"ttft_ms": ttft, "itl_ms": itl}
    report.notes.append(f"{what}: TTFT {ttft:g} ms, every ITL {itl:g} ms.")


def values(
    outputs: Sequence[RequestOutput], limits: Mapping[str, float]
) -> dict[str, float | None]:
    """One point of a curve."""
    good = metrics.goodput(outputs, limits["ttft"], limits["itl"])
    return {
        "goodput": good.requests_per_s,
        "in_time": 100 * good.share,
        **metrics.latency(outputs),
        **metrics.throughput(outputs),
    }


def highest_rate(in_time: Mapping[float, float]) -> float | None:
    """The last rate, from the lowest on, at which enough requests are in time; None if not one.

    A higher rate that does well after a lower one has failed was lucky, and does not count.

    Args:
        in_time: arrival rate to the percentage of requests within the limits.
    """
    highest = None
    for rate in sorted(in_time):
        if in_time[rate] < 100 * SHARE:
            break
        highest = rate
    return highest


def best(
    report: Report, curve: str, table: str, names: Sequence[str], rates: Sequence[float]
) -> None:
    """What the curve says about each row, in a table of its own."""
    report.show(table, BEST)
    for name in names:
        found = {rate: report.median(curve, name, "in_time", rate=rate) for rate in rates}
        highest = highest_rate({rate: value or 0.0 for rate, value in found.items()})
        goodputs = [report.median(curve, name, "goodput", rate=rate) or 0.0 for rate in rates]
        report.measure(table, name, {"highest_rate": highest or 0.0, "best_goodput": max(goodputs)})
        if highest is None:
            report.notes.append(f"{curve}, {name}: too late already at {min(rates):g}/s.")
        elif highest == max(rates):
            report.notes.append(f"{curve}, {name}: in time at all rates, so it may bear more.")


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""
    one, other = rows.STAGES[4], rows.STAGES[3]
    for column, text in (("highest_rate", "highest rate"), ("best_goodput", "best goodput")):
        ratio = report.ratio(HIGHEST, one, other, column)
        report.claim(f"{text}, 04 / 03", ratio, 1, at_least=True)
