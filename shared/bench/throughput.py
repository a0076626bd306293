"""Tokens per second of stages 01 and 04 beside what transformers offers: 16 chats at once."""

from __future__ import annotations

from shared.measure.workloads import chat
from shared.programs.options import whole

from . import rows
from .options import Parser, add_stages, sizes
from .results import Report
from .session import Session

TABLE = "throughput"
COLUMNS = ("output_tok_s", "total_tok_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_max", "kv_waste")
FULL = {"rounds": 3, "num_requests": 16, "prompt_tokens": (32, 256), "max_tokens": 64}
QUICK = {"rounds": 1, "num_requests": 8, "prompt_tokens": (32, 128), "max_tokens": 24}


def add_options(parser: Parser) -> None:
    """Its own options."""
    add_stages(parser, [1, 4])
    parser.add_argument("--requests", type=whole(1, 1000), help="default 16")


def run(session: Session) -> None:
    """The rows, in turn."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    workload = chat(
        session.text(),
        args.seed,
        num_requests=args.requests or size["num_requests"],
        prompt_tokens=size["prompt_tokens"],
        max_tokens=size["max_tokens"],
    )
    report.workloads["chat"] = workload.summary()
    report.show(TABLE, COLUMNS)
    report.notes.append(rows.PEER_NOTE)
    names = [*(rows.STAGES[stage] for stage in args.stages), rows.PEER_BATCH, rows.PEER_PADDED]
    rows.measure(session, TABLE, workload, names, args.rounds or size["rounds"])


def conclude(report: Report) -> None:
    """The project's claims, beside what was measured."""
    limits = {1: (2.8, 1.5), 4: (3.0, 1.7)}
    for stage, of_peers in limits.items():
        for peer, limit in zip((rows.PEER_BATCH, rows.PEER_PADDED), of_peers, strict=True):
            ratio = report.ratio(TABLE, rows.STAGES[stage], peer, "output_tok_s")
            text = f"output tok/s, {rows.STAGES[stage]} / {peer}"
            report.claim(text, ratio, limit, at_least=True)
