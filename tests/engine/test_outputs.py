"""A request from its first token to its end: reasons, text, measures, and outputs that stay put."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.engine.outputs import Request, RequestMetrics, RequestOutput, SampledToken
from shared.engine.sampling_params import SamplingParams

EOS = "<eos>"


@cache
def tokenizer() -> Tokenizer:
    """One token for each byte, and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def make_request(max_tokens: int = 100, **params) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(**{"max_tokens": None, **params}),
        tokenizer=tokenizer(),
        eos_token_ids=frozenset(ids(EOS)),
        max_tokens=max_tokens,
        arrival_time=10.0,
    )


def run(request: Request, token_ids: list[int]) -> list[RequestOutput]:
    """Feed tokens until the request ends; token i comes at second 11 + i."""
    outputs = []
    for i, token_id in enumerate(token_ids):
        reason = request.append(SampledToken(token_id), now=11.0 + i)
        outputs.append(request.output())
        assert outputs[-1].finish_reason == reason == request.finish_reason
        assert outputs[-1].finished is request.finished is (reason is not None)
        if reason:
            break
    # The pieces make up the text, and no piece is taken back.
    assert "".join(output.new_text for output in outputs) == outputs[-1].text
    for earlier, later in zip(outputs, outputs[1:], strict=False):
        assert later.text.startswith(earlier.text)
    return outputs


# ----------------------------------------------------------------------------------- finish reasons


def test_length():
    outputs = run(make_request(max_tokens=3), ids("abcdef"))
    assert [output.new_text for output in outputs] == ["a", "b", "c"]
    assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("length", ids("abc"))


def test_eos_stops_and_is_a_token_but_no_text():
    outputs = run(make_request(), ids("ab" + EOS + "c"))
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "ab")
    assert outputs[-1].token_ids == ids("ab" + EOS)


@pytest.mark.parametrize(
    "params, text",
    [({}, "ab" + EOS), ({"stop_token_ids": ids("c")}, "abc"), ({"stop": "bc"}, "abc")],
)
def test_m4_a_stop_on_the_last_allowed_token_is_a_stop(params, text):
    outputs = run(make_request(max_tokens=3, **params), ids(text))
    assert len(outputs) == 3
    assert outputs[-1].finish_reason == "stop"


def test_m4_eos_as_the_only_token():
    (output,) = run(make_request(max_tokens=1), ids(EOS))
    assert (output.finish_reason, output.text, output.token_ids) == ("stop", "", ids(EOS))


def test_ignore_eos():
    outputs = run(make_request(max_tokens=4, ignore_eos=True), ids("a" + EOS + "b" + EOS))
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("length", "ab")
    # A stop token still stops, also if it is EOS.
    request = make_request(ignore_eos=True, stop_token_ids=ids(EOS))
    assert run(request, ids("a" + EOS))[-1].finish_reason == "stop"


def test_stop_token_ids():
    outputs = run(make_request(stop_token_ids=ids("xy")), ids("abyc"))
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "ab")
    assert outputs[-1].token_ids == ids("aby")


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_m5_max_tokens_below_1_is_refused(max_tokens):
    with pytest.raises(ValueError, match=f"max_tokens must be 1 or more, got {max_tokens}"):
        make_request(max_tokens=max_tokens)


def test_several_eos_tokens():
    for eos in ids("xy"):
        request = Request("a", [1], SamplingParams(), tokenizer(), frozenset(ids("xy")), 9, 0.0)
        assert request.append(SampledToken(eos), 1.0) == "stop"


# --------------------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize(
    "params, text, expected",
    [
        ({"stop": "b"}, "abcb", "abc"),
        ({"stop": "b"}, "abbb", "ab"),
        # Begun among the first two tokens, complete with the third: it counts.
        ({"stop": "bc"}, "abc", "a"),
        ({"stop_token_ids": ids("b")}, "abcb", "abc"),
        ({}, "a" + EOS + "b" + EOS, "ab"),
    ],
)
def test_min_tokens(params, text, expected):
    outputs = run(make_request(min_tokens=2, **params), ids(text))
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", expected)
    assert len(outputs[-1].token_ids) == len(ids(text)) or text == "abbb"
    assert len(outputs[-1].token_ids) > 2


def test_min_tokens_equal_to_max_tokens():
    outputs = run(make_request(min_tokens=3, max_tokens=3, stop="c"), ids("abc"))
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("length", "abc")


# ----------------------------------------------------------------------------------- text and stops


def test_t1_stop_across_tokens_is_withheld_and_left_out():
    outputs = run(make_request(stop=["END"]), ids("x E ENDy"))
    assert [output.new_text for output in outputs] == ["x", " ", "", "E ", "", "", ""]
    assert outputs[-1].text == "x E "
    assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("stop", ids("x E END"))


def test_t1_what_was_withheld_comes_at_the_end():
    outputs = run(make_request(max_tokens=3, stop=["bcd"]), ids("abcd"))
    assert [output.new_text for output in outputs] == ["a", "", "bc"]
    assert outputs[-1].finish_reason == "length"
    outputs = run(make_request(stop=["bcd"]), ids("abc" + EOS))
    assert outputs[-1].text == "abc"


def test_t1_the_prompt_is_not_searched():
    request = make_request(stop=["ab"])
    request.prompt_token_ids[:] = ids("xa")
    assert run(request, ids("bcab"))[-1].text == "bc"


def test_t1_a_stop_within_one_token():
    class Words:
        def decode(self, token_ids, skip_special_tokens):
            return "".join(["one ", "two.three"][i] for i in token_ids)

    request = Request("a", [1], SamplingParams(stop="."), Words(), frozenset(), 9, 0.0)
    outputs = run(request, [0, 1])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one two", "stop")


def test_t1_a_stop_in_the_very_last_text():
    """An incomplete character is shown at the end only; a stop may be complete with it."""
    incomplete = ids("你")[:2]
    outputs = run(make_request(max_tokens=3, stop="\ufffd"), [*ids("a"), *incomplete])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("a", "stop")
    outputs = run(make_request(max_tokens=3), [*ids("a"), *incomplete])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("a\ufffd", "length")


def test_d1_characters_over_several_tokens():
    outputs = run(make_request(max_tokens=8), ids("é🙂你"))
    assert [output.new_text for output in outputs] == ["", "é", "", "", "", "🙂", "", "\ufffd"]
    outputs = run(make_request(max_tokens=9), ids("é🙂你"))
    assert outputs[-1].text == "é🙂你"


def test_text_without_a_tokenizer():
    request = Request("a", [1], SamplingParams(stop="x"), None, frozenset([5]), 9, 0.0)
    outputs = run(request, [1, 2, 5])
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("", "stop")


def test_new_text_is_what_came_since_the_last_output():
    request = make_request()
    for token_id in ids("abc"):
        request.append(SampledToken(token_id), 11.0)
    assert request.output().new_text == "abc"
    assert request.output().new_text == ""


@settings(deadline=None)
@given(
    text=st.text("ab你\n", max_size=12),
    stop=st.lists(st.text("ab你\n", min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 15),
    min_tokens=st.integers(0, 15),
    has_eos=st.booleans(),
)
def test_any_request(text, stop, max_tokens, min_tokens, has_eos):
    """Tokens up to the end, one reason, and text that is a beginning of what the tokens say."""
    token_ids = ids(text) + (ids(EOS) if has_eos else []) + ids("a") * 20
    params = SamplingParams(stop=stop, min_tokens=min(min_tokens, max_tokens))
    request = Request("a", [1], params, tokenizer(), frozenset(ids(EOS)), max_tokens, 0.0)
    outputs = run(request, token_ids)
    last = outputs[-1]
    whole = tokenizer().decode(last.token_ids, skip_special_tokens=True)
    assert last.finished and last.token_ids == token_ids[: len(last.token_ids)]
    assert len(last.token_ids) <= max_tokens
    if last.finish_reason == "length":
        assert last.text == whole and len(last.token_ids) == max_tokens
    else:
        assert last.finish_reason == "stop" and len(last.token_ids) > params.min_tokens
        stopped_by_eos = last.token_ids[-1:] == ids(EOS)
        assert stopped_by_eos or any(whole.startswith(last.text + one) for one in stop)
    assert not (params.min_tokens == 0 and any(one in last.text for one in stop))


# ---------------------------------------------------------------------------------- abort and error


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_finish_from_outside(reason):
    request = make_request(stop="cd")
    for token_id in [*ids("abc"), ids("你")[0]]:
        request.append(SampledToken(token_id), 11.0)
    assert request.output().text == "ab"
    request.finish(reason, 20.0)
    output = request.output()
    # What was held back is let go, and text and reason do not change again.
    assert (output.finish_reason, output.text, output.new_text) == (reason, "abc\ufffd", "c\ufffd")
    assert output.metrics.latency == 10.0
    request.finish("abort", 30.0)
    assert request.output().finish_reason == reason
    assert request.output().metrics.latency == 10.0


def test_finish_before_the_first_token():
    request = make_request()
    request.finish("abort", 12.0)
    output = request.output()
    assert (output.finished, output.text, output.token_ids) == (True, "", [])
    assert (output.metrics.ttft, output.metrics.tpot, output.metrics.latency) == (None, None, 2.0)


def test_no_token_after_the_end():
    request = make_request(max_tokens=1)
    request.append(SampledToken(1), 11.0)
    with pytest.raises(ValueError, match="'a' is already finished .length."):
        request.append(SampledToken(1), 12.0)
    assert request.token_ids == [1]


# --------------------------------------------------------------------------------- outputs stay put


def test_an_output_does_not_change_later():
    request = make_request(logprobs=1)
    request.append(SampledToken(1, {1: -0.5}), 11.0)
    output = request.output()
    kept = copy.deepcopy(output)
    request.append(SampledToken(2, {2: -0.7}), 12.0)
    request.finish("abort", 13.0)
    assert output == kept
    # And what a caller does to an output does not change the request.
    output.token_ids.append(99)
    output.metrics.token_times.append(99.0)
    output.logprobs.append({})
    later = request.output()
    assert later.token_ids == [1, 2]
    assert later.metrics.token_times == [11.0, 12.0]
    assert later.logprobs == [{1: -0.5}, {2: -0.7}]


def test_logprobs_only_when_asked_for():
    request = make_request()
    request.append(SampledToken(1, None), 11.0)
    assert request.output().logprobs is None


def test_the_callers_prompt_is_copied():
    prompt = [1, 2]
    request = Request("a", prompt, SamplingParams(), None, frozenset(), 9, 0.0)
    prompt.append(3)
    assert request.prompt_token_ids == request.output().prompt_token_ids == [1, 2]


# ----------------------------------------------------------------------------------------- measures


def test_metrics():
    request = make_request(max_tokens=3)
    for now in (12.0, 12.5, 14.0):
        request.append(SampledToken(1), now)
    metrics = request.output().metrics
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finish_time) == (10, 12, 14)
    assert metrics.ttft == 2.0
    assert metrics.itls == [0.5, 1.5]
    assert metrics.tpot == 1.0
    assert metrics.latency == 4.0
    assert metrics.num_cached_tokens == 0


def test_metrics_before_there_are_tokens():
    metrics = RequestMetrics(arrival_time=1.0)
    assert (metrics.first_token_time, metrics.ttft, metrics.tpot, metrics.latency) == (None,) * 4
    assert metrics.itls == []
    metrics.token_times.append(3.0)
    assert (metrics.ttft, metrics.tpot, metrics.itls) == (2.0, None, [])


def test_cached_tokens_are_passed_on():
    request = make_request()
    request.metrics.num_cached_tokens = 8
    assert request.output().metrics.num_cached_tokens == 8
