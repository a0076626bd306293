"""What the benchmarks measure, and from what: one definition for all rows of all tables.

Tools use the same names for different things: vLLM's TPOT leaves the first token out, GuideLLM's
has it in, AIPerf calls TPOT "ITL". So every number is printed with its formula, from `MEASURES`.

Knows finished requests (`RequestOutput`) and steps (`StepRecord`); no engine, no model, no clock.
Times go in as seconds and come out in the unit that `MEASURES` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shared.engine.outputs import RequestOutput
from shared.engine.trace import StepRecord

MS = 1e3  # milliseconds in a second
MIB = 2**20


@dataclass(frozen=True)
class Measure:
    """One column: how it is called, in which unit, and how it is computed.

    Attributes:
        better: "lower", "higher", or "" where neither is.
    """

    title: str
    unit: str
    formula: str
    better: str = ""


TTFT = "request added -> its first token, each request once"
ITL = "gap between two tokens of one request that follow each other, every gap counted"
SPAN = "(last token of all - first arrival)"

QUANTILES = ("p50", "p90", "p99", "max")

MEASURES = {
    **{f"ttft_{q}": Measure(f"TTFT {q}", "ms", TTFT, "lower") for q in QUANTILES},
    **{f"itl_{q}": Measure(f"ITL {q}", "ms", ITL, "lower") for q in QUANTILES},
    "tpot_p50": Measure(
        "TPOT p50", "ms", "(last token - first token) / (n - 1), one number per request", "lower"
    ),
    "output_tok_s": Measure("output", "tok/s", f"generated tokens / {SPAN}", "higher"),
    "total_tok_s": Measure(
        "total", "tok/s", f"(prompt tokens, cached ones too, + generated tokens) / {SPAN}", "higher"
    ),
    "kv_waste": Measure(
        "KV waste",
        "%",
        "1 - tokens held / slots allocated, mean over steps weighted by their time; a block that "
        "several requests share counts once",
        "lower",
    ),
    "kv_peak": Measure("KV peak", "MiB", "most slots allocated at once, in bytes", "lower"),
    "hit_rate": Measure(
        "hit rate", "%", "prompt tokens found in the prefix cache / prompt tokens", "higher"
    ),
    "stall": Measure(
        "longest stall",
        "ms",
        "longest ITL of requests already streaming while another's prompt waits or is in prefill",
        "lower",
    ),
}


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0 to 100), linear between ranks, as numpy has it; None of no values."""
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile is between 0 and 100, got {q}")
    return float(np.percentile(values, q)) if len(values) else None


def quantiles(name: str, values: Sequence[float], scale: float = MS) -> dict[str, float | None]:
    """p50, p90, p99 and max of `values`, as `name_p50` and so on, times `scale`."""
    scaled = [value * scale for value in values]
    numbers = {f"{name}_p{q}": percentile(scaled, q) for q in (50, 90, 99)}
    return {**numbers, f"{name}_max": percentile(scaled, 100)}


def latency(outputs: Iterable[RequestOutput]) -> dict[str, float | None]:
    """TTFT, ITL and TPOT over all requests, in milliseconds."""
    metrics = [output.metrics for output in outputs]
    ttfts = [m.ttft for m in metrics if m.ttft is not None]
    itls = [gap for m in metrics for gap in m.itls]
    tpots = [m.tpot * MS for m in metrics if m.tpot is not None]
    return {**quantiles("ttft", ttfts), **quantiles("itl", itls), "tpot_p50": percentile(tpots, 50)}


def span(outputs: Sequence[RequestOutput]) -> float:
    """Seconds from the first arrival to the last token of all requests; 0 without any token."""
    ends = [o.metrics.token_times[-1] for o in outputs if o.metrics.token_times]
    return max(ends) - min(o.metrics.arrival_time for o in outputs) if ends else 0.0


def throughput(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """Output and total tokens per second; None if nothing took any time."""
    seconds = span(outputs)
    generated = sum(len(output.token_ids) for output in outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "output_tok_s": generated / seconds if seconds else None,
        "total_tok_s": (prompt + generated) / seconds if seconds else None,
    }


def hit_rate(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """Share of prompt tokens that came from the prefix cache, in percent."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return {"hit_rate": 100 * cached / prompt if prompt else None}


# --- memory -----------------------------------------------------------------------------------


def kv_use(steps: Iterable[StepRecord], block_size: int) -> list[tuple[float, int, int]]:
    """For each step: its seconds, the tokens held in the cache and the slots allocated for them.

    As the step ran: what it writes is held. Blocks in several tables count once, with as many
    tokens as the holder that filled them most.

    Raises:
        ValueError: the steps carry no block tables (`trace.record_blocks` was off).
    """
    context_lens: dict[str, int] = {}
    use = []
    for step in steps:
        if step.block_tables is None:
            raise ValueError(f"step {step.index} has no block tables; set trace.record_blocks")
        context_lens.update({name: start + n for name, start, n in step.slices})
        filled: dict[int, int] = {}
        for name, table in step.block_tables.items():
            for i, block in enumerate(table):
                held = min(block_size, max(0, context_lens.get(name, 0) - i * block_size))
                filled[block] = max(filled.get(block, 0), held)
        use.append((step.duration, sum(filled.values()), len(filled) * block_size))
    return use


def padded_use(
    prompt_lens: Sequence[int], max_tokens: Sequence[int], token_times: Sequence[float]
) -> list[tuple[float, int, int]]:
    """The same for a batch that is padded to its longest member and ends with it.

    Tokens of a request that has ended, and padding, are slots that hold nothing of use.

    Args:
        prompt_lens: tokens of each prompt.
        max_tokens: tokens that each request generates.
        token_times: when each token of the longest request was there.
    """
    width = max(prompt_lens)
    use = []
    for step in range(1, len(token_times)):  # the n-th decode step; the prefill is no step of it
        live = [p for p, n in zip(prompt_lens, max_tokens, strict=True) if step < n]
        seconds = token_times[step] - token_times[step - 1]
        held = sum(live) + step * len(live)
        use.append((seconds, held, (width + step) * len(prompt_lens)))
    return use


def kv_memory(
    use: Sequence[tuple[float, int, int]], bytes_per_token: int
) -> dict[str, float | None]:
    """KV waste in percent, and the peak of allocated slots in MiB, of what `kv_use` returned."""
    seconds = sum(duration for duration, _, slots in use if slots)
    if not seconds:
        return {"kv_waste": None, "kv_peak": None}
    waste = sum(duration * (1 - held / slots) for duration, held, slots in use if slots) / seconds
    peak = max(slots for _, _, slots in use)
    return {"kv_waste": 100 * waste, "kv_peak": peak * bytes_per_token / MIB}


# --- stalls -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stall:
    """What one request's prefill did to those that were streaming when it came.

    Attributes:
        longest: the longest of their gaps that overlaps its arrival .. first token, in seconds.
        usual: the median of their gaps before it came, in seconds.
        gaps: all their gaps that overlap that time, in seconds.
    """

    longest: float
    usual: float | None
    gaps: list[float]

    @property
    def ratio(self) -> float | None:
        """Decode stall over what was usual."""
        return self.longest / self.usual if self.usual else None


def decode_stall(outputs: Iterable[RequestOutput], request_id: str) -> Stall | None:
    """The stall that the prefill of `request_id` caused; None if no request was streaming.

    Raises:
        ValueError: no such request, or it has no token.
    """
    by_id = {output.request_id: output.metrics for output in outputs}
    if request_id not in by_id or not by_id[request_id].token_times:
        raise ValueError(f"there is no request {request_id!r} with a token")
    arrival, first_token = by_id[request_id].arrival_time, by_id[request_id].token_times[0]
    before: list[float] = []
    during: list[float] = []
    for other, metrics in by_id.items():
        times = metrics.token_times
        if other == request_id or not times or times[0] > arrival:
            continue  # it came later, or was not streaming yet
        for earlier, later in pairwise(times):
            if later <= arrival:
                before.append(later - earlier)
            elif earlier < first_token:
                during.append(later - earlier)
    if not during:
        return None
    return Stall(max(during), percentile(before, 50), during)


def longest_stall(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """The worst `decode_stall` that any request caused, in milliseconds; None if there is none."""
    stalls = [decode_stall(outputs, o.request_id) for o in outputs if o.metrics.token_times]
    return {"stall": max((s.longest * MS for s in stalls if s), default=None)}


# --- goodput ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goodput:
    """Requests that met both limits: per second of the whole run, and their share of all."""

    requests_per_s: float
    share: float


def goodput(outputs: Sequence[RequestOutput], max_ttft: float, max_itl: float) -> Goodput:
    """A request meets the limits if its TTFT and every one of its gaps do.

    Args:
        max_ttft, max_itl: limits in seconds.

    Raises:
        ValueError: a limit is not above 0, or there is no request.
    """
    if max_ttft <= 0 or max_itl <= 0:
        raise ValueError(f"limits must be above 0, got TTFT {max_ttft} s, ITL {max_itl} s")
    if not outputs:
        raise ValueError("there are no requests")
    good = sum(
        o.metrics.ttft is not None
        and o.metrics.ttft <= max_ttft
        and max(o.metrics.itls, default=0.0) <= max_itl
        for o in outputs
    )
    seconds = span(outputs)
    return Goodput(good / seconds if seconds else 0.0, good / len(outputs))
