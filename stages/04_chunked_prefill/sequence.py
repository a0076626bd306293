"""One request's tokens and how far the engine has got with them.

Knows nothing of models, tensors or text: only token ids, counters and the block table.
"""

from __future__ import annotations

from enum import Enum


class SequenceStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"  # holds no blocks
    PREFILLING = "prefilling"  # part of its prompt is in the cache; no token out yet
    RUNNING = "running"  # its whole prompt is in the cache; it decodes
    FINISHED = "finished"  # for one of the reasons stop, length, abort, error


class Sequence:
    """The tokens of one request, prompt first, and their place in the KV cache.

    The newest generated token is *not* in the cache: it is the input of the next decode. So after
    a prefill of P tokens `cached_token_count == P` with one generated token, and after the first
    decode it is P + 1 with two.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], max_tokens: int, cache_salt: str = ""
    ) -> None:
        self.request_id = request_id  # unique among live requests
        self.token_ids = list(prompt_token_ids)  # prompt, then generated
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens  # generated ones
        self.cache_salt = cache_salt  # prefixes are shared only under the same salt
        self.block_hashes: list[bytes] = []  # of the full blocks looked up or published so far
        self.num_hit_tokens: int | None = None  # prompt tokens found in the cache when admitted
        self.block_table: list[int] = []  # physical block of logical block i
        self.cached_token_count = 0  # tokens whose K and V are in the cache
        self.last_step = 0  # in which it got its newest token
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and the generated ones."""
        return len(self.token_ids)

    @property
    def prefilled_token_count(self) -> int:
        """Prompt tokens whose prefill is done."""
        return min(self.cached_token_count, self.num_prompt_tokens)

    def __repr__(self) -> str:
        cached = f"{self.cached_token_count} of {self.num_tokens} tokens cached"
        return f"Sequence({self.request_id!r}, {self.status.value}, {cached})"
