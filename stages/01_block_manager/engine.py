"""The engine: takes requests, drives scheduler and model runner, returns text.

Knows no tensor: what the runner computes goes to the sampler unopened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import count

from tqdm import tqdm

from shared.models import load_model
from shared.outputs import Request, RequestOutput
from shared.prompts import encode, eos_token_ids
from shared.sampler import Sampler
from shared.sampling_params import SamplingParams
from shared.trace import StepRecord, Trace

from .block_manager import BlockManager
from .config import EngineConfig
from .model_runner import ModelRunner
from .scheduler import ScheduledBatch, Scheduler
from .sequence import Sequence

logger = logging.getLogger(__name__)


class LLMEngine:
    """Serves many requests at once from one model.

    Args:
        model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair. The
            tokenizer may be None; prompts are then token ids, and outputs have no text.
        device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
        dtype: "auto", "float32", "bfloat16" or "float16".
        options: the fields of `EngineConfig`.

    Attributes:
        block_manager: its `num_blocks` and `num_free_blocks` tell how full the KV cache is.
        trace: one `StepRecord` per step in `trace.steps`.
    """

    def __init__(self, model="smollm2", *, device="auto", dtype="auto", **options) -> None:
        config = EngineConfig(**options)
        if isinstance(model, str):
            model = load_model(model, device=device, dtype=dtype)
        model, self.tokenizer = model
        self.model_runner = ModelRunner(model, config)
        self.config = self.model_runner.config
        self.block_manager = BlockManager(self.config.num_blocks, self.config.block_size)
        self.scheduler = Scheduler(self.config, self.block_manager)
        self.sampler = Sampler()
        self.trace = Trace(max_steps=10_000)
        self._vocab_size = self.model_runner.shape.vocab_size
        self._eos_token_ids = eos_token_ids(model, self.tokenizer)
        self._ids = count()
        self._live: dict[str, tuple[Sequence, Request]] = {}
        self._outbox: list[RequestOutput] = []  # not yet returned by `step`
        self._inboxes: dict[str, list[RequestOutput]] = {}  # not yet taken by `stream`
        self._totals = dict.fromkeys("steps tokens generated finished preemptions".split(), 0)

    # ---------------------------------------------------------------- requests

    def add_request(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Raises:
            ValueError: the prompt is empty, has an id outside the vocabulary or can never fit;
                or `request_id` names a live request. Nothing has changed then.
        """
        arrival_time = time.perf_counter()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
        prompt_token_ids = encode(prompt, self.tokenizer, self._vocab_size)
        max_tokens = self.scheduler.check(len(prompt_token_ids), params.max_tokens)
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._live)
        elif not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        elif request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is in use by a request that still runs")

        sequence = Sequence(request_id, prompt_token_ids, max_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_tokens=max_tokens,
            arrival_time=arrival_time,
        )
        self._live[request_id] = (sequence, request)
        self.scheduler.add(sequence)
        return request_id

    def abort_request(self, request_id: str) -> bool:
        """End a request now, in whatever state it is. False if there is no such live request.

        Its blocks come back at once; its last output, with reason "abort", comes with the next
        `step`.
        """
        if request_id not in self._live:
            return False
        self._finish(request_id, "abort", time.perf_counter())
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to return."""
        return self.scheduler.has_unfinished() or bool(self._outbox)

    # ---------------------------------------------------------------- one step

    def step(self) -> list[RequestOutput]:
        """Compute one batch; return an output for each request that got a token or ended."""
        self._advance()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _advance(self) -> None:
        # 1. Decide.
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch.slices:
            return
        requests = [self._live[sequence.request_id][1] for sequence in batch.sampling]

        # 2. Compute. What fails here fails for this batch only: its blocks hold nothing that can
        # be trusted, so its requests end; all others go on.
        try:
            logits = self.model_runner.run(batch)
            sampled = self.sampler.sample(logits, requests)
        except Exception:
            logger.exception("a step failed; its %d requests end", len(batch.slices))
            for s in batch.slices:
                self._finish(s.sequence.request_id, "error", time.perf_counter())
            return
        now = time.perf_counter()

        # 3. Record, and hand out the tokens.
        self.scheduler.commit(batch, [token.token_id for token in sampled])
        self._record(batch, start, now)
        for request, token in zip(requests, sampled, strict=True):
            reason = request.append(token, now)
            if reason:
                self._finish(request.request_id, reason, now)
            else:
                self._deliver(request)

    def _finish(self, request_id: str, reason: str, now: float) -> None:
        sequence, request = self._live.pop(request_id)
        self.scheduler.finish(sequence, reason)
        request.finish(reason, now)
        self._totals["finished"] += 1
        self._deliver(request)

    def _deliver(self, request: Request) -> None:
        self._inboxes.get(request.request_id, self._outbox).append(request.output())

    def _record(self, batch: ScheduledBatch, start: float, end: float) -> None:
        tables = None
        if self.trace.record_blocks:
            tables = {s.request_id: s.block_table.copy() for s in self.scheduler.running}
        self._totals["steps"] += 1
        self._totals["tokens"] += batch.num_tokens
        self._totals["generated"] += len(batch.sampling)
        self._totals["preemptions"] += len(batch.preempted)
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
                num_running=len(self.scheduler.running),
                block_tables=tables,
            )
        )

    # ---------------------------------------------------------------- whole requests

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their ends; the outputs come in the order of the prompts.

        Args:
            prompts: one or several, each text or token ids.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            ValueError: a prompt is refused; none has started then.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(sampling_params, list):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, {len(sampling_params)} sampling_params")

        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_ids.append(self.add_request(prompt, params))
                self._inboxes[request_ids[-1]] = []
            progress = tqdm(total=len(prompts), disable=not use_tqdm, unit="request")
            with progress:
                while unfinished := sum(request_id in self._live for request_id in request_ids):
                    progress.update(len(prompts) - unfinished - progress.n)
                    self._advance()
                progress.update(len(prompts) - progress.n)
            return [self._inboxes[request_id][-1] for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self.abort_request(request_id)
                del self._inboxes[request_id]

    def stream(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Add a request now and iterate over its outputs. Closing the iterator aborts it."""
        request_id = self.add_request(prompt, sampling_params)
        self._inboxes[request_id] = []
        return self._take(request_id)

    def _take(self, request_id: str) -> Iterator[RequestOutput]:
        inbox = self._inboxes[request_id]
        try:
            while inbox or request_id in self._live:
                if inbox:
                    yield inbox.pop(0)
                else:
                    self._advance()
        finally:
            self.abort_request(request_id)
            del self._inboxes[request_id]

    def stats(self) -> dict[str, int]:
        """Counts since the engine was made, and what it holds now."""
        return {
            **self._totals,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "num_blocks": self.block_manager.num_blocks,
            "free_blocks": self.block_manager.num_free_blocks,
        }
