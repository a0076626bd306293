"""What every engine does around its `step`: requests in, outputs out, counts and trace.

Knows neither tensors nor how a step is decided. A stage's engine derives from `EngineBase` and
has a `scheduler`, a `block_manager`, `add_request` and `_advance`.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from tqdm import tqdm

from .checks import check_text, short
from .outputs import Request, RequestOutput, SampledToken, merge_outputs
from .prompts import encode, eos_token_ids, special_stop_ids
from .sampling_params import SamplingParams
from .trace import StepRecord, Trace

Prompt = str | list[int]

# Outputs that wait to be fetched. Beyond this many, those of one request are merged into one.
MAX_UNREAD = 128


class EngineBase:
    """The part of an engine that is the same in all stages.

    Its methods may be called from several threads; they take turns. A process that was forked off
    cannot use the engine, because the threads that compute exist in the parent only.

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
        self._lock = threading.RLock()
        self._depth = 0  # of calls that change the engine, in the thread that has the lock
        self._to_abort: list[str] = []  # as soon as no call is changing the engine
        self._process_id = os.getpid()
        names = "steps tokens generated preemptions finished prompt_tokens hit_tokens"
        self._totals = dict.fromkeys(names.split(), 0)  # the last three when a request ends

    def clock(self) -> float:
        """Now, in seconds. A simulated engine has a clock of its own."""
        return time.perf_counter()

    # Invariant: nobody but the thread that has the lock changes the engine, and no request ends in
    # the middle of a step. `abort_request` may be called there, since the garbage collector closes
    # an abandoned stream whenever it likes; what it asks for is done when the step is over.
    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Have the engine to oneself; afterwards do the aborts that came in the meantime."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this engine was made in process {self._process_id} and cannot be used in its "
                f"fork {os.getpid()}: make an engine after the fork"
            )
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._do_aborts()
                yield
            finally:
                if self._depth == 1:
                    self._do_aborts()
                self._depth -= 1

    def _do_aborts(self) -> None:
        while self._to_abort:
            request_id = self._to_abort.pop()
            if request_id in self._requests:
                self._finish(request_id, "abort", self.clock())

    def _new_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        check: Callable[[int, int | None], int],
    ) -> Request:
        """Check everything about a request but whether its id is in use.

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
        self._check_stops(params)
        prompt_token_ids = encode(prompt, self.tokenizer, self._vocab_size)
        max_tokens = check(len(prompt_token_ids), params.max_tokens)
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._requests)
        check_text("request_id", request_id)
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
        return request

    def _register(self, request: Request, sequence: Any) -> str:
        """Make a request live, unless its id is in use; return the id."""
        request_id = request.request_id
        with self._changing():
            if request_id in self._requests:
                raise ValueError(
                    f"request_id {request_id!r} is in use by a request that still runs"
                )
            self._requests[request_id] = request
            self._sequences[request_id] = sequence
            self.scheduler.add(sequence)
        return request_id

    def _check_stops(self, params: SamplingParams) -> None:
        """Raise ValueError for what could never stop a request of this engine."""
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer; this engine has none: {params.stop}")
        if (largest := max(params.stop_token_ids or (), default=0)) >= self._vocab_size:
            raise ValueError(
                f"stop token id {short(largest)} lies outside the vocabulary of {self._vocab_size}"
            )

    def _check_salt(self, cache_salt: str) -> None:
        """Raise TypeError or ValueError for a `cache_salt` of which no hash can be made."""
        check_text("cache_salt", cache_salt)

    def abort_request(self, request_id: str) -> bool:
        """End a request, whatever its state. False if there is no such live request.

        Its blocks are free at once, and the next `step` returns its last output, with reason
        "abort". During a step, in this thread or another, the request ends after the step: it still
        gets that step's token. The call never waits for a step.
        """
        if request_id not in self._requests or request_id in self._to_abort:
            return False
        self._to_abort.append(request_id)
        if self._lock.acquire(blocking=False):  # else whoever has it does the abort
            try:
                if self._depth == 0:
                    with self._changing():
                        pass
            finally:
                self._lock.release()
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to return."""
        return self.scheduler.has_unfinished() or bool(self._outbox)

    def step(self) -> list[RequestOutput]:
        """Compute one batch; return an output for each request that got a token or ended."""
        with self._lock:
            with self._changing():
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
        output = request.output()
        if request.inbox is not None:  # of a stream
            request.inbox.append(output)
            if len(request.inbox) > MAX_UNREAD:
                merged = merge_outputs(request.inbox)
                request.inbox.clear()
                request.inbox.extend(merged)
        else:
            self._outbox.append(output)
            if len(self._outbox) > 2 * MAX_UNREAD + len(self._requests):
                self._outbox = merge_outputs(self._outbox)

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

        requests: list[Request] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                requests.append(self._add_with_inbox(cast(Prompt, prompt), params, max_unread=1))
            with tqdm(total=len(prompts), disable=not use_tqdm, unit="request") as progress:
                while live := sum(not request.finished for request in requests):
                    progress.update(len(prompts) - live - progress.n)
                    with self._changing():
                        self._advance()
                progress.update(len(prompts) - progress.n)
            return [request.inbox[-1] for request in requests if request.inbox]
        finally:
            for request in requests:
                self._close(request)

    def _add_with_inbox(
        self, prompt: Prompt, params: SamplingParams | None, max_unread: int | None = None
    ) -> Request:
        """Add a request whose outputs do not go to `step`."""
        with self._changing():
            request = self._requests[self.add_request(prompt, params)]
            request.inbox = deque(maxlen=max_unread)
        return request

    def _close(self, request: Request) -> None:
        """Nobody reads the outputs of this request any more."""
        request.inbox = deque(maxlen=0)
        if self._requests.get(request.request_id) is request:
            self.abort_request(request.request_id)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request now and iterate over its outputs. Closing the iterator aborts it.

        Several streams may be read in turn: reading one drives the whole engine.
        """
        outputs = self._take(self._add_with_inbox(prompt, sampling_params))
        next(outputs)
        return outputs

    def _take(self, request: Request) -> Iterator[Any]:
        try:
            yield  # for `stream`: only an iterator that has begun does what `finally` says
            while request.inbox or not request.finished:
                if request.inbox:
                    yield request.inbox.popleft()
                else:
                    with self._changing():
                        self._advance()
        finally:
            self._close(request)

    def progress(self, request_id: str) -> dict[str, Any] | None:
        """How far a live request has got inside, however little it has shown; None if not live.

        A request without a first token may not have begun, or be half done: only the engine knows.
        `seconds` is the time since its arrival.
        """
        with self._changing():
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
