"""Clients that leave are aborted, whatever state their request is in; their blocks come back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from shared import SamplingParams

from .raw import open_request, read_until

LONG = {"model": "stage-04", "temperature": 0, "ignore_eos": True}


class Gate:
    """Lets an engine make a step only when the test says so."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may = threading.Semaphore(0)
        self.done = 0
        step = engine.step

        def gated() -> Any:
            self._may.acquire()
            try:
                return step()
            finally:
                self.done += 1

        monkeypatch.setattr(engine, "step", gated)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._may.release()


@pytest.fixture
def gate(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    one = Gate(server.engines["stage-04"], monkeypatch)
    yield one
    one.steps(10_000)  # whatever is left may end


def one_step(server: Any, gate: Gate) -> None:
    """Let the engine make exactly one more step."""
    before = gate.done
    gate.steps(1)
    server.wait_for(lambda: gate.done > before)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("steps, state", [(0, "waiting"), (2, "prefilling"), (9, "running")])
def test_in_every_state_within_one_step(
    stream: bool, steps: int, state: str, server: Any, gate: Gate
) -> None:
    """100 prompt tokens in chunks of 16: two steps leave the prompt half done, nine decode."""
    engine, driver = server.engines["stage-04"], server.driver
    body = {**LONG, "prompt": list(range(3, 103)), "max_tokens": 50, "stream": stream}
    sock = open_request(server.url, "/v1/completions", body)
    server.wait_for(lambda: driver.num_live("stage-04") == 1 and engine.stats()["waiting"])
    for _ in range(steps):
        one_step(server, gate)
    if state == "waiting":
        assert engine.stats()["waiting"] == 1 and engine.stats()["running"] == 0
    else:
        [sequence] = engine.scheduler.running
        assert sequence.status.value == state
        assert engine.stats()["free_blocks"] < engine.stats()["num_blocks"]
    sock.close()
    [live] = driver._live_streams()
    server.wait_for(lambda: live.is_aborted)
    one_step(server, gate)
    assert engine.stats()["free_blocks"] == engine.stats()["num_blocks"]
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    server.wait_for(lambda: driver.num_live() == 0)


def test_one_of_several_prompts_and_completions(server: Any, gate: Gate) -> None:
    engine = server.engines["stage-04"]
    body = {**LONG, "prompt": [[5] * 30, [6] * 30], "n": 3, "max_tokens": 50, "stream": True}
    sock = open_request(server.url, "/v1/completions", body)
    server.wait_for(lambda: engine.stats()["waiting"] == 6)
    for _ in range(4):
        one_step(server, gate)
    sock.close()
    [live] = server.driver._live_streams()
    server.wait_for(lambda: live.is_aborted)
    one_step(server, gate)
    assert engine.stats()["free_blocks"] == engine.stats()["num_blocks"]


def test_before_the_text_is_tokens(server: Any) -> None:
    """The tokenizer is busy: a request that leaves meanwhile is added and aborted at once."""
    busy = threading.Event()
    server.driver._tokenizing.submit(busy.wait)
    try:
        body = {**LONG, "prompt": "x" * 50, "max_tokens": 400, "stream": True}
        sock = open_request(server.url, "/v1/completions", body)
        server.wait_for(lambda: server.driver.num_live() == 1)
        sock.close()
    finally:
        busy.set()
    generated = server.engines["stage-04"].stats()["generated"]
    server.wait_until_idle()
    assert server.engines["stage-04"].stats()["generated"] - generated < 10


def test_others_go_on(server: Any) -> None:
    """A stream beside one that leaves has the text that it has alone."""
    alone = {**LONG, "prompt": "others", "max_tokens": 40}
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/completions", json=alone).json()["choices"][0]["text"]
        sock = open_request(
            server.url, "/v1/completions", {**alone, "prompt": "leaver", "stream": True}
        )
        read_until(sock, b"data: ")
        results: list[str] = []

        def other() -> None:
            results.append(client.post("/v1/completions", json=alone).json()["choices"][0]["text"])

        thread = threading.Thread(target=other)
        thread.start()
        sock.close()
        thread.join(60)
    assert results == [expected]


def test_closing_an_openai_stream_aborts(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        aborted = aborts(server)
        stream = client.completions.create(
            model="stage-04", prompt="go on", max_tokens=400, stream=True, temperature=0
        )
        next(iter(stream))
        stream.close()
    server.wait_until_idle()
    assert aborts(server) == aborted + 1


def test_an_async_client_leaves_one_stream_and_reads_three(server: Any) -> None:
    """All four are of one client, with a stage each."""
    greedy = SamplingParams(temperature=0, max_tokens=60)
    aborted = aborts(server)

    async def read(client: openai.AsyncOpenAI, stage: int) -> str:
        limit = 400 if stage == 2 else 60
        stream = await client.completions.create(
            model=f"stage-0{stage}", prompt="go on", max_tokens=limit, stream=True, temperature=0
        )
        text = ""
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if stage == 2:
                    break
        return text

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(read(client, stage) for stage in (1, 2, 3, 4)))

    texts = asyncio.run(read_all())
    server.wait_until_idle()
    assert aborts(server) == aborted + 1
    expected = server.engines["stage-02"].generate("go on", greedy, use_tqdm=False)[0].text
    assert [texts[i] for i in (0, 2, 3)] == [expected] * 3
    assert expected.startswith(texts[1]) and texts[1] != expected


def aborts(server: Any) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    lines = [x for x in text.splitlines() if 'request_success_total{finished_reason="abort"' in x]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_slow_reader_holds_back_nobody(start_server: Callable[..., Any]) -> None:
    """It does not read at all: the engine goes on to its end, and the text is kept for it once."""
    server = start_server(stages=(4,), send_buffer=8192)
    engine = server.engines["stage-04"]
    # Far more bytes than all buffers on the way take.
    body = {**LONG, "prompt": "slow", "max_tokens": 200, "stream": True, "n": 4, "logprobs": 20}
    sock = open_request(server.url, "/v1/completions", body, receive_buffer=4096)
    stream = server.wait_for(lambda: next(iter(server.driver._live_streams()), None))
    other = {**LONG, "prompt": "slow", "max_tokens": 200}
    answer = httpx2.post(f"{server.url}/v1/completions", json=other, timeout=60).json()
    server.wait_until_idle()  # the engine has ended, though nobody read
    assert len(stream._unread) == 4, "one output for each choice waits, and no more"
    pieces: dict[int, str] = {}
    num_tokens = 0
    lines = read_until(sock, b"data: [DONE]").decode().splitlines()
    sock.close()
    for line in lines:
        if line.startswith("data: {"):
            [choice] = json.loads(line[6:])["choices"]
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
            num_tokens += len((choice["logprobs"] or {"tokens": []})["tokens"])
    assert set(pieces.values()) == {answer["choices"][0]["text"]}
    assert len(pieces) == 4
    assert num_tokens == 4 * 200, "no log-probability is lost"
    assert engine.stats()["free_blocks"] == engine.stats()["num_blocks"]
