"""Requests to measure with: the same ones on every run, for every row of a table.

Made from real text, since random ids make a model behave as it never would, and from a seed.
`Workload.checksum` says whether two runs measured the same thing. Knows token ids and arrival
times; no engine, no model, no clock.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WorkloadRequest:
    """One request and when it comes.

    Attributes:
        request_id: unique in its workload.
        prompt_token_ids: the prompt; if the request `continues` another, only what is added to
            that one's prompt and answer.
        max_tokens: tokens to generate, exactly: an end-of-sequence token does not end it.
        arrival_time: seconds after the start, or after what `after` names.
        after: id of a request that this one waits for.
        after_tokens: that one's n-th token; None is its end.
        continues: it is the next turn of the conversation that `after` names.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_time: float = 0.0
    after: str | None = None
    after_tokens: int | None = None
    continues: bool = False


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, as far as that is known beforehand."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def checksum(self) -> str:
        """SHA-256 over all prompts, arrival times, lengths and dependencies, as hex."""
        content = [
            [
                *(list(r.prompt_token_ids), r.max_tokens, round(r.arrival_time, 6)),
                *(r.after, r.after_tokens, r.continues),
            ]
            for r in self.requests
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def lengths(self) -> dict[str, int]:
        """Prompt plus generated tokens of each request at its end, earlier turns included."""
        lengths: dict[str, int] = {}
        for r in self.requests:
            before = lengths[r.after] if r.continues and r.after else 0
            lengths[r.request_id] = before + len(r.prompt_token_ids) + r.max_tokens
        return lengths

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all requests at once, none shared."""
        return sum(-(-length // block_size) for length in self.lengths().values())

    def summary(self) -> dict[str, Any]:
        """What goes into the results."""
        return {
            "checksum": self.checksum,
            "num_requests": len(self.requests),
            "prompt_tokens": sum(len(r.prompt_token_ids) for r in self.requests),
            "output_tokens": sum(r.max_tokens for r in self.requests),
        }


def read_text(path: str | Path | None = None) -> str:
    """The text of a file, or the language reference that every Python brings along.

    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the text {path}: {error}") from error


class Passages:
    """Cuts passages of given lengths from one long text.

    No two of one object begin alike, so none is the prefix-cache hit of another by accident.

    Args:
        token_ids: the text.
        seed: chooses the places.
    """

    DISTINCT = 16  # tokens in which the beginnings of two passages differ

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._token_ids = token_ids
        self.rng = random.Random(seed)
        self._beginnings: set[tuple[int, ...]] = set()

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """The next passage. Raises ValueError if the text is too short for it."""
        if not 1 <= num_tokens <= len(self._token_ids):
            raise ValueError(
                f"a passage of {num_tokens} tokens from a text of {len(self._token_ids)}"
            )
        for _ in range(1000):
            start = self.rng.randrange(len(self._token_ids) - num_tokens + 1)
            passage = tuple(self._token_ids[start : start + num_tokens])
            if passage[: self.DISTINCT] not in self._beginnings:
                self._beginnings.add(passage[: self.DISTINCT])
                return passage
        raise ValueError(
            f"no new passage in a text of {len(self._token_ids)} tokens after "
            f"{len(self._beginnings)}: it is too short or too uniform"
        )


# --- the workloads ----------------------------------------------------------------------------


def chat(
    token_ids: Sequence[int],
    seed: int = 0,
    num_requests: int = 16,
    prompt_tokens: tuple[int, int] = (32, 256),
    max_tokens: int = 64,
) -> Workload:
    """Short prompts of different lengths, nothing in common, all there at once."""
    passages = Passages(token_ids, seed)
    requests = [
        WorkloadRequest(
            f"chat-{i}", passages.take(passages.rng.randint(*prompt_tokens)), max_tokens
        )
        for i in range(num_requests)
    ]
    return Workload("chat", tuple(requests))


def shared_prefix(
    token_ids: Sequence[int],
    seed: int = 0,
    num_requests: int = 16,
    prefix_tokens: int = 1024,
    own_tokens: int = 32,
    max_tokens: int = 1,
) -> Workload:
    """A system prompt or retrieved document before each question, one question after another."""
    passages = Passages(token_ids, seed)
    prefix = passages.take(prefix_tokens)
    requests = [
        WorkloadRequest(
            request_id=f"question-{i}",
            prompt_token_ids=prefix + passages.take(own_tokens),
            max_tokens=max_tokens,
            after=f"question-{i - 1}" if i else None,
        )
        for i in range(num_requests)
    ]
    return Workload("shared_prefix", tuple(requests))


def long_prompt(
    token_ids: Sequence[int],
    seed: int = 0,
    num_streams: int = 4,
    stream_prompt_tokens: int = 64,
    stream_tokens: int = 96,
    long_prompt_tokens: int = 3072,
    long_tokens: int = 8,
    after_tokens: int = 16,
) -> Workload:
    """Streams are running when a long prompt arrives that is not in the cache.

    It comes when the last stream has `after_tokens` tokens: that depends on no machine's speed.
    """
    passages = Passages(token_ids, seed)
    streams = [
        WorkloadRequest(f"stream-{i}", passages.take(stream_prompt_tokens), stream_tokens)
        for i in range(num_streams)
    ]
    long = WorkloadRequest(
        request_id="long",
        prompt_token_ids=passages.take(long_prompt_tokens),
        max_tokens=long_tokens,
        after=streams[-1].request_id,
        after_tokens=after_tokens,
    )
    return Workload("long_prompt", (*streams, long))


def multi_turn(
    token_ids: Sequence[int],
    seed: int = 0,
    num_chats: int = 4,
    num_turns: int = 4,
    turn_tokens: tuple[int, int] = (32, 96),
    max_tokens: int = 48,
) -> Workload:
    """Conversations: each turn repeats all before it and the answers, and adds a question."""
    passages = Passages(token_ids, seed)
    requests = []
    for turn in range(num_turns):
        for i in range(num_chats):
            requests.append(
                WorkloadRequest(
                    request_id=f"chat-{i}-turn-{turn}",
                    prompt_token_ids=passages.take(passages.rng.randint(*turn_tokens)),
                    max_tokens=max_tokens,
                    after=f"chat-{i}-turn-{turn - 1}" if turn else None,
                    continues=turn > 0,
                )
            )
    return Workload("multi_turn", tuple(requests))


def mixed(
    token_ids: Sequence[int],
    seed: int = 0,
    num_requests: int = 32,
    rate: float = 2.0,
    burstiness: float = 1.0,
    prompt_tokens: tuple[float, float, int] = (128, 1.0, 1024),
    output_tokens: tuple[float, float, int] = (48, 0.7, 192),
) -> Workload:
    """Requests at random times with log-normal lengths, as public traces of chat services have.

    Args:
        rate: arrivals per second.
        burstiness: shape of the gamma-distributed gaps; 1 is a Poisson process, less is burstier.
            (vLLM's `benchmark_serving` has the same two.)
        prompt_tokens, output_tokens: median, sigma of the logarithm, and where it is cut off.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be above 0, got {rate} and {burstiness}")
    passages = Passages(token_ids, seed)
    rng = passages.rng

    def length(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

    now, requests = 0.0, []
    for i in range(num_requests):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        prompt = passages.take(length(*prompt_tokens))
        requests.append(WorkloadRequest(f"request-{i}", prompt, length(*output_tokens), now))
    return Workload("mixed", tuple(requests))


def example(
    token_ids: Sequence[int],
    seed: int = 0,
    num_chats: int = 6,
    system_tokens: int = 128,
    own_tokens: tuple[int, int] = (16, 64),
    max_tokens: int = 24,
    document_tokens: int = 1024,
) -> Workload:
    """Chats with a common system prompt, then a long document: the running example, other sizes.

    The other chats come with the first token of the first one, whose system prompt is in the cache
    by then; the document when the last chat has a sixth of its answer.
    """
    passages = Passages(token_ids, seed)
    system = passages.take(system_tokens)
    chats = [
        WorkloadRequest(
            request_id=f"chat-{i}",
            prompt_token_ids=system + passages.take(passages.rng.randint(*own_tokens)),
            max_tokens=max_tokens,
            after="chat-0" if i else None,
            after_tokens=1 if i else None,
        )
        for i in range(num_chats)
    ]
    document = WorkloadRequest(
        request_id="document",
        prompt_token_ids=passages.take(document_tokens),
        max_tokens=2,
        after=chats[-1].request_id,
        after_tokens=max(1, max_tokens // 6),
    )
    return Workload("example", (*chats, document))


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "chat": chat,
    "shared_prefix": shared_prefix,
    "long_prompt": long_prompt,
    "multi_turn": multi_turn,
    "mixed": mixed,
    "example": example,
}
