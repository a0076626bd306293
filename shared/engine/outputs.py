"""What a caller gets back from an engine, and what an engine keeps per request to make it.

`Request` joins sampling parameters, text and times of one request. It knows nothing of blocks,
batches or scheduling (a stage's `Sequence` does that) and of tensors (the sampler does that).
All times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from .detokenizer import IncrementalDetokenizer, StopMatcher
from .sampling_params import SamplingParams


class SampledToken(NamedTuple):
    """One token that the sampler chose.

    Attributes:
        logprobs: token id to log-probability under the model's own distribution: first the chosen
            token, then the likeliest ones, likeliest first. None if not asked for.
    """

    token_id: int
    logprobs: dict[int, float] | None = None


@dataclass
class RequestMetrics:
    """The times of one request, and the measures computed from them.

    Attributes:
        token_times: when each generated token was there, in order.
        num_cached_tokens: prompt tokens that the prefix cache held already.
    """

    arrival_time: float
    finish_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def first_token_time(self) -> float | None:
        """When the first token was there; None before."""
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Time to first token: request added to first token; None before."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: every gap between two tokens that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1); None below two."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def latency(self) -> float | None:
        """Request added to finished; None before."""
        return None if self.finish_time is None else self.finish_time - self.arrival_time


@dataclass
class RequestOutput:
    """A request as it stands after a step. Later steps do not change it.

    A request with `n` above 1 has an output for each of its completions, which `index` tells apart;
    each has text, tokens and an end of its own. `generate` returns the output of completion 0, and
    all of them are in its `outputs`. So `output.outputs[i].text` means what it means in vLLM.

    Attributes:
        prompt_token_ids: one list, shared by all outputs of the request.
        token_ids: all generated tokens so far, an EOS or stop token that ended them included.
        text: their text so far, without EOS and stop strings; what could still become part of a
            stop string or of an incomplete character is held back until it is decided.
        new_text: what was added to the text since the request's last output.
        finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
        logprobs: for each token of token_ids, as in `SampledToken`; None if not asked for.
        index: which completion of the request this is, from 0.
        stop_reason: if `finish_reason` is "stop", the stop string or the id of the stop token that
            ended it; None for EOS.
        others: in what `generate` returns, the outputs of the completions from 1 on.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    new_text: str
    finished: bool
    finish_reason: str | None
    metrics: RequestMetrics
    logprobs: list[dict[int, float]] | None = None
    index: int = 0
    stop_reason: int | str | None = None
    others: list[RequestOutput] = field(default_factory=list, repr=False)

    @property
    def outputs(self) -> list[RequestOutput]:
        """All completions of the request, this one first."""
        return [self, *self.others]


class Request:
    """One completion from its arrival to its last output: tokens in, text and a finish reason out.

    Args:
        request_id: unique among the engine's live requests, completions included.
        max_tokens: most tokens to generate, at least 1; the engine has resolved
            `params.max_tokens=None` and the model's context.
        tokenizer: as for `IncrementalDetokenizer`; None leaves the text empty.
        eos_token_ids: tokens that end the output unless the parameters say `ignore_eos`.
        arrival_time: when the request was added.
        index: which of the `n` completions of the user's request this is.
        public_id: the id of the user's request; None if that is `request_id`.

    stop_token_ids: EOS and stop tokens together, which `min_tokens` makes impossible at first.
    sampler_state: belongs to the sampler alone (random generator, token counts).
    inbox: the outputs of a stream that its reader has not fetched; None if `step` returns them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        arrival_time: float,
        index: int = 0,
        public_id: str | None = None,
    ):
        if max_tokens < 1:
            raise ValueError(
                f"request {request_id!r}: max_tokens must be 1 or more, got {max_tokens}"
            )
        self.request_id = request_id
        self.public_id = request_id if public_id is None else public_id
        self.index = index
        self.abort_asked = False
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        stop_token_ids = frozenset(params.stop_token_ids or ())
        self.stop_token_ids = eos_token_ids | stop_token_ids
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._end_token_ids = stop_token_ids | self._eos_token_ids
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(arrival_time)
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.sampler_state: Any = None
        self.inbox: deque[RequestOutput] | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_matcher = StopMatcher(params.stop or ())
        self._num_chars_output = 0

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def append(self, sampled: SampledToken, now: float) -> str | None:
        """Take the next token; return the finish reason, or None if there is none yet.

        "stop" goes before "length" when the last allowed token is EOS, a stop token, or completes
        a stop string. Raises ValueError if the request is finished.
        """
        if self.finished:
            raise ValueError(
                f"request {self.request_id!r} is already finished ({self.finish_reason})"
            )
        token_id, logprobs = sampled
        self.token_ids.append(token_id)
        self.metrics.token_times.append(now)
        if self.logprobs is not None:
            self.logprobs.append({} if logprobs is None else logprobs)

        may_stop = len(self.token_ids) > self.params.min_tokens
        reason = None
        if may_stop and token_id in self._end_token_ids:
            reason = "stop"
            self.stop_reason = None if token_id in self._eos_token_ids else token_id
        else:
            self._add_text(self._detokenizer.append(token_id), may_stop)
        if reason is None and len(self.token_ids) >= self.max_tokens:
            reason = "length"
        if reason is not None:
            self._add_text(self._detokenizer.flush(), may_stop)
        if self.stop_reason is None and self._stop_matcher.stopped is not None:
            reason, self.stop_reason = "stop", self._stop_matcher.stopped
        if reason is not None:
            self._end(reason, now)
        return reason

    def finish(self, reason: str, now: float) -> None:
        """End the request from outside ("abort", "error"); a finished one stays as it is.

        Text that was held back is released.
        """
        if not self.finished:
            with suppress(Exception):  # a tokenizer that has failed may fail again
                self._add_text(self._detokenizer.flush(), may_stop=False)
            self._end(reason, now)

    def output(self) -> RequestOutput:
        """The request as it stands, with the text that is new since the last call."""
        new_text = self.text[self._num_chars_output :]
        self._num_chars_output = len(self.text)
        metrics = self.metrics
        return RequestOutput(
            request_id=self.public_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.token_ids.copy(),
            text=self.text,
            new_text=new_text,
            finished=self.finished,
            finish_reason=self.finish_reason,
            metrics=RequestMetrics(
                metrics.arrival_time,
                metrics.finish_time,
                metrics.token_times.copy(),
                metrics.num_cached_tokens,
            ),
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            index=self.index,
            stop_reason=self.stop_reason,
        )

    def _add_text(self, text: str, may_stop: bool) -> None:
        self.text += self._stop_matcher.append(text, may_stop)

    def _end(self, reason: str, now: float) -> None:
        self.text += self._stop_matcher.flush()
        self.finish_reason = reason
        self.metrics.finish_time = now
