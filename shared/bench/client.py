"""A server in a process of its own, and a light client that measures it.

The client is the standard library's, one thread for each connection: on a machine of two cores a
heavier one would measure itself.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 600.0  # seconds without a byte


class Server:
    """A running `python -m shared.serve` on this machine.

    Attributes:
        host, port: where it listens.
        pid: that of its process, if it is known.
    """

    def __init__(self, host: str, port: int, pid: int | None = None) -> None:
        self.host, self.port, self.pid = host, port, pid

    @classmethod
    def at(cls, url: str, pid: int | None = None) -> Server:
        """The one at `http://HOST:PORT`."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(host, int(port), pid)

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)

    def get(self, path: str) -> str:
        """The body of an answer. Raises RuntimeError if it is no success."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"GET {path}: {response.status} {text}")
        return text

    def metrics(self) -> dict[str, float]:
        """All values of /metrics, by name and labels."""
        lines = self.get("/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@contextmanager
def server(*options: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server on a free port of the loopback, and end it afterwards.

    Args:
        environ: further environment variables of the server.

    Raises RuntimeError with its last line if it does not start.
    """
    command = [sys.executable, "-m", "shared.serve", "--port", "0", "--grace-period", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | (environ or {})
        )
        try:
            assert process.stdout
            line = process.stdout.readline()
            if not line.startswith("http://"):
                log.seek(0)
                lines = [line for line in log.read().splitlines() if line.strip()]
                raise RuntimeError(lines[-1] if lines else "the server has ended without a word")
            yield Server.at(line.split()[0], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()


@dataclass
class Received:
    """What a client got, and when; times are those of `time.perf_counter`.

    Attributes:
        status: of HTTP; 0 if the connection ended before.
        times: when each event with text or a token came.
        usage: as the server counted.
        finish_reasons: of each choice, by its index.
        error: the message of an error, if there was one.
    """

    start: float
    status: int = 0
    text: str = ""
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    request_id: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return self.usage.get("completion_tokens", 0)

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first event."""
        return self.times[0] - self.start


def post(
    where: Server,
    path: str,
    body: dict[str, Any],
    on_event: Callable[[Received], bool] = lambda received: True,
) -> Received:
    """Send a request and read its answer, streamed or not.

    Args:
        on_event: called after each event; False closes the connection.
    """
    connection = where.connect()
    received = Received(time.perf_counter())
    try:
        content = json.dumps(body).encode()
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        received.status = response.status
        if response.getheader("Content-Type", "").startswith("text/event-stream"):
            _read_events(response, received, on_event)
        else:
            _take(json.loads(response.read()), received)
    except (OSError, http.client.HTTPException) as error:
        received.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return received


def _read_events(
    response: http.client.HTTPResponse, received: Received, on_event: Callable[[Received], bool]
) -> None:
    for line in response:
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if _take(json.loads(line[6:]), received):
                received.times.append(now)
            if not on_event(received):
                return
        elif line.startswith(b"data: [DONE]"):
            return
    received.error = received.error or "the stream ended without [DONE]"


def _take(answer: dict[str, Any], received: Received) -> bool:
    """Add an answer or a part of one; whether it shows that a token was made."""
    if "error" in answer:
        received.error = answer["error"]["message"]
        return False
    received.request_id = answer["id"]
    received.usage = answer.get("usage") or received.usage
    news = False
    for choice in answer["choices"]:
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        received.text += text
        if choice.get("finish_reason"):
            received.finish_reasons[choice["index"]] = choice["finish_reason"]
        news |= bool(text or choice.get("logprobs") or choice.get("finish_reason"))
    return news


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all jobs, each run in a thread of its own, begun at once.

    Raises what the first failing one raised.
    """
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:  # told by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@contextmanager
def step_events(where: Server) -> Iterator[list[dict[str, Any]]]:
    """Within, the list fills with the events of `GET /events`."""
    events: list[dict[str, Any]] = []
    connection = where.connect()
    connection.request("GET", "/events")
    response = connection.getresponse()
    assert response.status == 200, response.status
    response.readline()  # its greeting: from now on nothing is missed

    def read() -> None:
        try:
            for line in response:
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass  # closed, below

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield events
    finally:
        time.sleep(0.2)  # the last ones are on their way
        if connection.sock:
            connection.sock.shutdown(2)
        reader.join(10)
        connection.close()
