"""The decode stall in exact numbers: what a running chat waits for when a long prompt arrives.

The same traffic through all stages: four chats are running, then a document of 100 tokens comes.
Counted are tokens, not seconds: for each two tokens of a chat that follow each other, the tokens
computed in the steps after the first, up to and with the step that gave the second.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from shared import load_stage
from shared.engine.trace import StepRecord
from tests.contract.helpers import greedy

CHATS = [f"chat {i}" for i in range(1, 5)]
DOCUMENT = [100 + i for i in range(100)]
WARM = 60  # tokens of the document that another request has left in the prefix cache
CHUNK = 24
BLOCK_SIZE = 4  # divides WARM, so that the hit is exactly that long

# The document and all that decodes once it is there. A stage that computes whole prompts puts the
# prefill in a step of its own; the chats' next tokens come with the step after it, in which the
# document decodes, too.
ALL_DECODES = len(CHATS) + 1


@pytest.fixture
def make_engine(tiny: Any) -> Callable[..., Any]:
    def make(stage: int, **options: Any) -> Any:
        options = {"block_size": BLOCK_SIZE, "num_blocks": 192, **options}
        return load_stage(stage).LLMEngine(model=tiny, **options)

    return make


def run_traffic(engine: Any, warm: int = 0, chat_tokens: int = 40) -> dict[str, Any]:
    """Four chats, then the document; the last output of each request by its id.

    Args:
        warm: tokens of the document that another request leaves in the prefix cache before.
        chat_tokens: how long the chats are.
    """
    if warm:
        engine.generate([*DOCUMENT[:warm], 9], greedy(1), use_tqdm=False)
    first_step = len(engine.trace.steps)
    outputs: dict[str, Any] = {}
    for i, chat in enumerate(CHATS):
        engine.add_request([20 + i] * 6, greedy(chat_tokens), request_id=chat)
    while len(outputs) < len(CHATS) or any(len(o.token_ids) < 5 for o in outputs.values()):
        outputs |= {output.request_id: output for output in engine.step()}
    engine.add_request(DOCUMENT, greedy(3), request_id="document")
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    del engine.trace.steps[:first_step]
    assert [len(outputs[chat].token_ids) for chat in CHATS] == [chat_tokens] * len(CHATS)
    return outputs


def prefill_of_document(steps: list[StepRecord]) -> dict[int, int]:
    """Index in `steps` of each step that computed a part of the document -> tokens of that part.

    Every chat must have tokens before the first and after the last of them.
    """
    prefill = {
        i: num_tokens
        for i, step in enumerate(steps)
        for name, start_pos, num_tokens in step.slices
        if name == "document" and start_pos < len(DOCUMENT)
    }
    for chat in CHATS:
        sampled = [i for i, step in enumerate(steps) if chat in step.sampled]
        assert sampled[0] < min(prefill) and max(prefill) < sampled[-1], (
            f"{chat} got its tokens in the steps {sampled}, the prefill ran in {list(prefill)}"
        )
    return prefill


def tokens_between(steps: list[StepRecord], request_id: str) -> list[int]:
    """For each two tokens of a request that follow each other: the tokens computed in between."""
    sampled = [i for i, step in enumerate(steps) if request_id in step.sampled]
    return [sum(step.num_tokens for step in steps[a + 1 : b + 1]) for a, b in pairwise(sampled)]


def most_tokens_between(steps: list[StepRecord]) -> int:
    return max(max(tokens_between(steps, chat)) for chat in CHATS)


@pytest.mark.parametrize("warm", [0, WARM])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_whole_prompts_stall_every_chat(
    number: int, warm: int, make_engine: Callable[..., Any], record_property: Callable[..., None]
) -> None:
    engine = make_engine(number)
    outputs = run_traffic(engine, warm)
    steps = engine.trace.steps
    most = most_tokens_between(steps)
    hit = warm if number >= 3 else 0
    uncached = len(DOCUMENT) - hit
    made_of = f"{uncached} + {ALL_DECODES}"
    record_property("decode_stall", [number, warm, hit, "whole", "-", made_of, most])

    assert outputs["document"].metrics.num_cached_tokens == hit
    assert list(prefill_of_document(steps).values()) == [uncached]
    assert most == uncached + ALL_DECODES
    for chat in CHATS:  # once, and otherwise a decode of everybody
        assert tokens_between(steps, chat).count(most) == 1
        assert sorted(tokens_between(steps, chat))[-2] == ALL_DECODES


# max_prefill_chunk_size, max_num_batched_tokens, the chunks of a cold document, and of a warm one.
CHUNKED = [
    # The chunk size bounds: the budget has room for it beside the four decodes.
    (CHUNK, 128, [24, 24, 24, 24, 4], [24, 16]),
    (CHUNK, CHUNK + 4, [24, 24, 24, 24, 4], [24, 16]),
    # The budget bounds: what the decodes leave of it.
    (CHUNK, 16, [12] * 8 + [4], [12, 12, 12, 4]),
    (1000, 40, [36, 36, 28], [36, 4]),
]


@pytest.mark.parametrize("warm", [0, WARM])
@pytest.mark.parametrize("chunk_size, budget, cold_chunks, warm_chunks", CHUNKED)
def test_chunks_bound_the_stall(
    chunk_size: int,
    budget: int,
    cold_chunks: list[int],
    warm_chunks: list[int],
    warm: int,
    make_engine: Callable[..., Any],
    record_property: Callable[..., None],
) -> None:
    engine = make_engine(4, max_prefill_chunk_size=chunk_size, max_num_batched_tokens=budget)
    assert engine.config.target_step_ms is None
    outputs = run_traffic(engine, warm)
    steps = engine.trace.steps
    most = most_tokens_between(steps)
    chunk = min(chunk_size, budget - len(CHATS))
    made_of = f"{chunk} + {len(CHATS)}"
    record_property("decode_stall", [4, warm, warm, chunk_size, budget, made_of, most])

    assert outputs["document"].metrics.num_cached_tokens == warm
    prefill = prefill_of_document(steps)
    chunks = list(prefill.values())
    assert len(chunks) > 1 and sum(chunks) == len(DOCUMENT) - warm
    assert chunks == (warm_chunks if warm else cold_chunks)
    assert most == chunk + len(CHATS) <= budget
    # Every chat has a token on every step, so that each gap is one step: its chunk and the decodes.
    from_before = steps[min(prefill) - 1 : max(prefill) + 1]
    for chat in CHATS:
        assert tokens_between(from_before, chat) == [n + len(CHATS) for n in chunks]


@pytest.mark.parametrize("target_step_ms", [1e-3, 1e6])
def test_a_time_target_only_makes_chunks_shorter(
    target_step_ms: float, make_engine: Callable[..., Any]
) -> None:
    """The times differ from run to run and the chunks with them, but the bound is the same."""
    engine = make_engine(4, max_prefill_chunk_size=CHUNK, target_step_ms=target_step_ms)
    run_traffic(engine, chat_tokens=len(DOCUMENT) + 20)  # they outlast chunks of one token
    steps = engine.trace.steps
    chunks = list(prefill_of_document(steps).values())
    assert len(chunks) > 1 and sum(chunks) == len(DOCUMENT)
    assert max(chunks) <= CHUNK
    chats_prefill = 4 * 6  # in one step, while nobody decodes
    assert most_tokens_between(steps) <= max(chats_prefill, max(chunks) + len(CHATS))


def test_a_target_does_not_lift_the_budget(make_engine: Callable[..., Any]) -> None:
    """One prompt's chunk is the whole budget: the next prompt gets nothing, not even a token."""
    engine = make_engine(4, max_num_batched_tokens=2, target_step_ms=10_000.0)
    for request_id in ("first", "waits"):
        engine.add_request(list(range(2, 11)), greedy(2), request_id)
    while engine.has_unfinished_requests():
        engine.step()
    assert any(step.num_waiting and step.num_tokens == 2 for step in engine.trace.steps[1:])
    assert max(step.num_tokens for step in engine.trace.steps) == 2
