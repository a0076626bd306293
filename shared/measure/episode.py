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

from . import agreement
from .metrics import Stall, decode_stall

DOCUMENT = "document"  # its request id; the chats are A, B, C and D

# Long enough for whole blocks of it to be found in the prefix cache.
SYSTEM = (
    "You are a storyteller. Tell the story that you are asked for slowly, in long and calm "
    "sentences, say what people see and hear and think, and do not hurry to its end."
)
STORIES = {
    "A": "a lighthouse and a letter",
    "B": "a fox who learns to read",
    "C": "a night train in the desert",
    "D": "a baker and her old oven",
}
TASK = (
    "Here are pages of the Python language reference.\n\n{}\n\nSummarize them in a few sentences."
)
SUMMARY_TOKENS = 48

# What the document is about; of the others, the longest that still fit fill it up.
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


def build_arrivals(tokenizer: Any, document_tokens: int, max_tokens: int) -> list[Arrival]:
    """The chats, each a little after the one before, and the document once all of them stream.

    Args:
        document_tokens: most tokens of the document, see `document_text`.
        max_tokens: tokens of each chat, exactly: no end-of-sequence token ends it.
    """
    arrivals: list[Arrival] = []
    for name, story in STORIES.items():
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Tell me a story about {story}."},
        ]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        after = 2 if arrivals else 0  # A has left the common prompt in the cache by then
        arrivals.append(Arrival(name, story, _encode(tokenizer, messages), params, after))
    text = document_text(tokenizer, document_tokens)
    prompt = _encode(tokenizer, [{"role": "user", "content": TASK.format(text)}])
    params = SamplingParams(temperature=0, max_tokens=SUMMARY_TOKENS)
    title = "pages of the Python reference, to summarize"
    return [*arrivals, Arrival(DOCUMENT, title, prompt, params, after=max_tokens // 4)]


def document_text(tokenizer: Any, num_tokens: int) -> str:
    """Real text of at most `num_tokens` tokens: whole topics of the reference in every Python.

    The topics differ a little between versions of Python, and so does the document.
    """
    from pydoc_data.topics import topics

    names = [name for name in TOPICS if name in topics]
    others = [name for name in sorted(topics) if name not in names]
    names += sorted(others, key=lambda name: -len(topics[name]))
    chosen: list[str] = []
    for name in names:
        topic = topics[name].strip() + "\n\n"
        # Long ones are not even counted: a token hardly ever has more than six characters.
        if len(topic) <= 6 * num_tokens:
            length = len(tokenizer.encode(topic, add_special_tokens=False, verbose=False))
            length += 1  # its last line break may split differently before the next topic
            if length <= num_tokens:
                chosen.append(topic)
                num_tokens -= length
    return "".join(chosen).strip()


def task_tokens(tokenizer: Any) -> int:
    """Tokens that the document's request has beside the document, at most."""
    spare = 4  # text may split differently where the document begins and ends
    return len(_encode(tokenizer, [{"role": "user", "content": TASK.format("")}])) + spare


def _encode(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if not tokenizer.chat_template:
        text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        return tokenizer.encode(text)
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
