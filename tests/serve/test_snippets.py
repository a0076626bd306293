"""Every command and program of chapter 7 is run as it stands there, against the test's server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "docs" / "chapters" / "7-serving.md"
URL = "http://127.0.0.1:8000"

# By a word of the snippet: what its output must contain.
EXPECTED = {
    "/v1/models": ['"id":"stage-01"', '"id":"stage-04"'],
    "-sN http://127.0.0.1:8000/v1/chat": [
        '"object":"chat.completion.chunk"',
        '"usage":{',
        "[DONE]",
    ],
    "/v1/completions": ['"finish_reason":"length"', '"completion_tokens":8'],
    "/metrics": ['model_name="stage-04"'],
    "/events": [": steps follow"],
    "OpenAI(base": [""],
    "AsyncOpenAI": [""],
    "shared.serve.stall": ["stage-03 D", "stage-04 document", "longest wait"],
}
# The server itself; the benchmark and the exercise, which have tests of their own.
NOT_RUN = ("make serve", "shared.bench", "pytest")


def snippets() -> list[tuple[str, str]]:
    """`(language, code)` of the chapter's snippets that are run."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", CHAPTER.read_text(), re.MULTILINE | re.DOTALL)
    return [(kind, text) for kind, text in found if not any(word in text for word in NOT_RUN)]


def expected(text: str) -> list[str]:
    return next(words for key, words in reversed(EXPECTED.items()) if key in text)


def test_every_snippet_is_known() -> None:
    texts = [text for _, text in snippets()]
    assert len(texts) == len(EXPECTED)
    assert all(any(key in text for text in texts) for key in EXPECTED)
    assert {kind for kind, _ in snippets()} == {"sh", "python"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"), snippets(), ids=[str(i) for i, _ in enumerate(snippets())]
)
def test_a_snippet_does_what_it_says(kind: str, text: str, example_server: Any) -> None:
    if "curl" in text and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    assert URL in text or "shared.serve" in text
    text = text.replace(URL, example_server.url).replace(".venv/bin/python", sys.executable)
    if "shared.serve.stall" in text:  # the tiny model's tokens are short: fewer characters
        text = re.sub(r"(--model \S+)", rf"\1 --url {example_server.url} --characters 900", text)
    command = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for words in expected(text.replace(example_server.url, URL)):
        assert words in done.stdout
    example_server.wait_until_idle()
