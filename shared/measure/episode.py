"""The course's running example: four chats are streaming when a long document arrives.

Says who asks what and when, serves it once with an engine, and keeps what came out. Knows neither
stages nor screens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from shared.engine.outputs import RequestOutput
from shared.engine.prompts import chat_prompt
from shared.engine.sampling_params import SamplingParams

from . import agreement, example
from .metrics import Stall, decode_stall

DOCUMENT = "document"  # its request id; the chats are A, B, C and D

SUMMARY_TOKENS = 48

# What the document is about; more topics follow, the longest first, until it is long enough.
TOPICS = ("exceptions", "try", "raise", "with", "context-managers")


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes: in tokens, so that it is the same on a fast and a slow machine.

    Attributes:
        name: its request id.
        title: what it is about, for people.
        after: comes when the request before it has this many tokens.
    """

    name: str
    title: str
    prompt_token_ids: list[int]
    params: SamplingParams
    after: int

    @property
    def max_tokens(self) -> int:
        """Most tokens that it generates."""
        assert self.params.max_tokens
        return self.params.max_tokens

    @property
    def is_document(self) -> bool:
        """Whether it is the long document, and no chat."""
        return self.name == DOCUMENT


def build_arrivals(
    tokenizer: Any,
    document_tokens: int,
    max_tokens: int,
    before_document: int = example.BEFORE_DOCUMENT,
) -> list[Arrival]:
    """The chats, each a little after the one before, and the document once all of them stream.

    Args:
        document_tokens: of the document's prompt, exactly.
        max_tokens: of each chat, exactly: no end-of-sequence token ends it.
        before_document: tokens that chat D has when the document arrives.

    Raises:
        ValueError: the document is too short for its own question.
    """
    arrivals: list[Arrival] = []
    for name, story in example.STORIES.items():
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = _encode(tokenizer, f"{example.LEAD} {story}")
        after = example.BETWEEN_CHATS if arrivals else 0
        arrivals.append(Arrival(name, story, prompt, params, after))
    params = SamplingParams(temperature=0, max_tokens=SUMMARY_TOKENS)
    title = "pages of the Python reference, to summarize"
    prompt = document_prompt(tokenizer, document_tokens)
    return [*arrivals, Arrival(DOCUMENT, title, prompt, params, before_document)]


def document_prompt(tokenizer: Any, num_tokens: int) -> list[int]:
    """A prompt of `num_tokens` tokens: the question, and real text that is cut off at its end.

    Raises:
        ValueError: `num_tokens` leaves no room for the document.
    """
    question = f"{example.LEAD} {example.TASK}"
    ends = [_encode(tokenizer, question + letter)[::-1] for letter in "ab"]
    tail = next(i for i, (a, b) in enumerate(zip(*ends, strict=False)) if a != b)
    if num_tokens <= len(ends[0]):
        raise ValueError(f"{num_tokens} tokens are not enough: the question has {len(ends[0])}")
    whole: list[int] = []
    num_chars = 6 * num_tokens
    while len(whole) < num_tokens:  # a token hardly ever has more than six characters
        whole = _encode(tokenizer, question + document_text(num_chars))
        num_chars *= 2
    return whole[: num_tokens - tail] + whole[len(whole) - tail :]


def document_text(num_chars: int) -> str:
    """At least `num_chars` characters of the language reference that comes with Python.

    Its topics differ a little between versions of Python, and so does the text.
    """
    from pydoc_data.topics import topics

    names = [name for name in TOPICS if name in topics]
    others = [name for name in sorted(topics) if name not in names]
    names += sorted(others, key=lambda name: -len(topics[name]))
    text = ""
    for name in names:
        if len(text) < num_chars:
            text += topics[name].strip() + "\n\n"
    while len(text) < num_chars:
        text += text
    return text


def _encode(tokenizer: Any, request: str) -> list[int]:
    """Token ids of a conversation that begins with the common system prompt."""
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{example.SYSTEM}\n\n{request}\n\n")
    messages = [
        {"role": "system", "content": example.SYSTEM},
        {"role": "user", "content": request},
    ]
    prompt = chat_prompt(tokenizer, messages)
    assert isinstance(prompt, list)
    return prompt


class Gap(NamedTuple):
    """The time between two tokens of a chat that follow each other, in `time.perf_counter`."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


@dataclass
class Episode:
    """One service of the whole example.

    Attributes:
        label, title: of the stage, short and long.
        outputs: the last output of each request, in the order of their arrivals.
        start, end: seconds of `time.perf_counter`.
    """

    label: str
    title: str
    outputs: dict[str, RequestOutput]
    start: float
    end: float

    @property
    def document(self) -> RequestOutput:
        """The document's last output."""
        return self.outputs[DOCUMENT]

    @property
    def prefill(self) -> tuple[float, float]:
        """When the document came and when its first token did, as `start`."""
        metrics = self.document.metrics
        return metrics.arrival_time, metrics.token_times[0]

    @property
    def gaps(self) -> list[Gap]:
        """Every gap of every chat."""
        return [
            Gap(name, earlier, later)
            for name, output in self.outputs.items()
            for earlier, later in pairwise(output.metrics.token_times)
            if name != DOCUMENT
        ]

    @property
    def longest_gap(self) -> Gap:
        """The longest gap of any chat."""
        return max(self.gaps, key=lambda gap: gap.seconds)

    @property
    def stall(self) -> Stall | None:
        """What the document did to the chats; None if they had ended before it came."""
        return decode_stall(self.outputs.values(), DOCUMENT)


def serve(
    engine: Any,
    arrivals: Sequence[Arrival],
    label: str,
    title: str,
    arrived: Callable[[Arrival], None],
    stepped: Callable[[list[RequestOutput]], None],
) -> Episode:
    """Serve the example once.

    Args:
        label, title: of the engine, for people.
        arrived: called when a request was added.
        stepped: called after each step, with what it put out.

    Raises:
        RuntimeError: a request failed.
    """
    outputs: dict[str, RequestOutput] = {}
    waiting = deque(arrivals)
    newest: str | None = None
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and (newest is None or has(outputs.get(newest), waiting[0].after)):
            arrival = waiting.popleft()
            newest = engine.add_request(arrival.prompt_token_ids, arrival.params, arrival.name)
            arrived(arrival)
        for output in (news := engine.step()):
            if output.finish_reason == "error":
                raise RuntimeError(f"{label}: the request {output.request_id!r} failed")
            outputs[output.request_id] = output
        stepped(news)
    outputs = {arrival.name: outputs[arrival.name] for arrival in arrivals}
    return Episode(label, title, outputs, start, time.perf_counter())


def has(output: RequestOutput | None, num_tokens: int) -> bool:
    """Whether a request has got that far, or will get no further."""
    return output is not None and (len(output.token_ids) >= num_tokens or output.finished)


def first_difference(episodes: Sequence[Episode]) -> str | None:
    """Where an episode has other tokens than the first one; None if all texts are the same."""
    one = episodes[0]
    for other in episodes[1:]:
        for name, output in one.outputs.items():
            expected, got = output.token_ids, other.outputs[name].token_ids
            same = agreement.first_difference(expected, got)
            if same is not None:
                return f"{name}: {one.label} and {other.label} differ after {same} equal tokens"
    return None


def seconds(value: float | None) -> str:
    """A time as people read it: "62 ms", "1.62 s", "21.4 s"."""
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def warm_up(engine: Any, arrivals: Sequence[Arrival], chunk: int) -> None:
    """Compile kernels and touch memory before anything is measured.

    Runs a decode and, beside it, a prefill of a little more than one chunk, and then empties the
    prefix cache.
    """
    chat, document = arrivals[0].prompt_token_ids, arrivals[-1].prompt_token_ids
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request(chat, params)
    for _ in range(3):
        engine.step()
    engine.add_request(document[: chunk + 16], params)
    while engine.has_unfinished_requests():
        engine.step()
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()
