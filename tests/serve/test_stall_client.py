"""A client that measures its own stall: ours, or with `--client FILE` yours.

The server here is a stand-in that says when each piece of text comes: it moves the client's clock.
So the longest gap is known, and no time is waited for.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.serve import stall

Step = tuple[float, list[bytes], int]  # the clock; packets; texts in them


@pytest.fixture(scope="module")
def longest_gap(pytestconfig: pytest.Config) -> Callable[..., float]:
    """`longest_gap(url, body, clock)` of the client that is tested."""
    path = pytestconfig.getoption("--client")
    if path is None:
        return stall.longest_gap
    spec = importlib.util.spec_from_file_location("client", path)
    assert spec and spec.loader, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.longest_gap


class Clock:
    """Stands still until the server moves it; counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = threading.Semaphore(0)

    def __call__(self) -> float:
        now = self.now
        self.reads.release()
        return now


class Server:
    """Answers one request with packets, each at its time."""

    def __init__(self, clock: Clock, steps: list[Step]) -> None:
        self.clock, self.steps = clock, steps
        self.body: dict[str, Any] = {}
        self.problem = ""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(20)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        connection, _ = self.socket.accept()
        connection.settimeout(20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as lines:
            headers = {}
            while line := lines.readline().strip():
                name, _, value = line.partition(b": ")
                headers[name.lower()] = value
            self.body = json.loads(lines.read(int(headers[b"content-length"])))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for now, packets, num_texts in self.steps:
                while self.clock.reads.acquire(blocking=False):
                    pass
                self.clock.now = now
                for packet in packets:
                    connection.sendall(packet)
                # Who reads the clock for what is no text gets the time to do it wrong.
                for _ in range(num_texts or 1):
                    read = self.clock.reads.acquire(timeout=5 if num_texts else 0.1)
                    if num_texts and not read:
                        self.problem = f"at {now} s a text came, and nobody read the clock"
                        return

    def close(self) -> None:
        self.thread.join(20)
        self.socket.close()


def event(*deltas: dict[str, str], reason: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": reason} for delta in deltas]
    text = json.dumps({"choices": choices, **more}, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


@pytest.fixture
def measure(longest_gap: Callable[..., float]) -> Iterator[Callable[[list[Step]], float]]:
    """The longest gap that the client finds in these steps."""

    def run(steps: list[Step]) -> float:
        clock = Clock()
        server = Server(clock, steps)
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "stage-03", "messages": messages}
        found = longest_gap(server.url, body, clock)
        server.close()
        assert not server.problem, server.problem
        assert server.body["stream"] is True, "the client did not ask for a stream"
        assert server.body["messages"] == messages
        return found

    yield run


DONE = b"data: [DONE]\n\n"


def test_the_longest_gap_is_between_two_texts(measure: Callable[..., float]) -> None:
    steps = [(t, [event({"content": "x"})], 1) for t in (0.0, 0.1, 0.2, 1.5, 1.6, 1.7)]
    assert measure([*steps, (1.7, [DONE], 0)]) == pytest.approx(1.3)


def test_only_texts_count(measure: Callable[..., float]) -> None:
    """The wait for the first token is no gap between two; comments and counts are no text."""
    steps = [
        (-9.0, [event({"role": "assistant", "content": ""})], 0),
        (0.0, [event({"content": "a"})], 1),
        (0.1, [event({"content": "b"})], 1),
        (0.8, [b": prefilling, 256 of 1500 prompt tokens\n\n"], 0),
        (1.5, [event({"content": "c"})], 1),
        (9.0, [event({}, reason="length")], 0),
        (9.9, [event(usage={"completion_tokens": 3}), DONE], 0),
    ]
    assert measure(steps) == pytest.approx(1.4)


def test_packets_are_not_events(measure: Callable[..., float]) -> None:
    """The network cuts where it likes: within a character, or after two events."""
    split = event({"content": "fox \N{FOX FACE}"})
    middle = split.index(b"\xa6")
    steps = [
        (0.0, [event({"content": "a"})], 1),
        (2.0, [split[:middle], split[middle:]], 1),
        (2.5, [event({"content": "b"}) + event({"content": "c"})], 2),
        (2.5, [DONE], 0),
    ]
    assert measure(steps) == pytest.approx(2.0)


@pytest.mark.parametrize("num_texts", [0, 1])
def test_fewer_than_two_texts_have_no_gap(measure: Callable[..., float], num_texts: int) -> None:
    texts = [(3.0, [event({"content": "a"})], 1)][:num_texts]
    assert measure([*texts, (9.0, [event({}, reason="stop"), DONE], 0)]) == 0


def test_the_example_through_http(example_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", example_server.url, "--max-tokens", "20", "--characters", "300"]
    assert stall.main([*options, "--model", "stage-04"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["A", "B", "C", "D", "document"]
    assert stall.main([*options, "--model", "stage-05"]) == 1
    assert "there is no model 'stage-05'" in capsys.readouterr().err
    example_server.wait_until_idle()
