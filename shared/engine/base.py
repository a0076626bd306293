"""What every engine does around its `step`: requests in, outputs out, counts and trace.

Knows neither tensors nor how a step is decided. A stage's engine derives from `EngineBase` and
has a `scheduler`, a `block_manager`, `add_request` and `_advance`.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from tqdm import tqdm

from .checks import check_text, short
from .outputs import Request, RequestOutput, SampledToken
from .prompts import chat_prompt, encode, eos_token_ids, special_stop_ids
from .sampling_params import SamplingParams
from .trace import StepRecord, Trace
from .turns import Turns

logger = logging.getLogger(__name__)

Prompt = str | list[int]
Messages = str | list[dict[str, Any]]

# Outputs of one request that are kept while its stream is not read; then they are merged.
MAX_UNREAD = 64


@dataclasses.dataclass
class _Load:
    """What was computed since the last log line. Times are those of the engine's clock."""

    since: float = -math.inf
    last: float = -math.inf
    tokens_in: int = 0
    tokens_out: int = 0


class EngineBase:
    """The part of an engine that is the same in all stages.

    Several threads may use one engine, or engines of one model: steps take turns, `add_request` and
    `abort_request` never wait for a step. Processes may not: after a fork an engine refuses to
    work, so start processes with the method "spawn".

    Attributes:
        trace: one `StepRecord` per step in `trace.steps`, the newest 10,000.
        log_interval: seconds between two log lines about the load; infinity is never.
        name: begins these lines, where several engines log.
    """

    log_interval = 10.0
    name = ""

    scheduler: Any
    block_manager: Any
    add_request: Callable[..., str]
    _advance: Callable[[], None]

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"an engine needs a loaded (model, tokenizer) pair, got model {model!r}"
            )
        self._turns = Turns.of(model)
        self.tokenizer = tokenizer
        self.trace = Trace(max_steps=10_000)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._eos_token_ids = eos_token_ids(model, tokenizer)
        self._ids = count()
        self._ids_lock = threading.Lock()  # held for moments only, never during a step
        self._requests: dict[str, Request] = {}  # live completions, like the next
        self._sequences: dict[str, Any] = {}
        self._groups: dict[str, list[Request]] = {}  # all completions of a live request, by its id
        self._outbox: dict[Request, deque[RequestOutput]] = {}  # not yet returned by `step`
        # What `_open` is about to add: where its requests go, and how many outputs each keeps.
        self._opening: dict[str, tuple[list[Request], int]] = {}
        self._load = _Load()
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
        """Check everything about a request except whether its id is free. Changes nothing.

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
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop {short(list(params.stop))} needs text, and this engine has no tokenizer: "
                "use stop_token_ids"
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("logit_bias", dict(params.logit_bias or ())),
        ):
            if wrong := [i for i in ids if i >= self._vocab_size]:
                raise ValueError(
                    f"{name}: token id {short(wrong[0])} is outside the vocabulary of "
                    f"{self._vocab_size}"
                )
        prompt_token_ids = encode(prompt, self.tokenizer, self._vocab_size)
        max_tokens = check(len(prompt_token_ids), params.max_tokens)
        request_id = self._new_id() if request_id is None else request_id
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
        if params.min_tokens and len(request.stop_token_ids) == self._vocab_size:
            raise ValueError("min_tokens leaves no token: all of the vocabulary are stop tokens")
        return request

    def _new_id(self) -> str:
        return next(i for i in map(str, self._ids) if i not in self._groups)

    def _register(self, request: Request, sequence: Any) -> str:
        """Make a checked request live, with its sequence, and return its id. Never waits.

        Each of its `n` completions is a sequence of its own. Completion 2 of request "a" is called
        "a#2" in the trace; completion 0 is "a".

        Raises:
            ValueError: its id is in use. Nothing has changed then.
        """
        request_id, params = request.request_id, request.params
        requests, sequences = [request], [sequence]
        for index in range(1, params.n):
            requests.append(
                Request(
                    f"{request_id}#{index}",
                    *(request.prompt_token_ids, params.completion(index), self.tokenizer),
                    *(self._eos_token_ids, request.max_tokens, request.metrics.arrival_time),
                    *(index, request_id),
                )
            )
            sequences.append(copy.deepcopy(sequence))
            sequences[-1].request_id = requests[-1].request_id
        group, most = self._opening.get(request_id, ([], None))
        by_id = {r.request_id: r for r in requests}
        with self._ids_lock:
            if used := [i for i in by_id if i in self._requests or i in self._groups]:
                raise ValueError(f"request_id {used[0]!r} is in use by a request that still runs")
            for one in requests:
                one.inbox = None if most is None else deque(maxlen=most)
            group.extend(requests)
            self._sequences.update(zip(by_id, sequences, strict=True))
            self._requests.update(by_id)
            self._groups[request_id] = group
        self._turns.change(lambda: [self.scheduler.add(one) for one in sequences])
        return request_id

    def _check_salt(self, cache_salt: str) -> None:
        """Raise TypeError or ValueError for a `cache_salt` that cannot be hashed."""
        check_text("cache_salt", cache_salt)

    def abort_request(self, request_id: str) -> bool:
        """End a request in whatever state it is. False if there is no such live request.

        Its blocks are free at once; the next `step` returns its last output, with reason "abort".
        If a step is running, in this thread or in another, this happens at its end, after its
        tokens were delivered: a request that ends with that step keeps its own reason. Never waits.
        """
        group = self._groups.get(request_id)
        if group is None or group[0].abort_asked:
            return False
        self._abort(group)
        return True

    def _abort(self, group: list[Request]) -> None:
        """End all completions of a request that are live by then."""

        def end() -> None:
            for request in group:
                if self._is_live(request):
                    self._finish(request.request_id, "abort", self.clock())

        group[0].abort_asked = True
        self._turns.change(end)

    def _is_live(self, request: Request) -> bool:
        """Whether it is unfinished. Another request may have its id since it ended."""
        return self._requests.get(request.request_id) is request

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to return."""
        return self.scheduler.has_unfinished() or bool(self._outbox) or self._turns.has_changes

    def step(self) -> list[RequestOutput]:
        """Compute one batch; return an output for each request that got a token or ended."""
        with self._turns.take():
            self._advance()
            self._turns.catch_up()
            outbox, self._outbox = self._outbox, {}
        return [output for outputs in outbox.values() for output in outputs]

    def _finish(self, request_id: str, reason: str, now: float) -> None:
        request = self._requests[request_id]
        self.scheduler.finish(self._sequences.pop(request_id), reason)
        request.finish(reason, now)
        self._totals["finished"] += 1
        self._totals["prompt_tokens"] += len(request.prompt_token_ids)
        self._totals["hit_tokens"] += request.metrics.num_cached_tokens
        self._deliver(request)
        # Only now is it no longer live: a reader in another thread must find its last output.
        del self._requests[request_id]
        group = self._groups[request.public_id]
        if not any(map(self._is_live, group)):
            del self._groups[request.public_id]

    def _deliver(self, request: Request) -> None:
        """Put its output where it is read. Outputs that stay unread for long are merged."""
        outputs, output = request.inbox, request.output()
        if outputs is None:
            outputs = self._outbox.setdefault(request, deque(maxlen=MAX_UNREAD))
        if len(outputs) == outputs.maxlen:
            with suppress(IndexError):  # its reader, in another thread, was faster
                output.new_text = outputs.pop().new_text + output.new_text
        outputs.append(output)

    def _fail(self, batch: Any) -> None:
        """End all requests of a batch that could not be computed, which leaves no record."""
        self._totals["preemptions"] += len(batch.preempted)
        for s in batch.slices:
            self._finish(s.sequence.request_id, "error", self.clock())

    def _hand_out(self, requests: list[Request], sampled: list[SampledToken], now: float) -> None:
        """Give each request its token; end those for which it was the last.

        A tokenizer that fails to decode a token ends only the request that has it, as an error.
        """
        for request, token in zip(requests, sampled, strict=True):
            try:
                reason = request.append(token, now)
            except Exception:
                logger.exception("no text for token %d; its request ends", token.token_id)
                reason = "error"
            if reason:
                self._finish(request.request_id, reason, now)
            else:
                self._deliver(request)

    def _log_load(self, batch: Any, start: float, end: float) -> None:
        """Log a line about the load, every `log_interval` seconds in which there are steps."""
        load = self._load
        if start - load.last > self.log_interval:  # it was idle: a new interval begins
            self._load = load = _Load(since=start)
        load.last = end
        load.tokens_in += sum(
            max(0, min(s.end_pos, s.sequence.num_prompt_tokens) - s.start_pos) for s in batch.slices
        )
        load.tokens_out += len(batch.sampling)
        seconds = end - load.since
        if seconds < self.log_interval:
            return
        self._load = _Load(since=end, last=end)
        manager, totals = self.block_manager, self._totals
        logger.info(
            "%s%.0f prompt tokens/s in, %.1f tokens/s out; %d running, %d waiting; "
            "pool %.1f %% used; prefix cache hit rate %.1f %%",
            self.name and f"{self.name}: ",
            *(load.tokens_in / seconds, load.tokens_out / seconds),
            *(len(self.scheduler.running), len(self.scheduler.waiting)),
            100 * (1 - manager.num_free_blocks / manager.num_blocks),
            100 * totals["hit_tokens"] / max(1, totals["prompt_tokens"]),
        )

    def _record(self, batch: Any, start: float, end: float) -> None:
        """Add a step to the trace and to the counts."""
        running = self.scheduler.running
        self._totals["steps"] += 1
        self._totals["tokens"] += sum(s.num_tokens for s in batch.slices)
        self._totals["generated"] += len(batch.sampling)
        self._totals["preemptions"] += len(batch.preempted)
        self._log_load(batch, start, end)
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

        Returns:
            For each prompt the output of its first completion; with `n` above 1 all of them are in
            `output.outputs`.

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

        groups: list[list[Request]] = []
        prompt: Any
        try:
            for prompt, params in zip(prompts, each, strict=True):
                groups.append(self._open(prompt, params, most=1))
            with tqdm(total=len(prompts), disable=not use_tqdm, unit="request") as progress:
                while live := [group for group in groups if any(map(self._is_live, group))]:
                    progress.update(len(prompts) - len(live) - progress.n)
                    with self._turns.take():
                        if any(self._is_live(request) for group in live for request in group):
                            self._advance()
                progress.update(len(prompts) - progress.n)
            outputs = [[r.inbox[-1] for r in group if r.inbox] for group in groups]
            for first, *others in outputs:
                first.others = others
            return [first for first, *_ in outputs]
        finally:
            for group in groups:
                self._abort(group)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request now and iterate over its outputs. Closing the iterator aborts it.

        Several streams may be read in turn: reading one drives the whole engine. Of a
        completion whose outputs are not read, the oldest 63 are kept, and the newest with all later
        text in its `new_text`. With `n` above 1 all completions' outputs come as they are made.
        """
        outputs = self._take(self._open(prompt, sampling_params, most=MAX_UNREAD))
        next(outputs)
        return outputs

    def _open(self, prompt: Prompt, params: SamplingParams | None, most: int) -> list[Request]:
        """Add a request whose outputs go to its inboxes, at most `most` for each completion."""
        request_id, group = self._new_id(), []  # type: str, list[Request]
        self._opening[request_id] = group, most
        try:
            self.add_request(prompt, params, request_id)
        finally:
            del self._opening[request_id]
        return group

    def _take(self, group: list[Request]) -> Iterator[Any]:
        try:
            yield  # for `stream`: only an iterator that has begun does what `finally` says
            while True:
                is_live = any(map(self._is_live, group))  # first: what ends has delivered by then
                inbox = next((r.inbox for r in group if r.inbox), None)
                if inbox:
                    yield inbox.popleft()
                elif is_live:
                    with self._turns.take():
                        if not any(r.inbox for r in group):  # the step of another thread may have
                            self._advance()
                else:
                    return
        finally:
            self._abort(group)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for conversations, in the model's own chat format.

        Args:
            messages: one conversation or a list of them; each is a list of `{"role": ...,
                "content": ...}`, or the text of one user message.
            sampling_params, use_tqdm: as for `generate`.

        Raises:
            TypeError, ValueError: as `chat_prompt` and `generate`.
        """
        if self.tokenizer is None:
            raise TypeError("a chat needs a tokenizer; this engine has none")
        is_one = isinstance(messages, str) or not all(
            isinstance(one, (str, list)) for one in messages
        )
        conversations: Any = [messages] if is_one else messages
        prompts = [chat_prompt(self.tokenizer, one) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def progress(self, request_id: str) -> dict[str, Any] | None:
        """How far a live request has got, even if it has no output yet; None if not live.

        A request without a first token may not have begun, or may be half done.
        `seconds` is the time since its arrival. Of several completions, the first that is live.
        """
        request = next(filter(self._is_live, self._groups.get(request_id, ())), None)
        sequence = self._sequences.get(request.request_id) if request else None
        if request is None or sequence is None:
            return None
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
