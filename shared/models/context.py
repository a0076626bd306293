"""How long a sequence may be: within the model's context and the limits of missing features.

The engines have no sliding window, for instance. But a window changes nothing for sequences that
are shorter than it, so such a model is not refused: its sequences are kept that short.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("mini_vllm")


def context_length(config: Any, windows: list[int], max_model_len: int | None, name: str) -> int:
    """The longest sequence that a model of `config` can run, in tokens.

    `windows` are the sliding windows that its layers asked for; `name` goes into messages. With
    `max_model_len` that many, if every limit allows it (else ValueError); with None as many as the
    limits allow, and one log line if that is less than the model's own context.
    """
    if max_model_len is not None and max_model_len < 1:
        raise ValueError(f"max_model_len must be at least 1, got {max_model_len}")
    context = getattr(config, "max_position_embeddings", None)
    limits = _limits(config, windows)
    if max_model_len is None:
        if context is None:
            raise ValueError(f"{name}: the config names no context length; pass max_model_len")
        max_model_len = min([context, *limits.values()])
        if max_model_len < context:
            reason = min(limits, key=lambda why: limits[why])
            logger.warning(
                "%s: sequences are limited to %d tokens instead of %d, since %s is not supported",
                *(name, max_model_len, context, reason),
            )
        return max_model_len
    if context is not None:
        limits["its context"] = context
    exceeded = [f"{reason} ({limit})" for reason, limit in limits.items() if limit < max_model_len]
    if exceeded:
        message = f"{name}: max_model_len {max_model_len} exceeds {', '.join(exceeded)}"
        raise ValueError("; ".join([message, *_why_rotary(config)]))
    return max_model_len


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a config: one set for all layers, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes, *(value for value in ropes.values() if isinstance(value, dict))]


def _why_rotary(config: Any) -> list[str]:
    """Why a rotary scaling in the config does not raise the limit, one sentence for each kind."""
    said = {}
    for rope in _ropes(config):
        kind, factor = rope.get("rope_type", "default"), rope.get("factor")
        if "dynamic" in kind or kind == "longrope":
            said[kind] = (
                f"rotary scaling {kind!r} changes with the longest sequence of a batch, so one "
                "long request would change the others' tokens"
            )
        elif kind != "default" and factor:
            said[kind] = (
                f"rotary scaling {kind!r} by {factor:g} does not raise the limit: the config does "
                "not say whether max_position_embeddings counts before or after scaling, so set "
                "it there to the length that the model was trained for"
            )
    return list(said.values())


def _limits(config: Any, windows: list[int]) -> dict[str, int]:
    """Missing features by name, each with the longest sequence on which it has no effect.

    A window of w tokens includes the token itself, so it has no effect on sequences of up to w
    tokens. A rotary table of kind "dynamic" or "longrope" changes with the largest position in the
    whole row, so one long sequence would change the results of the others; up to the length where
    that begins, the table is constant.
    """
    limits = {}
    layer_types = set(getattr(config, "layer_types", None) or [])
    if "sliding_attention" in layer_types and getattr(config, "sliding_window", None):
        windows = [*windows, config.sliding_window]
    if windows:
        limits["a sliding window"] = min(windows)
    if "chunked_attention" in layer_types:
        limits["chunked attention"] = config.attention_chunk_size
    if getattr(config, "attn_temperature_tuning", False):
        limits["temperature tuning of attention"] = config.floor_scale - 1

    for rope in _ropes(config):
        kind = rope.get("rope_type", "")
        if "dynamic" in kind:
            limits[f"rotary scaling {kind!r}"] = config.max_position_embeddings
        elif kind == "longrope":
            limits[f"rotary scaling {kind!r}"] = rope["original_max_position_embeddings"]
    return limits
