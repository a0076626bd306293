"""What the prefix cache saves when prompts begin alike, and what it costs when they do not.

(a) Questions about one document, one after another, in stages 02 and 03, and the bare forward of
the question's own tokens after the document, which is a lower bound. (b) Prompts with nothing in
common: stages 02 and 03 should be alike. (c) The block manager by itself.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from shared import load_stage
from shared.measure import metrics, workloads
from shared.measure.agreement import first_difference
from shared.measure.metrics import MEASURES, Measure
from shared.measure.runner import run_engine
from shared.measure.workloads import Workload
from shared.programs.options import whole

from . import bookkeeping, rows
from .options import Parser, sizes
from .results import Report
from .session import Session

QUESTIONS = "(a) questions about one document"
UNSHARED = "(b) nothing in common"
BARE = "bare forward"
FIRST = "stage 03, first question"
OWN = {
    "ttft": Measure("TTFT", "ms", "request added -> first token; bare: forward -> token", "lower"),
    "hit_rate": MEASURES["hit_rate"],
}
BLOCK_SIZE = 16
FULL = {
    **{"questions": 16, "prefix_tokens": 1024, "own_tokens": 32, "rounds": 5},
    **{"num_requests": 16, "max_tokens": 32, "block_tokens": 1_000_000},
}
QUICK = {
    **{"questions": 6, "prefix_tokens": 512, "rounds": 2},
    **{"num_requests": 8, "max_tokens": 16, "block_tokens": 100_000},
}


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument("--questions", type=whole(2, 1000), help="default 16")
    parser.add_argument("--prefix-tokens", type=whole(16, 100_000), help="default 1024")
    parser.add_argument("--own-tokens", type=whole(1, 10_000), help="default 32")
    parser.add_argument(
        "--parts", nargs="+", choices=("a", "b", "c"), default=["a", "b", "c"], help="default: all"
    )


def run(session: Session) -> None:
    """The parts that were asked for."""
    args = session.args
    size = sizes(args, FULL, QUICK)
    if "a" in args.parts:
        workload = workloads.shared_prefix(
            session.text(),
            args.seed,
            num_requests=args.questions or size["questions"],
            prefix_tokens=args.prefix_tokens or size["prefix_tokens"],
            own_tokens=args.own_tokens or size["own_tokens"],
        )
        questions(session, workload)
    if "b" in args.parts:
        workload = workloads.chat(
            session.text(),
            args.seed,
            num_requests=size["num_requests"],
            max_tokens=size["max_tokens"],
        )
        session.report.workloads["chat"] = workload.summary()
        session.report.show(UNSHARED, ["output_tok_s", "total_tok_s", "ttft_p50", "hit_rate"])
        names = [rows.STAGES[2], rows.STAGES[3]]
        rows.measure(session, UNSHARED, workload, names, args.rounds or size["rounds"])
    if "c" in args.parts:
        bookkeeping.block_manager(session, 3 if not args.quick else 1, size["block_tokens"])


def questions(session: Session, workload: Workload) -> None:
    """Part (a): each question in turn in both stages and bare; a row's rounds are questions."""
    report = session.report
    report.workloads["shared_prefix"] = workload.summary()
    report.show(QUESTIONS, OWN)
    options = rows.engine_options(workload, BLOCK_SIZE)
    engines = {stage: session.engine(stage, **options) for stage in (2, 3)}
    ids = [request.request_id for request in workload.requests]
    for request in session.track(workload.requests, ids):
        alone = Workload("question", (dataclasses.replace(request, after=None),))
        # The first question fills the cache; the later ones are what the table is about.
        first = request is workload.requests[0]
        for stage, engine in engines.items():
            output = run_engine(engine, alone).outputs[0]
            name = FIRST if first and stage == 3 else rows.STAGES[stage]
            ttft = output.metrics.ttft
            assert ttft is not None
            values = {"ttft": ttft * metrics.MS, **metrics.hit_rate([output])}
            report.measure(QUESTIONS, name, values)
        if not first:
            num_own = len(request.prompt_token_ids) - common_prefix(workload)
            seconds = bare_forward(engines[3], list(request.prompt_token_ids), num_own)
            report.measure(QUESTIONS, BARE, {"ttft": seconds * metrics.MS})


def common_prefix(workload: Workload) -> int:
    """Tokens that all prompts begin with, in whole blocks: what a cache can find."""
    first, second = (request.prompt_token_ids for request in workload.requests[:2])
    return (first_difference(first, second) or 0) // BLOCK_SIZE * BLOCK_SIZE


def bare_forward(engine: Any, prompt_token_ids: list[int], num_own: int) -> float:
    """Seconds to compute the last `num_own` tokens behind cached ones, and to choose a token.

    By hand, with nothing of scheduler, hashing, sampler or outputs in it.
    """
    stage = load_stage(3)
    sequence = stage.sequence.Sequence("bare", prompt_token_ids, 1)
    manager = engine.block_manager
    start_pos = len(prompt_token_ids) - num_own
    prefix = manager.find_prefix(sequence)[: start_pos // BLOCK_SIZE]
    if len(prefix) * BLOCK_SIZE != start_pos:
        raise RuntimeError(
            f"{len(prefix)} blocks of the document are cached, not {start_pos} tokens"
        )
    manager.allocate(sequence, len(prompt_token_ids), prefix)
    batch = stage.scheduler.ScheduledBatch([stage.scheduler.Slice(sequence, start_pos, num_own)])
    start = time.perf_counter()
    with torch.inference_mode():
        engine.model_runner.run(batch)[0].argmax().item()
    seconds = time.perf_counter() - start
    manager.free(sequence)
    return seconds


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""
    cached, uncached = rows.STAGES[3], rows.STAGES[2]
    median = report.median(QUESTIONS, cached, "ttft")
    bare = report.median(QUESTIONS, BARE, "ttft")
    if median and bare:
        text = "TTFT of later questions / bare forward"
        report.claim(text, median / bare, 1.15, at_least=False)
        without = report.median(QUESTIONS, uncached, "ttft")
        text = "TTFT, stage 02 / stage 03"
        report.claim(text, without and without / median, 10, at_least=True)
    ratio = report.ratio(UNSHARED, cached, uncached, "output_tok_s")
    report.claim("nothing in common: output tok/s, 03 / 02", ratio, 0.98, at_least=True)
    bookkeeping.conclude_blocks(report)
