"""The engine: takes requests, drives scheduler and model runner, returns tokens.

Knows no tensors: it passes the runner's logits to the sampler. What all stages have in common (ids,
outputs, `generate`, `stream`) is in `shared.engine.base`.
"""

from __future__ import annotations

import logging
import time

from shared.engine.base import EngineBase, Prompt
from shared.engine.sampler import Sampler
from shared.engine.sampling_params import SamplingParams
from shared.models import load_model

from .block_manager import BlockManager
from .config import EngineConfig
from .model_runner import ModelRunner
from .scheduler import Scheduler
from .sequence import Sequence

logger = logging.getLogger(__name__)


class LLMEngine(EngineBase):
    """Serves many requests at once from one model.

    Args:
        model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair. The
            tokenizer may be None; prompts are then token ids, and outputs have no text.
        device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
        dtype: "auto", "float32", "bfloat16" or "float16".
        options: the fields of `EngineConfig`.
    """

    def __init__(self, model="smollm2", *, device="auto", dtype="auto", **options) -> None:
        config = EngineConfig(**options)
        loaded = load_model(model, device=device, dtype=dtype)
        super().__init__(loaded.model, loaded.tokenizer)
        self.model_runner = ModelRunner(loaded.model, config)
        self.config = config = self.model_runner.config
        self.block_manager = BlockManager(self.model_runner.kv_cache.num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.block_manager)
        self.sampler = Sampler()

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Raises ValueError if the prompt is empty, has an id outside the vocabulary or can never fit,
        or if `request_id` names a live request. Nothing has changed then.
        """
        request = self._new_request(prompt, sampling_params, request_id, self.scheduler.check)
        sequence = Sequence(request.request_id, request.prompt_token_ids, request.max_tokens)
        return self._register(request, sequence)

    def _advance(self) -> None:
        # 1. Decide.
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch.slices:
            return
        requests = [self._requests[sequence.request_id] for sequence in batch.sampling]

        # 2. Compute. A failure ends the requests of this batch, because what their slices wrote
        # cannot be trusted. All others go on.
        try:
            logits = self.model_runner.run(batch)
            sampled = self.sampler.sample(logits, requests)
        except Exception:
            logger.exception("a step failed; its %d requests end", len(batch.slices))
            self._fail(batch)
            return
        end = time.perf_counter()

        # 3. Record the step and return its tokens.
        self.scheduler.commit(batch, [token.token_id for token in sampled])
        self._record(batch, start, end)
        self._hand_out(requests, sampled, end)
