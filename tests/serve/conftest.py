"""Servers to talk to: all four stages on the tiny model, in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import uvicorn

from shared.models import LoadedModel
from shared.models.tiny import build_tiny_model, tiny_tokenizer
from shared.serve.app import create_app
from shared.serve.driver import Driver
from shared.serve.metrics import Metrics
from shared.serve.server import bind, make_engines

OPTIONS = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256}
CHUNKED = {**OPTIONS, "max_prefill_chunk_size": 16, "max_num_batched_tokens": 24}


class TestServer(SimpleNamespace):
    """A running server. `url` is where, `driver` and `engines` are its own."""

    __test__ = False

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Fails if requests or blocks are left."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = [engine.stats() for engine in self.engines.values()]
            if self.driver.num_live() == 0 and not any(
                s["running"] or s["waiting"] or s["free_blocks"] < s["num_blocks"] for s in stats
            ):
                return
            time.sleep(0.01)
        raise AssertionError(f"not idle: {self.driver.num_live()} completions live, {stats}")

    def wait_for(self, what: Callable[[], Any], seconds: float = 20) -> Any:
        """The first true value of `what()`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            time.sleep(0.002)
        raise AssertionError("it did not happen")


@pytest.fixture(scope="session")
def start_server(tiny: Any) -> Iterator[Callable[..., TestServer]]:
    """Starts servers, which end with the session; options as for `create_app`, or the engines'."""
    running: list[tuple[uvicorn.Server, threading.Thread, Driver]] = []

    def start(
        stages: tuple[int, ...] = (1, 2, 3, 4),
        options: dict[str, Any] | None = None,
        max_waiting: int = 256,
        loaded: Any = tiny,
        send_buffer: int = 0,
        by_stage: dict[int, dict[str, Any]] | None = None,
        **more: Any,
    ) -> TestServer:
        every = {
            i: (CHUNKED if i == 4 else OPTIONS) | (options or {}) | (by_stage or {}).get(i, {})
            for i in stages
        }
        engines = make_engines(loaded, stages, every)
        metrics = Metrics(engines)
        driver = Driver(engines, max_waiting, metrics)
        app = create_app(driver, loaded.tokenizer, metrics, **more)
        sock = bind("127.0.0.1", 0)
        if send_buffer:  # that the system keeps of what a client does not read, as it rounds it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        driver.start()
        thread.start()
        running.append((server, thread, driver))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        found = TestServer(url=url, driver=driver, engines=engines, tokenizer=loaded.tokenizer)
        found.wait_for(lambda: server.started)
        return found

    yield start
    for server, _, driver in running:
        driver.abort_all()
        driver.close_listeners()
        server.should_exit = True
    for _, thread, driver in running:
        thread.join(20)
        driver.stop()


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., TestServer]) -> TestServer:
    """One server for all tests that change nothing of it."""
    return start_server()


@pytest.fixture(scope="session")
def example_server(start_server: Callable[..., TestServer]) -> TestServer:
    """All stages on a tiny model whose context has room for the running example."""
    model = build_tiny_model(max_position_embeddings=8192, num_hidden_layers=1)
    options = {"block_size": 16, "num_blocks": 1024, "max_num_batched_tokens": 8192}
    chunked = {"max_num_batched_tokens": 24, "max_prefill_chunk_size": 16}
    loaded = LoadedModel(model, tiny_tokenizer())
    return start_server(options=options, by_stage={4: chunked}, loaded=loaded)


@pytest.fixture
def server(shared_server: TestServer) -> Iterator[TestServer]:
    """The shared server. Whatever a test did, all blocks must come back."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def http(server: TestServer) -> Iterator[httpx2.Client]:
    """A plain HTTP client of the shared server."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
