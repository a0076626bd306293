"""Decode graphs: what is copied in, what is padded. Here a "graph" just runs the forward again."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from shared import SamplingParams
from tests.contract.helpers import graphed

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def prompts_of(num_prompts: int) -> list[list[int]]:
    return [[(7 * i + j) % 200 + 1 for j in range(3 + i % 5)] for i in range(num_prompts)]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_ladder(stage: ModuleType, max_num_seqs: int, sizes: list[int]) -> None:
    cuda_graph = importlib.import_module(f"{stage.__name__}.cuda_graph")
    assert cuda_graph.ladder(max_num_seqs) == sizes


def test_K6_padded_replay_equals_eager(stage: ModuleType, make_engine: Any) -> None:
    """Batches of 7, 6, .. 1: between two sizes, and each smaller than the one before it."""
    prompts = prompts_of(7)
    params = [
        SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options = {"attention_backend": "gather", "max_num_seqs": 8, "max_model_len": 64}
    expected = [o.token_ids for o in make_engine(**options).generate(prompts, params, False)]

    engine = make_engine(**options)
    graphs = graphed(stage, engine)
    sizes, padding, replay = [], [], graphs.replay

    def look(inputs: dict[str, Any]) -> Any:
        n = inputs["input_ids"].shape[1]
        sizes.append(n)
        logits = replay(inputs)
        rest = slice(n, next(size for size in (1, 2, 4, 8) if size >= n))
        padding.extend(torch.stack([graphs.rows[2, rest], graphs.context_lens[rest]], 1).tolist())
        return logits

    graphs.replay = look
    outputs = engine.generate(prompts, params, False)
    assert [o.token_ids for o in outputs] == expected
    assert set(sizes) == {1, 2, 3, 4, 5, 6, 7}, f"replayed batch sizes {sizes}"
    # What a larger batch left in these rows was written for requests that may be gone by now.
    assert padding and all(row == [-1, 0] for row in padding), f"their slots, contexts: {padding}"


def test_K6_table_at_its_widest(stage: ModuleType, make_engine: Any) -> None:
    """A sequence that fills the context to its last position, right after a wide batch."""
    options = {"attention_backend": "gather", "max_num_seqs": 4, "max_model_len": 20}
    prompts = [[5] * 10, [6] * 19, [7] * 4]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = [o.token_ids for o in make_engine(**options).generate(prompts, params, False)]
    engine = make_engine(**options)
    graphs = graphed(stage, engine)
    assert graphs.block_tables.shape == (4, 5)
    outputs = engine.generate(prompts, params, False)
    assert [o.token_ids for o in outputs] == expected
    assert [len(tokens) for tokens in expected] == [10, 1, 16]


def test_padding_rows_write_nothing(stage: ModuleType, make_engine: Any) -> None:
    """K1: rows of padding have slot -1; the pool's last slot keeps what it holds."""
    engine = make_engine(attention_backend="gather", max_num_seqs=8, num_blocks=16)
    graphs = graphed(stage, engine)
    slots = []  # of each replay, those of padding rows included
    for size, replay in list(graphs.replays.items()):
        graphs.replays[size] = lambda size=size, replay=replay: (
            slots.append(graphs.rows[2, :size].tolist()),
            replay(),
        )[1]
    pool = engine.model_runner.kv_cache.pool
    pool[:, :, -1, -1] = 123.0
    engine.generate(prompts_of(3), GREEDY, False)
    assert len(slots) == 9 and all(len(row) == 4 and row[3] == -1 for row in slots), slots
    assert (pool[:, :, -1, -1] == 123.0).all()


def test_a_prefill_is_not_replayed(stage: ModuleType, make_engine: Any) -> None:
    engine = make_engine(attention_backend="gather")
    graphs = graphed(stage, engine)
    replayed = []
    replay = graphs.replay
    graphs.replay = lambda inputs: (replayed.append(inputs), replay(inputs))[1]
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=1), False)
    assert not replayed


@pytest.mark.gpu
def test_graphs_on_a_device(stage: ModuleType) -> None:
    """Real graphs give the tokens of eager steps, at batch sizes between the captured ones."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from shared.models import load_model

    pair = load_model("tiny", device="cuda", dtype="float32")
    options = {"model": pair, "num_blocks": 128, "max_num_seqs": 12}
    eager = stage.LLMEngine(enforce_eager=True, **options)
    expected = [o.token_ids for o in eager.generate(prompts_of(11), GREEDY, False)]
    engine = stage.LLMEngine(**options)
    assert engine.model_runner.graphs is not None
    assert [o.token_ids for o in engine.generate(prompts_of(11), GREEDY, False)] == expected
