"""Whole engines on the device that is not there: kernels behind their checks, graphs, dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shared import SamplingParams, load_stage
from shared.engine import sampler
from shared.models import load_model
from shared.models.tiny import ARCHITECTURES, build_tiny_model
from tests.contract.helpers import (
    check_reference,
    compare_with_generate,
    drain,
    expect,
    greedy,
    make_prompt,
    poison_cache,
    preempted,
    run,
)

from . import Device

STAGES = (1, 2, 3, 4)
DTYPES = ("float32", "bfloat16", "float16")
# Every architecture, and every stage with every dtype; with --long all with all.
FULL = list(itertools.product(ARCHITECTURES, STAGES, DTYPES))
PAIRS = [(arch, STAGES[i % 4], DTYPES[i % 3]) for i, arch in enumerate(ARCHITECTURES)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        combinations = FULL if metafunc.config.getoption("--long") else PAIRS
        metafunc.parametrize(
            "combination", combinations, ids=lambda values: "-".join(map(str, values))
        )


def test_the_pairs_are_enough() -> None:
    assert {pair[0] for pair in PAIRS} == {*ARCHITECTURES}
    assert {pair[1:] for pair in PAIRS} == {*itertools.product(STAGES, DTYPES)}


def on_host(number: int, pair: Any, prompts: list[list[int]], params: Any, **options: Any) -> Any:
    """What the stage computes on the CPU, with kernels that do as those of the device do here."""
    if number > 1:
        options["attention_backend"] = "gather"
    engine = load_stage(number).LLMEngine(pair, num_blocks=64, max_num_seqs=4, **options)
    return run(engine, prompts, params)


def test_greedy_identity(device: Device, combination: tuple[str, int, str]) -> None:
    """Three prompts, so that batches lie between two graphs; tokens are those of the host.

    In float32 they are those of `generate()`. In 16 bits its rounding is another one.
    """
    arch, number, dtype = combination
    stage = load_stage(number)
    prompts = [make_prompt(length, seed=1) for length in (9, 1, 5)]
    host = load_model(f"tiny:{arch}", device="cpu", dtype=dtype, pack_linears=False)
    there = load_model(f"tiny:{arch}", device="cuda", dtype=dtype)
    engine = stage.LLMEngine(there, num_blocks=16, block_size=4, max_num_seqs=4)
    poison_cache(engine)
    outputs = run(engine, prompts, [greedy(n) for n in (6, 4, 6)])
    wanted = on_host(number, host, prompts, [greedy(n) for n in (6, 4, 6)], block_size=4)
    expect([o.token_ids for o in outputs], [o.token_ids for o in wanted], "tokens.", engine)
    if number > 1:
        assert device.replays == 5, "each decode step is replayed"
    if dtype == "float32":
        model = build_tiny_model(arch)
        compared = [compare_with_generate(o, model, len(o.token_ids)) for o in outputs]
        assert sum(compared) > 8, f"too many near ties to say anything: {compared}"


@pytest.mark.parametrize("number", STAGES)
def test_mixed_traffic(device: Device, tiny: Any, number: int) -> None:
    """Two engines on one model and `generate()` in between; a small pool; batches that shrink.

    So a replayed batch has rows of padding that a larger one filled before.
    """
    stage = load_stage(number)
    there = load_model("tiny", device="cuda", dtype="float32")
    assert torch.equal(there.model.lm_head.weight.cpu(), build_tiny_model().lm_head.weight)
    engines = [stage.LLMEngine(there, block_size=4, num_blocks=n, max_num_seqs=4) for n in (8, 30)]
    lengths = {}
    for engine, seed in zip(engines, (0, 1), strict=True):
        poison_cache(engine)
        for i, length in enumerate((9, 3, 14, 6)):
            request_id = engine.add_request(make_prompt(length, seed=seed), greedy(4 + 3 * i))
            lengths[engine, request_id] = 4 + 3 * i
    outputs: list[dict[str, list]] = [{}, {}]
    for _ in range(3):
        for engine, seen in zip(engines, outputs, strict=True):
            for output in engine.step():
                seen.setdefault(output.request_id, []).append(output)
    ids = torch.tensor([make_prompt(5)], device="cuda")
    there.model.set_attn_implementation("sdpa")
    there.model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    for engine, seen in zip(engines, outputs, strict=True):
        engine.add_request(make_prompt(9, seed=5), greedy(2), request_id="late")
        lengths[engine, "late"] = 2
        drain(engine, seen)
        assert len(seen) == 5
        for request_id, (*_, last) in seen.items():
            check_reference(last, tiny, lengths[engine, request_id], engine)
    assert preempted(engines[0]), "the pool was not small enough: nobody was preempted"
    if number > 1:
        assert device.replays > 15
        steps = [step for step in engines[1].trace.steps if step.num_tokens == len(step.slices)]
        sizes = [len(step.slices) for step in steps]
        assert {*sizes} == {1, 2, 3, 4}, f"3 is between two graphs: {sizes}"


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"seed": 3, "temperature": 0.7},
    "top_k": {"seed": 3, "top_k": 5},
    "top_p": {"seed": 3, "top_p": 0.6},
    "min_p": {"seed": 3, "min_p": 0.2},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
    "logit_bias": {"temperature": 0, "logit_bias": {7: 3.0, 9: -2.0}},
    "min_tokens": {"temperature": 0, "min_tokens": 5, "ignore_eos": False, "stop_token_ids": [11]},
    "logprobs": {"temperature": 0, "logprobs": 4},
}
OPTIONS["all"] = {
    name: value
    for options in OPTIONS.values()
    for name, value in options.items()
    if (name, value) != ("temperature", 0)
}


@pytest.mark.parametrize("option", OPTIONS)
def test_sampling(device: Device, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Each option alone and all at once, beside a greedy request and one without a seed.

    The seeds' numbers are made alike on both sides, so the tokens must be, too.
    """
    number, dtype = STAGES[list(OPTIONS).index(option) % 4], DTYPES[list(OPTIONS).index(option) % 3]
    monkeypatch.setattr(
        sampler, "_seeded", lambda seed, where: torch.Generator(where).manual_seed(seed)
    )
    prompts = [make_prompt(length, seed=2) for length in (6, 3, 5)]
    wanted = {"max_tokens": 8, "ignore_eos": True} | OPTIONS[option]
    params = [SamplingParams(**wanted), greedy(8), SamplingParams(max_tokens=8, ignore_eos=True)]
    host = load_model("tiny", device="cpu", dtype=dtype, pack_linears=False)
    there = load_model("tiny", device="cuda", dtype=dtype)
    options = {"num_blocks": 64, "max_num_seqs": 4}
    outputs = run(load_stage(number).LLMEngine(there, **options), prompts, params)
    expected = on_host(number, host, prompts, params)
    for output, right in zip(outputs[:2], expected[:2], strict=True):
        assert (output.token_ids, output.finish_reason) == (right.token_ids, right.finish_reason)
        assert output.logprobs is None or [*map(list, output.logprobs)] == [
            *map(list, right.logprobs)
        ]
    assert outputs[2].finish_reason == "length"


def test_the_numbers_of_a_seed_on_the_device_are_its_own(device: Device) -> None:
    """With the engine's own generators: the same tokens alone and in company, run after run."""
    there = load_model("tiny", device="cuda", dtype="float32")
    engine = load_stage(4).LLMEngine(there, num_blocks=64, max_num_seqs=4)
    seeded = SamplingParams(max_tokens=8, ignore_eos=True, seed=7)
    [alone] = run(engine, [make_prompt(5)], seeded)
    other = SamplingParams(max_tokens=5, ignore_eos=True)
    again = run(engine, [make_prompt(3), make_prompt(5), make_prompt(9)], [other, seeded, seeded])
    assert again[1].token_ids == alone.token_ids != again[2].token_ids


@pytest.mark.parametrize("number", [2, 3, 4])
def test_graphs_are_recorded_with_the_kernels_own_flag(
    device: Device, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whether an engine records them is the Triton module's word; eager steps say the same."""
    stage = load_stage(number)
    there = load_model("tiny", device="cuda", dtype="float32")
    options = {"num_blocks": 32, "max_num_seqs": 4}
    outputs = {}
    for eager in (False, True):
        engine = stage.LLMEngine(there, enforce_eager=eager, **options)
        before = device.replays
        outputs[eager] = [o.token_ids for o in run(engine, [make_prompt(4)] * 3, greedy(5))]
        assert device.replays - before == (0 if eager else 4)
    assert outputs[True] == outputs[False]
