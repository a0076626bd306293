"""The server as a program: it starts, says what it does, and ends as it is told to."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared.bench import __main__ as bench
from shared.bench import client as bench_client
from shared.bench import serve
from shared.serve import __main__ as program
from shared.serve import server as server_module
from shared.serve.app import create_app
from shared.serve.driver import Driver
from shared.serve.server import bind, make_engines, run

from .raw import open_request, read_until

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--block-size", "4"]
PROGRAM = [sys.executable, "-m", "shared.serve", *TINY, "--port", "0"]
TEXTS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A server in a process of its own, until it has ended."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "--num-blocks", "600", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+)  stage-0", line)
        assert found, (line, self.process.communicate())
        self.url = found[1]
        self.said = line + self.process.stdout.readline()  # `communicate` would lose it

    def end(self) -> tuple[int, str]:
        """Exit code and what it logged."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A server that several tests use."""
    one = Process("--stages", "4", "3")
    yield one
    if one.process.poll() is None:
        one.process.terminate()
        assert one.end()[0] == 0


@pytest.mark.slow
def test_curl_sees_the_stream(process: Process) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    body = {"model": "stage-04", "prompt": "hello", "max_tokens": 5, "stream": True}
    shown = subprocess.run(
        [
            *(curl, "-sN", f"{process.url}/v1/completions"),
            *("-H", "Content-Type: application/json", "-d", json.dumps(body)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    lines = shown.splitlines()
    assert len([line for line in lines if line.startswith("data: {")]) >= 3
    assert lines[-2:] == ["data: [DONE]", ""]


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const asked = { model: "stage-03", messages: [{ role: "user", content: "hello" }], max_tokens: 6,
                temperature: 0 };
const whole = await client.chat.completions.create(asked);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
let refused = "";
try {
  await client.chat.completions.create({ ...asked, model: "gpt-4" });
} catch (error) {
  refused = `${error.constructor.name} ${error.status} ${error.code}`;
}
const early = await client.chat.completions.create({ ...asked, stream: true, max_tokens: 900 });
for await (const chunk of early) break;  // closes the connection
console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, refused }));
"""


@pytest.mark.slow
def test_the_npm_client(process: Process, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "openai"]
    try:
        subprocess.run(install, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"npm cannot install openai: {error}")
    (tmp_path / "client.mjs").write_text(NODE)
    done = subprocess.run(
        ["node", "client.mjs", process.url], cwd=tmp_path, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found["whole"] and found["whole"] == found["text"]
    assert found["refused"] == "NotFoundError 404 model_not_found"
    where = bench_client.Server.at(process.url)
    aborted = 'vllm:request_success_total{finished_reason="abort",model_name="stage-03"}'
    deadline = time.monotonic() + 20
    while not where.metrics().get(aborted) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert where.metrics()[aborted] == 1


@pytest.mark.slow
def test_sigterm() -> None:
    """Four streams and a half-done prompt: nobody is left without a word, and it exits with 0."""
    # So small a budget makes the prompt last, beside the streams.
    server = Process("--stages", "4", "--max-num-batched-tokens", "5", "--grace-period", "0.3")
    usual = {"model": "stage-04", "temperature": 0, "ignore_eos": True, "stream": True}
    socks = [
        open_request(server.url, TEXTS, usual | {"prompt": f"{i}", "max_tokens": 900})
        for i in range(4)
    ]
    seen = [read_until(sock, b"data: ") for sock in socks]
    socks.append(open_request(server.url, TEXTS, usual | {"prompt": [7] * 1000, "max_tokens": 3}))
    seen.append(read_until(socks[-1], b"\r\n\r\n"))
    half_done = 'mini_vllm:num_requests_prefilling{model_name="stage-04"}'
    while not bench_client.Server.at(server.url).metrics()[half_done]:
        time.sleep(0.01)
    server.process.terminate()
    ends = [
        before + read_until(sock, b"data: [DONE]\n\n")
        for before, sock in zip(seen, socks, strict=True)
    ]
    code, log = server.end()
    assert code == 0 and "Traceback" not in log, log
    assert "stopping: 5 requests have 0.3 s to end" in log
    assert "aborting 5 requests" in log
    for end in ends:
        *_, last, done = re.findall(rb"^data: (.+)$", end, re.MULTILINE)
        error = json.loads(last)["error"]
        assert (error["code"], done) == (503, b"[DONE]")
        assert "has aborted this request" in error["message"]


def test_streams_under_way_may_end(tiny: Any) -> None:
    """While the server waits for them it answers, and takes nothing new."""
    options = {"block_size": 4, "num_blocks": 64}
    driver = Driver(make_engines(tiny, [4], {4: options}))
    may, step = threading.Event(), driver.engines["stage-04"].step
    driver.engines["stage-04"].step = lambda: may.wait(60) and step()
    sock, started = bind("127.0.0.1", 0), threading.Event()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    app = create_app(driver, tiny.tokenizer)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(run(app, driver, sock, 60, started.set)))
    thread.start()
    assert started.wait(60)
    body = {"model": "stage-04", "prompt": "x", "max_tokens": 20, "stream": True}
    stream = open_request(url, TEXTS, body | {"ignore_eos": True})
    listener = httpx2.stream("GET", f"{url}/events", timeout=60)
    with listener as events:
        while not driver.num_live():
            time.sleep(0.001)
        driver.on_failure()  # what a signal does, too
        while httpx2.get(f"{url}/health").status_code == 200:
            time.sleep(0.001)
        answer = httpx2.post(f"{url}{TEXTS}", json=body)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "shutting down" in answer.json()["error"]["message"]
        assert httpx2.get(f"{url}/events").status_code == 503
        may.set()
        events.read()  # ends by itself
    text = read_until(stream, b"data: [DONE]")
    thread.join(60)
    assert ended == [0]
    assert b'"finish_reason":"length"' in text and b"error" not in text


@pytest.mark.slow
def test_what_it_says(process: Process) -> None:
    """Where it listens, and for whom."""
    assert process.said.startswith(f"{process.url}  stage-03, stage-04\nOnly this machine can")


def test_the_pools_are_told(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = {"block_size": 4, "num_blocks": 600}
    engines = make_engines(tiny, [1, 4], {1: options, 4: options})
    assert list(engines) == ["stage-01", "stage-04"]
    said = [record.getMessage() for record in caplog.records]
    assert said.count("stage-01:") == said.count("stage-04:") == 1
    assert len([line for line in said if "KV cache: 2,400 tokens" in line]) == 2
    assert all("2.3 requests of 1,024 tokens" in line for line in said if "KV cache" in line)


def test_the_pools_share_the_memory(tiny: Any) -> None:
    """Without a number of blocks, four engines take together what one would take."""
    options = {"max_num_seqs": 10_000, "memory_utilization": 0.001}
    [alone] = make_engines(tiny, [1], {1: options}).values()
    four = make_engines(tiny, [1, 2, 3, 4], dict.fromkeys([1, 2, 3, 4], options)).values()
    together = sum(engine.config.num_blocks for engine in four)
    assert together == pytest.approx(alone.config.num_blocks, rel=0.1)


def test_the_pools_share_a_gpu() -> None:
    """There each pool leaves less for the next one, and yet all are alike."""
    free, pools = 80.0, []
    for i in range(4):
        pools.append(free * server_module._share("cuda", 0.9, i, 4))
        free -= pools[-1]
    assert pools == pytest.approx([80 * 0.9 / 4] * 4)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--stages", "5"], "invalid choice: 5"),
        (["--port", "99999"], "must be a whole number from 0 to 65535"),
        (["--num-blocks", "0"], "num_blocks must be an integer from 1"),
        (["--max-waiting", "0"], "from 1 to 100000"),
        (["--apikey", "x"], "did you mean --api-key"),
    ],
)
def test_wrong_options(options: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(options)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.models.load_model", lambda *args, **kwargs: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert program.main([*TINY, "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert program.main([*TINY, "--host", "no.such.host.invalid"]) == 1
    assert "cannot listen on no.such.host.invalid" in capsys.readouterr().err


def test_256_streams_at_once_lose_nothing(start_server: Callable[..., Any]) -> None:
    limits = {"max_num_seqs": 256, "num_blocks": 2048, "max_num_batched_tokens": 1024}
    server = start_server(stages=(4,), options=limits, max_waiting=1000)
    where = bench_client.Server.at(server.url)
    jobs = [
        functools.partial(bench_client.post, where, TEXTS, serve.body([3 + i, 9, 17], 6))
        for i in range(256)
    ]
    for got in bench_client.together(jobs):
        assert (got.status, got.error, got.finish_reasons) == (200, None, {0: "length"})
        assert got.num_tokens == 6
    server.wait_until_idle()


@pytest.mark.slow
def test_a_small_soak() -> None:
    said = serve.soak(60, seed=1)
    assert said.startswith("60 requests in ") and "all blocks free" in said
    assert "hung up before the answer" in said and "whole" in said


def test_the_soak_finds_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    where = bench_client.Server.at("http://127.0.0.1:1")
    left = {'vllm:num_requests_running{model_name="stage-01"}': 1.0}
    monkeypatch.setattr(where, "metrics", lambda: left)
    with pytest.raises(RuntimeError, match="left in the server: .*running"):
        serve._wait_until_idle(where, seconds=0.1)


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"streams": 2, "max_tokens": 20, "singles": 2, "long_prompt_tokens": 100,
             "stream_tokens": 40, "many": 8, "many_tokens": 3}  # fmt: skip
    monkeypatch.setattr(serve, "QUICK", serve.QUICK | sizes)
    options = ["--quick", "--model", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main(["serve", *options]) == 0
    content = json.loads((tmp_path / "serve.json").read_text())
    assert content["complete"] and content["failures"] == []
    rows = {(row["table"], row["name"]): row["values"] for row in content["rows"]}
    assert rows["many streams", "over HTTP"]["lost"]["max"] == 0
    assert rows["stall", "seen by the client"]["gap_max"]["max"] > 0
    assert rows["stall", "the engine's own"]["gap_max"]["max"] > 0
    assert len(content["claims"]) == 3


@pytest.mark.slow
def test_a_second_signal_ends_it_now(process: Process) -> None:
    """The last test of this process: the first signal would have left it ten seconds."""
    body = {"model": "stage-04", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
    sock = open_request(process.url, TEXTS, body | {"stream": True})
    read_until(sock, b"data: ")
    for _ in range(2):
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    code, log = process.end()
    assert code == 0 and "Traceback" not in log, log
