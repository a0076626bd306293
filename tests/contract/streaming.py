"""What a caller sees while a request runs: outputs, text, and the ways to fetch them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from .helpers import (
    MakeEngine,
    check_idle,
    check_reference,
    collect,
    drain,
    expect,
    greedy,
    make_prompt,
    run,
    scripted,
    unfinished,
)


def test_outputs_grow_token_by_token(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    ids = [engine.add_request(make_prompt(n), greedy(10)) for n in (3, 8)]
    outputs = drain(engine)
    for request_id, length in zip(ids, (3, 8), strict=True):
        text = ""
        for n, output in enumerate(outputs[request_id], 1):
            what = f"output {n} of request {request_id!r}"
            expect(output.prompt_token_ids, make_prompt(length), f"{what}: its prompt.", engine)
            expect(len(output.token_ids), n, f"{what}: number of tokens.", engine)
            text += output.new_text
            expect(output.text, text, f"{what}: its text, beside the pieces so far.", engine)
            ended = (output.finished, output.finish_reason)
            expect(ended, (n == 10, "length" if n == 10 else None), f"{what}: finished, reason.")
        whole = tiny[1].decode(output.token_ids, skip_special_tokens=True)
        expect(text, whole, f"all pieces of {request_id!r}, beside its tokens decoded at once.")


def test_an_output_is_not_changed_by_later_steps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(make_prompt(3), greedy(5, logprobs=1))
    [first] = engine.step()
    kept = copy.deepcopy(first)
    drain(engine)
    assert first == kept, "an output that was handed out changed afterwards"


def test_D1_characters_that_span_tokens(make_engine: MakeEngine, tiny: Any) -> None:
    """Nothing is shown of a character before its last byte is there."""
    engine, text = make_engine(), "a😀b你好é!"
    token_ids = tiny[1].encode(text)
    assert len(token_ids) > len(text) + 6, "no character of this text spans tokens"
    with scripted(tiny[0], 5, token_ids):
        engine.add_request(make_prompt(5), greedy(len(token_ids)))
        [outputs] = drain(engine).values()
    expect(outputs[-1].token_ids, token_ids, "the tokens of the only request.", engine)
    for output in outputs:
        assert "\ufffd" not in output.text, f"half a character was shown: {output.text!r}"
        assert text.startswith(output.text), f"{output.text!r} is no beginning of {text!r}"
    pieces = "".join(output.new_text for output in outputs)
    expect((pieces, outputs[-1].text), (text, text), "the pieces joined, and the last text.")


def test_D1_a_character_that_is_cut_off(make_engine: MakeEngine, tiny: Any) -> None:
    """The last token ends inside a character: the text says so, once, at the end."""
    engine = make_engine()
    token_ids = tiny[1].encode("hi 😀")[:-1]
    with scripted(tiny[0], 5, token_ids):
        engine.add_request(make_prompt(5), greedy(len(token_ids)))
        [outputs] = drain(engine).values()
    for n, output in enumerate(outputs[:-1]):
        assert "\ufffd" not in output.text, f"output {n} shows half a character: {output.text!r}"
    expect(outputs[-1].text, tiny[1].decode(token_ids), "the last text, cut inside a character.")


@pytest.mark.parametrize(
    ("stop", "text", "shown", "reason"),
    [
        ("lo w", "hello world", "hel", "stop"),
        (["xyz", "wor"], "hello world", "hello ", "stop"),
        ("lo t", "hello world", "hello world", "length"),
        ("worlds", "hello world", "hello world", "length"),
        (None, "hello world", "hello world", "length"),
        ([], "hello world", "hello world", "length"),
        ("h", "hello world", "", "stop"),
    ],
)
def test_T1_stop_strings(
    make_engine: MakeEngine, tiny: Any, stop: Any, text: str, shown: str, reason: str
) -> None:
    """Found wherever tokens part it, never shown, and what only looked like one is let go."""
    engine, token_ids = make_engine(), tiny[1].encode(text)
    with scripted(tiny[0], 5, token_ids):
        engine.add_request(make_prompt(5), greedy(len(token_ids), stop=stop))
        [outputs] = drain(engine).values()
    for output in outputs:
        assert shown.startswith(output.text), f"{output.text!r} was shown, the end is {shown!r}"
    ended = (outputs[-1].text, outputs[-1].finish_reason)
    expect(ended, (shown, reason), f"text and reason of {text!r} with stop={stop!r}.", engine)
    pieces = "".join(output.new_text for output in outputs)
    expect(pieces, shown, f"the pieces of {text!r} with stop={stop!r}, joined.", engine)


def test_T2_a_stop_string_in_the_prompt_does_not_count(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    prompt = tiny[1].encode("stop here")
    with scripted(tiny[0], len(prompt), tiny[1].encode("go on")):
        [output] = run(engine, [prompt], greedy(4, stop="stop"))
    what = "how a request ends whose prompt, not its output, has the stop string."
    expect(output.finish_reason, "length", what, engine)


def test_streams_take_turns(make_engine: MakeEngine, tiny: Any) -> None:
    """Whichever stream is asked, the engine computes for both; each gets its own outputs."""
    engine = make_engine()
    streams = [engine.stream(make_prompt(n), greedy(6)) for n in (4, 9)]
    ahead = [next(streams[0]) for _ in range(3)]
    numbers = [len(output.token_ids) for output in ahead]
    expect(numbers, [1, 2, 3], "tokens in the first three outputs of a stream.", engine)
    assert any(len(step.slices) == 2 for step in engine.trace.steps), "not batched"
    rest = [list(stream) for stream in streams]
    for outputs, length in zip((ahead + rest[0], rest[1]), (4, 9), strict=True):
        name = outputs[-1].request_id
        numbers = [len(output.token_ids) for output in outputs]
        expect(numbers, list(range(1, 7)), f"tokens in the outputs of stream {name!r}.", engine)
        prompt = make_prompt(length)
        expect(outputs[-1].prompt_token_ids, prompt, f"the prompt of stream {name!r}.", engine)
        check_reference(outputs[-1], tiny, 6, engine)
    assert len(engine.trace.steps) <= 7, "a stream computed what the other had computed already"
    expect(engine.step(), [], "outputs of step() when the streams have fetched all.", engine)


def test_a_stream_is_refused_when_it_is_asked_for(make_engine: MakeEngine) -> None:
    """Not when the first output is fetched, which may be much later."""
    with pytest.raises(ValueError):
        make_engine().stream([], greedy(1))


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_closing_a_stream_aborts_its_request(
    make_engine: MakeEngine, tiny: Any, num_taken: int
) -> None:
    engine = make_engine()
    other = engine.add_request(make_prompt(5), greedy(6))
    stream = engine.stream(make_prompt(9), greedy(6))
    for _ in range(num_taken):
        next(stream)
    stream.close()
    outputs = drain(engine)
    expect(list(outputs), [other], "whose outputs come after the stream was closed.", engine)
    check_reference(outputs[other][-1], tiny, 6, engine)
    sampled = [request_id for step in engine.trace.steps for request_id in step.sampled]
    assert len(sampled) == 6 + num_taken, "the closed stream's request was computed further"


def test_a_stream_whose_request_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(make_prompt(9), greedy(6))
    request_id = next(stream).request_id
    expect(engine.abort_request(request_id), True, f"abort_request({request_id!r}), streaming.")
    ended = [(o.finished, o.finish_reason, len(o.token_ids)) for o in stream]
    what = f"finished, reason, number of tokens in what stream {request_id!r} gives when aborted."
    expect(ended, [(True, "abort", 1)], what, engine)
    check_idle(engine)


def test_step_stream_and_generate_on_one_engine(make_engine: MakeEngine, tiny: Any) -> None:
    """Each way to fetch outputs gets those of its own requests, all of them, once."""
    engine = make_engine()
    stepped = engine.add_request(make_prompt(3), greedy(12))
    stream = engine.stream(make_prompt(4), greedy(10))
    outputs: dict[str, list] = {}
    collect(engine.step(), outputs)
    next(stream)
    [generated] = engine.generate([make_prompt(6)], greedy(5), use_tqdm=False)
    check_reference(generated, tiny, 5, engine)
    streamed = list(stream)
    numbers = [len(output.token_ids) for output in streamed]
    expect(numbers, list(range(2, 11)), "tokens in the outputs that the stream still gave.", engine)
    check_reference(streamed[-1], tiny, 10, engine)
    drain(engine, outputs)
    expect(list(outputs), [stepped], "whose outputs step() gave.", engine)
    numbers = [len(output.token_ids) for output in outputs[stepped]]
    expect(numbers, list(range(1, 13)), f"tokens in the outputs of {stepped!r}.", engine)
    check_reference(outputs[stepped][-1], tiny, 12, engine)


def test_generate_takes_one_prompt_or_many(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    one = engine.generate("hello", greedy(3), use_tqdm=False)
    for prompt in (["hello"], tiny[1].encode("hello")):
        [same] = engine.generate(prompt, greedy(3), use_tqdm=False)
        expect(same.token_ids, one[0].token_ids, f"tokens for the prompt {prompt}, as for 'hello'.")
    outputs = engine.generate(["hello", [5, 6, 7]], [greedy(3), greedy(1)], use_tqdm=False)
    numbers = [len(output.token_ids) for output in outputs]
    expect(numbers, [3, 1], "tokens of two prompts, each with its own max_tokens.", engine)


def test_generate_shows_its_progress(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine()
    engine.generate([make_prompt(3), make_prompt(4)], greedy(2))
    said = capsys.readouterr().err
    assert "2/2" in said, f"expected a progress bar that ends at 2/2, came {said!r}"
    engine.generate([make_prompt(3)], greedy(2), use_tqdm=False)
    expect(capsys.readouterr().err, "", "what is printed with use_tqdm=False.")


def test_a_finished_stream_and_a_new_request_with_its_id(
    make_engine: MakeEngine, tiny: Any
) -> None:
    """An open iterator of an ended request has nothing to do with a later one of the same id."""
    engine = make_engine()
    stream = engine.stream(make_prompt(4), greedy(3))
    first = next(stream)
    for _ in unfinished(engine):
        engine.step()
    engine.add_request(make_prompt(7), greedy(5), request_id=first.request_id)
    engine.step()
    *_, last = stream
    expect(len(last.token_ids), 3, "tokens of the stream that had ended.")
    stream.close()
    [outputs] = drain(engine).values()
    check_reference(outputs[-1], tiny, 5, engine)


def test_a_stream_that_nobody_reads_stays_small(make_engine: MakeEngine, tiny: Any) -> None:
    """Its outputs are merged; no token and no text is lost."""
    engine = make_engine(num_blocks=128)
    unread = engine.stream(make_prompt(4), greedy(300))
    added = engine.add_request(make_prompt(5), greedy(300))
    *_, read = engine.stream(make_prompt(6), greedy(300))
    inbox = [r.inbox for r in engine._requests.values() if r.inbox]
    assert all(len(one) <= 129 for one in inbox), [len(one) for one in inbox]
    assert len(engine._outbox) < 280, len(engine._outbox)
    outputs = list(unread)
    assert 1 < len(outputs) < 300, f"{len(outputs)} outputs: none were merged"
    expect("".join(o.new_text for o in outputs), outputs[-1].text, "the joined text.")
    check_reference(outputs[-1], tiny, 300, engine)
    stepped = drain(engine)[added]
    expect("".join(o.new_text for o in stepped), stepped[-1].text, "the joined text of `step`.")
    check_reference(stepped[-1], tiny, 300, engine)


def test_n_completions_of_a_prompt(make_engine: MakeEngine, tiny: Any) -> None:
    """Completion i is what the seed `seed + i` gives alone; each ends for itself."""
    engine = make_engine()
    random = {"temperature": 3.0, "seed": 5}
    alone = [
        run(engine, [make_prompt(5)], greedy(4, **{**random, "seed": 5 + i}))[0] for i in range(3)
    ]
    wanted = [output.token_ids for output in alone]
    assert len(set(map(tuple, wanted))) == 3, "the seeds give the same tokens"

    params = [greedy(4, n=3, **random), greedy(2)]
    first, second = engine.generate([make_prompt(5), make_prompt(6)], params, use_tqdm=False)
    expect([o.index for o in first.outputs], [0, 1, 2], "the indices of the completions.")
    expect([o.token_ids for o in first.outputs], wanted, "tokens of the completions.", engine)
    assert first.outputs[0] is first and second.outputs == [second]
    check_reference(second, tiny, 2, engine)

    streamed = list(engine.stream(make_prompt(5), params[0]))
    expect(len(streamed), 12, "outputs of a stream of 3 completions of 4 tokens.", engine)
    assert len({output.request_id for output in streamed}) == 1
    for i in range(3):
        mine = [output for output in streamed if output.index == i]
        expect(mine[-1].token_ids, wanted[i], f"the tokens of completion {i}, streamed.", engine)
        expect([o.finished for o in mine], [False] * 3 + [True], f"ends of completion {i}.")


def test_n_completions_are_one_request(make_engine: MakeEngine) -> None:
    """One abort ends all; their id is in use until the last has ended."""
    engine = make_engine()
    stop = {"n": 2, "temperature": 3.0, "seed": 5}
    request_id = engine.add_request(make_prompt(5), greedy(9, **stop), request_id="a")
    engine.step()
    assert engine.stats()["running"] == 2
    for used in ("a", "a#1"):
        with pytest.raises(ValueError, match=f"'{used}' is in use"):
            engine.add_request(make_prompt(5), greedy(9), request_id=used)
    assert engine.progress("a")["generated_tokens"] == 1
    assert engine.abort_request(request_id) and not engine.abort_request(request_id)
    ended = [(o.request_id, o.index, o.finish_reason) for o in engine.step()]
    expect(ended, [("a", 0, "abort"), ("a", 1, "abort")], "the last outputs of both.", engine)
    check_idle(engine)


def test_chat(make_engine: MakeEngine, tiny: Any) -> None:
    """As `generate` with the prompt that `chat_prompt` makes: one conversation or several."""
    engine = make_engine()
    messages = [{"role": "user", "content": "hello"}]
    template = tiny[1].chat_template
    tiny[1].chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    try:
        [one] = engine.chat(messages, greedy(3), use_tqdm=False)
        both = engine.chat([messages, "hello"], greedy(3), use_tqdm=False)
        expected = tiny[1].encode("<user>hello", add_special_tokens=False)
    finally:
        tiny[1].chat_template = template
    for output in (one, *both):
        expect(output.prompt_token_ids, expected, "the prompt of a chat.")
        check_reference(output, tiny, 3, engine)
    with pytest.raises(TypeError, match="tokenizer"):
        make_engine(model=(tiny[0], None)).chat(messages)
