"""The model of step times: what it learns, and what it predicts from it."""

from __future__ import annotations

import numpy as np
import pytest

from shared.engine.step_time import FIRST_CHUNK, WINDOW, Chunk, StepTimeModel, work


def seconds_of(a: float, b: float, c: float, slices: list[Chunk]) -> float:
    _, tokens, context = work(slices)
    return a + b * tokens + c * context


def steps() -> list[list[Chunk]]:
    """Decodes alone, chunks alone, and both together, at several places."""
    decodes = [Chunk(100 + i, 1) for i in range(4)]
    chunks = [[Chunk(start, n)] for start in (0, 64, 512) for n in (8, 32, 64)]
    return [decodes, *chunks, *([*decodes, *chunk] for chunk in chunks)]


def fitted(a: float, b: float, c: float, target: float = 1.0) -> StepTimeModel:
    model = StepTimeModel(target)
    for slices in steps():
        model.observe(slices, seconds_of(a, b, c, slices))
    return model


def test_work_by_hand():
    """Tokens 10 and 11 have contexts of 11 and 12; a decode at 5 has one of 6."""
    assert work([Chunk(10, 2), Chunk(5, 1)]) == (1.0, 3.0, 11 + 12 + 6)
    assert work([]) == (1.0, 0.0, 0.0)


def test_it_predicts_what_it_was_shown_decodes_included():
    model = fitted(5e-3, 2e-4, 3e-7)
    for slices in ([Chunk(700, 1)] * 30, [Chunk(300, 50)], [Chunk(900, 1)] * 20 + [Chunk(0, 40)]):
        wanted = seconds_of(5e-3, 2e-4, 3e-7, slices)
        assert model.predict(slices) == pytest.approx(wanted, rel=1e-3)


def test_the_longest_chunk_leaves_time_for_the_decodes():
    """10 ms less 1 ms, and 0.1 ms a token: 90 tokens, or 60 beside 30 decodes."""
    model = fitted(1e-3, 1e-4, 0, target=10.05e-3)
    assert model.longest_chunk([], 0, 1000) == 90
    assert model.longest_chunk([Chunk(500, 1)] * 30, 0, 1000) == 60
    assert model.longest_chunk([], 0, 50) == 50
    assert model.longest_chunk([Chunk(500, 1)] * 500, 0, 1000) == 1, "a step gets on all the same"


def test_later_chunks_are_shorter():
    model = fitted(1e-3, 1e-5, 1e-7, target=5e-3)
    lengths = [model.longest_chunk([], start, 128) for start in (0, 400, 4000)]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 3
    for start, n in zip((400, 4000), lengths[1:], strict=True):
        assert seconds_of(1e-3, 1e-5, 1e-7, [Chunk(start, n)]) <= 5.001e-3
        assert seconds_of(1e-3, 1e-5, 1e-7, [Chunk(start, n + 1)]) > 4.999e-3


def test_more_work_never_takes_less_time():
    """Steps that get shorter as they grow, which noise may look like, make no negative price."""
    model = StepTimeModel(1.0)
    for n in range(1, 20):
        model.observe([Chunk(0, n)], 1.0 / n)
    times = [model.predict([Chunk(0, n)]) for n in (1, 10, 100, 1000)]
    assert times == sorted(times) and times[0] >= 0


def test_the_first_chunk_is_short_and_the_next_at_most_twice_the_longest():
    model = StepTimeModel(target=100.0)
    assert model.longest_chunk([], 0, 1000) == FIRST_CHUNK
    model.observe([Chunk(0, FIRST_CHUNK)], 1e-3)
    assert model.longest_chunk([], 16, 1000) == 2 * FIRST_CHUNK
    model.observe([Chunk(0, 200)], 1e-3)
    model.observe([Chunk(0, 3)], 1e-3)
    assert model.longest_chunk([], 0, 1000) == 400


def test_old_steps_are_forgotten():
    model = fitted(1.0, 1.0, 1.0)
    rng = np.random.default_rng(0)
    for _ in range(WINDOW):
        slices = [Chunk(int(rng.integers(500)), int(rng.integers(1, 64)))]
        model.observe(slices, seconds_of(1e-3, 1e-4, 0, slices))
    assert model.predict([Chunk(100, 30)]) == pytest.approx(4e-3, rel=1e-3)
