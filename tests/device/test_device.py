"""The device that is not there disagrees: faults of the usual kinds, each refused or counted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared import SamplingParams, load_stage
from shared.engine.sampler import Sampler
from shared.models import load_model
from tests.contract.helpers import greedy, make_prompt, run

from . import CudaTensor, Device


def on_device(*values: Any) -> Tensor:
    return torch.tensor(values, device="cuda")


def record(what: Callable[[], object]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        what()


# Operations that no CUDA device does, and what it says.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a sum of host and device": (lambda: on_device(1.0, 2.0) + torch.ones(2), "same device"),
    "a matrix on the host": (lambda: torch.eye(2) @ torch.eye(2, device="cuda"), "same device"),
    "a list of both": (lambda: torch.cat([on_device(1.0), torch.ones(1)]), "same device"),
    "a host tensor indexed from the device": (lambda: torch.ones(3)[on_device(1)], "indices"),
    "rows of the host picked from the device": (
        lambda: torch.ones(3).index_select(0, on_device(1)),
        "same device",
    ),
    "rows written from the host": (
        lambda: on_device(1.0, 2.0).index_copy_(0, on_device(1), torch.ones(1)),
        "same device",
    ),
    "values from the host for an index": (
        lambda: on_device(1.0, 2.0, 3.0).__setitem__(on_device(0, 1), torch.ones(2)),
        "same device",
    ),
    "a generator of the host": (
        lambda: torch.empty(2, device="cuda").uniform_(generator=torch.Generator()),
        "generator",
    ),
    "numpy": (lambda: on_device(1.0).numpy(), "numpy"),
    "more memory than there is": (
        lambda: torch.empty(2**34, dtype=torch.uint8, device="cuda"),
        "out of memory",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_it_refuses(device: Device, fault: str) -> None:
    operation, message = REFUSED[fault]
    with pytest.raises((RuntimeError, TypeError), match=message):
        operation()


# What makes the host wait, and how often.
WAITS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "bool": (lambda x: bool((x > 0).all()), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "a boolean index": (lambda x: x[x > 1], 1),
    "torch.equal": (lambda x: torch.equal(x, x), 1),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1),
    "a list as an index": (lambda x: x[[0, 1]], 1),
    "a list as a tensor": (lambda x: torch.tensor([1, 2], device="cuda"), 1),
    "a copy from pageable memory": (lambda x: x.copy_(torch.ones(3), non_blocking=True), 1),
    "a value put in one place": (lambda x: x.__setitem__(0, 1.0), 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), 1),
    # and what does not
    "a copy from pinned memory": (
        lambda x: torch.tensor([1, 2], pin_memory=True).to("cuda", non_blocking=True),
        0,
    ),
    "arithmetic, slices, a number": (lambda x: x[1:].mul_(2).add(1).softmax(0)[:1], 0),
    "a mask with a number": (lambda x: x.masked_fill_(x > 1, 0.0), 0),
    "indices of the device": (lambda x: x[torch.arange(2, device="cuda")], 0),
    "topk, sort, argmax": (lambda x: (x.topk(2), x.sort(), x.argmax()), 0),
}


@pytest.mark.parametrize("operation", WAITS)
def test_it_counts_waits_and_refuses_them_in_a_graph(device: Device, operation: str) -> None:
    """An operation that waits cannot be recorded; the others can."""
    function, expected = WAITS[operation]
    x = on_device(1.0, 2.0, 3.0)
    function(x)  # what is done once, at first
    device.waits.clear()
    function(x)
    assert len(device.waits) == expected, device.waits
    if expected:
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            record(lambda: function(x))
    else:
        record(lambda: function(x))


def test_a_wait_is_told_with_its_place(device: Device) -> None:
    logits = torch.randn(2, 50, device="cuda")
    device.waits.clear()
    request = SimpleNamespace(params=greedy(3), token_ids=[])
    Sampler().sample(logits, [request] * 2)
    [wait] = device.waits
    assert "a copy to the host at shared/engine/sampler.py:" in wait and "in _read" in wait


def test_a_replay_reads_what_its_inputs_hold_by_then(device: Device) -> None:
    """Tensors are read anew; numbers and shapes are those of the recording."""
    x, factor = on_device(1.0, 2.0), 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * factor)[1:] + x[:1]
    factor = 5
    x.copy_(on_device(10.0, 20.0))
    graph.replay()
    assert y.tolist() == [20 * 3 + 10], f"not with the factor {factor} of later"


def test_values_survive_the_way_there_and_back(device: Device) -> None:
    values = torch.randn(3, 4)
    there = values.to("cuda")
    assert isinstance(there, CudaTensor) and there.is_cuda and there.device.index == 0
    there[1:, ::2] *= 2
    values[1:, ::2] *= 2
    assert torch.equal(there.cpu(), values)
    assert torch.equal((there.T @ there).cpu(), values.T @ values)


def test_memory_is_counted_until_it_is_free(device: Device) -> None:
    x = torch.empty(1000, dtype=torch.uint8, device="cuda")
    view = x[10:]
    assert (device.allocated, torch.cuda.mem_get_info()[0]) == (1000, 2**33 - 1000)
    del x
    assert device.allocated == 1000, "the view lies in it"
    del view
    assert (device.allocated, device.peak) == (0, 1000)


# Faults of the usual kinds in the engine's own modules: what is broken, and by what.
PLANTED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "the runner leaves its row on the host": (
        "model_runner.ModelRunner",
        "_tensor",
        lambda self, values, dtype=torch.long: torch.tensor(values, dtype=dtype),
    ),
    "block tables on the host": (
        "paged_attention_triton",
        "paged_decode",
        lambda original, *args, **options: original(  # args: only `warm_up` has them
            *args,
            **({**options, "block_tables": options["block_tables"].cpu()} if options else {}),
        ),
    ),
    "the cache is on the host": (
        "paged_attention_triton",
        "store_kv",
        lambda original, key, value, k_cache, v_cache, slots: original(
            key, value, torch.zeros(k_cache.shape), torch.zeros(v_cache.shape), slots
        ),
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("number", [2, 4])
def test_planted_in_a_stage(
    device: Device, monkeypatch: pytest.MonkeyPatch, number: int, fault: str
) -> None:
    """The engine's requests end with an error; without the fault they get their tokens."""
    place, name, replacement = PLANTED[fault]
    stage = load_stage(number)
    pair = load_model("tiny", device="cuda", dtype="float32")
    options = {"num_blocks": 16, "max_num_seqs": 2, "enforce_eager": True}
    [output] = run(stage.LLMEngine(pair, **options), [make_prompt(5)], greedy(3))
    assert output.finish_reason == "length"

    module, _, owner = place.partition(".")
    broken: Any = importlib.import_module(f"{stage.__name__}.{module}")
    broken = getattr(broken, owner) if owner else broken
    if not owner:
        original, function = getattr(broken, name), replacement
        replacement = lambda *args, **options: function(original, *args, **options)  # noqa: E731
    monkeypatch.setattr(broken, name, replacement)
    try:
        [output] = run(stage.LLMEngine(pair, **options), [make_prompt(5)], greedy(3))
    except (RuntimeError, ValueError):
        return  # as early as in the construction
    assert output.finish_reason == "error"


def test_a_generator_of_the_host_in_the_sampler(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = importlib.import_module("shared.engine.sampler")
    host = torch.Generator("cpu").manual_seed
    monkeypatch.setattr(sampler, "_seeded", lambda seed, device: host(seed))
    pair = load_model("tiny", device="cuda", dtype="float32")
    engine = load_stage(4).LLMEngine(pair, num_blocks=16, max_num_seqs=2, enforce_eager=True)
    [output] = run(engine, [make_prompt(5)], SamplingParams(max_tokens=3, seed=1))
    assert output.finish_reason == "error"


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_forward_that_waits_is_not_recorded(
    device: Device, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine says so and goes on without graphs, with the same tokens."""
    pair = load_model("tiny", device="cuda", dtype="float32")
    stage = load_stage(number)
    options = {"num_blocks": 16, "max_num_seqs": 2}
    [expected] = run(stage.LLMEngine(pair, **options), [make_prompt(5)], greedy(3))
    assert device.replays == 2

    def wait(_module: Any, args: Any) -> None:
        args[0].sum().item()

    handle = pair.model.model.layers[1].register_forward_pre_hook(wait)
    try:
        engine = stage.LLMEngine(pair, **options)
        [output] = run(engine, [make_prompt(5)], greedy(3))
    finally:
        handle.remove()
    assert engine.model_runner.graphs is None and device.replays == 2
    assert "without CUDA graphs: CUDA error: operation not permitted" in caplog.text
    assert output.token_ids == expected.token_ids
