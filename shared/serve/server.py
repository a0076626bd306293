"""How a server process begins and ends: engines, socket, signals.

Knows uvicorn, and the application only as something to run.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn

from shared.engine.memory import DEFAULT_UTILIZATION
from shared.models import LoadedModel
from shared.stages import load_stage

from .driver import Driver

logger = logging.getLogger("mini_vllm")

MAX_STEPS = 1000  # of each engine, kept in its trace
FLUSH_SECONDS = 5  # that clients have to read their last words


def model_name(stage: int) -> str:
    """What clients call a stage."""
    return f"stage-{stage:02d}"


def make_engines(
    loaded: LoadedModel, stages: Sequence[int], options: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """An engine for each stage, on one copy of the weights, each with a pool of its own.

    Args:
        options: the engine's, by stage. `memory_utilization` is for all pools together.
    """
    engines = {}
    for i, stage in enumerate(stages):
        mine = dict(options[stage])
        if mine.get("num_blocks") is None:
            share = mine.get("memory_utilization")
            mine["memory_utilization"] = _share(loaded.model.device.type, share, i, len(stages))
        name = model_name(stage)
        logger.info("%s:", name)
        engines[name] = load_stage(stage).LLMEngine(loaded, **mine)
        engines[name].name = name
        engines[name].trace.max_steps = MAX_STEPS
    return engines


def _share(device: str, utilization: float | None, index: int, count: int) -> float:
    """The `memory_utilization` of engine `index` of `count`, so that all pools are alike.

    An engine takes a share of what is free when it is made. On CUDA the pools before it are gone
    by then; on a CPU they take memory only as they are written.
    """
    total = utilization or DEFAULT_UTILIZATION[device]
    return total / (count - total * index) if device == "cuda" else total / count


def bind(host: str, port: int) -> socket.socket:
    """Take the address now, so that a port in use is told before the model is loaded.

    Nobody can connect before the server listens. Raises OSError with the address in the message.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error.strerror or error}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock


class _Server(uvicorn.Server):
    """uvicorn stops listening at the first signal; we first answer 503 for a while."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self.stop_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stop_asked.is_set():  # a second time: now
            self.force_exit = self.should_exit = True
        self._loop.call_soon_threadsafe(self.stop_asked.set)


async def serve(
    app: Any,
    driver: Driver,
    sock: socket.socket,
    grace_seconds: float,
    on_start: Callable[[], object] = lambda: None,
) -> None:
    """Answer until SIGTERM or SIGINT, or until the engines fail.

    Then, in this order: new requests get 503; those under way have `grace_seconds` to end; what is
    left is aborted; the socket closes. `on_start` is called once clients can connect.
    """
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    server = _Server(config, on_start)
    driver.on_failure = lambda: loop.call_soon_threadsafe(server.stop_asked.set)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    asked = asyncio.create_task(server.stop_asked.wait())
    await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    driver.close()
    if num_live := driver.num_live():
        logger.info("stopping: %d requests have %g s to end", num_live, grace_seconds)
    deadline = loop.time() + grace_seconds
    while driver.num_live() and loop.time() < deadline and not server.force_exit:
        await asyncio.sleep(0.05)
    if num_live := driver.num_live():
        logger.info("aborting %d requests", num_live)
    driver.abort_all()
    driver.close_listeners()
    while driver.num_live() and not (server.force_exit or driver.error):
        await asyncio.sleep(0.01)  # one step
    server.should_exit = True
    await running


def run(
    app: Any,
    driver: Driver,
    sock: socket.socket,
    grace_seconds: float,
    on_start: Callable[[], object] = lambda: None,
) -> int:
    """Start the driver, `serve`, and stop it. Returns the exit code: 1 if the engines failed."""
    driver.start()
    try:
        asyncio.run(serve(app, driver, sock, grace_seconds, on_start))
    finally:
        driver.stop()
    return int(driver.error is not None)
