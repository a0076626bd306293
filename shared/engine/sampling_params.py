"""What a caller may ask of the sampler for one request, checked when it is made.

Knows nothing of tensors, tokenizers or models: a value that depends on one of them (a token id
beyond the vocabulary, ``max_tokens`` beyond the context) is checked by the engine, when the request
is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

# vLLM v0.11.0, vllm/sampling_params.py: _SAMPLING_EPS.
GREEDY_BELOW = 1e-5
MAX_N = 1024  # completions of one request


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Fields that vLLM has mean what they mean there (v0.11.0, vllm/sampling_params.py). What
    differs: ``max_tokens`` is 256 unless told (16 there), a temperature between 0 and 0.01 is
    used as it is (raised to 0.01 there), ``-1`` is refused for ``seed`` (None there) and for
    ``logprobs`` (the whole vocabulary there), a ``logit_bias`` out of range is refused (clipped
    there), ``n`` above 1 is allowed with greedy sampling (refused there).

    The order is: mask of ``min_tokens``, ``logit_bias``, penalties, temperature, ``min_p``,
    ``top_k``, ``top_p``.

    Attributes:
        temperature: divides the logits; below 1e-5 the choice is greedy.
        top_k: keep the k likeliest tokens; 0 and -1 switch it off, 1 is greedy.
        top_p: keep the likeliest tokens that together hold at least this mass, in (0, 1]. Tokens as
            likely as the last one that top_k or top_p keeps are kept with it.
        min_p: keep tokens at least this fraction as likely as the likeliest one, in [0, 1].
        repetition_penalty: from 1e-6 to 1e6; divides positive and multiplies negative logits of
            every token that is in the prompt or in the output.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of a token that
            is in the output, once, or once for each time.
        logit_bias: token id to a number in [-100, 100] that is added to its logit; -100 bans a
            token in practice, 100 forces it. Kept as a tuple of pairs.
        seed: makes the request's output depend on this request alone, not on its batch. Completion
            ``i`` of ``n`` has the seed ``seed + i``, as in vLLM.
        n: completions of the prompt, at most 1,024 (see `RequestOutput.index`).
        max_tokens: most tokens to generate; None means the room that the model's context leaves.
        min_tokens: the first ``min_tokens`` tokens neither are EOS or a stop token, nor complete a
            stop string.
        stop: strings that end the output when it contains them; their text is left out. Kept as a
            tuple.
        stop_token_ids: tokens that end the output, as EOS does. Kept as a tuple.
        ignore_eos: continue after EOS.
        logprobs: for every token, also report its log-probability and those of the ``logprobs``
            likeliest tokens, of the model's own distribution (before mask, bias, penalties and
            temperature).

    Raises TypeError for a value of the wrong type and ValueError for one out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be over 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # beyond, a float32 logit could overflow
            raise ValueError(
                f"repetition_penalty must be from 1e-6 to 1e6, got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be from -2 to 2, got {getattr(self, name)}")

        _integer("top_k", self.top_k, least=-1)
        if self.seed is not None:
            _integer("seed", self.seed, least=0, most=2**64 - 1)
        _integer("n", self.n, least=1, most=MAX_N)
        _integer("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most max_tokens, got {self.min_tokens} "
                    f"over {self.max_tokens}"
                )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, least=0)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")

        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    def completion(self, index: int) -> SamplingParams:
        """The parameters of completion `index` of the `n`, as a request of its own."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return replace(self, n=1, seed=seed)

    @cached_property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken, so that no random number is drawn."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @cached_property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def is_plain_greedy(self) -> bool:
        """True if nothing but the argmax of the model's logits is ever asked for."""
        return (
            self.is_greedy
            and not self.has_penalties
            and self.min_tokens == 0
            and self.logprobs is None
            and not self.logit_bias
        )


def _number(name: str, value: object) -> float:
    # bool is an int in Python, but `temperature=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be {most} or less, got {value}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in strings:
        # The empty string is in every text, so it would end every request at once.
        raise ValueError(f"stop must not contain the empty string, got {stop!r}")
    return tuple(strings)


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
        raise TypeError(f"stop_token_ids must be a list of integers, got {token_ids!r}")
    token_ids = tuple(token_ids)
    for token_id in token_ids:
        _integer("each of stop_token_ids", token_id, least=0)
    return token_ids


def _logit_bias(bias: object) -> tuple[tuple[int, float], ...]:
    if bias is None:
        return ()
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        raise TypeError(f"logit_bias must map token ids to numbers, got {bias!r}")
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"logit_bias must map token ids to numbers, got {bias!r}")
        token_id, value = pair
        _integer("each token id of logit_bias", token_id, least=0)
        checked[token_id] = _number(f"the logit_bias of token {token_id}", value)
        if not -100 <= checked[token_id] <= 100:
            raise ValueError(
                f"the logit_bias of token {token_id} must be from -100 to 100, got {value}"
            )
    return tuple(checked.items())
