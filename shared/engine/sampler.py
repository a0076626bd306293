"""Logits to tokens, for all requests of a step at once.

Knows a request only by its parameters, its token ids and a place to keep its random generator;
nothing of text, blocks or the model. All arithmetic is in float32.

On CUDA the host waits for the device once a step, to read the tokens, and once more if somebody
wants log-probabilities: what goes to the device comes from pinned memory, and the rest stays there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .memory import to_device
from .outputs import Request, SampledToken

__all__ = ["SampledToken", "Sampler"]

# How many of the likeliest tokens `top_p` looks at first.
NUM_TOP_P_CANDIDATES = 256


@dataclass
class _State:
    """What the sampler keeps with one request, on the device of the logits.

    Attributes:
        generator: of a request with a seed; it moves once per sampled token and never else.
        stop_ids: int64 [n], the tokens that `min_tokens` forbids.
        prompt_mask: bool [vocab_size], the tokens of the prompt.
        bias: the ids of `logit_bias`, int64 [n], and what is added to their logits, float32 [n].
        output_counts: float32 [vocab_size], how often each token was generated.
        num_counted: how many generated tokens output_counts holds.
    """

    generator: Any = None
    stop_ids: Tensor | None = None
    bias: tuple[Tensor, Tensor] | None = None
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None
    num_counted: int = 0


class Sampler:
    """Chooses one token for each request.

    Follows vLLM's order (v0.11.0, vllm/v1/sample/sampler.py): log-probabilities of the raw
    logits, mask of min_tokens, logit bias, penalties, then argmax for greedy rows, and temperature,
    min_p, top_k, top_p and a draw for the others.

    Args:
        seed: of the generator that all requests without a seed of their own share; None takes one
            from the operating system.
    """

    def __init__(self, seed: int | None = None):
        self._seed = seed
        self._shared_generator: torch.Generator | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, requests: list[Request]) -> list[SampledToken]:
        """Choose a token for each row.

        Args:
            logits: [num_requests, vocab_size], any float dtype, left as they are.

        Raises ValueError if the shapes do not fit, or if the largest logit of a row is not finite
        after the mask: the row has a NaN, overflowed, or has no token left.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests):
            raise ValueError(
                f"logits must be [{len(requests)}, vocab_size] for {len(requests)} requests, "
                f"got {list(logits.shape)}"
            )
        if not requests:  # the end of a step is the end of its computing, also without a token
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            return []
        if all(request.params.is_plain_greedy for request in requests):
            return [
                SampledToken(token_id) for token_id in _read(*_argmax(logits), logits, requests)
            ]

        # 1. Mask, bias, penalties, on a copy: the reported log-probabilities are of the raw logits.
        scores = logits.float()
        masked = [len(r.token_ids) < r.params.min_tokens for r in requests]
        if any(masked) or any(r.params.has_penalties or r.params.logit_bias for r in requests):
            scores = logits.to(torch.float32, copy=True)
            for row, request in enumerate(requests):
                if masked[row]:
                    _mask_stop_tokens(scores[row], request)
                if request.params.logit_bias:
                    _apply_bias(scores[row], request)
                if request.params.has_penalties:
                    _apply_penalties(scores[row], request)

        # 2. The greedy choice for every row; it is also the check for NaN.
        chosen, finite = _argmax(scores)

        # 3. The random choice for the rows that want one.
        rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if len(rows) == len(requests):
            chosen = self._draw(scores, requests)
        elif rows:
            at = to_device(rows, scores.device)
            drawn = self._draw(scores.index_select(0, at), [requests[row] for row in rows])
            chosen.index_copy_(0, at, drawn)

        # 4. Now the host waits, and again for log-probabilities, where asked for.
        token_ids = _read(chosen, finite, scores, requests)
        logprobs = _logprobs(logits, requests, token_ids, chosen)
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]

    def _draw(self, scores: Tensor, requests: list[Request]) -> Tensor:
        """Draw from softmax(scores / temperature) after the filters.

        scores: [n, vocab_size]. Returns int64 [n].
        """
        params = [request.params for request in requests]

        def column(values: list[float]) -> Tensor:
            return to_device(values, scores.device, torch.float32)[:, None]

        # With the largest score at 0 a tiny temperature can only send scores to -inf, never to
        # inf or NaN, and a score is the log of the token's ratio to the likeliest one.
        scores = scores - scores.amax(dim=-1, keepdim=True)
        scores.div_(column([p.temperature for p in params]))
        if any(p.min_p > 0 for p in params):
            least = column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])
            scores.masked_fill_(scores < least, -math.inf)
        if any(p.top_k > 0 for p in params):
            _keep_top_k(scores, [p.top_k for p in params])
        rows = [row for row, p in enumerate(params) if p.top_p < 1]
        if rows:
            at = to_device(rows, scores.device)
            top_p = column([params[row].top_p for row in rows])
            scores.index_copy_(0, at, _keep_top_p(scores.index_select(0, at), top_p))
        return scores.add_(self._gumbel_noise(scores, requests)).argmax(dim=-1)

    def _gumbel_noise(self, scores: Tensor, requests: list[Request]) -> Tensor:
        """Noise g, shaped like scores, for which argmax(scores + g) is a draw from softmax(scores).

        Every token of the vocabulary has noise of its own. So what the filters drop, and what
        stands in other rows, does not change a draw; and logits that differ in the last bits, as
        they do between batches, change it only in a near tie. (One random number for a row, looked
        up in the cumulative sum, is cheaper, but each small difference adds up along the sum.)
        """
        noise = torch.empty_like(scores)
        if any(request.params.seed is None for request in requests):
            noise.uniform_(generator=self._generator(scores.device))
        for row, request in enumerate(requests):
            if request.params.seed is not None:
                state = _state(request)
                if state.generator is None:
                    state.generator = _seeded(request.params.seed, scores.device)
                if isinstance(state.generator, np.random.Generator):
                    state.generator.random(out=noise[row].numpy(), dtype=np.float32)
                else:
                    noise[row].uniform_(generator=state.generator)
        # -log(-log(u)) for u in [0, 1). A u of 0 would make -inf, with which a token that is the
        # only one left could not be told from the tokens that were dropped.
        tiny = torch.finfo(noise.dtype).tiny
        return noise.clamp_min_(tiny).log_().neg_().log_().neg_()

    def _generator(self, device: torch.device) -> torch.Generator:
        if self._shared_generator is None or self._shared_generator.device != device:
            self._shared_generator = torch.Generator(device)
            if self._seed is None:
                self._shared_generator.seed()
            else:
                self._shared_generator.manual_seed(self._seed)
        return self._shared_generator


def _seeded(seed: int, device: torch.device) -> Any:
    """A generator for which every bit of `seed` counts. torch's own for CPUs takes 32 of them."""
    if device.type == "cpu":
        return np.random.default_rng(seed)
    return torch.Generator(device).manual_seed(seed)


def _state(request: Request) -> _State:
    if request.sampler_state is None:
        request.sampler_state = _State()
    return request.sampler_state


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, int64 [n], and whether its score is finite, bool [n]."""
    token_ids = scores.argmax(dim=-1, keepdim=True)
    # argmax takes a NaN for the largest value, so a finite largest value means no NaN.
    return token_ids.squeeze(1), scores.gather(1, token_ids).isfinite().squeeze(1)


def _read(chosen: Tensor, finite: Tensor, scores: Tensor, requests: list[Request]) -> list[int]:
    """The chosen tokens, with one transfer from the device. All rows must be finite."""
    token_ids = chosen.where(finite, -1).tolist()
    for row, token_id in enumerate(token_ids):
        if token_id < 0:
            largest = scores[row, scores[row].argmax()].item()
            num_nan = int(scores[row].isnan().sum())
            raise ValueError(
                f"request {requests[row].request_id!r}: cannot sample from its logits, the "
                f"largest is {largest} ({num_nan} of {scores.shape[1]} are NaN)"
            )
    return token_ids


def _mask_stop_tokens(scores: Tensor, request: Request) -> None:
    """Make EOS and stop tokens impossible. scores: [vocab_size], changed in place."""
    state = _state(request)
    if state.stop_ids is None:
        known = [token_id for token_id in request.stop_token_ids if token_id < len(scores)]
        state.stop_ids = to_device(known, scores.device)
    scores.index_fill_(0, state.stop_ids, -math.inf)


def _apply_bias(scores: Tensor, request: Request) -> None:
    """Add the request's `logit_bias`. scores: [vocab_size], changed in place."""
    state = _state(request)
    if state.bias is None:
        token_ids, values = zip(*request.params.logit_bias or (), strict=True)
        state.bias = (
            to_device(token_ids, scores.device),
            to_device(values, scores.device, torch.float32),
        )
    scores.index_add_(0, *state.bias)


def _apply_penalties(scores: Tensor, request: Request) -> None:
    """Make earlier tokens less likely. scores: [vocab_size], changed in place.

    As in vLLM v0.11.0, vllm/model_executor/layers/utils.py: `apply_penalties`.
    """
    params, state = request.params, _state(request)
    if state.prompt_mask is None or state.output_counts is None:
        state.prompt_mask = torch.zeros_like(scores, dtype=torch.bool)
        prompt = to_device(request.prompt_token_ids, scores.device)
        state.prompt_mask.index_fill_(0, prompt, True)
        state.output_counts = torch.zeros_like(scores)
    # Only the tokens that are new since the last time are counted.
    if state.num_counted < len(request.token_ids):
        new = to_device(request.token_ids[state.num_counted :], scores.device)
        state.output_counts.index_add_(0, new, torch.ones_like(new, dtype=torch.float32))
        state.num_counted += len(new)

    in_output = state.output_counts > 0
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores.copy_(torch.where(state.prompt_mask | in_output, penalised, scores))
    scores.sub_(state.output_counts, alpha=params.frequency_penalty)
    scores.sub_(in_output.float(), alpha=params.presence_penalty)


def _keep_top_k(scores: Tensor, top_k: list[int]) -> None:
    """Mask all but the k largest of each row, in place; k below 1 or over the vocabulary is off.

    Ties with the k-th are kept, as in vLLM, so that the outcome does not depend on their order.
    """
    vocab_size = scores.shape[1]
    is_on = [0 < k < vocab_size for k in top_k]
    if not any(is_on):
        return
    # The k-th largest of a row is at k - 1; a row that is off reads any place and masks nothing.
    last = [k - 1 if on else 0 for k, on in zip(top_k, is_on, strict=True)]
    largest = scores.topk(max(last) + 1, dim=-1).values
    least = largest.gather(1, to_device(last, scores.device)[:, None])
    off = to_device([not on for on in is_on], scores.device, torch.bool)[:, None]
    scores.masked_fill_(scores < least.masked_fill(off, -math.inf), -math.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the likeliest tokens that together hold `top_p` of the mass. top_p: [n, 1].

    A token is kept if those before it hold less than `top_p`; so the likeliest always is. Ties
    with the last are kept, so that the outcome does not depend on their order.
    """
    probs = scores.softmax(dim=-1)
    vocab_size = probs.shape[1]
    least = torch.empty_like(top_p)
    # A few of the likeliest tokens hold enough in most rows, and finding them is much cheaper
    # than sorting the vocabulary. Each row decides for itself whether it needs more, so that its
    # outcome does not depend on its batch. On CUDA to ask for that would cost more than sorting.
    rows = torch.arange(len(probs), device=probs.device)
    num_candidates = vocab_size if probs.is_cuda else NUM_TOP_P_CANDIDATES
    while len(rows):
        num_candidates = min(num_candidates, vocab_size)
        candidates = probs[rows].topk(num_candidates, dim=-1).values
        mass = candidates.cumsum(dim=-1)
        num_kept = (mass - candidates < top_p[rows]).sum(dim=-1, keepdim=True)
        num_kept.clamp_min_(1)  # a top_p below the smallest float32 is 0 here
        least[rows] = candidates.gather(1, num_kept - 1)
        if num_candidates == vocab_size:
            break
        rows = rows[mass[:, -1] < top_p[rows, 0]]
        num_candidates *= 16
    return scores.masked_fill(probs < least, -math.inf)


def _logprobs(
    logits: Tensor, requests: list[Request], token_ids: list[int], chosen: Tensor
) -> list[dict[int, float] | None]:
    """For each row that asks: its token's log-probability, then the likeliest ones.

    token_ids and chosen are the same, on the host and on the device.
    """
    result: list[dict[int, float] | None] = [None] * len(requests)
    wanted = [(row, n) for row, r in enumerate(requests) if (n := r.params.logprobs) is not None]
    if not wanted:
        return result
    rows = to_device([row for row, _ in wanted], logits.device)
    logprobs = logits.index_select(0, rows).float().log_softmax(dim=-1)
    most = min(max(n for _, n in wanted), logits.shape[1])
    top = logprobs.topk(most, dim=-1)
    own = logprobs.gather(1, chosen.index_select(0, rows)[:, None])
    # One transfer for all: float64 holds a float32, and the id of a token, exactly.
    table = torch.cat([own, top.values, top.indices.double()], dim=1).tolist()
    for (row, n), (value, *likeliest) in zip(wanted, table, strict=True):
        values, ids = likeliest[:most], map(int, likeliest[most:])
        result[row] = {token_ids[row]: value, **dict([*zip(ids, values, strict=True)][:n])}
    return result
