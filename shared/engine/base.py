"""What every engine does around its `step`: requests in, outputs out, counts and trace.

Knows neither tensors nor how a step is decided. A stage's engine derives from `EngineBase` and
has a `scheduler`, a `block_manager`, `add_request` and `_advance`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from tqdm import tqdm

from .checks import check_text
from .outputs import Request, RequestOutput, SampledToken
from .prompts import encode, eos_token_ids, special_stop_ids
from .sampling_params import SamplingParams
from .trace import StepRecord, Trace

Prompt = str | list[int]


class EngineBase:
    """The part of an engine that is the same in all stages.

    Attributes:
        trace: one `StepRecord` per step in `trace.steps`, the newest 10,000.
    """

    scheduler: Any
    block_manager: Any
    add_request: Callable[..., str]
    _advance: Callable[[], None]

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"an engine needs a loaded (model, tokenizer) pair, got model {model!r}"
            )
        self.tokenizer = tokenizer
        self.trace = Trace(max_steps=10_000)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._eos_token_ids = eos_token_ids(model, tokenizer)
        self._ids = count()
        self._requests: dict[str, Request] = {}  # live ones, like the next
        self._sequences: dict[str, Any] = {}
        self._outbox: list[RequestOutput] = []  # not yet returned by `step`
        self._inboxes: dict[str, list[RequestOutput]] = {}  # not yet taken by `stream`
        names = "steps tokens generated preemptions finished prompt_tokens hit_tokens"
        self._totals = dict.fromkeys(names.split(), 0)  # the last three when a request ends

    def clock(self) -> float:
        """Now, in seconds. A simulated engine has a clock of its own."""
        return time.perf_counter()

    def _new_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        check: Callable[[int, int | None], int],
    ) -> Request:
        """Check everything about a request; it is live afterwards.

        Args:
            check: given the number of prompt tokens and `max_tokens`, returns the `max_tokens` to
                use or raises ValueError.
        """
        arrival_time = self.clock()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
        if special := special_stop_ids(params.stop or (), self.tokenizer):
            stop_token_ids = (*(params.stop_token_ids or ()), *sorted(special))
            params = dataclasses.replace(params, stop_token_ids=stop_token_ids)
        prompt_token_ids = encode(prompt, self.tokenizer, self._vocab_size)
        max_tokens = check(len(prompt_token_ids), params.max_tokens)
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._requests)
        check_text("request_id", request_id)
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use by a request that still runs")
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_tokens=max_tokens,
            arrival_time=arrival_time,
        )
        num_stops = sum(t < self._vocab_size for t in request.stop_token_ids)
        if params.min_tokens and num_stops == self._vocab_size:
            raise ValueError("min_tokens leaves no token: all of the vocabulary are stop tokens")
        self._requests[request_id] = request
        return request

    def _check_salt(self, cache_salt: str) -> None:
        """Raise TypeError or ValueError for a `cache_salt` of which no hash can be made."""
        check_text("cache_salt", cache_salt)

    def abort_request(self, request_id: str) -> bool:
        """End a request now, in whatever state it is. False if there is no such live request.

        Its blocks come back at once; its last output, with reason "abort", with the next `step`.
        """
        if request_id not in self._requests:
            return False
        self._finish(request_id, "abort", self.clock())
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to return."""
        return self.scheduler.has_unfinished() or bool(self._outbox)

    def step(self) -> list[RequestOutput]:
        """Compute one batch; return an output for each request that got a token or ended."""
        self._advance()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _finish(self, request_id: str, reason: str, now: float) -> None:
        self.scheduler.finish(self._sequences.pop(request_id), reason)
        request = self._requests.pop(request_id)
        request.finish(reason, now)
        self._totals["finished"] += 1
        self._totals["prompt_tokens"] += len(request.prompt_token_ids)
        self._totals["hit_tokens"] += request.metrics.num_cached_tokens
        self._deliver(request)

    def _deliver(self, request: Request) -> None:
        self._inboxes.get(request.request_id, self._outbox).append(request.output())

    def _fail(self, batch: Any) -> None:
        """End all requests of a batch that could not be computed."""
        for s in batch.slices:
            self._finish(s.sequence.request_id, "error", self.clock())

    def _hand_out(self, requests: list[Request], sampled: list[SampledToken], now: float) -> None:
        """Give each request its token; end those for which it was the last."""
        for request, token in zip(requests, sampled, strict=True):
            reason = request.append(token, now)
            if reason:
                self._finish(request.request_id, reason, now)
            else:
                self._deliver(request)

    def _record(self, batch: Any, start: float, end: float) -> None:
        """Add a step to the trace and to the counts."""
        running = self.scheduler.running
        self._totals["steps"] += 1
        self._totals["tokens"] += sum(s.num_tokens for s in batch.slices)
        self._totals["generated"] += len(batch.sampling)
        self._totals["preemptions"] += len(batch.preempted)
        tables = None
        if self.trace.record_blocks:
            tables = {s.request_id: s.block_table.copy() for s in running}
        self.trace.add(
            StepRecord(
                index=self._totals["steps"] - 1,
                start=start,
                end=end,
                slices=[(s.sequence.request_id, s.start_pos, s.num_tokens) for s in batch.slices],
                sampled=[sequence.request_id for sequence in batch.sampling],
                preempted=[sequence.request_id for sequence in batch.preempted],
                num_free_blocks=self.block_manager.num_free_blocks,
                num_waiting=len(self.scheduler.waiting),
                num_running=len(running),
                num_prefilling=sum(s.status.value == "prefilling" for s in running),
                block_tables=tables,
            )
        )

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their ends; the outputs come in the order of the prompts.

        Args:
            prompts: one or several, each text or token ids.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            TypeError, ValueError: a prompt is refused; none has started then.
        """
        if not isinstance(prompts, (str, list, tuple)):
            kind = type(prompts).__name__  # type: ignore[unreachable]
            raise TypeError(f"prompts are text, token ids, or a list of either, got {kind}")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        each: list[Any] = [sampling_params] * len(prompts)
        if isinstance(sampling_params, (list, tuple)):
            each = list(sampling_params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling_params")

        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                request_ids.append(self.add_request(prompt, params))
                self._inboxes[request_ids[-1]] = []
            with tqdm(total=len(prompts), disable=not use_tqdm, unit="request") as progress:
                while live := sum(request_id in self._requests for request_id in request_ids):
                    progress.update(len(prompts) - live - progress.n)
                    self._advance()
                progress.update(len(prompts) - progress.n)
            return [self._inboxes[request_id][-1] for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self.abort_request(request_id)
                self._inboxes.pop(request_id, None)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request now and iterate over its outputs. Closing the iterator aborts it.

        Several streams may be read in turn: reading one drives the whole engine.
        """
        request_id = self.add_request(prompt, sampling_params)
        self._inboxes[request_id] = []
        outputs = self._take(request_id)
        next(outputs)
        return outputs

    def _take(self, request_id: str) -> Iterator[Any]:
        inbox = self._inboxes[request_id]
        try:
            yield  # for `stream`: only an iterator that has begun does what `finally` says
            while inbox or request_id in self._requests:
                if inbox:
                    yield inbox.pop(0)
                else:
                    self._advance()
        finally:
            self.abort_request(request_id)
            del self._inboxes[request_id]

    def progress(self, request_id: str) -> dict[str, Any] | None:
        """How far a live request has got inside, however little it has shown; None if not live.

        A request without a first token may not have begun, or be half done: only the engine knows.
        `seconds` is the time since its arrival.
        """
        if request_id not in self._requests:
            return None
        sequence, request = self._sequences[request_id], self._requests[request_id]
        return {
            "state": sequence.status.value,
            "prefilled_tokens": min(sequence.cached_token_count, sequence.num_prompt_tokens),
            "prompt_tokens": sequence.num_prompt_tokens,
            "generated_tokens": len(request.token_ids),
            "blocks_held": len(sequence.block_table),
            "seconds": self.clock() - request.metrics.arrival_time,
        }

    def stats(self) -> dict[str, int]:
        """Counts since the engine was made, and what it holds now."""
        return {
            **self._totals,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "prefilling": sum(s.status.value == "prefilling" for s in self.scheduler.running),
            "num_blocks": self.block_manager.num_blocks,
            "free_blocks": self.block_manager.num_free_blocks,
        }
