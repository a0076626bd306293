"""Every measure against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shared.bench import stall
from shared.engine.outputs import RequestMetrics, RequestOutput
from shared.engine.trace import StepRecord
from shared.measure import metrics
from shared.measure.metrics import MEASURES
from shared.measure.runner import Run


def output(
    name: str, arrival: float, times: list[float], prompt: int = 4, cached: int = 0
) -> RequestOutput:
    end = times[-1] if times else None
    return RequestOutput(
        request_id=name,
        prompt_token_ids=list(range(prompt)),
        token_ids=list(range(len(times))),
        text="",
        new_text="",
        finished=True,
        finish_reason="length",
        metrics=RequestMetrics(arrival, end, times, cached),
    )


def step(
    index: int,
    start: float,
    end: float,
    slices: list[tuple[str, int, int]],
    tables: dict[str, list[int]] | None,
) -> StepRecord:
    return StepRecord(index, start, end, slices, block_tables=tables)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([0.0, 10.0, 20.0, 30.0], 90, 27.0),
        (list(range(101)), 99, 99.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([], 50, None),
    ],
)
def test_percentile(values: list[float], q: float, expected: float | None) -> None:
    assert metrics.percentile(values, q) == pytest.approx(expected)


def test_percentile_refuses_what_is_none() -> None:
    with pytest.raises(ValueError, match="101"):
        metrics.percentile([1.0], 101)


def test_latency_counts_each_gap_once_and_each_request_once() -> None:
    # Gaps: a 100, 300 ms; b 200 ms. TTFT: a 500, b 1,000 ms. TPOT: a 200, b 200 ms.
    outputs = [output("a", 0.0, [0.5, 0.6, 0.9]), output("b", 1.0, [2.0, 2.2])]
    values = metrics.latency(outputs)
    assert values["itl_p50"] == pytest.approx(200)
    assert values["itl_max"] == pytest.approx(300)
    assert values["itl_p90"] == pytest.approx(280)
    assert values["ttft_p50"] == pytest.approx(750)
    assert values["ttft_max"] == pytest.approx(1000)
    assert values["tpot_p50"] == pytest.approx(200)


def test_the_span_begins_with_the_first_arrival_wherever_it_is_listed() -> None:
    first, last = output("first", 1.0, [3.0, 4.0]), output("last", 2.0, [2.5, 6.0])
    assert metrics.span([last, first]) == metrics.span([first, last]) == 5.0


def test_latency_of_a_single_token_has_no_gap() -> None:
    values = metrics.latency([output("a", 0.0, [0.5])])
    assert values["ttft_p99"] == pytest.approx(500)
    assert values["itl_p50"] is values["tpot_p50"] is None


def test_throughput_spans_first_arrival_to_last_token() -> None:
    outputs = [output("a", 1.0, [2.0, 3.0], prompt=6), output("b", 2.0, [4.0, 5.0], prompt=2)]
    values = metrics.throughput(outputs)
    assert metrics.span(outputs) == pytest.approx(4.0)
    assert values["output_tok_s"] == pytest.approx(4 / 4)
    assert values["total_tok_s"] == pytest.approx(12 / 4)
    assert metrics.throughput([output("a", 0.0, [])])["output_tok_s"] is None


def test_hit_rate_is_over_all_prompt_tokens() -> None:
    outputs = [output("a", 0, [1], prompt=10, cached=8), output("b", 0, [1], prompt=30)]
    assert metrics.hit_rate(outputs) == {"hit_rate": pytest.approx(20)}
    assert metrics.hit_rate([]) == {"hit_rate": None}


def test_kv_waste_is_weighted_by_time() -> None:
    steps = [
        # 5 tokens in 2 blocks of 4: 3 of 8 slots are empty, for 1 s.
        step(0, 0, 1, [("a", 0, 5)], {"a": [0, 1]}),
        # 8 tokens in 2 blocks: full, for 3 s.
        step(1, 1, 4, [("a", 5, 3)], {"a": [0, 1]}),
    ]
    use = metrics.kv_use(steps, 4)
    assert use == [(1, 5, 8), (3, 8, 8)]
    values = metrics.kv_memory(use, bytes_per_token=2**18)
    assert values["kv_waste"] == pytest.approx(100 * (3 / 8 * 1 + 0 * 3) / 4)
    assert values["kv_peak"] == pytest.approx(2.0)


def test_kv_use_counts_shared_blocks_once_and_remembers_who_does_not_run() -> None:
    steps = [
        step(0, 0, 1, [("a", 0, 9)], {"a": [0, 1, 2]}),
        # b hits a's first two blocks and computes the rest; a waits in this step.
        step(1, 1, 2, [("b", 8, 3)], {"a": [0, 1, 2], "b": [0, 1, 3]}),
    ]
    use = metrics.kv_use(steps, 4)
    assert use[1] == (1, 9 + 3, 16)  # blocks 0, 1, 2 and 3


def test_kv_use_of_an_allocated_but_unwritten_block_is_all_waste() -> None:
    use = metrics.kv_use([step(0, 0, 1, [("a", 0, 4)], {"a": [5, 6]})], 4)
    assert use == [(1, 4, 8)]


def test_kv_use_needs_block_tables() -> None:
    with pytest.raises(ValueError, match="record_blocks"):
        metrics.kv_use([step(0, 0, 1, [("a", 0, 4)], None)], 4)


def test_padded_batch_wastes_padding_and_those_that_have_ended() -> None:
    # Prompts of 2 and 4 tokens; the first generates 2 tokens, the second 3.
    use = metrics.padded_use([2, 4], [2, 3], [1.0, 2.0, 4.0])
    # After the first decode both hold one more: 3 + 5 in 2 rows of 5. Then only the second is left.
    assert use == [(1.0, 8, 10), (2.0, 6, 12)]
    assert metrics.kv_memory([], 1) == {"kv_waste": None, "kv_peak": None}


def streams_and_long() -> list[RequestOutput]:
    """Two streams with gaps of 0.1 s; the long prompt comes at 1.05 and has its token at 3.0."""
    usual = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    return [
        output("a", 0.0, [*usual, 3.1, 3.2]),  # waits 2.1 s over the prefill
        output("b", 0.0, [*usual, 1.1, 3.15, 3.3]),  # one token in between, then 2.05 s
        output("late", 1.2, [3.1, 9.9]),  # was not streaming when it came
        output("long", 1.05, [3.0, 3.2], prompt=1000),
    ]


def test_decode_stall_is_the_longest_gap_that_overlaps_the_prefill() -> None:
    stall = metrics.decode_stall(streams_and_long(), "long")
    assert stall is not None
    assert stall.longest == pytest.approx(2.1)
    assert stall.usual == pytest.approx(0.1)
    assert stall.ratio == pytest.approx(21)
    assert sorted(stall.gaps) == pytest.approx([0.1, 2.05, 2.1])


def test_a_gap_that_ends_after_the_first_token_counts_one_that_begins_after_it_does_not() -> None:
    outputs = [output("a", 0, [1.0, 2.5, 9.0]), output("long", 2.0, [2.4])]
    stall = metrics.decode_stall(outputs, "long")
    assert stall is not None and stall.gaps == pytest.approx([1.5])
    assert stall.usual is None and stall.ratio is None  # it came before there was a whole gap


def test_no_stall_without_streams() -> None:
    outputs = [output("a", 5.0, [6.0, 7.0]), output("long", 0.0, [2.0])]
    assert metrics.decode_stall(outputs, "long") is None
    assert metrics.longest_stall(outputs[1:]) == {"stall": None}
    for wrong in ("nobody", "empty"):
        with pytest.raises(ValueError, match=wrong):
            metrics.decode_stall([*outputs, output("empty", 0, [])], wrong)


def test_longest_stall_takes_the_worst_cause() -> None:
    assert metrics.longest_stall(streams_and_long())["stall"] == pytest.approx(2100)


def test_goodput_needs_both_limits_and_every_gap() -> None:
    outputs = [
        output("good", 0.0, [1.0, 1.1, 1.2]),
        output("slow start", 0.0, [2.5, 2.6]),
        output("one stall", 0.0, [1.0, 1.1, 4.0]),
        output("one token", 0.0, [1.0]),
        output("none", 0.0, []),
    ]
    result = metrics.goodput(outputs, max_ttft=2.0, max_itl=0.5)
    assert result.share == pytest.approx(2 / 5)
    assert result.requests_per_s == pytest.approx(2 / 4.0)
    with pytest.raises(ValueError, match="above 0"):
        metrics.goodput(outputs, 0, 1)
    with pytest.raises(ValueError, match="no requests"):
        metrics.goodput([], 1, 1)


def test_every_measure_says_how_it_is_computed() -> None:
    for measure in MEASURES.values():
        assert measure.formula and measure.title and measure.unit
        assert measure.better in ("lower", "higher")


def test_the_numbers_of_a_stall_by_hand() -> None:
    """The stream's gaps before: 1 s; during the prefill from 10 to 40: ten of 1, one of 20 s."""
    times = [float(t) for t in range(1, 21)] + [40.0]
    result = Run([output("chat", 0.5, times), output("long", 10.5, [39.0, 39.5])])
    values = stall.measure(result, target_ms=1000.0)
    assert values["gap_max"] == pytest.approx(20_000)
    assert values["gap_usual"] == pytest.approx(1000)
    assert values["stall_ratio"] == pytest.approx(20)
    assert values["long_ttft"] == pytest.approx(28_500)
    assert values["gap_p99"] == pytest.approx(np.percentile([1000.0] * 10 + [20_000.0], 99))
    assert values["over_target"] == pytest.approx(values["gap_p99"] / 1000)
