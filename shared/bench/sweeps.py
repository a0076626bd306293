"""One option at a time: chunk size, block size, pool size, and what each costs and buys."""

from __future__ import annotations

from typing import Any

from shared.measure import workloads
from shared.measure.metrics import MEASURES, Measure
from shared.programs.options import whole

from . import rows, stall
from .options import Parser, sizes
from .session import Session

CHUNKS, BLOCKS, POOLS = "chunk size", "block size", "pool size"
PREEMPTED = {
    "preemptions": Measure("preempted", "", "times a request lost its blocks", "lower"),
    "computed": Measure(
        "computed", "%", "tokens computed / (prompt + generated tokens - one per request)", "lower"
    ),
}
FULL: dict[str, Any] = {
    **{"chunk": [64, 128, 256, 512, 1024, 2048], "block": [4, 16, 64, 256]},
    **{"pool": [25, 40, 60, 80, 100], "rounds": 1, "long_prompt_tokens": 3072},
    **{"stream_tokens": 80, "num_requests": 16, "max_tokens": 64},
}
QUICK: dict[str, Any] = {
    **{"chunk": [64, 256, 1024], "block": [16, 128], "pool": [40, 100]},
    **{"long_prompt_tokens": 1024, "stream_tokens": 40, "num_requests": 8, "max_tokens": 24},
}


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument(
        "--of", nargs="+", choices=("chunk", "block", "pool"), default=["chunk", "block", "pool"]
    )
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=4, help="default 4")
    parser.add_argument("--long-prompt", type=whole(64, 1_000_000), help="tokens, default 3072")
    parser.add_argument("--chunk", type=whole(16, 8192), nargs="+", help="chunk sizes, tokens")
    parser.add_argument("--block", type=whole(1, 1024), nargs="+", help="block sizes, tokens")
    parser.add_argument(
        "--pool", type=whole(1, 1000), nargs="+", help="pool sizes, % of what all requests fill"
    )


def run(session: Session) -> None:
    """The sweeps that were asked for."""
    args = session.args
    size = sizes(args, FULL, QUICK)
    rounds = args.rounds or size["rounds"]
    if "chunk" in args.of:
        chunk_sizes(session, args.chunk or size["chunk"], rounds, size)
    chat = workloads.chat(
        session.text(), args.seed, size["num_requests"], max_tokens=size["max_tokens"]
    )
    if "block" in args.of:
        block_sizes(session, chat, args.block or size["block"], rounds)
    if "pool" in args.of:
        # Answers longer than prompts: what was admitted grows until the pool is full.
        talk = workloads.chat(
            *(session.text(), args.seed, size["num_requests"], (16, 64)),
            max_tokens=2 * size["max_tokens"],
        )
        pool_sizes(session, talk, args.pool or size["pool"], rounds)


def chunk_sizes(session: Session, chunks: list[int], rounds: int, size: dict[str, Any]) -> None:
    """Longest gap against TTFT: the episode of `stall`, with stage 04."""
    workload = workloads.long_prompt(
        session.text(),
        session.args.seed,
        long_prompt_tokens=session.args.long_prompt or size["long_prompt_tokens"],
        stream_tokens=size["stream_tokens"],
    )
    session.report.workloads["long_prompt"] = workload.summary()
    stall.sweep(session, CHUNKS, workload, chunks, rounds)


def block_sizes(
    session: Session, workload: workloads.Workload, blocks: list[int], rounds: int
) -> None:
    """Waste against speed: larger blocks leave more slots empty, smaller ones are more to walk."""
    report, stage = session.report, session.args.stage
    report.workloads["chat"] = workload.summary()
    report.show(BLOCKS, ("kv_waste", "kv_peak", "output_tok_s", "itl_p50", "ttft_p50"))
    engines = {
        str(block): session.engine(stage, **rows.engine_options(workload, block))
        for block in blocks
    }
    for name in session.turns(list(engines), rounds):
        values = rows.values(rows.serve(engines[name], workload), session.bytes_per_token())
        report.measure(BLOCKS, rows.STAGES[stage], values, block=int(name))


def pool_sizes(
    session: Session, workload: workloads.Workload, percents: list[int], rounds: int
) -> None:
    """Preemptions against throughput, from a pool that is almost too small to one for all."""
    report, stage = session.report, session.args.stage
    report.workloads["chat, long answers"] = workload.summary()
    shown = ("output_tok_s", "ttft_p50", "ttft_max", "itl_max", "kv_waste")
    report.show(POOLS, PREEMPTED | {key: MEASURES[key] for key in shown})
    options = rows.engine_options(workload)
    largest = -(-max(workload.lengths().values()) // options["block_size"])
    pools = {p: max(largest, options["num_blocks"] * p // 100) for p in percents}
    for p in percents:
        if pools[p] == largest and options["num_blocks"] * p // 100 < largest:
            report.notes.append(f"pool of {p} %: raised to the largest request's {largest} blocks.")
    engines = {
        str(p): session.engine(stage, **{**options, "num_blocks": pools[p]}) for p in percents
    }
    for name in session.turns(list(engines), rounds):
        before = engines[name].stats()
        values = rows.values(rows.serve(engines[name], workload), session.bytes_per_token())
        after = engines[name].stats()
        needed = sum(workload.lengths().values()) - len(workload.requests)
        values["preemptions"] = after["preemptions"] - before["preemptions"]
        values["computed"] = 100 * (after["tokens"] - before["tokens"]) / needed
        params = {"pool %": int(name), "blocks": pools[int(name)]}
        report.measure(POOLS, rows.STAGES[stage], values, **params)
