"""What a request may ask for is checked when the parameters are made."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shared.engine.sampling_params import SamplingParams

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs")


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens) == (256, 0)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert (params.seed, params.logprobs, params.ignore_eos) == (None, None, False)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", None, [1.0]])
def test_numbers_of_the_wrong_type(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a number, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite, got {value}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_is_a_number(name):
    value = getattr(SamplingParams(**{name: 1}), name)
    assert value == 1.0 and isinstance(value, float)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, 1.0, "1", [1]])
def test_integers_of_the_wrong_type(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.01),
        ("temperature", -1e-10),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("top_k", -2),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop_token_ids", [-5]),
    ],
)
def test_m1_m5_out_of_range(name, value):
    # The message says what was given, so that it can be found in the caller's code.
    given = value[0] if isinstance(value, list) else value
    with pytest.raises(ValueError, match=rf"{name} must be .*got {given}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_p", 1e-9),
        ("min_p", 1.0),
        ("repetition_penalty", 1e-3),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("top_k", -1),
        ("top_k", 10**9),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("max_tokens", 1),
        ("max_tokens", None),
        ("logprobs", 0),
        ("stop_token_ids", (0,)),
    ],
)
def test_the_ends_of_each_range_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_over_max_tokens():
    with pytest.raises(ValueError, match="got 5 over 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(min_tokens=1000, max_tokens=None)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_ignore_eos_is_a_bool(value):
    with pytest.raises(TypeError, match="ignore_eos must be a bool"):
        SamplingParams(ignore_eos=value)


@pytest.mark.parametrize(
    "given, kept",
    [(None, ()), ([], ()), ((), ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
)
def test_t2_stop_is_kept_as_a_tuple(given, kept):
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_t2_empty_stop_is_refused(stop):
    with pytest.raises(ValueError, match="stop must not contain the empty string"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("stop", [1, [1], ["a", None], {"a": 1}, b"a"])
def test_stop_of_the_wrong_type(stop):
    with pytest.raises(TypeError, match="stop must be a string or a list of strings"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("token_ids", [3, "3", b"3", [1.0], [True], ["1"], [None]])
def test_stop_token_ids_of_the_wrong_type(token_ids):
    with pytest.raises(TypeError, match="stop_token_ids must be"):
        SamplingParams(stop_token_ids=token_ids)


def test_a_list_of_the_caller_is_copied():
    stop, token_ids = ["a"], [7]
    params = SamplingParams(stop=stop, stop_token_ids=token_ids)
    stop.append("b")
    token_ids.append(8)
    assert (params.stop, params.stop_token_ids) == (("a",), (7,))


def test_frozen_hashable_and_replaceable():
    params = SamplingParams(stop="a", stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0
    assert params.is_greedy is False
    greedy = dataclasses.replace(params, temperature=0)
    assert greedy.is_greedy is True
    assert len({params, greedy, SamplingParams(stop=["a"], stop_token_ids=(1,))}) == 2


@pytest.mark.parametrize(
    "given, is_greedy",
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-10}, True),
        ({"temperature": 9.9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"temperature": 1e-4}, False),
        ({"top_k": 1}, True),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": 2}, False),
    ],
)
def test_m1_m3_greedy(given, is_greedy):
    assert SamplingParams(**given).is_greedy is is_greedy


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"temperature": 1.0},
    ],
)
def test_what_makes_greedy_not_plain(given):
    assert SamplingParams(temperature=0).is_plain_greedy
    assert SamplingParams(temperature=0, top_p=0.5, min_p=0.5, seed=1).is_plain_greedy
    assert not SamplingParams(**{"temperature": 0, **given}).is_plain_greedy


# -------------------------------------------------------------------------------- n and logit_bias


@pytest.mark.parametrize(
    "field, value, error, says",
    [
        ("n", 0, ValueError, "n must be 1 or more, got 0"),
        ("n", 1025, ValueError, "n must be 1024 or less, got 1025"),
        ("n", True, TypeError, "n must be an integer"),
        ("logit_bias", {3: 100.5}, ValueError, "token 3 must be from -100 to 100, got 100.5"),
        ("logit_bias", {3: -101}, ValueError, "token 3 must be from -100 to 100, got -101"),
        ("logit_bias", {3: float("nan")}, ValueError, "token 3 must be finite"),
        ("logit_bias", {3: "1"}, TypeError, "token 3 must be a number"),
        ("logit_bias", {-1: 1.0}, ValueError, "must be 0 or more, got -1"),
        ("logit_bias", {"3": 1.0}, TypeError, "each token id of logit_bias must be an integer"),
        ("logit_bias", [3], TypeError, "logit_bias must map token ids to numbers"),
        ("logit_bias", "3", TypeError, "logit_bias must map token ids to numbers"),
    ],
)
def test_n_and_logit_bias_are_checked(field, value, error, says):
    with pytest.raises(error, match=says):
        SamplingParams(**{field: value})


def test_logit_bias_is_copied_and_no_plain_greedy():
    bias = {3: 100, 4: -100.0}
    params = SamplingParams(temperature=0, logit_bias=bias)
    bias[5] = 1.0
    assert params.logit_bias == ((3, 100.0), (4, -100.0))
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias
    assert not params.is_plain_greedy
    assert SamplingParams(temperature=0, logit_bias={}).is_plain_greedy


def test_each_completion_is_a_request_with_a_seed_of_its_own():
    params = SamplingParams(n=3, seed=2**64 - 1, top_k=5)
    assert [params.completion(i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert {params.completion(i).n for i in range(3)} == {1}
    assert params.completion(1).top_k == 5
    assert SamplingParams(n=2).completion(1).seed is None
