"""What HTTP costs: the server's streams beside the same engine in this process.

Stage 04 in turn, in this process and in a server that is another one: 16 streams at once, and
single requests one after the other. Then the stall as a client sees it: four streams and a long
prompt, the longest gap between two events of a stream beside the one between two steps of the
engine. Last, 256 streams at once on a tiny model: all must be whole.

With `--soak`, nothing is timed: so many requests of all kinds go through a server on the tiny
model, a third of the clients hang up on the way, and nothing may be left: no request, no block, no
byte.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import psutil

from shared import SamplingParams
from shared.measure import metrics, workloads
from shared.measure.metrics import MS, Measure
from shared.measure.workloads import Workload
from shared.programs.options import whole

from .client import Received, Server, post, server, step_events, together
from .options import Parser, sizes
from .results import Report
from .session import Session, fresh

STREAMS, SINGLE, STALL, MANY = "streams at once", "one by one", "stall", "many streams"
HERE, HTTP, CLIENT, ENGINE = "in process", "over HTTP", "seen by the client", "the engine's own"
MODEL = "stage-04"
COLUMNS = ("output_tok_s", "ttft_p50", "itl_p50", "itl_max")
TTFT = {"ttft": Measure("TTFT", "ms", "median time to the first token", "lower")}
GAP = {
    "gap_max": Measure("longest gap", "ms", "longest gap of a stream after the long prompt came")
}
LOST = {
    "streams": Measure("streams", "", "how many at once"),
    "lost": Measure("lost", "", "tokens that did not come", "lower"),
}
FULL = {
    **{"rounds": 5, "streams": 16, "prompt_tokens": (32, 256), "max_tokens": 64, "singles": 20},
    **{"long_prompt_tokens": 3072, "stream_tokens": 112, "many": 256, "many_tokens": 40},
}
QUICK = {
    **{"rounds": 1, "streams": 8, "max_tokens": 24, "singles": 5},
    **{"long_prompt_tokens": 768, "stream_tokens": 48, "many": 64, "many_tokens": 10},
}
SLACK, PER_REQUEST = 16 << 20, 256  # bytes that a server may keep, as in `soak`
WORKERS = 24  # clients at once in the soak
TINY = {"OMP_NUM_THREADS": "1"}  # a tiny model is faster on one thread


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument(
        "--soak", type=whole(20, 10_000_000), metavar="REQUESTS", help="a soak instead: see above"
    )


def run(session: Session) -> None:
    """The tables, or the soak."""
    if session.args.soak:
        session.report.notes.append(soak(session.args.soak, session.args.seed))
        print(session.report.notes[-1])
        return
    size = sizes(session.args, FULL, QUICK)
    rounds = session.args.rounds or size["rounds"]
    chats = workloads.chat(
        session.text(),
        session.args.seed,
        num_requests=size["streams"],
        prompt_tokens=size["prompt_tokens"],
        max_tokens=size["max_tokens"],
    )
    stall = workloads.long_prompt(
        session.text(),
        session.args.seed,
        num_streams=4,
        long_prompt_tokens=size["long_prompt_tokens"],
        stream_tokens=size["stream_tokens"],
        after_tokens=16,
    )
    report = session.report
    report.workloads |= {"chat": chats.summary(), "long_prompt": stall.summary()}
    report.show(STREAMS, COLUMNS)
    report.show(SINGLE, TTFT)
    report.show(STALL, GAP)
    options = {
        "num_blocks": stall.num_blocks(16) + chats.num_blocks(16),
        "max_num_batched_tokens": 512,
        "max_prefill_chunk_size": 256,
    }
    words = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    args = session.args
    words += ["--model", args.model, "--device", args.device, "--dtype", args.dtype]
    engine = session.engine(4, **options)
    with server("--stages", "4", *words) as where:
        over_http(where, chats)  # warm
        for name in session.turns([HERE, HTTP], rounds):
            if name == HERE:
                report.measure(STREAMS, name, in_process(engine, chats))
                report.measure(SINGLE, name, {"ttft": singles_here(engine, size["singles"])})
            else:
                report.measure(STREAMS, name, over_http(where, chats))
                report.measure(SINGLE, name, {"ttft": singles_over_http(where, size["singles"])})
                seen, own = stall_over_http(where, stall)
                report.measure(STALL, CLIENT, {"gap_max": seen})
                report.measure(STALL, ENGINE, {"gap_max": own})
    del engine
    many(session, size["many"], size["many_tokens"])


def conclude(report: Report) -> None:
    """What is wanted, beside what was measured."""
    ratio = report.ratio(STREAMS, HTTP, HERE, "output_tok_s")
    report.claim("output tok/s, over HTTP / in process", ratio, 0.93, at_least=True)
    pairs = zip(
        report.rounds(SINGLE, HTTP, "ttft"), report.rounds(SINGLE, HERE, "ttft"), strict=False
    )
    if differences := [http - here for http, here in pairs]:
        more = statistics.median(differences)
        report.claim("TTFT over HTTP, more than in process (ms)", more, 10, at_least=False)
    ratio = report.ratio(STALL, CLIENT, ENGINE, "gap_max")
    report.claim("longest gap, client / engine", ratio, 1.1, at_least=False)


# --- the rows -------------------------------------------------------------------------------------


def params(max_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def body(prompt: Any, max_tokens: int) -> dict[str, Any]:
    """The same as a request."""
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def in_process(engine: Any, workload: Workload) -> dict[str, float | None]:
    """All requests at once, stepped by this thread."""
    fresh(engine)
    engine.trace.record_blocks = False
    last: dict[str, Any] = {}
    for r in workload.requests:
        engine.add_request(list(r.prompt_token_ids), params(r.max_tokens), r.request_id)
    while engine.has_unfinished_requests():
        last.update((output.request_id, output) for output in engine.step())
    outputs = list(last.values())
    return metrics.latency(outputs) | metrics.throughput(outputs)


def over_http(where: Server, workload: Workload) -> dict[str, float | None]:
    """All requests at once, each with a connection of its own.

    Raises RuntimeError if an answer is not whole.
    """
    received = together(
        [
            functools.partial(
                post, where, "/v1/completions", body(r.prompt_token_ids, r.max_tokens)
            )
            for r in workload.requests
        ]
    )
    for got, request in zip(received, workload.requests, strict=True):
        if got.error or got.num_tokens != request.max_tokens:
            raise RuntimeError(f"{got.num_tokens} of {request.max_tokens} tokens; {got.error}")
    seconds = max(got.times[-1] for got in received) - min(got.start for got in received)
    itls = [later - earlier for got in received for earlier, later in pairwise(got.times)]
    return {
        **metrics.quantiles("ttft", [got.ttft for got in received]),
        **metrics.quantiles("itl", itls),
        "output_tok_s": sum(got.num_tokens for got in received) / seconds,
    }


def singles(count: int) -> list[list[int]]:
    """Prompts of 32 tokens that have no beginning in common."""
    return [[5 + i % 40, *range(100 + i, 131 + i)] for i in range(count)]


def singles_here(engine: Any, count: int) -> float:
    """Median milliseconds to the first token of requests that come one by one."""
    fresh(engine)
    ttfts = []
    for prompt in singles(count):
        start = time.perf_counter()
        engine.add_request(prompt, params(3))
        engine.step()
        ttfts.append(MS * (time.perf_counter() - start))
        while engine.has_unfinished_requests():
            engine.step()
    return statistics.median(ttfts)


def singles_over_http(where: Server, count: int) -> float:
    """The same, as a client sees it."""
    # Each with a salt of its own: what earlier rounds computed is not found.
    salts = [{"cache_salt": f"{random.random()}"} for _ in range(count)]
    received = [
        post(where, "/v1/completions", body(prompt, 3) | salt)
        for prompt, salt in zip(singles(count), salts, strict=True)
    ]
    return statistics.median(MS * got.ttft for got in received)


def stall_over_http(where: Server, workload: Workload) -> tuple[float, float]:
    """Longest gap of the streams from the long prompt's arrival to its first token, in ms.

    Returns that between two events at the client, and that between two steps of the engine.
    """
    *streams, long = workload.requests
    salt = {"cache_salt": f"{random.random()}"}
    progress: dict[int, int] = {}
    asked: list[float] = []

    def stream(i: int) -> Received:
        def count(received: Received) -> bool:
            progress[i] = len(received.times)
            return True

        request = body(streams[i].prompt_token_ids, streams[i].max_tokens) | salt
        return post(where, "/v1/completions", request, count)

    def document() -> Received:
        while len(progress) < len(streams) or min(progress.values()) < 16:
            time.sleep(0.001)
        asked.append(time.perf_counter())
        return post(where, "/v1/completions", body(long.prompt_token_ids, 8) | salt)

    with step_events(where) as events:
        *chats, last = together(
            [*(functools.partial(stream, i) for i in range(len(streams))), document]
        )
    # A gap counts if it overlaps the time in which the document waits for its first token.
    begin, end = asked[0], last.times[0]
    seen = max(
        later - earlier
        for got in chats
        for earlier, later in pairwise(got.times)
        if later > begin and earlier < end
    )
    # The engine's own clock is that of the client: both are of one machine.
    own = 0.0
    for got in chats:
        times = [
            event["step"]["end"]
            for event in events
            if event["step"] and got.request_id in event["step"]["sampled"]
        ]
        gaps = [b - a for a, b in pairwise(times) if b > begin and a < end]
        own = max(own, *gaps)
    return MS * seen, MS * own


def many(session: Session, count: int, max_tokens: int) -> None:
    """So many streams at once on the tiny model; each must have all its tokens."""
    report = session.report
    report.show(MANY, LOST)
    options = ("--model", "tiny", "--device", "cpu", "--dtype", "float32", "--stages", "4")
    limits = ("--max-num-seqs", "256", "--num-blocks", "4096", "--max-waiting", "1000")
    with server(*options, *limits, environ=TINY) as where:
        received = together(
            [
                functools.partial(post, where, "/v1/completions", body([3 + i, 9, 17], max_tokens))
                for i in range(count)
            ]
        )
        left = {k: v for k, v in where.metrics().items() if "kv_cache_usage" in k or "num_req" in k}
    lost = sum(max_tokens - got.num_tokens for got in received)
    report.measure(MANY, HTTP, {"streams": count, "lost": lost})
    if lost or any(got.error or got.finish_reasons != {0: "length"} for got in received):
        report.failures.append(f"{lost} tokens of {count} streams are lost")
    if any(left.values()):
        report.failures.append(f"left in the server: {left}")


# --- the soak -------------------------------------------------------------------------------------


def soak(num_requests: int, seed: int) -> str:
    """Send requests of all kinds and hang up on a third of them.

    Raises:
        RuntimeError: something is left, or a request did not end as it must.
    """
    options = ("--model", "tiny", "--device", "cpu", "--dtype", "bfloat16", "--block-size", "4")
    limits = ("--num-blocks", "256", "--max-num-seqs", "16")
    # oneDNN compiles kernels for each new shape of a batch and keeps them: some 100 MiB, in which a
    # leak would not show. For the oldest processors it compiles none.
    with server(*options, *limits, environ=TINY | {"ONEDNN_MAX_CPU_ISA": "SSE41"}) as where:
        process = psutil.Process(where.pid)
        seen: Counter[str] = Counter()
        rss: list[tuple[int, int]] = []  # after so many requests
        start, done, part = time.perf_counter(), 0, max(20, num_requests // 20)
        while done < num_requests:
            count = min(part, num_requests - done)
            numbers = [range(done + i, done + count, WORKERS) for i in range(WORKERS)]
            for counts in together([functools.partial(_client, where, n, seed) for n in numbers]):
                seen += counts
            done += count
            _wait_until_idle(where)
            rss.append((done, process.memory_info().rss))
        seconds = time.perf_counter() - start
    if seen["wrong"]:
        raise RuntimeError(f"{seen['wrong']} of {done:,} requests did not end as they must: {seen}")
    # An allocator gives back late, so the lowest after a quarter is what counts.
    after = [(n, size) for n, size in rss if n >= num_requests / 4]
    grown = after[-1][1] - min(size for _, size in after)
    bound = SLACK + PER_REQUEST * (done - after[0][0])
    memory = f"memory {grown / 2**20:+.1f} MiB, at most {bound / 2**20:.1f}"
    if grown > bound:
        raise RuntimeError(memory)
    counts = ", ".join(f"{value:,} {name}" for name, value in sorted(seen.items()))
    return f"{done:,} requests in {seconds:.0f} s: all blocks free, {memory}; {counts}"


def _client(where: Server, numbers: range, seed: int) -> Counter[str]:
    """One after the other, as one client; how they ended."""
    seen: Counter[str] = Counter()
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        path, request = _any_request(rng)
        leaves = rng.random() < 1 / 3
        if leaves and rng.random() < 0.5:
            seen["hung up before the answer"] += 1
            _hang_up(where, path, request, rng.random() * 0.02)
            continue
        stay = rng.randrange(1, 8) if leaves else 10**9
        got = post(where, path, request, functools.partial(_stays, stay))
        if got.status == 200 and got.error is None:
            kind = "hung up on the way" if leaves and request.get("stream") else "whole"
            seen[kind] += 1
        elif got.status in (400, 404) and request["model"] == "none" or "refuse" in request:
            seen["refused"] += 1
        else:
            seen["wrong"] += 1
            seen[f"{got.status} {got.error}"] += 1
    return seen


def _stays(num_events: int, received: Received) -> bool:
    """Whether a client that reads so many events goes on."""
    return len(received.times) < num_events


def _any_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    request: dict[str, Any] = {
        "model": rng.choice(("stage-01", "stage-02", "stage-03", "stage-04")),
        "max_tokens": rng.randrange(1, 40),
        "n": rng.choice((1, 1, 1, 3)),
        "seed": rng.randrange(100),
        "stream": rng.random() < 0.7,
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.2:
        request["stop"] = [rng.choice("abcdefghij"), "xyz"]
    if rng.random() < 0.05:
        request["refuse"] = True  # there is no such option
    if rng.random() < 0.02:
        request["model"] = "none"
    if rng.random() < 0.5:
        if rng.random() < 0.3:
            request["logprobs"] = 2
        request["prompt"] = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 80))]
        return "/v1/completions", request
    text = "".join(rng.choice("abc défg 你好 🎉") for _ in range(rng.randrange(1, 40)))
    return "/v1/chat/completions", request | {"messages": [{"role": "user", "content": text}]}


def _hang_up(where: Server, path: str, request: dict[str, Any], seconds: float) -> None:
    """Send a request and close the connection without reading."""

    connection = where.connect()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(request).encode(), headers)
    time.sleep(seconds)
    connection.close()


def _wait_until_idle(where: Server, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = where.metrics()
        left = {k: v for k, v in found.items() if "kv_cache_usage" in k or "num_requests" in k}
        if not any(left.values()):
            return
        time.sleep(0.05)
    raise RuntimeError(f"left in the server: {left}")
