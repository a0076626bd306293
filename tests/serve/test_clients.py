"""The `openai` package as a client: what it reads is what `generate()` gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shared import SamplingParams

MODELS = ("stage-01", "stage-02", "stage-03", "stage-04")
PROMPTS = ("The quick brown fox", "Grüße, 你好, 👩‍👩‍👧 and 🎉!", "x")


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_stages_are_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == list(MODELS)
    assert client.models.retrieve("stage-03").id == "stage-03"


@pytest.mark.parametrize("model", MODELS)
def test_text_is_that_of_generate(model: str, client: openai.OpenAI, server: Any) -> None:
    for prompt in PROMPTS:
        for seed in (None, 7):
            params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=24)
            expected = server.engines[model].generate(prompt, params, use_tqdm=False)[0]
            asked: Any = {"model": model, "prompt": prompt, "max_tokens": 24, "seed": seed}
            asked["temperature"] = params.temperature
            whole = client.completions.create(**asked)
            assert whole.choices[0].text == expected.text
            assert whole.choices[0].finish_reason == expected.finish_reason
            pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
            assert len(pieces) > 1
            assert "".join(pieces) == expected.text


@pytest.mark.parametrize("model", MODELS)
def test_a_chat_is_that_of_chat(model: str, client: openai.OpenAI, server: Any) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief. 🎉"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = server.engines[model].chat(messages, params, use_tqdm=False)[0]
    asked: Any = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage and whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
