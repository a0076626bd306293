"""Sends the requests of a workload to an engine or to a baseline, each at its time.

Open loop: requests come at their times, whether or not earlier ones are answered. Closed loop: a
fixed number run at once, and the next comes when one is done.

A request's arrival is when it *was due*, not when the loop added it: a step that
takes a second would otherwise hide a second of waiting from the very requests that it kept waiting.

Knows workloads, engines and baselines; no tables, no models.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.engine.outputs import RequestMetrics, RequestOutput
from shared.engine.sampling_params import SamplingParams
from shared.engine.trace import StepRecord

from . import baselines
from .baselines import Generated
from .metrics import padded_use
from .workloads import Workload, WorkloadRequest

Clock = Callable[[], float]


@dataclass
class Job:
    """A request that is due.

    Attributes:
        request: as the workload has it.
        prompt_token_ids: the whole prompt, earlier turns included.
        arrival_time: when it was due, in seconds after the start.
        watched: some other request waits for one of its tokens.
    """

    request: WorkloadRequest
    prompt_token_ids: list[int]
    arrival_time: float
    watched: bool


@dataclass
class Run:
    """What came of a workload.

    Attributes:
        outputs: in the order of the workload's requests.
        steps: of the engine; none for a baseline.
        use: for baselines that know it, see `metrics.kv_use`.
    """

    outputs: list[RequestOutput]
    steps: list[StepRecord] = field(default_factory=list)
    use: list[tuple[float, int, int]] | None = None


class Feed:
    """Tells which requests are due. All times are seconds after the start.

    Args:
        workload: its requests may wait for each other.
        concurrency: requests that run at the same time; None is open loop. With a number the
            arrival times count for nothing but the order.

    Raises:
        ValueError: `concurrency` is below 1, or a request waits for one that is not before it.
    """

    def __init__(self, workload: Workload, concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._queue: list[tuple[float, int]] = []  # when it is due, its place in the workload
        self._requests = workload.requests
        self._followers: dict[str, list[int]] = {}
        self._texts: dict[str, list[int]] = {}  # prompt and answer of those that are done
        self._jobs: dict[str, Job] = {}
        self._seats = None if concurrency is None else [0.0] * concurrency
        self._open = len(workload.requests)
        known: set[str] = set()
        for i, request in enumerate(workload.requests):
            if request.after is None:
                due = 0.0 if concurrency else request.arrival_time
                heapq.heappush(self._queue, (due, i))
            elif request.after in known:
                self._followers.setdefault(request.after, []).append(i)
            else:
                raise ValueError(
                    f"{request.request_id!r} waits for {request.after!r}, which is not before it"
                )
            known.add(request.request_id)

    @property
    def done(self) -> bool:
        """Whether every request has come and ended."""
        return self._open == 0

    def take(self, now: float) -> list[Job]:
        """The requests that are due at `now`, in order, each once."""
        jobs = []
        while self._queue and self._queue[0][0] <= now and self._seats != []:
            due, i = heapq.heappop(self._queue)
            if self._seats is not None:
                due = max(due, heapq.heappop(self._seats))
            request = self._requests[i]
            before = self._texts[request.after] if request.continues and request.after else []
            prompt = [*before, *request.prompt_token_ids]
            job = Job(request, prompt, due, request.request_id in self._followers)
            self._jobs[request.request_id] = job
            jobs.append(job)
        return jobs

    def progress(
        self, request_id: str, token_ids: Sequence[int], token_times: Sequence[float], ended: bool
    ) -> None:
        """Report the tokens that a request has so far, and whether that is all."""
        left = []
        for i in self._followers.pop(request_id, []):
            n, delay = self._requests[i].after_tokens, self._requests[i].arrival_time
            if n is not None and len(token_times) >= n:
                heapq.heappush(self._queue, (token_times[n - 1] + delay, i))
            elif ended:
                heapq.heappush(self._queue, (token_times[-1] + delay, i))
            else:
                left.append(i)
        if left:
            self._followers[request_id] = left
        if ended:
            self._texts[request_id] = [*self._jobs[request_id].prompt_token_ids, *token_ids]
            self._open -= 1
            if self._seats is not None:
                heapq.heappush(self._seats, token_times[-1])

    def wait(self, now: float) -> float | None:
        """Seconds until the next request is due; None if that depends on running requests."""
        if not self._queue or self._seats == []:
            return None
        return max(0.0, self._queue[0][0] - now)


def params_of(request: WorkloadRequest) -> SamplingParams:
    """Greedy, and exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)


def run_engine(
    engine: Any,
    workload: Workload,
    concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Serve a workload with an engine; requests are added between steps.

    Args:
        engine: of any stage, without unfinished requests. Its trace is emptied first.
        clock, sleep: the time that the engine's outputs are in.

    Raises:
        RuntimeError: a request ended with an error.
        ValueError: a request is refused by the engine.
    """
    feed = Feed(workload, concurrency)
    jobs: dict[str, Job] = {}
    outputs: dict[str, RequestOutput] = {}
    engine.trace.steps.clear()
    start = clock()
    try:
        while not feed.done:
            for job in feed.take(clock() - start):
                jobs[job.request.request_id] = job
                engine.add_request(
                    job.prompt_token_ids, params_of(job.request), job.request.request_id
                )
            if not engine.has_unfinished_requests():
                sleep(feed.wait(clock() - start) or 0.0)
                continue
            for output in engine.step():
                if output.finish_reason == "error":
                    raise RuntimeError(f"request {output.request_id} failed, see the log")
                output.metrics.arrival_time = start + jobs[output.request_id].arrival_time
                outputs[output.request_id] = output
                times = [t - start for t in output.metrics.token_times]
                feed.progress(output.request_id, output.token_ids, times, output.finished)
    finally:
        for request_id in jobs:  # after Ctrl-C the engine can be used again
            engine.abort_request(request_id)
    ordered = [outputs[request.request_id] for request in workload.requests]
    return Run(ordered, list(engine.trace.steps))


def run_one_by_one(
    generate: Callable[[Sequence[int], int], Generated],
    workload: Workload,
    concurrency: int | None = None,
    has_cache: bool = True,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Serve a workload with something that takes one prompt at a time, in order of arrival.

    Args:
        has_cache: it keeps K and V, so there is memory to report.
    """

    def one(prompts: list[list[int]], max_tokens: list[int]) -> list[Generated]:
        return [generate(prompts[0], max_tokens[0])]

    run = run_static_batches(one, workload, concurrency, max_batch=1, clock=clock, sleep=sleep)
    return run if has_cache else Run(run.outputs)


def run_static_batches(
    generate: Callable[[list[list[int]], list[int]], list[Generated]],
    workload: Workload,
    concurrency: int | None = None,
    max_batch: int | None = None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Serve a workload in batches that no request joins or leaves.

    All that have come by then, at most `max_batch`, make the next batch; the others wait until it
    is done.
    """
    feed = Feed(workload, concurrency)
    waiting: list[Job] = []
    outputs: dict[str, RequestOutput] = {}
    use: list[tuple[float, int, int]] = []
    start = clock()
    while not feed.done:
        waiting += feed.take(clock() - start)
        if not waiting:
            sleep(feed.wait(clock() - start) or 0.0)
            continue
        batch, waiting = waiting[:max_batch], waiting[max_batch:] if max_batch else []
        prompts = [job.prompt_token_ids for job in batch]
        max_tokens = [job.request.max_tokens for job in batch]
        results = generate(prompts, max_tokens)
        longest = max((result.token_times for result in results), key=len)
        use += padded_use([len(prompt) for prompt in prompts], max_tokens, longest)
        for job, result in zip(batch, results, strict=True):
            outputs[job.request.request_id] = _output(job, start, result)
            times = [t - start for t in result.token_times]
            feed.progress(job.request.request_id, result.token_ids, times, ended=True)
    return Run([outputs[request.request_id] for request in workload.requests], use=use)


def run_generate_batch(model: Any, workload: Workload, concurrency: int | None = None) -> Run:
    """Serve a workload with the continuous batching of transformers (`generate_batch`)."""
    feed = Feed(workload, concurrency)
    jobs: dict[str, Job] = {}
    outputs: dict[str, RequestOutput] = {}
    lengths = list(workload.lengths().values())
    most = max(request.max_tokens for request in workload.requests)
    with baselines.continuous_batching(model, lengths, most) as batching:
        start = time.perf_counter()
        while not feed.done:
            for job in feed.take(time.perf_counter() - start):
                request = job.request
                jobs[request.request_id] = job
                batching.add(
                    request.request_id, job.prompt_token_ids, request.max_tokens, job.watched
                )
            wait = feed.wait(time.perf_counter() - start)
            result = batching.poll(timeout=min(1.0, 1.0 if wait is None else max(wait, 1e-3)))
            if result is None:
                continue
            request_id, generated, ended = result
            outputs[request_id] = _output(jobs[request_id], start, generated)
            times = [t - start for t in generated.token_times]
            feed.progress(request_id, generated.token_ids, times, ended)
    return Run([outputs[request.request_id] for request in workload.requests])


def _output(job: Job, start: float, generated: Generated) -> RequestOutput:
    """A baseline's result in the form that engines give."""
    times = list(generated.token_times)
    finish_time = times[-1] if times else None
    return RequestOutput(
        request_id=job.request.request_id,
        prompt_token_ids=job.prompt_token_ids,
        token_ids=list(generated.token_ids),
        text="",
        new_text="",
        finished=True,
        finish_reason="length",
        metrics=RequestMetrics(start + job.arrival_time, finish_time, times),
    )
