"""What can never finish, or makes no sense, is refused at the door, with the numbers."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from .helpers import (
    MakeEngine,
    check_idle,
    check_reference,
    drain,
    expect,
    greedy,
    make_prompt,
    run,
)


def refused(engine: Any, prompt: Any, params: Any, *numbers: int) -> None:
    """Assert that the request is refused, that the message has the numbers, and nothing changed."""
    with pytest.raises(ValueError) as error:
        engine.add_request(prompt, params)
    for number in numbers:
        found = re.findall(r"-?\d+", str(error.value))
        assert str(number) in found, f"the message lacks the number {number}: {error.value}"
    check_idle(engine)


@pytest.mark.parametrize("length", [15, 16, 17, 18])
def test_S1_a_prompt_about_as_large_as_the_pool(
    make_engine: MakeEngine, tiny: Any, length: int
) -> None:
    """A pool of 16 slots. What never fits is refused, what is accepted ends, the next one always.

    With its output's last token a prompt of 16 has 17 tokens, of which 16 are written: an engine
    may take it or refuse it, but must then know its own mind.
    """
    engine = make_engine(num_blocks=4)
    accepted = None
    if length >= 17:
        refused(engine, make_prompt(length), greedy(1), length, 16)
    else:
        try:
            accepted = engine.add_request(make_prompt(length), greedy(1))
        except ValueError:
            assert length == 16, f"{length} tokens and one more fit into 16 slots"
    follower = engine.add_request(make_prompt(2), greedy(3))
    outputs = drain(engine)
    check_reference(outputs[follower][-1], tiny, 3, engine)
    if accepted is not None:
        check_reference(outputs[accepted][-1], tiny, 1, engine)


def test_S1_output_that_outgrows_the_pool(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(num_blocks=4)
    refused(engine, make_prompt(10), greedy(8), 10, 8)
    [output] = run(engine, [make_prompt(10)], greedy(6))
    check_reference(output, tiny, 6, engine)


def test_S2_a_lone_request_never_meets_an_empty_pool(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(num_blocks=2)
    refused(engine, make_prompt(8), greedy(2), 8, 2)
    [output] = run(engine, [make_prompt(7)], greedy(1))
    check_reference(output, tiny, 1, engine)


def test_S6_no_max_tokens_means_the_room_that_is_left(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(max_model_len=24)
    [output] = run(engine, [make_prompt(10)], greedy(None))
    check_reference(output, tiny, 14, engine)


def test_S6_no_max_tokens_in_a_pool_smaller_than_the_context(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    refused(engine, make_prompt(18), greedy(None), 18, 1, 16)  # not even one token
    [output] = run(engine, [make_prompt(10)], greedy(None))
    expect(output.finish_reason, "length", "how a request without max_tokens ends.", engine)
    assert 6 <= len(output.token_ids) <= 7, "a pool of 16 slots has room for 6 more tokens"


def test_S6_one_of_three_reaches_the_end_of_the_context(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(max_model_len=24)
    params = [greedy(20), greedy(None), greedy(18)]
    outputs = run(engine, [make_prompt(n) for n in (4, 20, 6)], params)
    for output, num_tokens in zip(outputs, (20, 4, 18), strict=True):
        check_reference(output, tiny, num_tokens, engine)


@pytest.mark.parametrize("prompt", [[], ""])
def test_M5_an_empty_prompt(make_engine: MakeEngine, prompt: Any) -> None:
    refused(make_engine(), prompt, greedy(1))


def test_M5_a_prompt_as_long_as_the_context(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(max_model_len=12)
    for params in (greedy(1), greedy(None)):
        refused(engine, make_prompt(12), params, 12)
    refused(engine, make_prompt(9), greedy(4), 9, 4, 12)
    for params in (greedy(1), greedy(None)):
        [output] = run(engine, [make_prompt(11)], params)
        check_reference(output, tiny, 1, engine)


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
def test_a_token_outside_the_vocabulary(make_engine: MakeEngine, token_id: int) -> None:
    refused(make_engine(), [3, token_id, 4], greedy(1), token_id)


@pytest.mark.parametrize("prompt", [None, 5, 3.5, [1.5], ["a"], [True], [[1, 2]]])
def test_a_prompt_is_text_or_token_ids(make_engine: MakeEngine, prompt: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError):
        engine.add_request(prompt, greedy(1))
    check_idle(engine)


def test_other_arguments_of_a_wrong_type(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(TypeError):
        engine.add_request([1, 2], {"temperature": 0})
    with pytest.raises(TypeError):
        engine.add_request([1, 2], greedy(1), request_id=7)
    check_idle(engine)


def test_text_needs_a_tokenizer(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(model=(tiny[0], None))
    with pytest.raises(TypeError, match="tokenizer"):
        engine.add_request("text", greedy(1))
    [output] = run(engine, [make_prompt(5)], greedy(3))
    check_reference(output, tiny, 3, engine)
    expect(output.text, "", "the text of a request of an engine without a tokenizer.")


def test_an_id_that_is_in_use(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    engine.add_request(make_prompt(5), greedy(3), request_id="a")
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request(make_prompt(6), greedy(3), request_id="a")
    engine.step()
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request(make_prompt(6), greedy(3), request_id="a")
    outputs = drain(engine)
    check_reference(outputs["a"][-1], tiny, 3, engine)


def test_an_id_of_the_engine_s_own_making_is_free(make_engine: MakeEngine) -> None:
    """Names that a caller chose are never given to another request."""
    engine = make_engine()
    ids = [engine.add_request(make_prompt(3), greedy(1), request_id=str(n)) for n in range(3)]
    ids += [engine.add_request(make_prompt(3), greedy(1)) for _ in range(3)]
    assert len(set(ids)) == 6, f"two live requests have one id: {ids}"
    expect(sorted(drain(engine)), sorted(ids), "whose outputs came.", engine)


def test_generate_starts_all_prompts_or_none(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=12)
    with pytest.raises(ValueError):
        engine.generate([make_prompt(3), make_prompt(12)], greedy(1), use_tqdm=False)
    engine.step()
    check_idle(engine)
    expect(engine.trace.steps, [], "steps after a generate() of which one prompt was refused.")


def test_generate_needs_parameters_for_each_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="3"):
        engine.generate([make_prompt(3)] * 3, [greedy(1)] * 2, use_tqdm=False)
    check_idle(engine)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_blocks", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("max_model_len", 1025),
        ("block_size", 2.5),
        ("max_num_seqs", True),
    ],
)
def test_options_that_make_no_engine(stage: ModuleType, tiny: Any, option: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        stage.LLMEngine(model=tiny, **{"num_blocks": 8, option: value})
    assert option in str(error.value), f"the message does not name {option}: {error.value}"
    assert str(value) in str(error.value), f"the message lacks the value {value}: {error.value}"


def test_an_option_that_does_not_exist(stage: ModuleType, tiny: Any) -> None:
    with pytest.raises(TypeError, match="blok_size"):
        stage.LLMEngine(model=tiny, blok_size=4)


def test_the_engine_says_what_it_runs_with(make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=8, num_blocks=5)
    expect(engine.config.block_size, 8, "config.block_size.")
    manager = engine.block_manager
    expect((manager.num_blocks, manager.num_free_blocks), (5, 5), "all and free blocks of a pool.")


def test_the_pool_is_sized_from_memory(stage: ModuleType, tiny: Any) -> None:
    """`num_blocks=None`: enough for all seats at most, never more than the memory that is there."""
    engine = stage.LLMEngine(model=tiny, block_size=16, max_num_seqs=2, max_model_len=64)
    expect(
        engine.block_manager.num_blocks, 2 * 64 // 16, "blocks for two seats of 64 tokens, in 16s."
    )
    [output] = run(engine, [make_prompt(9)], greedy(3))
    check_reference(output, tiny, 3, engine)


def test_stops_that_could_never_stop_are_refused(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    vocab_size = tiny[0].config.vocab_size
    with pytest.raises(ValueError, match=rf"id {vocab_size} is outside .* of {vocab_size}"):
        engine.add_request(make_prompt(4), greedy(2, stop_token_ids=[3, vocab_size]))
    refused(engine, [3, 4], greedy(1, logit_bias={vocab_size: 1.0}), vocab_size)
    engine.add_request(make_prompt(4), greedy(2, stop_token_ids=[3, vocab_size - 1]))
    drain(engine)
    without = make_engine(model=(tiny[0], None))
    with pytest.raises(ValueError, match="this engine has no tokenizer"):
        without.add_request(make_prompt(4), greedy(2, stop=["x"]))
    assert not without.has_unfinished_requests()


def test_a_refused_request_leaves_its_id_free(make_engine: MakeEngine, tiny: Any) -> None:
    """Every check comes before the request is registered, the last one too."""
    engine = make_engine()
    every_token = list(range(tiny[0].config.vocab_size))
    for params in (greedy(4, min_tokens=2, stop_token_ids=every_token), greedy(10_000)):
        with pytest.raises(ValueError):
            engine.add_request(make_prompt(4), params, request_id="mine")
        assert engine.progress("mine") is None and not engine.has_unfinished_requests()
    engine.add_request(make_prompt(4), greedy(2), request_id="mine")
    check_reference(drain(engine)["mine"][-1], tiny, 2, engine)


def test_a_request_arrives_before_its_prompt_is_tokenised(
    make_engine: MakeEngine, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TTFT counts from when the user handed the prompt in."""
    engine = make_engine()
    now = [100.0]
    engine.clock = lambda: now[0]
    encode = tiny[1].encode

    def slow(*args: Any, **kwargs: Any) -> Any:
        now[0] += 5
        return encode(*args, **kwargs)

    monkeypatch.setattr(tiny[1], "encode", slow)
    engine.add_request("hello", greedy(1))
    [output] = engine.step()
    expect(output.metrics.arrival_time, 100.0, "arrival_time; the tokenizer took 5 seconds.")
