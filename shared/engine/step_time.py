"""How long will a step take? A model fitted while the engine runs.

A chunk's cost has two parts: each token passes the weights, and each token looks back at its whole
context. So a fixed number of tokens costs more late in a long prompt than early:

    seconds = a + b * tokens + c * (tokens x context)

Knows slices (anything with `start_pos` and `num_tokens`) and seconds; no tensor, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST_CHUNK = 16  # tokens of the first chunk, when nothing is known yet
WINDOW = 64  # steps that are remembered


Slices = Iterable[Any]


def work(slices: Slices) -> tuple[float, float, float]:
    """What a step's time depends on: a constant, its tokens, the sum of their contexts."""
    tokens = context = 0.0
    for s in slices:
        tokens += s.num_tokens
        context += s.num_tokens * (s.start_pos + (s.num_tokens + 1) / 2)
    return 1.0, tokens, context


@dataclass(frozen=True)
class Chunk:
    """A slice that is only thought of."""

    start_pos: int
    num_tokens: int


class StepTimeModel:
    """Least squares over the last steps.

    Args:
        target: seconds that a step should not exceed.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._longest = FIRST_CHUNK / 2
        self._coefficients: np.ndarray | None = None

    def observe(self, slices: Slices, seconds: float) -> None:
        """Learn from a step that computed `slices` and took `seconds`."""
        self._longest = max(self._longest, *(s.num_tokens for s in slices))
        self._steps.append((*work(slices), seconds))
        self._coefficients = None

    def predict(self, slices: Slices) -> float:
        """Seconds that a step of these slices will take."""
        if self._coefficients is None:
            steps = np.array(self._steps)
            scale = steps[:, :3].max(axis=0)  # the columns differ by orders of magnitude
            solution = np.linalg.lstsq(steps[:, :3] / scale, steps[:, 3], rcond=1e-3)[0]
            self._coefficients = np.maximum(solution, 0) / scale
        return float(self._coefficients @ work(slices))

    def longest_chunk(self, slices: Slices, start_pos: int, limit: int) -> int:
        """Largest chunk, at least 1 token, that keeps a step within the target.

        At most twice the longest slice ever seen: further out, the model would be guessing.

        Args:
            slices: what the step computes anyway.
            start_pos: where the chunk begins.
            limit: most tokens that it may have.
        """
        limit = min(limit, int(2 * self._longest))
        if not self._steps:
            return limit
        low, high = 1, limit  # bisection: time only grows with the chunk
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict([*slices, Chunk(start_pos, middle)]) <= self.target:
                low = middle
            else:
                high = middle - 1
        return low
