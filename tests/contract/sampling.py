"""What is sampled depends on the request alone: its parameters, its seed, its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from shared import SamplingParams

from .helpers import (
    MakeEngine,
    check_reference,
    drain,
    expect,
    greedy,
    make_prompt,
    preempted,
    run,
    scripted,
)


def at_random(max_tokens: int, **options: Any) -> SamplingParams:
    """A high temperature: the tiny model is rather sure of itself otherwise."""
    options = {"temperature": 4.0, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, **options)


@pytest.mark.parametrize("temperature", [0, 1e-10, 1e-6, 1e-4, 1e-2])
def test_M1_low_temperatures(make_engine: MakeEngine, tiny: Any, temperature: float) -> None:
    """Below 1e-5 it is greedy; above it the logits are divided and must stay numbers."""
    engine = make_engine()
    [output] = run(engine, [make_prompt(7)], greedy(8, temperature=temperature))
    ended = (output.finish_reason, len(output.token_ids))
    expect(ended, ("length", 8), f"reason and number of tokens at temperature {temperature}.")
    if temperature < 1e-3:
        check_reference(output, tiny, 8, engine)


def test_M2_greedy_beside_random(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    params = [greedy(8), at_random(8), greedy(8), at_random(8, seed=1)]
    outputs = run(engine, [make_prompt(5, seed=n) for n in range(4)], params)
    most = max(len(step.sampled) for step in engine.trace.steps)
    expect(most, 4, "most tokens sampled in one step; four requests decode together.", engine)
    for output in (outputs[0], outputs[2]):
        check_reference(output, tiny, 8, engine)


def test_M3_top_k(make_engine: MakeEngine, tiny: Any) -> None:
    """0 and -1 are off, and so is one larger than the vocabulary; 1 is greedy."""
    engine = make_engine()

    def tokens(top_k: int) -> list[int]:
        [output] = run(engine, [make_prompt(5)], at_random(12, seed=3, top_k=top_k))
        return output.token_ids

    whole = tokens(0)
    for top_k in (-1, 10**6):
        expect(tokens(top_k), whole, f"the tokens with top_k={top_k}, which is off, as top_k=0 is.")
    assert tokens(2) != whole, "top_k=2 gives the same 12 random tokens as no top_k"
    [output] = run(engine, [make_prompt(5)], at_random(12, top_k=1))
    check_reference(output, tiny, 12, engine)


def test_M4_eos_as_the_last_allowed_token(make_engine: MakeEngine, tiny: Any) -> None:
    """Both would end it there; the reason is `stop`."""
    engine = make_engine()
    eos = tiny[1].eos_token_id
    with scripted(tiny[0], 5, [40, 41, eos]):
        for max_tokens in (3, 4):
            [output] = run(engine, [make_prompt(5)], greedy(max_tokens, ignore_eos=False))
            what = f"tokens and reason with EOS ({eos}) as third token, max_tokens={max_tokens}."
            expect((output.token_ids, output.finish_reason), ([40, 41, eos], "stop"), what, engine)
            text = tiny[1].decode([40, 41])
            expect(output.text, text, "the text; EOS is not part of it.", engine)
        [output] = run(engine, [make_prompt(5)], greedy(4))
        what = "tokens and reason when EOS is ignored, max_tokens=4."
        ended = (output.token_ids, output.finish_reason)
        expect(ended, ([40, 41, eos, eos], "length"), what, engine)


def test_eos_as_the_first_token(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    with scripted(tiny[0], 5, [tiny[1].eos_token_id]):
        [output] = run(engine, [make_prompt(5)], greedy(8, ignore_eos=False))
    ended = (output.finish_reason, output.text, len(output.token_ids))
    expect(ended, ("stop", "", 1), "reason, text and number of tokens if the first is EOS.", engine)


def test_stop_tokens_and_min_tokens(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    with scripted(tiny[0], 5, [40, 41, 42, 43]):
        [output] = run(engine, [make_prompt(5)], greedy(8, stop_token_ids=[42]))
        ended = (output.token_ids, output.finish_reason)
        expect(ended, ([40, 41, 42], "stop"), "tokens and reason, stop_token_ids=[42].", engine)
        [output] = run(engine, [make_prompt(5)], greedy(4, stop_token_ids=[42], min_tokens=3))
        assert output.token_ids[:2] == [40, 41] and output.token_ids[2] != 42, (
            "a stop token must not come before min_tokens"
        )


def test_logit_bias_and_stop_reason(make_engine: MakeEngine, tiny: Any) -> None:
    """A bias of 100 forces a token and -100 bans one; the output says what ended it."""
    engine = make_engine()
    plain = run(engine, [make_prompt(5)], greedy(6))[0]
    banned = plain.token_ids[0]
    outputs = run(
        engine,
        [make_prompt(5)] * 4,
        [
            greedy(6, logit_bias={banned: -100}),
            greedy(6, logit_bias={40: 100.0}),
            greedy(6, logit_bias={40: 100.0}, stop_token_ids=[41, 40]),
            greedy(6),
        ],
    )
    assert banned not in outputs[0].token_ids
    expect(outputs[1].token_ids, [40] * 6, "the tokens when 40 is forced.", engine)
    ended = (outputs[2].token_ids, outputs[2].finish_reason, outputs[2].stop_reason)
    expect(ended, ([40], "stop", 40), "tokens, reason and what stopped it.", engine)
    expect(outputs[3].token_ids, plain.token_ids, "the tokens of who is beside them.", engine)
    assert outputs[1].stop_reason is None

    eos = tiny[1].eos_token_id
    with scripted(tiny[0], 5, [*tiny[1].encode("ab"), eos]):
        by_eos = greedy(6, ignore_eos=False)
        by_text = greedy(6, stop=["x", "b"])
        reasons = [o.stop_reason for o in run(engine, [make_prompt(5)] * 2, [by_eos, by_text])]
    expect(reasons, [None, "b"], "stop_reason after EOS, and after a stop string.", engine)


def test_a_seed_fixes_the_tokens_whatever_the_batch(make_engine: MakeEngine) -> None:
    """Design invariant 6: alone, in company, late, and preempted, the same tokens."""
    prompt, params = make_prompt(9), at_random(9, seed=42)
    alone = run(make_engine(), [prompt], params)[0].token_ids

    engine = make_engine()
    others = [make_prompt(n, seed=7) for n in (2, 6, 13)]
    outputs = run(
        engine, [*others, prompt], [at_random(9), greedy(12), at_random(7, seed=1), params]
    )
    assert outputs[3].token_ids == alone, "the same request among others drew other tokens"

    engine = make_engine(num_blocks=7)
    engine.add_request(make_prompt(9, seed=1), at_random(9))
    request_id = engine.add_request(prompt, params)
    outputs = drain(engine)
    assert request_id in preempted(engine), "it was not preempted"
    assert outputs[request_id][-1].token_ids == alone, (
        "a preempted request drew other tokens: its generator moved while its tokens were computed "
        "again, or began anew"
    )


def test_seeds_matter(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs = run(engine, [make_prompt(5)] * 3, [at_random(12, seed=n) for n in (1, 2, 1)])
    first, second, third = (output.token_ids for output in outputs)
    expect(third, first, "the tokens of two requests with the same prompt and seed.", engine)
    assert second != first, f"seeds 1 and 2 gave the same tokens: {first}"


def test_without_a_seed_twins_differ(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = run(engine, [make_prompt(5)] * 2, at_random(20))
    assert first.token_ids != second.token_ids, "two requests drew the same 20 tokens at random"


def test_penalties_see_prompt_and_output(make_engine: MakeEngine) -> None:
    """A penalty so strong that no token may come twice, also when the request was preempted."""
    prompts = [make_prompt(9, seed=n) for n in (5, 6)]  # these repeat a token of the output
    for output in run(make_engine(), prompts, greedy(9)):
        assert len(set(output.token_ids)) < 9, "the test's own prompts repeat no token"
    engine = make_engine(num_blocks=7)
    outputs = run(engine, prompts, greedy(9, repetition_penalty=1e6))
    assert preempted(engine), "7 blocks of 4 hold both requests of 18 tokens? Nobody gave way."
    for output in outputs:
        again = set(output.token_ids) & set(output.prompt_token_ids)
        assert len(set(output.token_ids)) == 9, f"a token came twice: {output.token_ids}"
        assert not again, f"{output.request_id!r} has the tokens {again} of its prompt again"


def test_logprobs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with_them, without = run(engine, [make_prompt(5)] * 2, [greedy(6, logprobs=3), greedy(6)])
    expect(without.logprobs, None, "logprobs of a request that did not ask for them.")
    expect(len(with_them.logprobs), 6, "logprobs of a request with 6 tokens.")
    for n, (token, logprobs) in enumerate(
        zip(with_them.token_ids, with_them.logprobs, strict=True)
    ):
        expect(len(logprobs), 3, f"logprobs of token {n}, logprobs=3: {logprobs}.")
        likeliest = max(logprobs, key=logprobs.get)
        expect(token, likeliest, f"the greedy token {n}, beside its logprobs {logprobs}.")
        assert max(logprobs.values()) <= 0, f"token {n}: a log-probability over 0: {logprobs}"
