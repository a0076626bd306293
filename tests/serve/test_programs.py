"""The server as a program: it starts, says what it does, and ends as it is told to."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared.bench import client as bench_client
from shared.serve import __main__ as program

from .raw import open_request, read_until

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--block-size", "4"]
PROGRAM = [sys.executable, "-m", "shared.serve", *TINY, "--port", "0"]
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

    def end(self) -> tuple[int, str]:
        """Exit code and what it logged."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A server that several tests use."""
    one = Process("--stages", "4", "3")
    yield one
    one.process.terminate()
    assert one.end()[0] == 0


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
    where = bench_client.Server(None, *process.url.removeprefix("http://").split(":"))  # type: ignore
    aborted = 'vllm:request_success_total{finished_reason="abort",model_name="stage-03"}'
    deadline = time.monotonic() + 20
    while not where.metrics().get(aborted) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert where.metrics()[aborted] == 1


@pytest.mark.parametrize("grace", [0.3, 30.0], ids=["aborted", "to the end"])
def test_sigterm(grace: float, record_property: Any) -> None:
    """Four streams and a half-done prompt: nobody is left without a word, and it exits with 0.

    With time enough the streams end as they would have; else all are told that they were aborted.
    """
    # So small a budget makes the prompt last, beside the streams.
    server = Process("--stages", "4", "--max-num-batched-tokens", "5", "--grace-period", str(grace))
    tokens = 900 if grace < 1 else 60
    usual = {"model": "stage-04", "temperature": 0, "ignore_eos": True, "stream": True}
    streams = [
        open_request(
            server.url, "/v1/completions", usual | {"prompt": f"{i}", "max_tokens": tokens}
        )
        for i in range(4)
    ]
    seen = [read_until(sock, b"data: ") for sock in streams]
    prompt = [7] * (1000 if grace < 1 else 60)
    late = open_request(server.url, "/v1/completions", usual | {"prompt": prompt, "max_tokens": 3})
    where = bench_client.Server(None, *server.url.removeprefix("http://").split(":"))  # type: ignore
    half_done = 'mini_vllm:num_requests_prefilling{model_name="stage-04"}'
    while grace < 1 and not where.metrics()[half_done]:
        time.sleep(0.01)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    # While it ends it still answers, and takes nothing new.
    answers = []
    with httpx2.Client(base_url=server.url) as client:
        for _ in range(200):
            try:
                answers.append(client.get("/health").status_code)
                if answers[-1] == 503:
                    answer = client.post("/v1/completions", json=usual | {"prompt": "new"})
                    answers.append(answer.status_code)
                    assert "shutting down" in answer.json()["error"]["message"]
                    assert answer.headers["Retry-After"]
                    break
            except httpx2.TransportError:
                break
    if grace > 1 or 503 in answers:  # a slow machine may not ask within a third of a second
        assert answers[-2:] == [503, 503]
    ends = [seen.pop(0) + read_until(sock, b"data: [DONE]\n\n") for sock in streams]
    ends.append(read_until(late, b"data: [DONE]\n\n"))
    code, log = server.end()
    record_property("seconds", time.monotonic() - begun)
    assert code == 0, log
    for end in ends:
        *_, last_event, done = re.findall(rb"^data: (.+)$", end, re.MULTILINE)
        assert done == b"[DONE]"
        last = json.loads(last_event)
        if grace < 1:
            assert last["error"]["code"] == 503
            assert "has aborted this request" in last["error"]["message"]
        else:
            assert last["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in log
    assert ("aborting 5 requests" in log) == (grace < 1)


def test_a_second_signal_ends_it_now() -> None:
    server = Process("--stages", "4", "--grace-period", "60")
    body = {"model": "stage-04", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
    sock = open_request(server.url, "/v1/completions", body | {"stream": True})
    read_until(sock, b"data: ")
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    code, log = server.end()
    assert code == 0 and "Traceback" not in log, log
    assert time.monotonic() - begun < 50


def test_what_it_says(process: Process) -> None:
    """Where it listens, and for whom; the pools were told in the log."""
    other = Process("--stages", "1", "2")
    other.process.terminate()
    code, log = other.end()
    assert code == 0
    assert "Only this machine can connect" in log
    assert len(re.findall(r"KV cache: 2,400 tokens", log)) == 2


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


def test_256_streams_at_once_lose_nothing(tmp_path: Path) -> None:
    from shared.bench import serve
    from shared.bench.results import Report

    class Session:
        report = Report("serve")

    serve.many(Session, 256, 6)  # type: ignore[arg-type]
    assert Session.report.failures == []
    [row] = Session.report.rows()
    assert (row["values"]["streams"]["max"], row["values"]["lost"]["max"]) == (256, 0)


def test_a_small_soak() -> None:
    from shared.bench import serve

    said = serve.soak(120, seed=1)
    assert said.startswith("120 requests in ") and "all blocks free" in said
    assert "hung up before the answer" in said and "whole" in said
    assert threading.active_count() < 100
