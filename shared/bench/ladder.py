"""The ladder: the same requests from naive generate to stage 04, every row in turn."""

from __future__ import annotations

from shared.measure.workloads import WORKLOADS
from shared.programs.options import whole

from . import rows
from .options import Parser, sizes
from .results import Report
from .session import Session

TABLE = "ladder"
COLUMNS = (
    *("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_max", "tpot_p50"),
    *("output_tok_s", "total_tok_s", "kv_waste", "kv_peak", "hit_rate", "stall"),
)
FULL = {"rounds": 3}
QUICK = {"rounds": 1, "num_chats": 4, "system_tokens": 64, "own_tokens": (16, 32), "max_tokens": 12}
# How a workload calls its number of requests, if not `num_requests`.
COUNTS = {"long_prompt": "num_streams", "multi_turn": "num_chats", "example": "num_chats"}
NAMES = {"naive": rows.NAIVE, "generate": rows.CACHED, "padded": rows.PADDED} | {
    **{f"{stage:02d}": name for stage, name in rows.STAGES.items()},
    **{"generate_batch": rows.PEER_BATCH, "padded_stock": rows.PEER_PADDED},
}


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="example")
    parser.add_argument(
        "--requests", type=whole(1, 1000), help="of the workload, in place of its own number"
    )
    parser.add_argument(
        "--concurrency",
        type=whole(1, 1000),
        help="closed loop: this many requests run at once (default: open loop)",
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(NAMES), default=list(NAMES))


def run(session: Session) -> None:
    """The rows, in turn, on one workload."""
    args, report = session.args, session.report
    size = sizes(args, FULL, QUICK)
    rounds = args.rounds or size["rounds"]
    own = {}
    if args.workload == "example":
        own = {key: value for key, value in size.items() if key != "rounds"}
    if args.requests:
        own[COUNTS.get(args.workload, "num_requests")] = args.requests
    workload = WORKLOADS[args.workload](session.text(), args.seed, **own)
    report.workloads[workload.name] = workload.summary()
    report.show(TABLE, COLUMNS)
    names = [NAMES[name] for name in args.rows]
    if any(name.endswith("*") for name in names):
        report.notes.append(rows.PEER_NOTE)
    if rows.NAIVE in names and rounds > 1:
        report.notes.append(f"{rows.NAIVE}: one round, since it takes longer than all others.")
    report.settings["concurrency"] = args.concurrency
    rows.measure(session, TABLE, workload, names, rounds, [rows.NAIVE], args.concurrency)


def conclude(report: Report) -> None:
    """Steps of the ladder that should show on any traffic."""
    for one, other in ((rows.CACHED, rows.NAIVE), (rows.STAGES[4], rows.CACHED)):
        ratio = report.ratio(TABLE, one, other, "output_tok_s")
        report.claim(f"output tok/s, {one} / {other}", ratio, 1.0, at_least=True)
