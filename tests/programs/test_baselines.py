"""The baselines say what `generate()` says, and tell when."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from shared import SamplingParams, load_stage
from shared.measure import baselines
from shared.measure.runner import run_generate_batch
from shared.measure.workloads import chat, long_prompt

PROMPTS = [[5, 9, 77, 140, 8], [300, 4, 4, 19, 222, 31, 60, 7, 90], [44] * 3]
MAX_TOKENS = [6, 9, 4]
NEEDS_PAGES = pytest.mark.skipif(
    not hasattr(ContinuousBatchingConfig(), "page_size"), reason="transformers is too old"
)


@pytest.fixture(scope="module")
def stock() -> Any:
    from shared.models import load_model

    return load_model("tiny", device="cpu", dtype="float32", pack_linears=False).model


@pytest.fixture(scope="module")
def expected(stock: Any) -> list[list[int]]:
    """Greedy tokens by a plain loop over full forwards, written out once more."""
    rows = []
    for prompt, n in zip(PROMPTS, MAX_TOKENS, strict=True):
        ids = list(prompt)
        for _ in range(n):
            with torch.inference_mode():
                logits = stock(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    assert len({tuple(row) for row in rows}) == 3  # not all alike, or nothing would be tested
    return rows


def check(results: list[baselines.Generated], expected: list[list[int]]) -> None:
    now = time.perf_counter()
    for result, tokens in zip(results, expected, strict=True):
        assert result.token_ids == tokens
        assert len(result.token_times) == len(tokens)
        assert result.token_times == sorted(result.token_times)
        assert now - 60 < result.token_times[0] <= result.token_times[-1] <= now


@pytest.mark.parametrize("generate", [baselines.generate_naive, baselines.generate_cached])
def test_one_by_one(generate: Any, stock: Any, tiny: Any, expected: list[list[int]]) -> None:
    for model in (stock, tiny[0]):  # the latter with packed linear layers
        pairs = zip(PROMPTS, MAX_TOKENS, strict=True)
        check([generate(model, prompt, n) for prompt, n in pairs], expected)


def test_padded_batch_cuts_each_row_at_its_own_length(
    stock: Any, expected: list[list[int]]
) -> None:
    check(baselines.generate_padded(stock, PROMPTS, MAX_TOKENS), expected)


@pytest.fixture
def opinionated(stock: Any) -> Any:
    """The model with a generation config that changes what `generate()` says if it is used."""
    own = stock.generation_config
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [7, 8]}
    settings |= {"do_sample": True, "temperature": 9.0}
    stock.generation_config = GenerationConfig(**settings, eos_token_id=2, pad_token_id=0)
    yield stock
    stock.generation_config = own


def test_a_checkpoint_s_generation_config_changes_no_row(
    opinionated: Any, expected: list[list[int]]
) -> None:
    own = opinionated.generation_config
    inputs = torch.tensor([PROMPTS[0]])
    used = opinionated.generate(inputs, do_sample=False, max_new_tokens=MAX_TOKENS[0])
    assert used[0, len(PROMPTS[0]) :].tolist() != expected[0]  # it would
    check(baselines.generate_padded(opinionated, PROMPTS, MAX_TOKENS), expected)
    assert opinionated.generation_config is own
    if hasattr(ContinuousBatchingConfig(), "page_size"):
        test_continuous_batching_of_transformers(opinionated, expected)
        assert opinionated.generation_config is own


@NEEDS_PAGES
def test_continuous_batching_of_transformers(stock: Any, expected: list[list[int]]) -> None:
    done: dict[str, baselines.Generated] = {}
    seen: list[int] = []
    lengths = [len(p) + n for p, n in zip(PROMPTS, MAX_TOKENS, strict=True)]
    with baselines.continuous_batching(stock, lengths, max(MAX_TOKENS)) as batching:
        for i, (prompt, n) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True)):
            batching.add(str(i), prompt, n, stream=i == 1)
        while len(done) < 3:
            result = batching.poll(timeout=10)
            assert result is not None
            request_id, generated, ended = result
            if request_id == "1":
                seen.append(len(generated.token_ids))
            if ended:
                done[request_id] = generated
        assert batching.poll(timeout=0.01) is None
    assert len(seen) > 1 and seen[-1] == MAX_TOKENS[1]  # it streamed
    check([done[str(i)] for i in range(3)], expected)


def test_an_engine_on_the_same_model_leaves_no_trace(tiny: Any, expected: list[list[int]]) -> None:
    engine = load_stage(1).LLMEngine(model=tiny, block_size=4, num_blocks=32)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in MAX_TOKENS]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    assert [output.token_ids for output in outputs] == expected
    check(baselines.generate_padded(tiny[0], PROMPTS, MAX_TOKENS), expected)


@NEEDS_PAGES
def test_generate_batch_serves_a_workload_and_its_late_requests(stock: Any) -> None:
    text = [3 + (7 * i * i + i) % 499 for i in range(2000)]
    for workload in (
        chat(text, num_requests=3, prompt_tokens=(4, 20), max_tokens=5),
        long_prompt(text, 0, 2, 8, 8, long_prompt_tokens=60, long_tokens=2, after_tokens=3),
    ):
        run = run_generate_batch(stock, workload)
        for request, output in zip(workload.requests, run.outputs, strict=True):
            assert output.request_id == request.request_id
            prompt = list(request.prompt_token_ids)
            alone = baselines.generate_cached(stock, prompt, request.max_tokens)
            assert output.token_ids == alone.token_ids
            assert output.metrics.ttft is not None and output.metrics.ttft > 0
    third_token = run.outputs[1].metrics.token_times[2]
    assert run.outputs[2].metrics.arrival_time == pytest.approx(third_token)


def test_logit_gap(stock: Any) -> None:
    ids = PROMPTS[0]
    with torch.inference_mode():
        logits = stock(torch.tensor([ids])).logits[0, -1]
    assert baselines.logit_gap(stock, ids, 3, 7) == pytest.approx(
        abs(float(logits[3] - logits[7])), abs=1e-4
    )
    assert baselines.logit_gap(stock, ids, 5, 5) == 0
