"""What reaches the model: one row of tokens, where its keys and values lie, no cache but ours."""

from __future__ import annotations

import importlib
from itertools import accumulate, takewhile
from typing import Any

import pytest
import torch

from shared import SamplingParams, load_stage


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_inputs_of_each_step(tiny: Any, number: int) -> None:
    model, _ = tiny
    engine = load_stage(number).LLMEngine(tiny, num_blocks=64, block_size=4, max_num_seqs=3)
    calls: list[dict] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, inputs: calls.append(inputs), with_kwargs=True
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
    try:
        engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    finally:
        hook.remove()
    num_decodes = []
    for step, inputs in zip(engine.trace.steps, calls, strict=True):
        shapes = [tuple(inputs[name].shape) for name in ("input_ids", "position_ids")]
        assert shapes == [(1, step.num_tokens)] * 2
        assert inputs["logits_to_keep"].shape == (len(step.sampled),)
        assert inputs["use_cache"] is False, "transformers would keep keys and values as well"

        meta = inputs["attn_metadata"]
        lens = [n for _, _, n in step.slices]
        ends = [start + n for _, start, n in step.slices]
        assert [*torch.as_tensor(meta.query_start_loc)] == [0, *accumulate(lens)]
        assert [*torch.as_tensor(meta.context_lens)] == ends
        if number > 1:
            num_decodes.append(len([*takewhile(lambda n: n == 1, lens)]))
            assert meta.num_decodes == num_decodes[-1], step.slices
            assert (meta.max_query_len, meta.max_context_len) == (max(lens), max(ends))
            assert meta.block_tables.dtype == meta.context_lens.dtype == torch.int32
    assert number == 1 or {0, 3} <= {*num_decodes}, "prefills alone, and decodes alone"


@pytest.mark.parametrize("number", [2, 3, 4])
def test_graphs_are_recorded_unless_told_otherwise(
    tiny: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels' own word for it: Triton's can be recorded, the others cannot."""
    pytest.importorskip("triton")
    stage = load_stage(number)
    triton = importlib.import_module(f"{stage.__name__}.paged_attention_triton")
    cuda_graph = importlib.import_module(f"{stage.__name__}.cuda_graph")
    recorded: list[int] = []

    def record(forward: Any, inputs: dict[str, Any], pool: Any) -> Any:
        recorded.append(inputs["input_ids"].shape[1])

    monkeypatch.setattr(cuda_graph, "record_cuda_graph", record)
    options = {"num_blocks": 8, "max_num_seqs": 4, "attention_backend": "gather"}
    assert stage.LLMEngine(tiny, **options).model_runner.graphs is None
    monkeypatch.setattr(stage.model_runner, "load_kernels", lambda *_: triton)
    assert stage.LLMEngine(tiny, enforce_eager=True, **options).model_runner.graphs is None
    assert recorded == []
    assert stage.LLMEngine(tiny, **options).model_runner.graphs is not None
    assert recorded == [4, 2, 1]


def test_an_engine_goes_on_without_graphs_that_cannot_be_recorded(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = load_stage(4)
    cuda_graph = importlib.import_module(f"{stage.__name__}.cuda_graph")
    gather = importlib.import_module(f"{stage.__name__}.paged_attention_gather")

    def record(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(cuda_graph, "record_cuda_graph", record)
    monkeypatch.setattr(gather, "CUDA_GRAPHS", True, raising=False)
    engine = stage.LLMEngine(tiny, num_blocks=8, attention_backend="gather")
    assert engine.model_runner.graphs is None
    assert "without CUDA graphs: operation not permitted" in caplog.text
    assert "and more" not in caplog.text
    [output] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.finish_reason in ("length", "stop")


def test_the_default_chunks_are_those_that_the_options_tell() -> None:
    stage = load_stage(4)
    sizes = stage.model_runner.CHUNK_SIZES
    told = " ".join((stage.EngineConfig.__doc__ or "").split())
    assert f"None is {sizes['cuda']} on CUDA, {sizes['cpu']} on CPU" in told
