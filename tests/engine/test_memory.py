"""How many blocks a machine has room for, and the forward that CUDA measures for it."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from shared import SamplingParams, load_stage
from shared.engine.memory import bytes_per_block, choose_num_blocks
from shared.models import inspect_model

STAGES = [load_stage(number) for number in (1, 2, 3, 4)]


def config(**options: Any) -> Any:
    return STAGES[0].EngineConfig(**{"max_model_len": 64, "max_num_seqs": 1000, **options})


def nothing() -> None:
    raise AssertionError("the CPU has no peak to measure")


def test_bytes_of_a_block(tiny: Any) -> None:
    shape = inspect_model(tiny[0])
    cache = STAGES[0].kv_cache.KVCache(shape, num_blocks=3, block_size=4)
    size = sum(x.nbytes for layer in range(shape.num_layers) for x in cache.layer(layer))
    assert 3 * bytes_per_block(shape, 4) == size


def test_a_share_of_what_is_available(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = inspect_model(tiny[0])
    block = bytes_per_block(shape, 16)
    memory = SimpleNamespace(available=100 * block, total=1000 * block)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert choose_num_blocks(shape, config(), nothing) == 25
    assert choose_num_blocks(shape, config(memory_utilization=0.5), nothing) == 50
    assert choose_num_blocks(shape, config(max_num_seqs=2), nothing) == 8, "all seats, all full"
    assert choose_num_blocks(shape, config(num_blocks=1000), nothing) == 1000
    with pytest.raises(ValueError, match=f"take {1001 * block} bytes; cpu has {1000 * block}"):
        choose_num_blocks(shape, config(num_blocks=1001), nothing)
    memory.available = 4 * block - 1
    with pytest.raises(ValueError, match=f"one block of {block} bytes: {block - 1} bytes left"):
        choose_num_blocks(shape, config(), nothing)


def test_the_last_block_of_a_sequence_counts_whole(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of 65 tokens in blocks of 16 take five blocks each, the last one almost empty."""
    shape = inspect_model(tiny[0])
    memory = SimpleNamespace(available=2**40, total=2**40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    options = config(max_model_len=65, max_num_seqs=3)
    assert choose_num_blocks(shape, options, nothing) == 15


@pytest.mark.parametrize("num_blocks", [None, 18])
def test_the_log_says_what_the_pool_holds(
    tiny: Any, caplog: pytest.LogCaptureFixture, num_blocks: int | None
) -> None:
    caplog.set_level("INFO")
    STAGES[0].LLMEngine(
        tiny, max_model_len=90, block_size=16, num_blocks=num_blocks, max_num_seqs=3
    )
    tokens, requests = ("288", "3.0")  # 18 blocks of 16; a request of 90 tokens takes 6 blocks
    assert f"KV cache: {tokens} tokens (18 blocks of 16" in caplog.text
    assert f", {requests} requests of 90 tokens" in caplog.text


@pytest.mark.parametrize(("options", "forwards"), [({}, 1), ({"enforce_eager": False}, 2)])
def test_on_cuda_the_peak_of_a_forward_goes_off(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], forwards: int
) -> None:
    """Of what is free, not of the whole card; once more for the graphs, which keep a forward's."""
    shape = dataclasses.replace(inspect_model(tiny[0]), device=torch.device("cuda"))
    block = bytes_per_block(shape, 16)
    calls: list[str] = []

    def fake(name: str, result: Any) -> None:
        def answer(*_: Any) -> Any:
            calls.append(name)
            return result

        monkeypatch.setattr(torch.cuda, name, answer)

    fake("reset_peak_memory_stats", None)
    fake("memory_allocated", 7 * block)
    fake("max_memory_allocated", 7 * block + 30 * block)
    fake("mem_get_info", (100 * block, 1000 * block))
    fake("empty_cache", None)
    asked = SimpleNamespace(**vars(config()), **options)
    chosen = choose_num_blocks(shape, asked, lambda: calls.append("profile"))
    assert chosen == 90 - 30 * forwards
    measured = [name for name in calls if name != "empty_cache"]
    assert measured[:3] == ["mem_get_info", "memory_allocated", "reset_peak_memory_stats"]
    assert measured[3:5] == ["profile", "max_memory_allocated"]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
@pytest.mark.parametrize(
    ("budget", "context", "most"), [(30, 64, 30), (80, 64, 64), (7, 64, 7), (8, 64, 8)]
)
def test_the_largest_forward_that_can_come(
    tiny: Any, stage: ModuleType, budget: int, context: int, most: int
) -> None:
    options = {"max_num_batched_tokens": budget, "max_model_len": context}
    runner = stage.LLMEngine(tiny, block_size=4, num_blocks=2, **options).model_runner
    run, seen = runner.run, []

    def spy(batch: Any) -> torch.Tensor:
        seen.append(
            (
                sum(s.num_tokens for s in batch.slices),
                runner.kv_cache.num_blocks,
                len(batch.sampling),
            )
        )
        return run(batch)

    runner.run = spy
    runner._profile()
    assert seen == [(most, -(-most // 4), 1)]
    assert not hasattr(runner, "kv_cache"), "the real cache has to fit beside it"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_the_last_token_needs_no_slot(tiny: Any, stage: ModuleType) -> None:
    engine = stage.LLMEngine(tiny, block_size=4, num_blocks=4)
    params = SamplingParams(max_tokens=1, temperature=0)
    [output] = engine.generate([list(range(10, 26))], params, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    with pytest.raises(ValueError, match="16 prompt tokens and 2 to generate"):
        engine.add_request(list(range(10, 26)), SamplingParams(max_tokens=2))
