"""One probe forward at load: does this model run through our attention, and in what shape?

An engine here replaces a model's attention function and feeds all sequences as one packed row. That
is right only for a model that calls its attention function once per layer, passes our metadata to
it, asks for nothing but plain causal attention, and mixes tokens nowhere else. Running a few tokens
shows all of this, so no list of architectures is needed. A missing feature is named in the error.

Knows nothing about engines, stages or caches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from shared.engine.model_shape import ModelShape

from .context import context_length

PROBE = "mini_vllm_probe"  # its name in transformers.AttentionInterface
PROBE_LEN = 4

# Keywords of an attention call that change nothing about causal attention in inference, and those
# that the probe looks at by name. Any other keyword with a value asks for something unknown.
HARMLESS = {
    "attn_metadata",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "scaling",
    "sliding_window",
    "use_cache",
}
UNSUPPORTED = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias in attention",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@contextmanager
def attention_set_to(implementation: str, model: Any) -> Iterator[None]:
    """Run a forward with this attention function; afterwards the model is as it was.

    The name stands in the model's config, which all users of the model share: other engines, in
    other threads too, and `generate()`. So one forward runs at a time.
    """
    with _locks.setdefault(model, threading.RLock()):
        before = model.config._attn_implementation
        model.config._attn_implementation = implementation
        try:
            yield
        finally:
            model.config._attn_implementation = before


@dataclass
class _Call:
    """What one call of the attention function was given."""

    layer_idx: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    is_causal: bool
    has_mask: bool
    options: dict[str, Any]


@dataclass
class _Probe:
    """The marker passed as `attn_metadata`; the attention function writes what it saw into it."""

    calls: list[_Call] = field(default_factory=list)


class UnsupportedModel(ValueError):
    """The engines here would run this model wrongly; the message says what is missing."""


def inspect_model(model: Any, max_model_len: int | None = None) -> ModelShape:
    """Check that `model` can run on our attention, and return its shape.

    `max_model_len` bounds the length of a sequence, in tokens. None means the model's context, cut
    (with one log line) to the length up to which a sliding window or a rotary scaling that we lack
    has no effect. The model's attention implementation is as before afterwards.

    Raises `UnsupportedModel` (a ValueError) that names what is missing, and ValueError if
    `max_model_len` is longer than what the model can do here.
    """
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported")
    if any(module.training for module in model.modules()):
        raise UnsupportedModel(f"{name}: is in training mode, with dropout on; call model.eval()")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(f"{name}: multimodal models are not supported ({part})")

    previous = config._attn_implementation
    try:
        probe, logits = _run_packed(model, name)
        calls = probe.calls
        _check_calls(calls, config.get_text_config().num_hidden_layers, name, model)
        _check_logits(model, logits, name)
    finally:
        model.set_attn_implementation(previous)

    windows = [w for call in calls if (w := call.options.get("sliding_window"))]
    first = calls[0]
    return ModelShape(
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_model_len=context_length(config.get_text_config(), windows, max_model_len, name),
        vocab_size=logits.shape[-1],
        dtype=first.dtype,
        device=logits.device,
    )


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attn_metadata: _Probe | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention for the probe's row: a sequence, then the same sequence backwards.

    query is [1, num_heads, 2 n, head_dim], key and value [1, num_kv_heads, 2 n, head_dim]; returns
    [1, 2 n, num_heads, head_dim].
    """
    if not isinstance(attn_metadata, _Probe):
        raise UnsupportedModel(
            f"{type(module).__name__} is not given the keyword arguments of the model's call, so "
            "the metadata (block tables) is missing in its attention function"
        )
    attn_metadata.calls.append(
        _Call(
            layer_idx=getattr(module, "layer_idx", None),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            dtype=key.dtype,
            is_causal=options.get("is_causal") is not False and getattr(module, "is_causal", True),
            has_mask=attention_mask is not None,
            options=options,
        )
    )
    forward = [tensor[:, :, :PROBE_LEN] for tensor in (query, key, value)]
    backward = [tensor[:, :, PROBE_LEN:].flip(2) for tensor in (query, key, value)]
    gqa = query.shape[1] != key.shape[1]
    out = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        for q, k, v in (forward, backward)
    ]
    return torch.cat([out[0], out[1].flip(2)], dim=2).transpose(1, 2).contiguous(), None


def _probe_tokens(model: Any) -> Tensor:
    """[n] distinct token ids, spread over the vocabulary."""
    rows = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(PROBE_LEN) * (rows // PROBE_LEN) + rows // (2 * PROBE_LEN)).to(
        model.device
    )


@torch.no_grad()
def _run_packed(model: Any, name: str) -> tuple[_Probe, Tensor]:
    """Run the probe's row; returns what attention saw and the logits [2, vocab] of both ends.

    The row is a, b, c, d, d, c, b, a at positions 0, 1, 2, 3, 3, 2, 1, 0: the same sequence twice,
    once written backwards. Attention goes by sequence and position, so both ds must come out alike;
    they do not if the model ignores position ids, or mixes neighbours outside attention.
    """
    AttentionInterface.register(PROBE, probe_attention)
    model.set_attn_implementation(PROBE)
    if model.config._attn_implementation != PROBE:
        raise UnsupportedModel(_not_reached(model, name))
    tokens, positions = _probe_tokens(model), torch.arange(PROBE_LEN, device=model.device)
    probe = _Probe()
    output = model(
        input_ids=torch.cat([tokens, tokens.flip(0)])[None],
        position_ids=torch.cat([positions, positions.flip(0)])[None],
        use_cache=False,
        logits_to_keep=torch.tensor([PROBE_LEN - 1, PROBE_LEN], device=model.device),
        attn_metadata=probe,
    )
    return probe, output.logits[0]


def _check_calls(calls: list[_Call], num_layers: int, name: str, model: Any) -> None:
    """Raise UnsupportedModel unless the calls are those of `num_layers` plain causal layers."""
    if not calls:
        raise UnsupportedModel(_not_reached(model, name))
    layers = [call.layer_idx for call in calls]
    if layers != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: attention must be reached exactly once per layer, in order; the model has "
            f"{num_layers} layers, attention was reached by layers {layers}"
        )
    for call in calls:
        where = f"{name}, layer {call.layer_idx}"
        if call.value_dim != call.head_dim:
            raise UnsupportedModel(
                f"{where}: value head_dim {call.value_dim} differs from key head_dim "
                f"{call.head_dim} (latent attention, MLA), which the KV cache here does not hold"
            )
        if not call.is_causal:
            raise UnsupportedModel(f"{where}: attention is not causal")
        if call.has_mask:
            raise UnsupportedModel(
                f"{where}: builds its own attention mask, which would be ignored"
            )
        for key, value in call.options.items():
            if value is None or value is False or key in HARMLESS:
                continue
            what = UNSUPPORTED.get(key, "an option of its attention function unknown here")
            raise UnsupportedModel(f"{where}: needs {what} ({key})")
    heads = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(heads) > 1:
        raise UnsupportedModel(
            f"{name}: layers differ in (heads, KV heads, head_dim): {sorted(heads)}; "
            "the KV cache here has one shape for all layers"
        )


@torch.no_grad()
def _check_logits(model: Any, logits: Tensor, name: str) -> None:
    """Raise UnsupportedModel if the row's two ends differ, or differ from the model on its own.

    The model on its own is compared in float32 only: 16-bit rounding would hide what it looks for.
    """
    exact = logits.dtype == torch.float32
    scale = logits.abs().max().item()
    if logits.shape[0] != 2:
        raise UnsupportedModel(f"{name}: ignores logits_to_keep")
    if (logits[0] - logits[1]).abs().max().item() > scale * (1e-3 if exact else 1e-1):
        raise UnsupportedModel(
            f"{name}: two equal sequences in one packed row do not give equal logits; the model "
            "ignores position_ids or mixes tokens outside attention"
        )
    if exact:
        model.set_attn_implementation("eager")
        alone = model(input_ids=_probe_tokens(model)[None], use_cache=False).logits[0, -1]
        if (logits[0] - alone).abs().max().item() > scale * 1e-3:
            raise UnsupportedModel(
                f"{name}: plain causal attention gives other logits than the model's own attention"
            )


def _not_reached(model: Any, name: str) -> str:
    inner = getattr(model.config, "attn_config", None)
    alibi = (
        getattr(model.config, "alibi", False)
        or getattr(inner, "alibi", False)
        or any("alibi" in attribute for attribute in dir(model.base_model))
    )
    hint = " (it uses ALiBi, position biases that are not supported here)" if alibi else ""
    return f"{name}: its attention is not reached through transformers.AttentionInterface{hint}"
