"""The sampler against plain statements of what each parameter means, and row against row."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.outputs import Request, SampledToken
from shared.engine.sampler import NUM_TOP_P_CANDIDATES, Sampler, _keep_top_p
from shared.engine.sampling_params import SamplingParams

VOCAB_SIZE = 50
EOS_ID = 7


def make_request(prompt=(1, 2, 3), generated=(), request_id="a", **params) -> Request:
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": None, **params}),
        tokenizer=None,
        eos_token_ids=frozenset([EOS_ID]),
        max_tokens=10_000,
        arrival_time=0.0,
    )
    request.token_ids.extend(generated)
    return request


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def sample_one(logits: torch.Tensor, request: Request) -> int:
    (token,) = Sampler(seed=0).sample(logits[None], [request])
    return token.token_id


def possible_tokens(logits: torch.Tensor, num_draws: int = 2000, **params) -> set[int]:
    """All tokens that come out; with logits close together none of those left is missed."""
    rows = logits.expand(num_draws, -1)
    tokens = Sampler(seed=0).sample(rows, [make_request(**params)] * num_draws)
    return {token.token_id for token in tokens}


# ------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_argmax(dtype):
    logits = make_logits(5).to(dtype)
    requests = [make_request(temperature=0) for _ in range(5)]
    tokens = Sampler().sample(logits, requests)
    assert tokens == [SampledToken(i, None) for i in logits.float().argmax(-1).tolist()]


def test_greedy_takes_the_first_of_equals_in_any_company():
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, [9, 4, 30]] = 1.0
    alone = Sampler().sample(logits[:1], [make_request(temperature=0)])
    mixed = Sampler().sample(logits, [make_request(temperature=0), make_request()])
    assert alone[0].token_id == mixed[0].token_id == 4


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"seed": 5, "top_p": 0.9},
        {"top_k": 3},
        {"logprobs": 2, "temperature": 0},
        {"repetition_penalty": 2.0},
        {"min_tokens": 5},
    ],
)
def test_m2_greedy_rows_do_not_notice_their_batch(other):
    logits = make_logits(8)
    requests = [make_request(**({"temperature": 0} if row % 2 else other)) for row in range(8)]
    tokens = Sampler().sample(logits, requests)
    assert [t.token_id for t in tokens[1::2]] == logits[1::2].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0, 1e-10, 1e-6, 9e-6])
def test_m1_a_tiny_temperature_is_greedy(temperature):
    # Equal to the last bit but for one: only the argmax finds it every time.
    logits = torch.full((VOCAB_SIZE,), 100.0)
    logits[20] = torch.nextafter(logits[20], torch.tensor(math.inf))
    assert possible_tokens(logits, temperature=temperature) == {20}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2])
def test_m1_a_small_temperature_is_finite(temperature):
    logits = make_logits(1)[0] * 1000
    logits[3] = -math.inf
    assert possible_tokens(logits, 20, temperature=temperature) == {int(logits.argmax())}
    # And it is still random: two equal tokens both come out.
    logits[3] = logits.max()
    assert possible_tokens(logits, 100, temperature=temperature) == {
        3,
        int(logits[4:].argmax()) + 4,
    }


# ------------------------------------------------------------------------------------------ filters


@pytest.mark.parametrize(
    "top_k, num_left", [(0, 50), (-1, 50), (1, 1), (2, 2), (7, 7), (50, 50), (999, 50)]
)
def test_m3_top_k(top_k, num_left):
    logits = make_logits(1)[0] / 10
    left = possible_tokens(logits, top_k=top_k, num_draws=4000)
    assert left == set(logits.topk(num_left).indices.tolist())


def test_top_k_keeps_ties_with_the_last():
    logits = torch.zeros(VOCAB_SIZE)
    logits[[3, 8]] = 1.0
    logits[[11, 12, 13]] = 0.5
    assert possible_tokens(logits, top_k=3) == {3, 8, 11, 12, 13}


def test_top_k_differs_by_row():
    logits = make_logits(1).expand(3000, -1) / 10
    kinds = [{"top_k": 3}, {"top_k": 0}, {"top_k": 11}]
    requests = [make_request(**kinds[row % 3]) for row in range(3000)]
    tokens = [token.token_id for token in Sampler(seed=0).sample(logits, requests)]
    best = logits[0].argsort(descending=True).tolist()
    assert set(tokens[0::3]) == set(best[:3])
    assert len(set(tokens[1::3])) > 40
    assert set(tokens[2::3]) == set(best[:11])


def kept_by_top_p(logits: torch.Tensor, top_p: float) -> set[int]:
    """By the definition, one token after another, in double precision."""
    probs = logits.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    mass, kept = 0.0, set()
    for token_id in order:
        if mass >= top_p:
            break
        kept.add(token_id)
        mass += probs[token_id]
    return kept


@pytest.mark.parametrize("top_p", [1e-60, 1e-9, 0.1, 0.37, 0.5, 0.9])
def test_top_p(top_p):
    logits = make_logits(1)[0] / 3
    kept = kept_by_top_p(logits, top_p)
    assert possible_tokens(logits, num_draws=5000, top_p=top_p) == kept
    assert 1 <= len(kept) < VOCAB_SIZE


def test_top_p_that_is_met_exactly_is_enough():
    logits = torch.tensor([0.0, -math.log(2), -math.log(2)])
    assert logits.softmax(-1)[0] == 0.5
    assert possible_tokens(logits, top_p=0.5) == {0}


def test_top_p_where_the_mass_is_spread_wide():
    """Rows that need the first look, a second one, and the whole vocabulary, side by side."""
    vocab_size = 50 * NUM_TOP_P_CANDIDATES
    widths = torch.tensor([200.0, 1.0, 20.0, 200.0])
    scores = torch.linspace(0, 1, vocab_size) * widths[:, None]
    top_p = torch.tensor([[0.01], [0.5], [0.9], [0.9]])
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    kept = _keep_top_p(scores[:, order], top_p).isfinite()
    expected = [kept_by_top_p(scores[row, order], float(top_p[row])) for row in range(4)]
    assert [set(row.nonzero()[:, 0].tolist()) for row in kept] == expected
    sizes = [len(one) for one in expected]
    assert sizes[0] < sizes[3] < NUM_TOP_P_CANDIDATES < sizes[2] < 16 * NUM_TOP_P_CANDIDATES
    assert 16 * NUM_TOP_P_CANDIDATES < sizes[1] < vocab_size


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.7, 1.0])
def test_min_p(min_p):
    logits = make_logits(1)[0] / 3
    probs = logits.softmax(-1)
    kept = set((probs >= min_p * probs.max() * (1 - 1e-6)).nonzero()[:, 0].tolist())
    assert possible_tokens(logits, num_draws=5000, min_p=min_p) == kept


def test_filters_come_after_temperature():
    logits = torch.tensor([0.0, math.log(2), math.log(4)])
    # At temperature 1 the likeliest holds 4/7 of the mass, at 1/2 it holds 16/21.
    assert possible_tokens(logits, top_p=0.6) == {1, 2}
    assert possible_tokens(logits, top_p=0.6, temperature=0.5) == {2}
    assert possible_tokens(logits, min_p=0.4) == {1, 2}
    assert possible_tokens(logits, min_p=0.4, temperature=0.5) == {2}


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that top_k leaves, the first holds 4/7: more than 0.5, so it is enough.
    assert possible_tokens(logits, top_k=2, top_p=0.5) == {0}
    assert possible_tokens(logits, top_p=0.5) == {0, 1}


def test_the_distribution_is_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0, -math.inf])
    num_draws = 20_000
    for params in ({"temperature": 0.7}, {"temperature": 2.0}, {"temperature": 1.0, "top_k": 3}):
        expected = logits / params["temperature"]
        if "top_k" in params:
            expected[3:] = -math.inf
        tokens = Sampler(seed=0).sample(
            logits.expand(num_draws, -1), [make_request(**params)] * num_draws
        )
        counts = Counter(token.token_id for token in tokens)
        for token_id, p in enumerate(expected.softmax(-1).tolist()):
            sigma = math.sqrt(num_draws * p * (1 - p))
            assert abs(counts[token_id] - num_draws * p) <= 4 * sigma + 1e-9


def test_the_distribution_of_one_seed():
    """The draws of one request, one after another, are a sample of softmax too."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    sampler, request, num_draws = Sampler(), make_request(seed=3), 2000
    counts = Counter(sampler.sample(logits, [request])[0].token_id for _ in range(num_draws))
    for token_id, p in enumerate(logits[0].softmax(-1).tolist()):
        assert abs(counts[token_id] - num_draws * p) <= 4 * math.sqrt(num_draws * p * (1 - p))


# -------------------------------------------------------------------------------------------- seeds


def draws(requests: list[Request], row: int, steps: int = 12) -> list[int]:
    """The tokens of one row; all rows of a step have the same logits, so that they can move."""
    sampler, tokens = Sampler(), []
    for step in range(steps):
        logits = make_logits(1, seed=step).expand(len(requests), -1) / 3
        tokens.append(sampler.sample(logits, requests)[row].token_id)
    return tokens


def test_a_seed_decides_alone():
    alone = draws([make_request(seed=1)], row=0)
    assert alone == draws([make_request(seed=1)], row=0)
    assert alone != draws([make_request(seed=2)], row=0)
    assert len(set(alone)) > 3
    company = [make_request(), make_request(seed=9), make_request(temperature=0)]
    for row in range(4):
        requests = [*company[:row], make_request(seed=1), *company[row:]]
        assert draws(requests, row) == alone


def test_two_requests_with_one_seed_do_not_share_a_generator():
    twins = [make_request(seed=1), make_request(seed=1)]
    assert draws(twins, 0) == draws([make_request(seed=1)], 0)
    twins = [make_request(seed=1), make_request(seed=1)]
    assert draws(twins, 1) == draws([make_request(seed=1)], 0)


def test_c4_the_generator_moves_once_for_each_token():
    request = make_request(seed=4)
    generator = np.random.default_rng(4)
    sampler = Sampler()
    for step in range(5):
        sampler.sample(make_logits(1, seed=step), [request])
        generator.random(VOCAB_SIZE, dtype=np.float32)
        moved = request.sampler_state.generator
        assert moved.bit_generator.state == generator.bit_generator.state
        sampler.sample(make_logits(1), [make_request()])  # others' steps leave it where it is
        assert moved.bit_generator.state == generator.bit_generator.state


def test_every_bit_of_a_seed_counts():
    seeds = [7, 7 + 2**16, 7 + 2**31, 7 + 2**32, 7 + 2**63, 2**64 - 1]
    assert len({tuple(draws([make_request(seed=seed)], 0)) for seed in seeds}) == len(seeds)


def test_min_p_is_of_the_likeliest_token_and_top_p_of_what_min_p_keeps():
    """0.5, 0.3, 0.2: min_p 0.5 keeps two, of which the first holds 0.625 of the mass."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    def drawn(**params: float) -> set[int]:
        sampler, requests = Sampler(0), [make_request(**params)]
        return {sampler.sample(logits, requests)[0].token_id for _ in range(100)}

    assert drawn(min_p=0.5) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(min_p=0.5, top_p=0.6) == {0}


def test_a_seed_works_with_every_filter():
    """Filters change which tokens may win, not the noise: what is kept anyway wins again."""
    plain = draws([make_request(seed=1)], 0)
    for params in ({"top_k": 49}, {"top_p": 0.9999}, {"min_p": 1e-4}, {"top_k": VOCAB_SIZE}):
        assert draws([make_request(seed=1, **params)], 0) == plain


def test_requests_without_a_seed_differ():
    tokens = Sampler().sample(torch.zeros(64, VOCAB_SIZE), [make_request() for _ in range(64)])
    assert len({token.token_id for token in tokens}) > 20
    other = Sampler().sample(torch.zeros(64, VOCAB_SIZE), [make_request() for _ in range(64)])
    assert tokens != other


def test_steps_without_a_seed_differ():
    """The generator that requests share goes on; it does not begin anew with each step."""
    sampler, logits, requests = Sampler(seed=0), torch.zeros(20, VOCAB_SIZE), [make_request()] * 20
    assert sampler.sample(logits, requests) != sampler.sample(logits, requests)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Sampler().sample(make_logits(2), [make_request(), make_request(seed=1)])
    assert torch.equal(torch.get_rng_state(), before)


params_of_any_kind = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-4, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 20, 999]),
        "top_p": st.sampled_from([0.1, 0.8, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0]),
        "min_tokens": st.sampled_from([0, 2]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 5),
    }
)


@settings(deadline=None, max_examples=50)
@given(st.lists(params_of_any_kind, min_size=1, max_size=6), st.sampled_from([50, 600]))
def test_every_row_is_as_if_alone(kinds, vocab_size):
    """The whole sampler, three steps: a row's tokens and log-probabilities are its own."""

    def run(kinds, rows):
        requests = [make_request(stop_token_ids=[3], **kind) for kind in kinds]
        sampler, steps = Sampler(), []
        for step in range(3):
            logits = make_logits(6, vocab_size, seed=step)[rows]
            steps.append(sampler.sample(logits, requests))
            for request, token in zip(requests, steps[-1], strict=True):
                request.token_ids.append(token.token_id)
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    together = run(kinds, list(range(len(kinds))))
    for row, kind in enumerate(kinds):
        assert run([kind], [row]) == [together[row]]


# ---------------------------------------------------------------------------------------- penalties


def penalised(logits: list[float], request: Request) -> list[float]:
    """By the definition, one token after another."""
    params, counts = request.params, Counter(request.token_ids)
    result = []
    for token_id, score in enumerate(logits):
        if token_id in request.prompt_token_ids or token_id in counts:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= params.frequency_penalty * counts[token_id]
        score -= params.presence_penalty * (counts[token_id] > 0)
        result.append(score)
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.3},
        {"presence_penalty": -1.3},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
)
def test_penalties(params):
    """Greedy under penalties follows the definition for 30 steps, and differs from plain greedy."""
    request = make_request(prompt=[5, 5, 9], temperature=0, **params)
    sampler, plain = Sampler(), []
    for step in range(30):
        logits = make_logits(1, vocab_size=12, seed=step) / 2
        plain.append(int(logits.argmax()))
        scores = penalised(logits[0].tolist(), request)
        token = sampler.sample(logits, [request])[0].token_id
        assert token == max(range(12), key=lambda i: scores[i])
        request.token_ids.append(token)
    assert request.token_ids != plain


def test_repetition_counts_the_prompt_and_the_others_do_not():
    logits = torch.tensor([1.0, 1.1, 0.0])
    params = {"prompt": [1], "temperature": 0}
    assert sample_one(logits, make_request(repetition_penalty=2.0, **params)) == 0
    assert sample_one(logits, make_request(presence_penalty=2.0, **params)) == 1
    assert sample_one(logits, make_request(frequency_penalty=2.0, **params)) == 1


def test_repetition_makes_a_negative_logit_more_negative():
    for logits in (torch.tensor([-1.0, -1.5]), torch.tensor([-0.1, -0.15])):
        more, less = (
            {"prompt": [0], "repetition_penalty": 2.0},
            {"prompt": [1], "repetition_penalty": 0.5},
        )
        assert sample_one(logits, make_request(temperature=0, **more)) == 1
        assert sample_one(logits, make_request(temperature=0, **less)) == 1


def test_penalties_move_random_draws_too():
    logits = torch.tensor([0.0, 0.0])
    left = possible_tokens(logits, prompt=[0], generated=[0] * 100, frequency_penalty=2.0)
    assert left == {1}


# --------------------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_makes_eos_and_stop_tokens_impossible(params, ignore_eos):
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS_ID], logits[0, 4], logits[0, 30] = 300.0, 200.0, 100.0
    request = make_request(
        min_tokens=2, stop_token_ids=[4, VOCAB_SIZE], ignore_eos=ignore_eos, **params
    )
    tokens = []
    for _ in range(3):
        tokens.append(Sampler().sample(logits, [request])[0].token_id)
        request.token_ids.append(tokens[-1])
    assert tokens == [30, 30, EOS_ID]


# ----------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_raw_distribution():
    logits = make_logits(1)
    expected = logits.log_softmax(-1)[0]
    request = make_request(
        prompt=[1],
        temperature=0.3,
        top_k=5,
        repetition_penalty=1.7,
        min_tokens=3,
        stop_token_ids=[int(logits.argmax())],
        logprobs=3,
        seed=1,
    )
    (token,) = Sampler().sample(logits, [request])
    assert token.logprobs is not None
    assert list(token.logprobs) == list(
        dict.fromkeys([token.token_id, *logits[0].topk(3).indices.tolist()])
    )
    # The likeliest token is masked, so it was not taken, but it is reported.
    assert int(logits.argmax()) in token.logprobs and token.token_id != int(logits.argmax())
    for token_id, value in token.logprobs.items():
        assert value == pytest.approx(float(expected[token_id]), abs=1e-5)


@pytest.mark.parametrize("num, expected", [(0, 1), (1, 1), (5, 5), (VOCAB_SIZE + 10, VOCAB_SIZE)])
def test_number_of_logprobs(num, expected):
    (token,) = Sampler().sample(make_logits(1), [make_request(temperature=0, logprobs=num)])
    assert len(token.logprobs) == expected
    assert next(iter(token.logprobs)) == token.token_id


def test_logprobs_only_for_those_who_ask():
    logits = make_logits(3)
    requests = [
        make_request(temperature=0),
        make_request(temperature=0, logprobs=2),
        make_request(logprobs=0),
    ]
    first, second, third = Sampler().sample(logits, requests)
    assert first.logprobs is None
    assert list(second.logprobs) == logits[1].topk(2).indices.tolist()
    assert list(third.logprobs) == [third.token_id]


# -------------------------------------------------------------------------------------------- doors


def test_nothing_to_sample():
    assert Sampler().sample(torch.empty(0, VOCAB_SIZE), []) == []


@pytest.mark.parametrize("shape", [(2, VOCAB_SIZE), (VOCAB_SIZE,), (1, 1, VOCAB_SIZE)])
def test_logits_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"logits must be \[1, vocab_size\]"):
        Sampler().sample(torch.zeros(shape), [make_request()])


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.5}])
@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.full((VOCAB_SIZE,), math.nan), "largest is nan .50 of 50 are NaN."),
        (torch.tensor([0.0] * 49 + [math.nan]), "largest is nan .1 of 50 are NaN."),
        (torch.full((VOCAB_SIZE,), -math.inf), "largest is -inf .0 of 50 are NaN."),
        (torch.tensor([0.0] * 49 + [math.inf]), "largest is inf"),
    ],
)
def test_logits_that_cannot_be_sampled(params, bad, message):
    logits = make_logits(3)
    logits[1] = bad
    requests = [make_request(request_id=name, **params) for name in ("good", "bad", "fine")]
    with pytest.raises(ValueError, match=f"request 'bad'.*{message}"):
        Sampler().sample(logits, requests)


def test_a_mask_that_leaves_nothing():
    request = make_request(min_tokens=1, stop_token_ids=list(range(VOCAB_SIZE)))
    with pytest.raises(ValueError, match="cannot sample from its logits, the largest is -inf"):
        Sampler().sample(make_logits(1), [request])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_as_they_are(dtype):
    logits = make_logits(3).to(dtype)
    before = logits.clone()
    kinds = [
        {"temperature": 0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0},
        {"min_tokens": 3, "logprobs": 2, "presence_penalty": 1.0},
    ]
    for chosen in (kinds, kinds[:1] * 3, [{"top_k": 3, "top_p": 0.5}] * 3, [{}] * 3):
        Sampler().sample(logits, [make_request(**kind) for kind in chosen])
        assert torch.equal(logits, before)


def test_a_token_that_is_alone_wins_whatever_the_noise(monkeypatch):
    """Also with a uniform number of 0, which comes once in 16 million."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, generator: self.zero_())
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, 20] = 0.0
    assert sample_one(logits[0], make_request()) == 20


def test_logit_bias_is_added_to_the_logit():
    """2 beats 1 by 1; a bias of 0.9 is too little for the other, and 1.1 is enough."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for bias, token_id in ((0.9, 0), (1.1, 1)):
        request = make_request(temperature=0, logit_bias={1: bias})
        assert Sampler().sample(logits, [request])[0].token_id == token_id
    assert logits.tolist() == [[2.0, 1.0, 0.0]], "the caller's logits have changed"
