"""What people do without an engine of this kind: the rows that the stages are compared with.

Greedy all of them, and none stops at an end-of-sequence token: every row computes the same tokens.
Each returns the tokens and when each one was there, in seconds of `time.perf_counter`.

Knows transformers models; no stage, no workload.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_EOS = -1  # no token has this id, so nothing ends early


class Generated(NamedTuple):
    """The tokens of one answer, and when each was there."""

    token_ids: list[int]
    token_times: list[float]


def use_sdpa(model: Any) -> None:
    """Compare with SDPA, whatever attention the model was loaded with."""
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")


@torch.inference_mode()
def generate_naive(model: Any, prompt_token_ids: Sequence[int], max_tokens: int) -> Generated:
    """Without a KV cache: the whole text so far is computed again for each token."""
    use_sdpa(model)
    token_ids = torch.tensor([list(prompt_token_ids)], device=model.device)
    times = []
    for _ in range(max_tokens):
        logits = model(input_ids=token_ids, use_cache=False, logits_to_keep=1).logits
        token_ids = torch.cat([token_ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        token_ids[0, -1].item()  # the token is there when it can be read
        times.append(time.perf_counter())
    return Generated(token_ids[0, len(prompt_token_ids) :].tolist(), times)


def generate_cached(model: Any, prompt_token_ids: Sequence[int], max_tokens: int) -> Generated:
    """`transformers`' `generate()` on one prompt, with its KV cache."""
    return generate_padded(model, [prompt_token_ids], [max_tokens])[0]


class _Clock:
    """A streamer: `generate()` calls it with the prompt, then with each step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, token_ids: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def generate_padded(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> list[Generated]:
    """`generate()` on a static batch, padded on the left to its longest prompt.

    It runs until the member with the most tokens is done; what the others compute beyond their
    own `max_tokens` is thrown away.
    """
    use_sdpa(model)
    width = max(map(len, prompts))
    padded = [[0] * (width - len(p)) + list(p) for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    clock = _Clock()
    with _neutral(model):
        token_ids = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=_greedy(max(max_tokens)),
            streamer=clock,
        )
    rows = token_ids[:, width:].tolist()
    times = clock.times[1:]  # the first call was the prompt's
    return [Generated(row[:n], times[:n]) for row, n in zip(rows, max_tokens, strict=True)]


class ContinuousBatching:
    """The continuous batching of transformers while it runs, from `continuous_batching`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, stream: bool
    ) -> None:
        """Queue a request.

        Args:
            stream: let `poll` tell of each token, not only of the end.
        """
        self._manager.add_request(
            list(prompt_token_ids),
            request_id=request_id,
            max_new_tokens=max_tokens,
            streaming=stream,
            record_timestamps=True,
            eos_token_id=NO_EOS,
        )

    def poll(self, timeout: float) -> tuple[str, Generated, bool] | None:
        """A request's id, its tokens so far, and whether that is all; None after `timeout` seconds.

        Raises:
            RuntimeError: the request, or the whole batching, failed.
        """
        result = self._manager.get_result(timeout=timeout)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("the continuous batching of transformers ended unexpectedly")
            return None
        if result.error is not None:
            raise RuntimeError(f"{result.request_id} failed in transformers: {result.error}")
        generated = Generated(list(result.generated_tokens), list(result.timestamps))
        return result.request_id, generated, result.is_finished()


@contextmanager
def continuous_batching(
    model: Any, lengths: Sequence[int], max_tokens: int
) -> Iterator[ContinuousBatching]:
    """What `generate_batch` is made of, so that requests can also come later.

    With its own defaults but for the size of its KV cache, which would be most of the machine's
    memory: here twice what the requests need. Making and filling it is not part of any time.

    Args:
        lengths: prompt plus generated tokens of each request that will come.
        max_tokens: most tokens that one of them generates.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    use_sdpa(model)
    config = ContinuousBatchingConfig()
    if not hasattr(config, "page_size"):
        raise RuntimeError(
            "generate_batch needs a newer transformers: the setup of this one is slow"
        )
    config.num_blocks = 2 * sum(-(-length // config.page_size) for length in lengths)
    with (
        _neutral(model),
        model.continuous_batching_context_manager(
            generation_config=_greedy(max_tokens), continuous_batching_config=config, timeout=5
        ) as manager,
    ):
        yield ContinuousBatching(manager)


@contextmanager
def _neutral(model: Any) -> Iterator[None]:
    """Without the checkpoint's generation config, whose settings `generate()` falls back on.

    A repetition penalty, suppressed tokens and the like would give other tokens than the rows that
    know nothing of them, and cost time.
    """
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _greedy(max_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=NO_EOS, pad_token_id=0
    )


@torch.inference_mode()
def logit_gap(model: Any, token_ids: Sequence[int], one: int, other: int) -> float:
    """How far apart the logits of two tokens are after `token_ids`: near 0, either is right."""
    use_sdpa(model)
    inputs = torch.tensor([list(token_ids)], device=model.device)
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    return abs(float(logits[one] - logits[other]))
