"""Packed linear layers compute what plain ones do, and free what they replace."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from torch import nn

from shared.models import load_model, packed_linear
from shared.models.packed_linear import PackedLinear, can_pack, pack_linears
from shared.models.tiny import ARCHITECTURES, build_tiny_model

needs_onednn = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.is_contiguous()
    if expected.numel():
        scale = max(1.0, expected.abs().max().item())
        assert (got - expected).abs().max().item() < 1e-5 * scale


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (33, 7), (1, 1), (576, 192)])
@torch.inference_mode()
def test_the_output_is_that_of_the_plain_layer(inputs, outputs, bias):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    packed = PackedLinear(linear)
    for rows in (0, 1, 2, 8, 33, 300):  # no rows: a step in which no token is sampled
        x = torch.randn(1, rows, inputs)
        assert_close(packed(x), linear(x))
        assert_close(packed(x[0]), linear(x[0]))
    strided = torch.randn(2 * inputs, 5).t()[:, ::2]
    assert not strided.is_contiguous() or inputs == 1
    assert_close(packed(strided), linear(strided))


@needs_onednn
@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_a_packed_model_gives_the_logits_of_the_plain_one(arch):
    model = build_tiny_model(arch)
    packed = copy.deepcopy(model)
    assert pack_linears(packed) > 0
    assert not any(type(module) is nn.Linear for module in packed.modules())
    tokens = torch.arange(3, 40)[None]
    assert_close(packed(tokens).logits, model(tokens).logits)


@needs_onednn
def test_a_tied_output_layer_is_packed_and_the_embedding_keeps_its_table():
    model = build_tiny_model("gpt2")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    table = model.get_input_embeddings().weight
    pack_linears(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert model.get_input_embeddings().weight is table
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")


@needs_onednn
def test_the_plain_weights_are_freed_one_by_one(monkeypatch):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def packed(linear):
        alive.append(sum(ref() is not None for ref in weights))
        return PackedLinear(linear)

    monkeypatch.setattr(packed_linear, "PackedLinear", packed)
    assert pack_linears(model) == 4
    assert alive == [4, 3, 2, 1]  # a peak of one layer, not of a second model
    assert all(ref() is None for ref in weights)


@needs_onednn
def test_a_packed_layer_tells_its_shape():
    packed = PackedLinear(nn.Linear(8, 6))
    assert (packed.in_features, packed.out_features) == (8, 6)
    assert repr(packed) == "PackedLinear(in_features=8, out_features=6, packed for oneDNN)"


def test_what_cannot_be_packed_stays_as_it_is():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Embedding(4, 4))
    before = list(model)
    assert pack_linears(model) == 0
    assert list(model) == before


def test_without_onednn_nothing_changes_but_one_log_line(monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = list(model)
    with caplog.at_level(logging.WARNING, logger="mini_vllm"):
        assert pack_linears(model) == 0
    assert list(model) == before
    assert [record.getMessage() for record in caplog.records] == [
        "this torch has no oneDNN: linear layers stay unpacked, decoding is slower"
    ]


@needs_onednn
def test_load_model_packs_only_where_it_should():
    assert isinstance(load_model("tiny", "cpu").model.lm_head, PackedLinear)
    assert type(load_model("tiny", "cpu", pack_linears=False).model.lm_head) is nn.Linear
    assert type(load_model("tiny", "cpu", "bfloat16").model.lm_head) is nn.Linear
