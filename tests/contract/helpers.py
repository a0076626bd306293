"""What the tests of the contract share: driving an engine, and saying what went wrong.

Uses only an engine's public face, but for `poison_cache` and `graphed`: these know a `ModelRunner`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from shared import RequestOutput, SamplingParams
from tests.reference import reference, reference_tokens

MakeEngine = Callable[..., Any]


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    """The likeliest token, always, and exactly `max_tokens` of them unless an option ends it."""
    return SamplingParams(
        max_tokens=max_tokens, **{"temperature": 0, "ignore_eos": True, **options}
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of the tiny model, without its special tokens; another one for each seed."""
    return random.Random(1000 * length + seed).choices(range(3, 512), k=length)


def drain(engine: Any, outputs: dict[str, list[RequestOutput]] | None = None) -> dict[str, list]:
    """Step until nothing is left; return all outputs of each request, in order.

    Args:
        outputs: of earlier steps; the new ones are added.
    """
    outputs = {} if outputs is None else outputs
    for _ in unfinished(engine):
        collect(engine.step(), outputs)
    return outputs


def unfinished(engine: Any, most: int = 2000) -> Iterator[None]:
    """For a loop that makes a step in each round: it ends when nothing is left.

    Raises AssertionError after `most` rounds, so that no engine keeps a test for ever.
    """
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return
        yield
    raise AssertionError(
        f"{most} steps did not finish all requests; the last:\n{last_steps(engine)}"
    )


def collect(new: list[RequestOutput], outputs: dict[str, list[RequestOutput]]) -> None:
    """Sort the outputs of a step into `outputs`; nothing may come after a last one."""
    for output in new:
        earlier = outputs.setdefault(output.request_id, [])
        assert not (earlier and earlier[-1].finished), (
            f"request {output.request_id!r} had ended with {earlier[-1].finish_reason!r}, and yet "
            f"there is another output of it: {output}"
        )
        earlier.append(output)


def run(
    engine: Any, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list:
    """Add all prompts at once, step to the end, return each request's last output in order."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    outputs = drain(engine)
    return [outputs[request_id][-1] for request_id in ids]


def check_tokens(
    output: RequestOutput, expected: list[int], engine: Any, reason: str | None = "length"
) -> None:
    """Assert that a finished request has exactly these tokens, and say where it went wrong.

    Args:
        reason: the finish reason that is expected; None does not look at it.
    """
    got, name = list(output.token_ids), f"request {output.request_id!r}"
    if got != expected:
        first = next(
            (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
            min(len(got), len(expected)),
        )
        sampled = [step for step in engine.trace.steps if output.request_id in step.sampled]
        where = f" It was sampled in {describe(sampled[first])}" if first < len(sampled) else ""
        raise AssertionError(
            f"{name} ({len(output.prompt_token_ids)} prompt tokens, ended with "
            f"{output.finish_reason!r}) differs from the same prompt alone at its token {first}: "
            f"{got[first : first + 1]} instead of {expected[first : first + 1]}.{where}\n"
            f"  got      {got}\n  expected {expected}"
        )
    assert output.finished, f"{name} is not finished"
    assert reason is None or output.finish_reason == reason, (
        f"{name} ended with {output.finish_reason!r} after {len(got)} tokens, expected {reason!r}"
    )


def check_reference(output: RequestOutput, tiny: Any, num_tokens: int, engine: Any) -> None:
    """Assert that a request ended with `num_tokens` tokens, those of `generate()`."""
    check_tokens(output, reference_tokens(tiny[0], output.prompt_token_ids, num_tokens), engine)


def compare_with_generate(output: RequestOutput, model: Any, num_tokens: int) -> int:
    """Assert that a request has the tokens of `generate()`; return how many were compared.

    Where the two best tokens are closer than rounding, either is right, and the rest of the output
    depends on the choice; so the comparison ends there.
    """
    wanted, margins = reference(model, output.prompt_token_ids, num_tokens)
    sure = next((i for i, margin in enumerate(margins) if margin < 1e-4), num_tokens)
    got = output.token_ids
    assert len(got) == num_tokens and output.finish_reason == "length", output
    assert got[:sure] == wanted[:sure], (
        f"request {output.request_id!r}, prompt {output.prompt_token_ids}:\n"
        f"  got        {got}\n  generate() {wanted}\n"
        f"  its margins {[f'{margin:.1e}' for margin in margins]}"
    )
    return sure


def expect(got: Any, wanted: Any, what: str, engine: Any = None) -> None:
    """Assert that two values are equal; else say what it is about, both values, the last steps.

    Args:
        what: a sentence about the value: whose it is, and why it must be so.
    """
    if got != wanted:
        steps = f"\nThe last steps:\n{last_steps(engine, 10)}" if engine else ""
        raise AssertionError(f"{what}\n  expected {wanted}\n  came     {got}{steps}")


def check_idle(engine: Any) -> None:
    """Assert that nothing is left to do, and that all blocks are free."""
    manager = engine.block_manager
    assert not engine.has_unfinished_requests(), "nothing lives, but the engine has unfinished work"
    assert manager.num_free_blocks == manager.num_blocks, (
        f"nothing runs, yet only {manager.num_free_blocks} of {manager.num_blocks} blocks are free"
    )


def preempted(engine: Any) -> list[str]:
    """The ids of all requests that lost their blocks so far, in order."""
    return [request_id for step in engine.trace.steps for request_id in step.preempted]


def describe(step: Any) -> str:
    """One step in words: `step 7: 'a' 0..9, 'b' 5..6`."""
    slices = [f"{i!r} {start}..{start + num}" for i, start, num in step.slices]
    lost = f"; preempted {step.preempted}" if step.preempted else ""
    return f"step {step.index}: {', '.join(slices)}{lost}"


def last_steps(engine: Any, count: int = 5) -> str:
    return "\n".join(describe(step) for step in engine.trace.steps[-count:]) or "(no step)"


def poison_cache(engine: Any) -> None:
    """Fill the KV cache with NaN, so that reading a slot that was never written shows."""
    engine.model_runner.kv_cache.pool.fill_(float("nan"))


def graphed(stage: ModuleType, engine: Any) -> Any:
    """Give an engine decode graphs that replay by calling the forward on their own inputs."""
    cuda_graph = importlib.import_module(f"{stage.__name__}.cuda_graph")
    runner = engine.model_runner
    runner.graphs = cuda_graph.DecodeGraphs(
        runner._forward,
        runner.config,
        runner.kv_cache,
        runner.kernels,
        record=lambda forward, inputs, pool: lambda: forward(inputs),
    )
    return runner.graphs


@contextmanager
def scripted(model: Any, prompt_len: int, token_ids: list[int]) -> Iterator[None]:
    """Within, the model answers every prompt of `prompt_len` tokens with `token_ids`.

    The last one is repeated. Made by replacing the logits, so it works with any engine.
    """

    def replace(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        keep = kwargs.get("logits_to_keep", 0)
        positions = kwargs["position_ids"][0]
        positions = positions[-keep:] if isinstance(keep, int) else positions[keep]
        output.logits = torch.full_like(output.logits, -100.0)
        for row, position in enumerate(positions.tolist()):
            index = min(max(0, position - prompt_len + 1), len(token_ids) - 1)
            output.logits[0, row, token_ids[index]] = 100.0
        return output

    handle = model.register_forward_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def failing(model: Any, error: BaseException, after: int = 0) -> Iterator[None]:
    """Within, the forward after `after` good ones raises `error` in its second layer.

    The first layer has written its keys and values by then. Only that one forward fails.
    """
    remaining = after

    def fail(module: Any, args: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == -1:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
        assert remaining < 0, "the test never came to the forward that should fail"
    finally:
        handle.remove()
