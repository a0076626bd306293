"""Every architecture that we claim runs right in a packed row; those that cannot are refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from shared.models import UnsupportedModel, inspect_model
from shared.models.context import context_length
from shared.models.tiny import (
    ARCHITECTURES,
    build_random_model,
    build_tiny_model,
    tiny_config,
)
from tests.packed_row import PackedRow, use_dense_attention

ROTARY = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.1] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 256,
    },
}


def sequences(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (length,), generator=generator) for length in lengths]


def alone(model: Any, tokens: torch.Tensor, attention: str = "eager") -> torch.Tensor:
    """[len(tokens), vocab]: the logits of the model as transformers runs it."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, expected.abs().max().item())
    assert (logits - expected).abs().max().item() < 1e-5 * scale
    assert expected.std() > 1e-2, "logits so flat that any error would pass"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_chunks_and_decodes_in_one_row_equal_each_sequence_alone(arch):
    """Positions that start anywhere: learned and rotary ones must come from `position_ids`."""
    model = build_tiny_model(arch)
    a, b, c = sequences([12, 8, 6])
    expected = [alone(model, sequence, "sdpa") for sequence in (a, b, c)]

    use_dense_attention(model)
    row = PackedRow()
    first = row.run(model, [(0, a[:5]), (1, b[:7])])
    second = row.run(model, [(1, b[7:]), (0, a[5:]), (2, c)])  # a decode, a chunk, a prompt
    assert_close(torch.cat([first[0], second[1]]), expected[0])
    assert_close(torch.cat([first[1], second[0]]), expected[1])
    assert_close(second[2], expected[2])
    assert row.masks_seen == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_probe_accepts(arch):
    model = build_tiny_model(arch)
    before = model.config._attn_implementation
    shape = inspect_model(model)
    assert model.config._attn_implementation == before
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (2, 4, 16)
    assert shape.num_kv_heads == ARCHITECTURES[arch].get("num_key_value_heads", 2)
    assert (shape.vocab_size, shape.max_model_len) == (512, 1024)
    assert (shape.dtype, shape.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ROTARY)
def test_scaled_rotary_tables_are_right_in_a_packed_row(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROTARY[kind]}
    model = build_tiny_model("llama", rope_parameters=rope)
    limit = inspect_model(model).max_model_len
    assert limit == (256 if kind == "longrope" else 1024)

    tokens = sequences([limit, 3, 40])
    expected = [alone(model, sequence) for sequence in tokens]
    plain = build_tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    if kind != "dynamic":  # it has no effect up to the context
        assert not torch.allclose(alone(plain, tokens[2]), expected[2], atol=1e-2)

    use_dense_attention(model)
    for got, want in zip(PackedRow().run(model, list(enumerate(tokens))), expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 1024), ("longrope", 256)])
def test_a_rotary_table_that_depends_on_the_row_limits_the_length(kind, limit):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROTARY[kind]}
    model = build_tiny_model("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match=rf"max_model_len {limit + 1} exceeds.*{kind}.*{limit}"):
        inspect_model(model, limit + 1)
    assert inspect_model(model, limit).max_model_len == limit

    # Why: beyond the limit one long sequence changes the results of its short neighbour.
    long, short = sequences([2 * limit, 20])
    expected = alone(model, short)
    use_dense_attention(model)
    logits = PackedRow().run(model, [(0, long), (1, short)])[1]
    assert not torch.allclose(logits, expected, atol=1e-2)


def test_why_a_rotary_scaling_does_not_raise_the_limit():
    for kind in ("linear", "yarn"):
        rope = {"rope_type": kind, "rope_theta": 10000.0, **ROTARY[kind]}
        model = build_tiny_model("llama", rope_parameters=rope)
        with pytest.raises(ValueError, match="2048 exceeds its context") as error:
            inspect_model(model, 2048)
        said = f"rotary scaling '{kind}' by 4 does not raise the limit: the config does not say"
        assert said in str(error.value) and "max_position_embeddings" in str(error.value)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ValueError, match="changes with the longest sequence of a batch"):
        inspect_model(build_tiny_model("llama", rope_parameters=rope), 2048)
    with pytest.raises(ValueError, match=r"its context \(1024\)$"):  # nothing about scaling
        inspect_model(build_tiny_model("llama"), 2048)


def test_a_sliding_window_limits_the_length(caplog):
    model = build_tiny_model("mistral", sliding_window=64)
    with caplog.at_level(logging.WARNING, logger="mini_vllm"):
        assert inspect_model(model).max_model_len == 64
    assert "limited to 64 tokens instead of 1024, since a sliding window" in caplog.text
    assert inspect_model(model, 64).max_model_len == 64
    with pytest.raises(ValueError, match=r"max_model_len 65 exceeds a sliding window \(64\)"):
        inspect_model(model, 65)

    tokens = sequences([64, 20])
    expected = [alone(model, sequence) for sequence in tokens]
    use_dense_attention(model)
    for got, want in zip(PackedRow().run(model, list(enumerate(tokens))), expected, strict=True):
        assert_close(got, want)


def test_a_sliding_window_of_some_layers_counts_too():
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    model = build_tiny_model("qwen2", **windows)
    assert inspect_model(model).max_model_len == 64
    # A window as long as the context, or longer, is none.
    assert inspect_model(build_tiny_model("mistral", sliding_window=1024)).max_model_len == 1024


def test_max_model_len_is_checked_against_the_context():
    model = build_tiny_model("opt")
    assert inspect_model(model, 1024).max_model_len == 1024
    assert inspect_model(model, 7).max_model_len == 7
    with pytest.raises(ValueError, match=r"max_model_len 1025 exceeds its context \(1024\)"):
        inspect_model(model, 1025)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        inspect_model(model, 0)


def test_a_config_without_a_context_needs_max_model_len():
    assert context_length(SimpleNamespace(), [], 100, "M") == 100
    with pytest.raises(ValueError, match="M: the config names no context length; pass max_model"):
        context_length(SimpleNamespace(), [], None, "M")


def test_features_of_other_architectures_limit_the_length():
    config = SimpleNamespace(
        max_position_embeddings=1000,
        layer_types=["chunked_attention", "sliding_attention", "full_attention"],
        sliding_window=200,
        attention_chunk_size=300,
        attn_temperature_tuning=True,
        floor_scale=500,
        rope_parameters={
            "full_attention": {"rope_type": "default"},
            "sliding_attention": {"rope_type": "longrope", "original_max_position_embeddings": 400},
        },
    )
    assert context_length(config, [], None, "M") == 200
    with pytest.raises(ValueError, match="max_model_len 1001 exceeds") as error:
        context_length(config, [100], 1001, "M")
    named = "a sliding window (100), chunked attention (300), temperature tuning of attention (499)"
    assert named in str(error.value)
    assert "rotary scaling 'longrope' (400), its context (1000)" in str(error.value)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
REFUSED = {
    "falcon": ("falcon", {}, "not reached"),
    "falcon with ALiBi": ("falcon", {"alibi": True}, "ALiBi"),
    "stablelm": ("stablelm", {}, "metadata .* is missing"),
    "gemma2": ("gemma2", {"head_dim": 16, "num_key_value_heads": 2}, "soft-capping"),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_key_value_heads": 2}, "sinks"),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}, "ALiBi"),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "ALiBi"),
    "mamba": ("mamba", {}, "not reached"),
    "bert": ("bert", {}, "not causal"),
    "diffllama": ("diffllama", {}, r"exactly once .* 2 layers, .* \[0, 0, 1, 1\]"),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
        r"value head_dim 16 differs from key head_dim 24.*MLA",
    ),
    "falcon_h1": (
        "falcon_h1",
        {"num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "mixes tokens outside attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_named(case):
    arch, changes, message = REFUSED[case]
    sizes = {} if arch == "mpt" else SIZES
    config = AutoConfig.for_model(arch, **{**sizes, **changes, "pad_token_id": 0})
    model = build_random_model(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=message):
        inspect_model(model)
    assert model.config._attn_implementation == before


def test_encoder_decoder_and_multimodal_models_are_refused():
    config = AutoConfig.for_model("t5", d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        inspect_model(AutoModel.from_config(config))
    model = build_tiny_model("llama")
    model.config.vision_config = object()
    with pytest.raises(UnsupportedModel, match="multimodal"):
        inspect_model(model)


class TestTheProbeSeesFaults:
    """Models that are wrong in one way each: the probe must not be fooled."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("arch", ["llama", "gpt2"])
    def test_positions_ignored(self, arch, dtype):
        model = build_random_model(tiny_config(arch), dtype=dtype)
        forward = model.forward
        model.forward = lambda **kw: forward(**{k: v for k, v in kw.items() if k != "position_ids"})
        with pytest.raises(UnsupportedModel, match="ignores position_ids"):
            inspect_model(model)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_neighbours_mixed_outside_attention(self, dtype):
        model = build_random_model(tiny_config("llama"), dtype=dtype)
        mlp = model.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x + x.roll(1, dims=1))
        with pytest.raises(UnsupportedModel, match="mixes tokens outside attention"):
            inspect_model(model)

    def test_an_option_nobody_knows(self):
        model = build_tiny_model("llama")
        attention = model.model.layers[1].self_attn
        forward = attention.forward
        attention.forward = lambda *args, **kw: forward(*args, **kw, window_shape=3)
        with pytest.raises(UnsupportedModel, match=r"layer 1: .*unknown here \(window_shape\)"):
            inspect_model(model)

    def test_a_mask_of_its_own(self):
        model = build_tiny_model("llama")
        attention = model.model.layers[0].self_attn
        forward = attention.forward
        mask = torch.zeros(1, 1, 8, 8)
        attention.forward = lambda **kw: forward(**{**kw, "attention_mask": mask})
        with pytest.raises(UnsupportedModel, match="its own attention mask"):
            inspect_model(model)

    def test_layers_of_different_shapes(self):
        model = build_tiny_model("llama")
        other = build_tiny_model("llama", num_key_value_heads=4)
        model.model.layers[1] = other.model.layers[1]
        model.model.layers[1].self_attn.config = model.config
        with pytest.raises(UnsupportedModel, match=r"layers differ.*\(4, 2, 16\), \(4, 4, 16\)"):
            inspect_model(model)

    def test_logits_to_keep_ignored(self):
        model = build_tiny_model("llama")
        forward = model.forward
        model.forward = lambda logits_to_keep=None, **kw: forward(**kw)
        with pytest.raises(UnsupportedModel, match="ignores logits_to_keep"):
            inspect_model(model)

    def test_attention_that_is_not_plain(self, monkeypatch):
        """Something only the model's own attention does: seen by comparing with it."""
        from transformers.models.llama import modeling_llama

        eager = modeling_llama.eager_attention_forward

        def biased(module, query, key, value, mask, **kw):
            bias = torch.arange(key.shape[2], dtype=query.dtype)
            return eager(module, query, key, value, mask + bias, **kw)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
        with pytest.raises(UnsupportedModel, match="other logits than the model's own"):
            inspect_model(build_tiny_model("llama"))


@pytest.mark.parametrize("part", ["model", "a layer"])
def test_a_model_in_training_mode_is_refused(part):
    """gpt2 has dropout; told as "does not give equal logits" before."""
    model = build_tiny_model("gpt2")
    (model if part == "model" else model.transformer.h[1]).train()
    with pytest.raises(UnsupportedModel, match=r"training mode.*; call model\.eval\(\)"):
        inspect_model(model)
    assert inspect_model(model.eval()).num_layers == 2


def test_the_probe_reads_the_dtype_of_the_cache():
    model = build_random_model(tiny_config("qwen3"), dtype=torch.bfloat16)
    assert inspect_model(model).dtype == torch.bfloat16


def test_an_unknown_tiny_architecture_is_refused():
    with pytest.raises(ValueError, match="no tiny model of architecture 'lama'; known: llama, "):
        tiny_config("lama")
