"""The simulator: the schedule of a real engine, on a clock that one can work out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from shared import load_stage
from shared.bench import stall
from shared.engine.step_time import Chunk
from shared.engine.trace import StepRecord, Trace
from shared.measure import metrics, workloads
from shared.measure.fleet import prefix_aware, round_robin, run_fleet
from shared.measure.roofline import GPUS, Gpu, ModelSize, Roofline
from shared.measure.runner import run_engine
from shared.measure.simulator import Fitted, SimulatedEngine, work
from shared.measure.workloads import Workload, WorkloadRequest
from shared.models.tiny import build_tiny_model
from tests.contract.helpers import greedy

TEXT = [3 + (7 * i * i + i) % 499 for i in range(3000)]
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 256}


def by_tokens(slices: Iterable[Any]) -> float:
    """A second for the step, and one for each token."""
    return 1.0 + sum(s.num_tokens for s in slices)


def simulated(stage: int, num_blocks: int = 100, **options: Any) -> SimulatedEngine:
    return SimulatedEngine(stage, by_tokens, num_blocks=num_blocks, **SMALL, **options)


def request(name: str, n: int, at: float, max_tokens: int = 2, first: int = 5) -> WorkloadRequest:
    return WorkloadRequest(name, (first, *range(10, 9 + n)), max_tokens, at)


# --- the schedule -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    return build_tiny_model(), None


CASES = {
    "plenty": {"num_blocks": 100},
    "preemption": {"num_blocks": 18, "max_num_seqs": 4},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_the_schedule_is_that_of_the_real_engine(stage: int, case: str, tiny: Any) -> None:
    options = {**SMALL, **CASES[case]}
    if stage == 4:
        options |= {"max_prefill_chunk_size": 7, "max_num_batched_tokens": 64}
    prompts = [TEXT[:30], TEXT[:19], TEXT[100:103], TEXT[:30], TEXT[200:224]]
    engines = [
        load_stage(stage).LLMEngine(model=tiny, **options),
        SimulatedEngine(stage, by_tokens, **options),
    ]
    seen = []
    for engine in engines:
        engine.trace.record_blocks = True
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy(4 + 3 * i), str(i))
        for _ in range(4):
            engine.step()
        engine.abort_request("1")
        engine.add_request(TEXT[:26], greedy(3), "late")
        while engine.has_unfinished_requests():
            engine.step()
        seen.append([{**vars(step), "start": 0, "end": 0} for step in engine.trace.steps])
        assert engine.block_manager.num_free_blocks == options["num_blocks"]
    assert len(seen[0]) > 12
    assert any(step["preempted"] for step in seen[0]) == (case == "preemption")
    assert seen[0] == seen[1]  # slices, tables, preemptions, queues


@pytest.mark.parametrize("stage", [3, 4])
def test_the_episode_of_stall_is_simulated_slice_for_slice(stage: int, tiny: Any) -> None:
    episode = workloads.long_prompt(TEXT, 0, 2, 8, 20, long_prompt_tokens=90, after_tokens=4)
    options = SMALL | {"num_blocks": 100}
    if stage == 4:
        options |= {"max_prefill_chunk_size": 16}
    real = run_engine(load_stage(stage).LLMEngine(model=tiny, **options), episode)
    engine = SimulatedEngine(stage, by_tokens, **options)
    run = run_engine(engine, episode, clock=engine.clock, sleep=engine.sleep)
    assert [s.slices for s in run.steps] == [s.slices for s in real.steps]
    # 90 prompt tokens in a step of their own, and then three decodes: 91 s and 4 s. In chunks, a
    # step has at most 16 tokens and the streams' two.
    longest = 91 + 4 if stage == 3 else 1 + 16 + 2
    assert stall.measure(run)["gap_max"] == pytest.approx(longest * metrics.MS)


# --- the clock --------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    engine = simulated(3)
    requests = Workload("two", (request("a", 5, 2.0), request("b", 3, 4.0, first=6)))
    run = run_engine(engine, requests, clock=engine.clock, sleep=engine.sleep)
    # Idle until 2. a's 5 tokens: 2 .. 8. b has come by then, its 3 tokens: 8 .. 12. Both decode:
    # 12 .. 15, and are done.
    assert [(s.start, s.end) for s in run.steps] == [(2, 8), (8, 12), (12, 15)]
    a, b = (output.metrics for output in run.outputs)
    assert (a.arrival_time, a.token_times, a.finish_time) == (2, [8, 15], 15)
    assert (b.arrival_time, b.token_times, b.ttft) == (4, [12, 15], 8)
    assert [output.finish_reason for output in run.outputs] == ["length", "length"]
    assert engine.clock() == 15


@pytest.mark.parametrize(
    ("options", "chunk_size", "budget"),
    [
        ({}, 512, 512 + 64),
        ({"max_num_seqs": 3}, 512, 515),
        ({"max_prefill_chunk_size": 16}, 16, 80),
        ({"max_num_batched_tokens": 99}, 512, 99),
    ],
)
def test_stage_04_has_the_defaults_of_a_gpu(
    options: dict[str, int], chunk_size: int, budget: int
) -> None:
    config = simulated(4, **options).config
    assert (config.max_prefill_chunk_size, config.max_num_batched_tokens) == (chunk_size, budget)


def test_what_reads_traces_and_metrics_reads_simulated_ones(tmp_path: Any) -> None:
    engine = simulated(4, max_prefill_chunk_size=4)
    engine.trace.record_blocks = True
    run = run_engine(
        engine,
        Workload("one", (request("a", 10, 0.0, 3),)),
        clock=engine.clock,
        sleep=engine.sleep,
    )
    engine.trace.save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    assert [phases for _, phases in trace.phases()] == [
        *(["prefill"], ["prefill"], ["prefill"], ["decode"], ["decode"])
    ]
    # Chunks of 4, 4 and 2 tokens: 5 + 5 + 3 s; then 2 s for each of two tokens.
    assert metrics.latency(run.outputs)["ttft_p50"] == pytest.approx(13_000)
    assert metrics.throughput(run.outputs)["output_tok_s"] == pytest.approx(3 / 17)
    # Tokens held in slots: 4 in 4, 8 in 8, 10 in 12, 11 in 12, 12 in 12, each for its seconds.
    waste = (3 * (1 - 10 / 12) + 2 * (1 - 11 / 12)) / 17
    use = metrics.kv_use(run.steps, block_size=4)
    assert metrics.kv_memory(use, 1)["kv_waste"] == pytest.approx(100 * waste)


def test_a_wait_too_short_for_the_clock_moves_it() -> None:
    engine = simulated(1)
    engine.now = 1e9
    engine.sleep(1e-12)
    assert engine.now == math.nextafter(1e9, math.inf)
    engine.sleep(-1.0)
    engine.sleep(0.0)
    assert engine.now == math.nextafter(1e9, math.inf)


def test_generate_and_stream_work_too_and_hits_are_counted() -> None:
    engine = simulated(3)
    first, again = (engine.generate(TEXT[:20], greedy(2), use_tqdm=False)[0] for _ in range(2))
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 16)
    assert first.metrics.ttft == 21 and again.metrics.ttft == 5  # 4 tokens are left to compute
    assert engine.reset_prefix_cache() > 0
    assert [len(o.token_ids) for o in engine.stream(TEXT[:20], greedy(3))] == [1, 2, 3]
    assert simulated(2).reset_prefix_cache() == 0


def test_stage_04_learns_its_step_times_for_a_target() -> None:
    options: dict[str, Any] = {"num_blocks": 300, "max_model_len": 1024}
    engine = SimulatedEngine(4, by_tokens, target_step_ms=30_000.0, **options)
    engine.generate(TEXT[:900], greedy(1), use_tqdm=False)
    chunks = [step.num_tokens for step in engine.trace.steps]
    assert len(chunks) > 30  # and after a few of them 1 + 29 seconds, the target, are met
    assert all(28 <= chunk <= 29 for chunk in chunks[4:-1])


def test_bad_requests_are_refused_as_by_a_real_engine() -> None:
    engine = simulated(3, num_blocks=4)
    with pytest.raises(ValueError, match="20 prompt tokens and 2 to generate do not fit"):
        engine.add_request(TEXT[:20], greedy(2))
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.add_request([])
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="needs num_blocks"):
        SimulatedEngine(3, by_tokens, max_model_len=100)
    with pytest.raises(ValueError, match="needs max_model_len"):
        SimulatedEngine(3, by_tokens, num_blocks=100)
    with pytest.raises(ValueError, match="there is no stage 5"):
        SimulatedEngine(5, by_tokens, num_blocks=100, max_model_len=100)
    with pytest.raises(ValueError, match="block_size must be"):
        SimulatedEngine(1, by_tokens, num_blocks=9, max_model_len=9, block_size=0)


# --- step times -------------------------------------------------------------------------------


def steps(model: Any, *batches: list[tuple[str, int, int]]) -> list[StepRecord]:
    return [
        StepRecord(i, 0.0, model([Chunk(start, n) for _, start, n in slices]), slices)
        for i, slices in enumerate(batches)
    ]


def test_work_of_a_step() -> None:
    # A prompt's tokens 4, 5, 6 see 5 + 6 + 7 tokens; two decodes read 10 and 1.
    assert work([Chunk(4, 3), Chunk(9, 1), Chunk(0, 1)]) == (1, 5, 18, 11)


BATCHES: list[list[tuple[str, int, int]]] = [
    *([("a", 0, n)] for n in (16, 64, 256, 1024)),
    *([("a", start, 128), ("b", 40, 1)] for start in (0, 500, 2000)),
    *([("b", context, 1), ("c", 30, 1)] for context in (50, 400, 3000)),
]


@pytest.mark.parametrize(
    "coefficients", [(0.02, 6e-4, 5e-7, 2e-6), (0.02, 0.0, 5e-7, 0.0), (0.0, 6e-4, 0.0, 2e-6)]
)
def test_a_fit_finds_the_law_that_made_the_steps(coefficients: Any) -> None:
    fitted = Fitted.to(steps(Fitted(coefficients), *BATCHES))
    assert fitted.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-12)


def test_no_coefficient_of_a_fit_is_negative() -> None:
    def falling(slices: Iterable[Any]) -> float:  # the longer the context, the faster
        _, tokens, multiplied, _ = work(slices)
        return 0.02 + 6e-4 * tokens - 2e-8 * multiplied

    a, b, c, d = Fitted.to(steps(falling, *BATCHES)).coefficients
    assert a > 0 and b > 0 and c == 0 and d >= 0


def test_a_fit_of_too_little_is_refused() -> None:
    law = Fitted((0.02, 6e-4, 0.0, 0.0))
    with pytest.raises(ValueError, match="7 steps"):
        Fitted.to(steps(law, *BATCHES[:7]))
    with pytest.raises(ValueError, match=r"20 steps of \[1\] tokens"):
        Fitted.to(steps(law, *[[("a", i, 1)] for i in range(20)]))


SHAPE = ModelSize(linear=1000.0, head=100.0, total=1200.0, attention=8.0, kv_bytes=20.0)
ROOFLINE = Roofline(Gpu("test", flops=1e4, bandwidth=1e3, memory=1e4), SHAPE, 1.0, 1.0, 0.5)


def test_a_decode_is_bound_by_reading() -> None:
    # Weights 2 x 1100 bytes, 2.2 s; the context of 50 tokens 1000 bytes, 1 s; overhead 0.5 s.
    assert ROOFLINE([Chunk(49, 1)]) == pytest.approx(2.2 + 1.0 + 0.5)


def test_a_long_prompt_is_bound_by_computing() -> None:
    # 2 x (100 x 1000 + 100) FLOPs, 20.02 s; tokens see 5050 tokens, x 8 FLOPs: 4.04 s.
    assert ROOFLINE([Chunk(0, 100)]) == pytest.approx(20.02 + 4.04 + 0.5)
    half = Roofline(ROOFLINE.gpu, SHAPE, 0.5, 1.0, 0.0)
    assert half([Chunk(0, 100)]) == pytest.approx(2 * (20.02 + 4.04))


def test_decodes_ride_along_for_little() -> None:
    both = ROOFLINE([Chunk(0, 100), Chunk(49, 1)])
    assert both - ROOFLINE([Chunk(0, 100)]) == pytest.approx(0.2 + 0.02 + 1.0)


def test_the_shape_of_a_known_model() -> None:
    llama = ModelSize.named("llama-3.1-8b")
    assert llama.total == pytest.approx(8.03e9, rel=1e-3)  # norms left out
    assert llama.kv_bytes == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert ModelSize.named("smollm2-135m").total == pytest.approx(134.5e6, rel=1e-3)  # tied
    with pytest.raises(ValueError, match="no shape 'gpt-5'; there are llama-3.1-8b"):
        ModelSize.named("gpt-5")


def test_blocks_that_fit_beside_the_weights() -> None:
    assert ROOFLINE.num_blocks(4) == int((9000 - 2400) / 80)
    with pytest.raises(ValueError, match=r"16\.1 GB of weights .* T4"):
        Roofline(GPUS["t4"], ModelSize.named("llama-3.1-8b")).num_blocks(16)


# --- a fleet ----------------------------------------------------------------------------------


def test_one_engine_of_a_fleet_is_served_as_by_the_runner() -> None:
    text = TEXT * 4
    lengths: dict[str, Any] = {"prompt_tokens": (8, 0.5, 30), "output_tokens": (4, 1.0, 9)}
    mixed = workloads.mixed(text, 0, 30, rate=0.05, **lengths)
    one, other = simulated(4, max_num_seqs=3), simulated(4, max_num_seqs=3)
    run = run_engine(one, mixed, clock=one.clock, sleep=one.sleep)
    outputs = run_fleet([other], mixed)
    assert [s.slices for s in other.trace.steps] == [s.slices for s in run.steps]
    for a, b in zip(outputs, run.outputs, strict=True):
        assert a.metrics.token_times == pytest.approx(b.metrics.token_times)
        assert a.metrics.arrival_time == pytest.approx(b.metrics.arrival_time)


def test_round_robin_by_hand() -> None:
    engines = [simulated(3), simulated(3)]
    requests = Workload("r", tuple(request(str(i), 4, i / 2, 1) for i in range(4)))
    outputs = run_fleet(engines, requests, round_robin())
    # Each takes two requests of 5 seconds; the second waits for the first.
    assert [o.metrics.token_times for o in outputs] == [[5.0], [5.5], [10.0], [10.5]]
    assert [o.metrics.ttft for o in outputs] == [5.0, 5.0, 9.0, 9.0]


def test_a_prefix_aware_router_goes_where_the_prompt_is() -> None:
    engines = [simulated(3) for _ in range(3)]
    long = {"n": 21, "max_tokens": 1}
    requests = Workload(
        "r",
        (
            request("a", at=0, first=5, **long),
            request("b", at=0, first=6, **long),
            request("b again", at=100, first=6, **long),
            request("a again", at=200, first=5, **long),
            request("new", at=200.5, first=7, **long),
        ),
    )
    run_fleet(engines, requests, prefix_aware())
    sent = [list(dict.fromkeys(s.slices[0][0] for s in e.trace.steps)) for e in engines]
    assert sent == [["a", "a again"], ["b", "b again"], ["new"]]


def test_a_step_that_has_not_ended_counts_as_load() -> None:
    requests = (
        request("a", 21, at=0, max_tokens=1, first=5),
        request("b", 41, at=0, max_tokens=1, first=6),
        request("a again", 21, at=100, max_tokens=1, first=5),  # computes one token, until 102
        request("new", 21, at=100.5, max_tokens=1, first=7),
    )
    engines = [simulated(3), simulated(3)]
    run_fleet(engines, Workload("r", requests), prefix_aware())
    sent = [[s.slices[0][0] for s in e.trace.steps] for e in engines]
    assert sent == [["a", "a again"], ["b", "new"]]  # though the first one's cache is emptier


def test_a_prefix_is_not_worth_any_queue() -> None:
    requests = Workload("r", tuple(request(str(i), 21, at=30.0 * (i > 0)) for i in range(5)))
    engines = [simulated(3), simulated(3)]
    run_fleet(engines, requests, prefix_aware(slack=1))
    # All are alike. 1 and 2 go to the first replica; then it has 2 more, and the second gets one.
    sent = [sorted({s[0] for step in e.trace.steps for s in step.slices}) for e in engines]
    assert sent == [["0", "1", "2", "4"], ["3"]]


def test_what_a_fleet_cannot_serve_is_refused() -> None:
    later = WorkloadRequest("b", (1, 2), 1, after="a")
    with pytest.raises(ValueError, match="requests that wait for others"):
        run_fleet([simulated(1)], Workload("w", (request("a", 3, 0.0), later)))
    used = simulated(1)
    used.sleep(1.0)
    with pytest.raises(ValueError, match="it has been used"):
        run_fleet([used], Workload("w", (request("a", 3, 0.0),)))
    with pytest.raises(ValueError, match="stage 03 or 04"):
        engines = [simulated(2), simulated(2)]
        run_fleet(engines, Workload("w", (request("a", 3, 0.0),)), prefix_aware())
