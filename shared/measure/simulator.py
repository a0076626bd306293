"""An engine without a model: a stage's own scheduler and block manager on a clock that jumps.

Everything that decides is real; only the forward is replaced, by a function from the slices of a
step to its seconds. There are two: `Fitted`, to the recorded steps of a real engine on a real
machine, and `shared.measure.roofline`, for a GPU that one may not have. So hours of traffic take
minutes, and what comes out, outputs with times and a trace, is what a real engine leaves.

Knows no tensor. Sampled tokens are all alike, which is what greedy decoding does as far as a prefix
cache can tell: the same prompt gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from shared.engine.base import EngineBase, Prompt
from shared.engine.outputs import SampledToken
from shared.engine.sampling_params import SamplingParams
from shared.engine.step_time import Chunk, StepTimeModel
from shared.engine.trace import StepRecord
from shared.stages import load_stage

VOCAB_SIZE = 2**31
TOKEN = SampledToken(0)

# Seconds of a step that computes these slices (anything with `start_pos` and `num_tokens`).
StepTime = Callable[[Iterable[Any]], float]


class SimulatedEngine(EngineBase):
    """Takes requests and makes steps as the engine of a stage does; `now` is its clock.

    It serves whatever a real one serves, `shared.measure.runner.run_engine` included, which wants
    `clock=engine.clock, sleep=engine.sleep` then.

    Args:
        stage: 1 to 4.
        step_time: how long a step takes.
        options: the fields of the stage's `EngineConfig`. A default that depends on the device is
            that of CUDA.

    Raises:
        ValueError: `num_blocks` or `max_model_len` is missing: there is no model to ask.
    """

    log_interval = math.inf

    def __init__(self, stage: int, step_time: StepTime, **options: Any) -> None:
        for name in ("num_blocks", "max_model_len"):
            if options.get(name) is None:
                raise ValueError(f"a simulated engine needs {name}: it has no model to ask")
        package = load_stage(stage)
        config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        super().__init__(
            SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), None
        )
        self.now = 0.0
        self.step_time = step_time
        if stage == 4:  # as its model runner does
            chunk_size = options.get("max_prefill_chunk_size")
            chunk_size = chunk_size or package.model_runner.CHUNK_SIZES["cuda"]
            max_num_seqs = options.get("max_num_seqs", package.EngineConfig.max_num_seqs)
            defaults = {"max_num_batched_tokens": chunk_size + max_num_seqs}
            options = {**defaults, **options, "max_prefill_chunk_size": chunk_size}
        self.config = package.EngineConfig(**options)
        self.block_manager = package.block_manager.BlockManager(
            self.config.num_blocks, self.config.block_size
        )
        self.scheduler = package.scheduler.Scheduler(self.config, self.block_manager)
        if getattr(self.config, "target_step_ms", None):
            self.scheduler.step_time = StepTimeModel(self.config.target_step_ms / 1000)
        self.new_sequence = package.sequence.Sequence

    def clock(self) -> float:
        """Virtual seconds since the engine was made."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass. A wait too short for the clock's precision still moves it."""
        if seconds > 0:
            self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request, as a real engine does. An answer ends at `max_tokens`."""
        request = self._new_request(prompt, sampling_params, request_id, self.scheduler.check)
        sequence = self.new_sequence(
            request.request_id, request.prompt_token_ids, request.max_tokens
        )
        return self._register(request, sequence)

    # As a stage's own `_advance`, with `step_time` in the place of the model.
    def _advance(self) -> None:
        start = self.now
        batch = self.scheduler.schedule()
        if not batch.slices:
            return
        requests = [self._requests[sequence.request_id] for sequence in batch.sampling]
        seconds = self.step_time(batch.slices)
        self.now = end = start + seconds
        self.scheduler.commit(batch, [0] * len(batch.sampling))
        for request, sequence in zip(requests, batch.sampling, strict=True):
            request.metrics.num_cached_tokens = getattr(sequence, "num_hit_tokens", None) or 0
        if getattr(self.scheduler, "step_time", None):
            self.scheduler.step_time.observe(batch.slices, seconds)
        self._record(batch, start, end)
        self._hand_out(requests, [TOKEN] * len(requests), end)

    def reset_prefix_cache(self) -> int:
        """As in stage 03; the stages before it have nothing to forget."""
        reset: Callable[[], int] = getattr(self.block_manager, "reset_prefix_cache", int)
        return reset()


# --- step times from a recorded trace ---------------------------------------------------------


def work(slices: Iterable[Any]) -> tuple[float, float, float, float]:
    """What a step's time is made of.

    A constant; its tokens; prompt tokens x their contexts, which attention multiplies; and the
    contexts of single tokens, which it reads: other kernels, another price. (`step_time.work` has
    one price for both: it learns in a running engine, from a few steps that are much alike.)
    """
    tokens = multiplied = read = 0.0
    for s in slices:
        tokens += s.num_tokens
        if s.num_tokens == 1:
            read += s.start_pos + 1
        else:
            multiplied += s.num_tokens * (s.start_pos + (s.num_tokens + 1) / 2)
    return 1.0, tokens, multiplied, read


@dataclass(frozen=True)
class Fitted:
    """Step times as a machine was seen to have them.

        seconds = a + b * tokens + c * (prompt tokens x context) + d * (decode contexts)

    Attributes:
        coefficients: a, b, c, d, none below 0.
    """

    coefficients: tuple[float, float, float, float]

    def __call__(self, slices: Iterable[Any]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, work(slices), strict=True))

    @classmethod
    def to(cls, steps: Iterable[StepRecord]) -> Fitted:
        """Fit to recorded steps, by least squares of the relative errors.

        A decode step counts as much as a prefill that takes a hundred times as long.

        Raises:
            ValueError: fewer than 8 steps, or all of one size: that does not tell b from a.
        """
        steps = [step for step in steps if step.duration > 0]
        x = np.array([work(Chunk(start, n) for _, start, n in s.slices) for s in steps])
        if len(steps) < 8 or len(set(x[:, 1])) < 2:
            sizes = sorted({step.num_tokens for step in steps})
            raise ValueError(
                f"cannot fit step times to {len(steps)} steps of {sizes[:8]} tokens: it takes 8 or "
                "more, of different sizes"
            )
        seconds = np.array([step.duration for step in steps])
        scale = np.maximum(x.max(axis=0), 1.0)  # the columns differ by orders of magnitude
        x = x / scale / seconds[:, None]
        # What comes out negative is noise: leave it out and fit the others again.
        solution, kept = np.full(4, -1.0), list(range(4))
        while (solution < 0).any():
            solution = np.zeros(4)
            solution[kept] = np.linalg.lstsq(x[:, kept], np.ones(len(x)), rcond=1e-9)[0]
            kept = [i for i in kept if i != int(solution.argmin())]
        a, b, c, d = (solution / scale).tolist()
        return cls((a, b, c, d))
