"""What is answered: shapes as OpenAI's own types have them, and a reason for every refusal."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from shared import SamplingParams
from shared.serve import protocol

from .raw import open_request, read_until

CHAT = {"model": "stage-04", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"model": "stage-04", "prompt": "hello", "max_tokens": 5}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


def events(text: str) -> list[Any]:
    """What the data lines of a stream hold; the last must be [DONE]."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def strict(kind: type[BaseModel], answer: dict[str, Any]) -> Any:
    """The answer as OpenAI's type. Their models accept anything unless told otherwise."""
    return kind.model_validate_json(json.dumps(answer), strict=True)


# --- answers --------------------------------------------------------------------------------------


def test_answers_are_of_openais_types(http: httpx2.Client) -> None:
    chat = strict(ChatCompletion, http.post(CHATS, json=CHAT | {"n": 2}).json())
    assert [choice.index for choice in chat.choices] == [0, 1]
    text = strict(Completion, http.post(TEXTS, json=TEXT | {"logprobs": 2}).json())
    assert text.choices[0].logprobs
    stream = http.post(CHATS, json=CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2})
    chunks = [strict(ChatCompletionChunk, chunk) for chunk in events(stream.text)]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for chunk in events(http.post(TEXTS, json=TEXT | {"stream": True}).text):
        # Their type of a chunk is that of an answer, whose choices have ended.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strict(Completion, chunk)


def test_the_types_can_disagree(http: httpx2.Client) -> None:
    answer = http.post(CHATS, json=CHAT).json()
    answer["choices"][0]["finish_reason"] = "tired"
    with pytest.raises(ValueError, match="finish_reason"):
        strict(ChatCompletion, answer)


def test_usage_counts_each_prompt_once(http: httpx2.Client, server: Any) -> None:
    body = TEXT | {"prompt": [[7] * 9, [8] * 10], "n": 3, "ignore_eos": True}
    expected = {
        "prompt_tokens": 19,
        "completion_tokens": 30,
        "total_tokens": 49,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = http.post(TEXTS, json=body | {"cache_salt": "once"}).json()
    assert whole["usage"] == expected
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    again = http.post(TEXTS, json=body | {"cache_salt": "once"}).json()
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 8 + 8}  # whole blocks of 4
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post(TEXTS, json=body | {"cache_salt": "two"} | options).text)
    assert last["choices"] == [] and last["usage"] == expected
    assert all(chunk["usage"] is None for chunk in chunks)
    options["stream_options"]["continuous_usage_stats"] = True
    *chunks, _ = events(http.post(TEXTS, json=body | {"cache_salt": "two"} | options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 30


def test_a_stream_without_options_has_no_usage(http: httpx2.Client) -> None:
    assert all(
        "usage" not in c for c in events(http.post(TEXTS, json=TEXT | {"stream": True}).text)
    )


@pytest.mark.parametrize("model", ["stage-01", "stage-04"])
def test_a_stop_string_over_several_chunks(model: str, http: httpx2.Client, server: Any) -> None:
    """Its beginning is never shown, streamed or not."""
    engine = server.engines[model]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = engine.generate("stop here", params, use_tqdm=False)[0].text
    stop = text[9:14]
    assert len(stop) == 5
    end = text.index(stop)
    body = {"model": model, "prompt": "stop here", "max_tokens": 30, "temperature": 0}
    body |= {"ignore_eos": True, "stop": [stop, "never in it"]}
    [choice] = http.post(TEXTS, json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[:end], "stop")
    assert choice["stop_reason"] == stop
    chunks = events(http.post(TEXTS, json=body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:end]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_every_option_reaches_the_engine() -> None:
    """Each with a value of its own, none of them a default."""
    same = {
        **{"n": 2, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["z"]},
        **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "top_k": 7, "min_p": 0.01},
        **{"repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
        **{"stop_token_ids": [4]},
    }
    body = same | {"logit_bias": {"5": -3.5}}
    expected = SamplingParams(**same, logit_bias={5: -3.5}, logprobs=2)
    text = protocol.CompletionRequest(model="m", prompt="p", logprobs=2, **body)
    assert text.sampling_params() == expected
    message = {"role": "user", "content": "c"}
    chat = protocol.ChatRequest(
        model="m", messages=[message], logprobs=True, top_logprobs=2, **body
    )
    assert chat.sampling_params() == expected
    newer = protocol.ChatRequest(model="m", messages=[message], max_completion_tokens=8)
    assert newer.sampling_params() == SamplingParams(max_tokens=8)
    defaults = SamplingParams.__dataclass_fields__.keys() - same.keys()
    assert defaults == {"logit_bias", "logprobs"}, "a parameter of the engine has no option here"


def test_defaults_are_openais(http: httpx2.Client) -> None:
    text = protocol.CompletionRequest(model="m", prompt="p")
    assert text.sampling_params() == SamplingParams(max_tokens=16)
    chat = protocol.ChatRequest(model="m", messages=[{"role": "user", "content": "c"}])
    assert chat.sampling_params() == SamplingParams(max_tokens=None)


def test_logit_bias_and_stop_reason(http: httpx2.Client, server: Any) -> None:
    body = TEXT | {"logit_bias": {"104": 100}, "stop_token_ids": [104], "temperature": 0}
    [choice] = http.post(TEXTS, json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 104)


def test_logprobs_are_those_of_the_engine(http: httpx2.Client, server: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    output = server.engines["stage-04"].generate("hello", params, use_tqdm=False)[0]
    body = TEXT | {"temperature": 0, "ignore_eos": True}
    names = [server.tokenizer.decode([i]) for i in output.token_ids]
    own = [p[i] for i, p in zip(output.token_ids, output.logprobs, strict=True)]
    whole = http.post(TEXTS, json=body | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == names and whole["token_logprobs"] == pytest.approx(own)
    assert [len(top) for top in whole["top_logprobs"]] == [2] * 5
    assert whole["text_offset"][0] == 0 and whole["text_offset"][1] == len(names[0])
    streamed = events(http.post(TEXTS, json=body | {"logprobs": 2, "stream": True}).text)
    parts = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    for key in whole:
        joined = [x for part in parts for x in part[key]]
        for one, other in zip(joined, whole[key], strict=True):
            assert one == (other if isinstance(other, str) else pytest.approx(other))
    chat = CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 0, "ignore_eos": True}
    content = http.post(CHATS, json=chat).json()["choices"][0]["logprobs"]["content"]
    for token in content:
        assert len(token["top_logprobs"]) == 3
        best = token["top_logprobs"][0]
        assert (best["token"], best["logprob"]) == (token["token"], token["logprob"])  # greedy


def test_tokenize_and_back(http: httpx2.Client, server: Any) -> None:
    text = "Grüße, 你好 🎉"
    found = http.post("/tokenize", json={"model": "stage-01", "prompt": text}).json()
    assert found["tokens"] == server.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
    back = http.post("/detokenize", json={"model": "stage-01", "tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    chat = {"model": "stage-02", "messages": CHAT["messages"], "return_token_strs": True}
    found = http.post("/tokenize", json=chat).json()
    usage = http.post(CHATS, json=CHAT).json()["usage"]
    assert found["count"] == usage["prompt_tokens"] == len(found["token_strs"])


# --- refusals -------------------------------------------------------------------------------------

REFUSED = [  # path, what is changed, a part of the message
    (TEXTS, {"max_tokens": 600}, "600 to generate do not fit: max_model_len is 1024, the KV"),
    (TEXTS, {"prompt": [5] * 600}, "600 prompt tokens"),
    (TEXTS, {"prompt": ""}, "the prompt is empty"),
    (TEXTS, {"prompt": []}, "the prompt is empty"),
    (TEXTS, {"prompt": [9999]}, "token id 9999 is outside the vocabulary of"),
    (TEXTS, {"prompt": 3}, "prompt: Input should be a valid string; or"),
    (TEXTS, {"prompt": "\ud800"}, "not valid Unicode"),
    (TEXTS, {"prompt": ["x"] * 129}, "129 prompts times n 1 are 129 choices"),
    (TEXTS, {"prompt": ["x"] * 50, "n": 3}, "50 prompts times n 3 are 150 choices"),
    (TEXTS, {"n": 129}, "n: Input should be less than or equal to 128"),
    (TEXTS, {"n": 13, "logprobs": 20}, "13 choices times 21 log-probabilities"),
    (TEXTS, {"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
    (TEXTS, {"stop": ["x"] * 17}, "stop: "),
    (TEXTS, {"stop": "x" * 1001}, "at most 1000 characters"),
    (TEXTS, {"stop": [""]}, "empty string"),
    (TEXTS, {"stop_token_ids": [9999]}, "token id 9999 is outside the vocabulary"),
    (TEXTS, {"logit_bias": {"x": 1}}, "logit_bias maps token ids to numbers, got the key 'x'"),
    (TEXTS, {"logit_bias": {"9999": 1}}, "token id 9999 is outside the vocabulary"),
    (TEXTS, {"logit_bias": {"5": 101}}, "must be from -100 to 100, got 101"),
    (TEXTS, {"temperature": -1}, "temperature must be 0 or more, got -1"),
    (TEXTS, {"temperature": "hot"}, "temperature: Input should be a valid number"),
    (TEXTS, {"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    (TEXTS, {"max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
    (TEXTS, {"top_p": 0}, "top_p must be over 0"),
    (TEXTS, {"seed": -1}, "seed must be 0 or more, got -1"),
    (TEXTS, {"stream_options": {"include_usage": True}}, "stream_options is for"),
    (TEXTS, {"stream": True, "stream_options": {"other": 1}}, "stream_options"),
    (TEXTS, {"echo": True}, "echo is not supported"),
    (TEXTS, {"suffix": "end"}, "suffix is not supported"),
    (TEXTS, {"best_of": 2}, "best_of is not supported"),
    (TEXTS, {"messages": []}, "messages is not supported"),
    (TEXTS, {"model": None}, "model: Input should be a valid string"),
    (CHATS, {"tools": [{"type": "function"}]}, "tools is not supported"),
    (CHATS, {"tool_choice": "required"}, "tool_choice is not supported"),
    (CHATS, {"response_format": {"type": "json_object"}}, "response_format is not supported"),
    (CHATS, {"reasoning_effort": "low"}, "reasoning_effort is not supported"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    (CHATS, {"messages": []}, "messages: "),
    (CHATS, {"messages": [{"role": "tool", "content": "x"}]}, "messages: 0.role: Input should"),
    (CHATS, {"messages": [{"role": "user"}]}, "0.content: Field required"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "only text is supported",
    ),
    (
        CHATS,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "tool_calls in a message is not supported",
    ),
    ("/tokenize", {"messages": CHAT["messages"]}, "either prompt or messages"),
    ("/detokenize", {"tokens": [-1]}, "token id -1 is outside the vocabulary of"),
]


@pytest.mark.parametrize("path, change, message", REFUSED, ids=lambda v: json.dumps(v)[:40])
def test_refused_with_the_reason(
    path: str, change: dict[str, Any], message: str, http: httpx2.Client
) -> None:
    usual: dict[str, Any] = {CHATS: CHAT, TEXTS: TEXT, "/detokenize": {"model": "stage-01"}}.get(
        path, {"model": "stage-01", "prompt": "x"}
    )
    content = json.dumps(usual | change)
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"] and error["type"] == "invalid_request_error"


HARMLESS = {
    **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    **{"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None},
    **{"parallel_tool_calls": False, "best_of": 1, "echo": False, "suffix": None},
}


def test_what_changes_nothing_is_accepted(http: httpx2.Client) -> None:
    plain = http.post(CHATS, json=CHAT | {"temperature": 0}).json()
    answer = http.post(CHATS, json=CHAT | {"temperature": 0} | HARMLESS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]
    nothing = dict.fromkeys(["stop", "n", "seed", "stream", "logprobs", "top_p", "tools"])
    assert http.post(CHATS, json=CHAT | nothing).status_code == 200


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "Field required"),
        (b"{", "JSON decode error"),
        (b"[" * 100_000, "error parsing the body"),
        (b"\xff", "error parsing the body"),
        (b'{"model": "stage-01", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "parsing the body"),
        (b'{"model": "stage-01", "prompt": "x", "temperature": Infinity}', "finite"),
    ],
)
def test_broken_bodies(content: bytes, said: str, http: httpx2.Client) -> None:
    answer = http.post(TEXTS, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in answer.text


def test_not_found_not_allowed(http: httpx2.Client) -> None:
    for method, path, status in (
        ("POST", CHATS, 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", "/v2", 404),
        ("GET", CHATS, 405),
        ("GET", "/page/../app.py", 404),
    ):
        body = {"json": CHAT | {"model": "gpt-4"}} if method == "POST" else {}
        answer = http.request(method, path, **body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    answer = http.post(CHATS, json=CHAT | {"model": "gpt-4"})
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "'gpt-4'; there are stage-01, stage-02" in answer.json()["error"]["message"]


def test_a_large_body(http: httpx2.Client) -> None:
    large = b'"' + b"x" * (4 << 20) + b'"'
    for content in (large, (part for part in [large[:100], large[100:]])):  # with a length, without
        answer = http.post(TEXTS, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert "at most 4194304" in answer.json()["error"]["message"]


def test_the_key(start_server: Callable[..., Any]) -> None:
    server = start_server(stages=(1,), api_key="geheim 🔑")
    body = TEXT | {"model": "stage-01"}
    with httpx2.Client(base_url=server.url) as client:
        for path in ("/health", "/metrics", "/"):
            assert client.get(path).status_code == 200
        for sent in (None, b"Bearer wrong", b"Basic geheim", "Bearer geheim 🔑x".encode()):
            headers = {} if sent is None else {"Authorization": sent}
            for answer in (
                client.post(TEXTS, json=body, headers=headers),
                client.get("/v1/models", headers=headers),
                client.get("/events", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
        right = {"Authorization": "Bearer geheim 🔑".encode()}
        assert client.post(TEXTS, json=body, headers=right).status_code == 200


def test_no_cors_unless_asked(start_server: Callable[..., Any], http: httpx2.Client) -> None:
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
    asked = start_server(stages=(1,), allow_origins=["http://page.example"])
    answer = httpx2.get(f"{asked.url}/v1/models", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    other = httpx2.get(f"{asked.url}/v1/models", headers={"Origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_too_many_wait(start_server: Callable[..., Any]) -> None:
    """The engine stands still: two completions may wait, the third is refused."""
    server = start_server(stages=(4,), max_waiting=2)
    engine = server.engines["stage-04"]
    may = threading.Event()
    step = engine.step
    engine.step = lambda: may.wait(60) and step()
    socks = [open_request(server.url, TEXTS, TEXT | {"stream": True}) for _ in range(2)]
    server.wait_for(lambda: server.driver.num_live() == 2)
    answer = httpx2.post(f"{server.url}{TEXTS}", json=TEXT)
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert "2 completions of stage-04 wait, and at most 2" in answer.json()["error"]["message"]
    may.set()
    for sock in socks:
        assert b"[DONE]" in read_until(sock, b"[DONE]")
        sock.close()
    assert httpx2.post(f"{server.url}{TEXTS}", json=TEXT).status_code == 200


def test_silence_is_kept_alive(start_server: Callable[..., Any]) -> None:
    """While the engine stands still in a prompt, comments come that say how far it is."""
    server = start_server(stages=(4,), keep_alive=0.05)
    engine = server.engines["stage-04"]
    may = threading.Semaphore(2)
    step = engine.step
    engine.step = lambda: may.acquire(timeout=60) and step()
    sock = open_request(server.url, TEXTS, TEXT | {"prompt": [9] * 100, "stream": True})
    text = read_until(sock, b": prefilling, 32 of 100 prompt tokens\n\n")
    assert b"data:" not in text
    may.release(1000)
    assert b"[DONE]" in read_until(sock, b"[DONE]")
    sock.close()


def test_a_step_that_fails(start_server: Callable[..., Any], caplog: Any) -> None:
    server = start_server(stages=(4,))
    runner = server.engines["stage-04"].model_runner
    run = runner.run
    runner.run = lambda batch: 1 / 0
    with caplog.at_level(logging.CRITICAL):
        answer = httpx2.post(f"{server.url}{TEXTS}", json=TEXT)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        [error] = events(httpx2.post(f"{server.url}{TEXTS}", json=TEXT | {"stream": True}).text)
        assert error["error"]["code"] == 500
    runner.run = run
    assert httpx2.post(f"{server.url}{TEXTS}", json=TEXT).status_code == 200


def test_an_engine_that_fails_ends_everything(
    start_server: Callable[..., Any], caplog: Any
) -> None:
    """A fault outside of a step's own care: nobody waits for ever, and the server says so."""
    server = start_server(stages=(4, 3))
    caplog.set_level(logging.CRITICAL)
    failed = threading.Event()
    server.driver.on_failure = failed.set
    server.engines["stage-04"].scheduler.schedule = lambda: 1 / 0
    answers: list[int] = []
    answer = httpx2.post(f"{server.url}{TEXTS}", json=TEXT)
    answers.append(answer.status_code)
    assert failed.wait(10)
    answers.append(httpx2.post(f"{server.url}{TEXTS}", json=TEXT).status_code)
    answers.append(httpx2.get(f"{server.url}/health").status_code)
    assert answers == [500, 500, 503]


# --- what is told ---------------------------------------------------------------------------------


def test_metrics_count(start_server: Callable[..., Any]) -> None:
    server = start_server(stages=(3, 4))
    body = {"prompt": [5] * 9, "max_tokens": 6, "ignore_eos": True}
    for _ in range(2):
        assert httpx2.post(f"{server.url}{TEXTS}", json=body | {"model": "stage-04"}).is_success
    text = httpx2.get(f"{server.url}/metrics").text
    values = {
        line.split("{")[0] + line.rpartition("{")[2].partition("}")[0].replace('model_name=', " "):
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }  # fmt: skip
    of = {name.partition(' "')[0]: v for name, v in values.items() if name.endswith('"stage-04"')}
    assert of["vllm:time_to_first_token_seconds_count"] == 2
    assert of["vllm:inter_token_latency_seconds_count"] == 2 * 5
    assert of["vllm:e2e_request_latency_seconds_count"] == 2
    assert of["vllm:request_queue_time_seconds_count"] == 2
    assert of["vllm:prompt_tokens_total"] == of["vllm:prefix_cache_queries_total"] == 18
    assert of["vllm:generation_tokens_total"] == 12
    assert of["vllm:prefix_cache_hits_total"] == 8  # the second's two whole blocks
    assert of["vllm:iteration_tokens_total_sum"] == 9 + 5 + 1 + 5
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "mini_vllm:num_requests_prefilling", "vllm:kv_cache_usage_perc",
                 "vllm:num_preemptions_total"):  # fmt: skip
        assert of[name] == 0
    assert 'vllm:request_success_total{finished_reason="length",model_name="stage-04"} 2.0' in text
    assert 'generation_tokens_total{model_name="stage-03"} 0.0' in text, "the other did nothing"


def test_events_are_the_steps(http: httpx2.Client, server: Any) -> None:
    sock = open_get(server.url, "/events")
    read_until(sock, b": steps follow\n\n")
    body = TEXT | {"prompt": [6] * 40, "max_tokens": 4, "ignore_eos": True, "cache_salt": "events"}
    answer = http.post(TEXTS, json=body).json()
    steps: list[Any] = []
    found = b""
    while sum(bool(event["step"]["sampled"]) for event in steps) < 4:
        found += read_until(sock, b"\n\n")
        lines = found.decode().splitlines()
        parsed = [json.loads(line[6:]) for line in lines if line.endswith("}")]
        steps = [event for event in parsed if event["step"]]
    sock.close()
    name = answer["id"]
    slices = [(start, count) for event in steps for _, start, count in event["step"]["slices"]]
    assert slices == [(0, 16), (16, 16), (32, 8), (40, 1), (41, 1), (42, 1)]
    first = steps[0]["requests"][name]
    assert len(set(first.pop("block_table"))) == 4
    assert first == {"state": "prefilling", "blocks": 4, "prefilled": 16, "prompt": 40}
    assert steps[0]["model"] == "stage-04"
    assert steps[0]["free_blocks"] == steps[0]["num_blocks"] - 4
    assert steps[-1]["requests"] == {} and steps[-1]["free_blocks"] == steps[-1]["num_blocks"]
    server.wait_for(lambda: server.driver.num_listeners == 0)


def open_get(url: str, path: str) -> Any:
    import socket

    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    return sock


def test_listeners_are_bounded(server: Any) -> None:
    socks = [open_get(server.url, "/events") for _ in range(16)]
    for sock in socks:
        read_until(sock, b": steps follow")
    assert httpx2.get(f"{server.url}/events").status_code == 429
    for sock in socks:
        sock.close()
    server.wait_for(lambda: server.driver.num_listeners == 0)


def test_the_page_is_there(http: httpx2.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert http.get("/page/index.html").text == answer.text


def test_the_schema_is_there_and_says_the_errors(http: httpx2.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert {CHATS, TEXTS, "/v1/models", "/tokenize", "/health"} <= schema["paths"].keys()
    assert {"400", "401", "404", "413", "429", "503"} <= schema["paths"][TEXTS]["post"][
        "responses"
    ].keys()


def test_nothing_of_a_prompt_is_logged(http: httpx2.Client, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "Zauberwort"
    assert http.post(TEXTS, json=TEXT | {"prompt": secret, "user": secret}).is_success
    assert http.post(TEXTS, json=TEXT | {"prompt": secret, "tools": [secret]}).status_code == 400
    assert http.post(TEXTS, json=TEXT | {"prompt": secret * 999}).status_code == 400
    assert http.post(TEXTS, json=TEXT | {"prompt": {"a": secret}}).status_code == 400
    messages = [{"role": "user", "content": secret}]
    assert http.post(CHATS, json=CHAT | {"messages": messages, "stream": True}).is_success
    server_side = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert secret not in "\n".join(record.getMessage() for record in server_side)
