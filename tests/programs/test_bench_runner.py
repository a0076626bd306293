"""Requests come when they are due, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared import load_stage
from shared.engine.outputs import RequestMetrics, RequestOutput
from shared.engine.trace import Trace
from shared.measure import runner, workloads
from shared.measure.baselines import Generated
from shared.measure.runner import Feed, run_engine, run_one_by_one, run_static_batches
from shared.measure.workloads import Workload, WorkloadRequest


class Time:
    """A clock that moves when somebody sleeps or works."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class FakeEngine:
    """Every request gets a token in every step; a step takes `step_time` seconds."""

    def __init__(self, time: Time, step_time: float = 1.0) -> None:
        self.time, self.step_time = time, step_time
        self.trace = Trace()
        self.live: dict[str, RequestOutput] = {}
        self.added: list[tuple[float, str, list[int]]] = []
        self.left: dict[str, int] = {}
        self.fail = False

    def add_request(self, prompt: list[int], params: Any, request_id: str) -> str:
        assert params.temperature == 0 and params.ignore_eos
        self.added.append((self.time.now, request_id, prompt))
        self.left[request_id] = params.max_tokens
        self.live[request_id] = RequestOutput(
            request_id, prompt, [], "", "", False, None, RequestMetrics(self.time.now)
        )
        return request_id

    def abort_request(self, request_id: str) -> bool:
        return self.live.pop(request_id, None) is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[RequestOutput]:
        assert self.live, "a step with nothing to do"
        self.time.now += self.step_time
        outputs = []
        for request_id, output in list(self.live.items()):
            output.token_ids.append(len(output.token_ids))
            output.metrics.token_times.append(self.time.now)
            output.finished = len(output.token_ids) == self.left[request_id]
            output.finish_reason = "length" if output.finished else None
            if self.fail:
                output.finished, output.finish_reason = True, "error"
            if output.finished:
                del self.live[request_id]
            outputs.append(output)
        return outputs


def request(name: str, at: float = 0.0, n: int = 2, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(name, (1, 2, 3), n, at, **more)


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("test", requests)


def serve(requests: Workload, step_time: float = 1.0, **options: Any) -> tuple[Any, FakeEngine]:
    time = Time()
    engine = FakeEngine(time, step_time)
    run = run_engine(engine, requests, clock=time, sleep=time.sleep, **options)
    return run, engine


def test_open_loop_adds_requests_between_steps_and_counts_from_when_they_were_due() -> None:
    # b is due at 0.5, in the middle of a's first step (0 .. 1): it is added at 1.
    run, engine = serve(workload(request("a"), request("b", at=0.5)))
    assert [(at, name) for at, name, _ in engine.added] == [(100, "a"), (101, "b")]
    b = run.outputs[1].metrics
    assert b.arrival_time == pytest.approx(100.5)
    assert b.ttft == pytest.approx(1.5)  # not 1.0: its wait for the loop is part of it


def test_open_loop_sleeps_until_the_next_one_is_due() -> None:
    run, engine = serve(workload(request("a"), request("b", at=10.0)))
    assert [at for at, _, _ in engine.added] == [100, 110]
    assert engine.time.slept == [pytest.approx(8.0)]
    assert run.outputs[1].metrics.ttft == pytest.approx(1.0)


def test_arrivals_do_not_wait_for_answers() -> None:
    _, engine = serve(workload(*(request(str(i), at=float(i), n=10) for i in range(4))))
    assert [at for at, _, _ in engine.added] == [100, 101, 102, 103]


def test_closed_loop_keeps_so_many_under_way() -> None:
    run, engine = serve(workload(*(request(str(i), at=9.0) for i in range(4))), concurrency=2)
    assert [(at, name) for at, name, _ in engine.added] == [
        *((100, "0"), (100, "1"), (102, "2"), (102, "3"))
    ]
    assert run.outputs[3].metrics.arrival_time == pytest.approx(102)


def test_a_request_may_wait_for_the_token_of_another() -> None:
    later = request("long", after="a", after_tokens=3, at=0.25)
    run, engine = serve(workload(request("a", n=6), later))
    # a's third token comes at 3; so the long one is due at 3.25 and added after the step at 4.
    assert [(at, name) for at, name, _ in engine.added] == [(100, "a"), (104, "long")]
    assert run.outputs[1].metrics.arrival_time == pytest.approx(103.25)


def test_a_request_that_waits_for_more_tokens_than_come_waits_for_the_end() -> None:
    _, engine = serve(workload(request("a", n=2), request("b", after="a", after_tokens=9)))
    assert [(at, name) for at, name, _ in engine.added] == [(100, "a"), (102, "b")]


def test_the_next_turn_repeats_the_conversation() -> None:
    turns = workload(request("a", n=2), request("b", after="a", continues=True, at=1.5))
    _, engine = serve(turns)
    assert [(at, prompt) for at, _, prompt in engine.added] == [
        (100, [1, 2, 3]),
        (103.5, [1, 2, 3, 0, 1, 1, 2, 3]),
    ]


def test_outputs_are_in_the_order_of_the_workload() -> None:
    run, _ = serve(workload(request("slow", n=5), request("late", at=1), request("fast", n=1)))
    assert [output.request_id for output in run.outputs] == ["slow", "late", "fast"]


def test_an_error_is_not_measured() -> None:
    time = Time()
    engine = FakeEngine(time)
    engine.fail = True
    with pytest.raises(RuntimeError, match="a failed"):
        run_engine(engine, workload(request("a")), clock=time, sleep=time.sleep)


def test_after_an_interruption_the_engine_is_free_again() -> None:
    time = Time()
    engine = FakeEngine(time)

    def interrupt() -> list[RequestOutput]:
        raise KeyboardInterrupt

    engine.step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_engine(engine, workload(request("a")), clock=time, sleep=time.sleep)
    assert not engine.has_unfinished_requests()


def test_feed_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        Feed(workload(request("a")), concurrency=0)
    with pytest.raises(ValueError, match="'b', which is not before it"):
        Feed(workload(request("a", after="b"), request("b")))


def test_feed_knows_how_long_to_wait() -> None:
    feed = Feed(workload(request("a"), request("b", at=5.0), request("c", after="a")))
    assert feed.wait(0.0) == 0.0
    assert [job.request.request_id for job in feed.take(0.0)] == ["a"]
    assert feed.take(0.0) == []
    assert feed.wait(2.0) == pytest.approx(3.0)
    feed.take(5.0)
    assert feed.wait(6.0) is None  # c hangs on a
    feed.progress("a", [7], [6.0], ended=True)
    assert feed.wait(6.0) == 0.0 and not feed.done


class FakeBatch:
    """A baseline: two tokens per second, whatever the batch."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.batches: list[tuple[float, int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
    ) -> list[Generated]:
        self.batches.append((self.time.now, len(prompts)))
        start = self.time.now
        self.time.now += 0.5 * max(max_tokens)
        return [Generated([9] * n, [start + 0.5 * (i + 1) for i in range(n)]) for n in max_tokens]


def test_static_batches_take_all_that_have_come_and_nobody_joins() -> None:
    time = Time()
    batch = FakeBatch(time)
    late = request("late", at=0.2, n=2)
    requests = workload(request("a", n=4), request("b", n=2), late)
    run = run_static_batches(batch, requests, clock=time, sleep=time.sleep)
    assert batch.batches == [(100, 2), (102, 1)]  # the batch ends with its longest member
    assert run.outputs[2].metrics.ttft == pytest.approx(2.5 - 0.2)
    assert len(run.outputs[1].token_ids) == 2
    # Prompts of 3: after a decode both hold 4, then b's row is lost; then "late" alone.
    assert run.use == [(0.5, 8, 8), (0.5, 5, 10), (0.5, 6, 12), (0.5, 4, 4)]


def test_a_closed_loop_of_static_batches_is_as_wide_as_its_concurrency() -> None:
    time = Time()
    batch = FakeBatch(time)
    requests = workload(*(request(str(i), n=2) for i in range(5)))
    run = run_static_batches(batch, requests, 2, clock=time, sleep=time.sleep)
    assert batch.batches == [(100, 2), (101, 2), (102, 1)]
    assert run.outputs[4].metrics.ttft == pytest.approx(0.5)  # it came when a seat was free


def test_one_by_one_serves_in_order_of_arrival() -> None:
    time = Time()
    batch = FakeBatch(time)
    requests = workload(request("a", at=0.1), request("b"), request("c", after="a", after_tokens=1))
    run = run_one_by_one(
        lambda prompt, n: batch([prompt], [n])[0],
        requests,
        has_cache=False,
        clock=time,
        sleep=time.sleep,
    )
    starts = {o.request_id: o.metrics.token_times[0] - 0.5 for o in run.outputs}
    assert starts == {"b": 100, "a": 101, "c": 102}
    assert run.outputs[2].metrics.arrival_time == pytest.approx(101.5)
    assert run.use is None


@pytest.mark.parametrize("number", [1, 4])
def test_a_real_engine_serves_every_workload(tiny: Any, number: int) -> None:
    engine = load_stage(number).LLMEngine(model=tiny, block_size=4, num_blocks=400)
    text = [3 + (7 * i * i + i) % 499 for i in range(3000)]
    made = [
        workloads.chat(text, num_requests=3, prompt_tokens=(4, 20), max_tokens=3),
        workloads.shared_prefix(text, num_requests=3, prefix_tokens=16, own_tokens=5),
        workloads.long_prompt(text, 0, 2, 8, 12, long_prompt_tokens=90, after_tokens=2),
        workloads.multi_turn(text, num_chats=2, num_turns=2, turn_tokens=(4, 9), max_tokens=4),
        workloads.mixed(text, 0, 4, 100.0, prompt_tokens=(8, 0.5, 30), output_tokens=(4, 1, 9)),
        workloads.example(text, 0, 2, 16, (4, 8), max_tokens=6, document_tokens=70),
    ]
    for each in made:
        run = run_engine(engine, each)
        assert [len(o.token_ids) for o in run.outputs] == [r.max_tokens for r in each.requests]
        lengths = each.lengths()
        for o in run.outputs:
            assert len(o.prompt_token_ids) + len(o.token_ids) == lengths[o.request_id]
            assert o.metrics.ttft is not None and o.metrics.ttft >= 0
        assert sum(len(step.sampled) for step in run.steps) == sum(
            r.max_tokens for r in each.requests
        )
    assert engine.block_manager.num_free_blocks == 400
    assert {w.name for w in made} == set(workloads.WORKLOADS)


def test_params_are_greedy_and_of_exact_length() -> None:
    params = runner.params_of(request("a", n=7))
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0, 7, True)
