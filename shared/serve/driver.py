"""Engines of several stages, driven by one thread, for a program that uses asyncio.

Requests come in from an event loop, and outputs go back to it. Knows nothing of HTTP, so any
asyncio program can hold a `Driver`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared.engine.outputs import RequestOutput
from shared.engine.sampling_params import SamplingParams
from shared.engine.trace import StepRecord

logger = logging.getLogger(__name__)

MAX_EVENTS = 256  # step records kept for one listener that does not read; then the oldest go


class Busy(RuntimeError):
    """As many requests wait as may wait."""


class Closed(RuntimeError):
    """The driver takes no new requests."""


class Failed(RuntimeError):
    """The engines have failed; nothing is computed any more."""


class Observer:
    """What the driver tells as it happens, in its own thread. Derive from it to count."""

    def started(self, model: str, waited: float) -> None:
        """The first slice of a completion was computed; it waited so many seconds before."""

    def stepped(self, model: str, record: StepRecord) -> None:
        """A step has ended."""

    def output(self, stream: Stream, output: RequestOutput, num_seen: int) -> None:
        """A completion got tokens, of which the first `num_seen` are known, or ended."""


class _Mailbox:
    """What a reader in an event loop waits for, and another thread tells it of."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_ready = False
        self._reader: asyncio.Future[None] | None = None

    async def _wait(self, timeout: float | None) -> bool:
        """Wait until something has come; False after `timeout` seconds.

        Not `asyncio.wait_for`, which makes a task for every call before Python 3.12.
        """
        if not self._is_ready:
            self._reader = reader = self._loop.create_future()
            timer = self._loop.call_later(timeout, self._release) if timeout is not None else None
            try:
                await reader
            finally:
                self._reader = None
                if timer:
                    timer.cancel()
        came, self._is_ready = self._is_ready, False
        return came

    def _release(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    def _tell(self) -> None:
        """Something has come; in the event loop."""
        self._is_ready = True
        self._release()


class Stream(_Mailbox):
    """The outputs of one request, for one reader in one event loop.

    Of each completion only one output is kept. If the reader has not fetched it when the next one
    comes, the two are merged: the text of both, the state of the newer one. So a slow reader costs
    no more memory than a fast one. (vLLM does the same: `RequestOutputCollector`.)

    Attributes:
        request_id: names it in the trace. With several prompts, that of prompt 1 is "ID-1" there.
        arrival_time: when it came, before its text became tokens; as `time.perf_counter`.
    """

    def __init__(self, model: str, request_id: str, num_prompts: int, n: int) -> None:
        super().__init__()
        self.model = model
        self.arrival_time = time.perf_counter()
        self.request_id = request_id
        self.engine_ids = [request_id]
        if num_prompts > 1:
            self.engine_ids = [f"{request_id}-{i}" for i in range(num_prompts)]
        self.n = n
        self.num_live = num_prompts * n
        self.is_aborted = False
        self._num_seen = [0] * self.num_live  # tokens of each completion, for the observer
        self._num_unread = self.num_live
        self._lock = threading.Lock()
        self._unread: dict[int, RequestOutput] = {}
        self._error: Exception | None = None

    def _put(self, output: RequestOutput) -> None:
        """Take an output; for the driver's thread."""
        with self._lock:
            if before := self._unread.get(output.index):
                output.new_text = before.new_text + output.new_text
            self._unread[output.index] = output

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error

    async def next(self, timeout: float | None = None) -> list[RequestOutput] | None:
        """Wait for outputs: at most one of each completion.

        The `index` of an output counts the completions of all prompts: with two for each, those of
        prompt 1 are 2 and 3.

        Returns:
            None when all completions have ended; an empty list after `timeout` seconds.

        Raises:
            Failed: the engines failed.
        """
        if self._num_unread == 0:
            return None
        await self._wait(timeout)
        with self._lock:
            if self._error:
                raise self._error
            outputs, self._unread = list(self._unread.values()), {}
        self._num_unread -= sum(output.finished for output in outputs)
        return outputs

    async def result(self) -> list[RequestOutput]:
        """Wait for the end; the last output of each completion, in order. Raises like `next`."""
        last: dict[int, RequestOutput] = {}
        while (outputs := await self.next()) is not None:
            last.update((output.index, output) for output in outputs)
        return [last[index] for index in sorted(last)]


class Listener(_Mailbox):
    """The step records of all engines, for one reader in one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._is_closed = False

    async def next(self, timeout: float | None = None) -> list[dict[str, Any]] | None:
        """Wait for records (see `step_event`).

        Returns:
            None when no more will come; an empty list after `timeout` seconds.
        """
        if not self._is_closed:
            await self._wait(timeout)
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events or (None if self._is_closed else [])


class Driver:
    """Runs the engines, a step of each busy one in turn; an idle engine costs nothing.

    All methods are for the event loop, but `close`, `stop` and the counts, which any thread may
    call.

    Args:
        engines: by the names that clients use. They may share one model.
        max_waiting: a request is refused if so many completions of its engine wait.
        observer: is told what happens.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        max_waiting: int = 256,
        observer: Observer | None = None,
    ) -> None:
        self.engines = dict(engines)
        self.max_waiting = max_waiting
        self.observer = observer or Observer()
        self.error: Exception | None = None  # what ended the thread, if anything did
        self.on_failure: Callable[[], object] = lambda: None  # called in the thread, then
        self._is_closed = False
        self._is_stopping = False
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of the next three; held for moments only
        self._streams: dict[str, tuple[Stream, int]] = {}  # engine id to stream, index of prompt
        # When completions came that have not begun, by their names in the trace.
        self._queued: dict[str, float] = {}
        self._listeners: tuple[Listener, ...] = ()
        # One thread: tokenizers are not made for several at once.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def in_tokenizer(self, what: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the tokenizer, without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, what, *args)

    async def submit(
        self,
        model: str,
        prompts: Sequence[Any],
        params: SamplingParams,
        cache_salt: str = "",
        request_id: str | None = None,
        encode: Callable[[Any], str | list[int]] = lambda prompt: prompt,
    ) -> Stream:
        """Queue a request. Waits for the tokenizer, never for a step.

        Args:
            prompts: each text or token ids, or whatever `encode` makes text or ids of.
            encode: called in the tokenizer's thread.

        Raises:
            KeyError: there is no such model.
            TypeError, ValueError: the engine or `encode` refuses a prompt, for the reason in the
                message; nothing is queued then.
            Busy, Closed, Failed: not now, or not any more.
        """
        engine = self.engines[model]
        if self.error:
            raise Failed("the engines have failed")
        if self._is_closed:
            raise Closed("the server is shutting down and takes no new requests")
        num_waiting = self.num_waiting(model)
        if num_waiting >= self.max_waiting:
            raise Busy(
                f"{num_waiting} completions of {model} wait, and at most {self.max_waiting} may"
            )
        stream = Stream(model, request_id or uuid.uuid4().hex, len(prompts), params.n)
        # Registered first: it counts as waiting from now on, and the engine's first output may
        # come before `add_request` returns.
        with self._lock:
            self._streams.update((name, (stream, i)) for i, name in enumerate(stream.engine_ids))

        def add() -> None:
            # All are encoded before the first one is added: a refusal is likelier there.
            encoded = [encode(prompt) for prompt in prompts]
            try:
                for name, prompt in zip(stream.engine_ids, encoded, strict=True):
                    self._add(engine, stream, name, prompt, params, cache_salt)
            finally:
                if stream.is_aborted:  # meanwhile, by `abort`
                    self._abort_in_engine(stream)
                self._wake.set()

        try:
            await self.in_tokenizer(add)
        except BaseException:  # refused, or nobody waits for it any more
            self.abort(stream)
            self._forget(stream)
            raise
        return stream

    def _add(
        self,
        engine: Any,
        stream: Stream,
        name: str,
        prompt: str | list[int],
        params: SamplingParams,
        cache_salt: str,
    ) -> None:
        completions = [name, *(f"{name}#{i}" for i in range(1, params.n))]
        with self._lock:
            self._queued.update(dict.fromkeys(completions, stream.arrival_time))
        # Stages without a prefix cache have no salt, and need none: they share nothing.
        salt = {"cache_salt": cache_salt} if hasattr(engine, "reset_prefix_cache") else {}
        engine.add_request(prompt, params, name, **salt)

    def abort(self, stream: Stream) -> None:
        """End a request, whatever its state; does nothing if it has ended. Never waits.

        Its blocks are free when the step that runs now has ended.
        """
        stream.is_aborted = True
        self._abort_in_engine(stream)
        self._wake.set()

    def _abort_in_engine(self, stream: Stream) -> None:
        for name in stream.engine_ids:
            self.engines[stream.model].abort_request(name)

    def abort_all(self) -> None:
        """End all requests."""
        for stream in self._live_streams():
            self.abort(stream)

    def close(self) -> None:
        """Take no new requests; those under way go on."""
        self._is_closed = True

    def stop(self) -> None:
        """Abort everything, wait for the last step, and end the threads."""
        self.close()
        self._tokenizing.shutdown(cancel_futures=True)
        self.abort_all()
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.close_listeners()

    def listen(self) -> Listener:
        """Get the records of all steps from now on, until `unlisten`."""
        listener = Listener()
        with self._lock:
            self._listeners += (listener,)
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Get no more."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

    def close_listeners(self) -> None:
        """Tell all listeners that no more records will come."""
        for listener in self._listeners:
            listener._is_closed = True
        _wake(list(self._listeners))

    @property
    def num_listeners(self) -> int:
        """Listeners that have not left."""
        return len(self._listeners)

    def num_live(self, model: str | None = None) -> int:
        """Completions that have not ended, of one model or of all."""
        return sum(s.num_live for s in self._live_streams() if model in (None, s.model))

    def num_waiting(self, model: str) -> int:
        """Completions that hold no blocks, those included that the scheduler has yet to see."""
        return max(0, self.num_live(model) - self.engines[model].stats()["running"])

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused."""
        return self._is_closed

    def _live_streams(self) -> list[Stream]:
        with self._lock:
            return list({id(stream): stream for stream, _ in self._streams.values()}.values())

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                busy = [n for n, e in self.engines.items() if e.has_unfinished_requests()]
                for name in busy:
                    self._step(name)
                if not busy:
                    if self._is_stopping:
                        return
                    self._wake.wait()
        except Exception as error:  # a fault of an engine: nobody may wait for ever
            logger.exception("the engines failed")
            self.error = error
            for stream in self._live_streams():
                stream._fail(Failed("the engines have failed"))
                self._forget(stream)
                _wake([stream])
            self.on_failure()

    def _step(self, name: str) -> None:
        engine = self.engines[name]
        num_steps = engine.stats()["steps"]
        outputs = engine.step()
        record = engine.trace.steps[-1] if engine.stats()["steps"] > num_steps else None
        woken: list[Any] = []
        if record:
            self._note_started(name, record)
            self.observer.stepped(name, record)
        for output in outputs:
            if stream := self._hand_over(output):
                woken.append(stream)
        if self._listeners:
            event = step_event(name, engine, record)
            for listener in self._listeners:
                listener._events.append(event)
                woken.append(listener)
        # One call for each event loop, since a call wakes it.
        woken.sort(key=lambda one: id(one._loop))
        for _, group in itertools.groupby(woken, key=lambda one: id(one._loop)):
            _wake(list(group))

    def _note_started(self, name: str, record: StepRecord) -> None:
        """Find the completions whose first slice was just computed."""
        for completion, _, _ in record.slices if self._queued else ():
            with self._lock:
                arrival_time = self._queued.pop(completion, None)
            if arrival_time is not None:
                self.observer.started(name, max(0.0, record.start - arrival_time))

    def _hand_over(self, output: RequestOutput) -> Stream | None:
        """Give an output to the stream it belongs to, if there still is one."""
        with self._lock:
            stream, prompt_index = self._streams.get(output.request_id, (None, 0))
        if stream is None:
            return None
        output.index += prompt_index * stream.n
        self.observer.output(stream, output, stream._num_seen[output.index])
        stream._num_seen[output.index] = len(output.token_ids)
        if output.finished:
            stream.num_live -= 1
            if stream.num_live == 0:
                self._forget(stream)
        stream._put(output)
        return stream

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            for name in stream.engine_ids:
                self._streams.pop(name, None)
                for i in range(stream.n):
                    self._queued.pop(f"{name}#{i}" if i else name, None)


def _wake(waiting: Sequence[_Mailbox]) -> None:
    """Tell streams and listeners of one event loop that something has come."""

    def tell() -> None:
        for one in waiting:
            one._tell()

    try:
        for one in waiting[:1]:
            one._loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop is closed: nobody reads any more
        logger.debug("an event loop has ended before its streams")


def step_event(name: str, engine: Any, record: StepRecord | None) -> dict[str, Any]:
    """A step of an engine as JSON: its record, and who holds how many blocks after it.

    Args:
        record: None if nothing was computed and a request only went away.

    Returns:
        model; step: index, end (seconds of a clock that only goes on), ms, slices [id, start,
        tokens], sampled, preempted, or None; waiting, running, prefilling; num_blocks,
        free_blocks; requests that hold blocks, by id: state, blocks, block_table, prefilled and
        prompt (tokens). Numbers outside `step` are those after the step.
    """
    stats = engine.stats()
    step = record and {
        "index": record.index,
        "end": round(record.end, 6),
        "ms": round(1000 * record.duration, 3),
        "slices": record.slices,
        "sampled": record.sampled,
        "preempted": record.preempted,
    }
    counts = ("waiting", "running", "prefilling", "num_blocks", "free_blocks")
    return {
        "model": name,
        "step": step,
        **{count: stats[count] for count in counts},
        "requests": {
            s.request_id: {
                "state": s.status.value,
                "blocks": len(s.block_table),
                "block_table": list(s.block_table),
                "prefilled": min(s.cached_token_count, s.num_prompt_tokens),
                "prompt": s.num_prompt_tokens,
            }
            for s in list(engine.scheduler.running)
        },
    }
