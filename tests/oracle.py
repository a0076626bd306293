"""The memory oracle: a stand-in for the model that remembers what every slot of the cache holds.

It is called like the model, by the stage's own `ModelRunner`, and does what attention does, with
perfect memory instead of numbers: first it writes each row's token into the row's slot, then each
slice reads its whole context back through its block table. A read is right only if the slot was
written, with the token of that position, after exactly that prefix. Its next token is a function
of the tokens *as read*, so a request's output is known beforehand, whatever the schedule was.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Slot(NamedTuple):
    """What a slot holds: a token, its position, and the hash of all tokens up to it."""

    position: int
    token_id: int
    prefix_hash: int


class WrongMemory(AssertionError):
    """A slot was read that does not hold what the reader must see."""


class ForwardFailed(Exception):
    """Raised in the middle of a forward on request, as a failing kernel would."""


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """The oracle's language: the token that follows `token_ids`."""
    return hash((len(token_ids), *token_ids)) % vocab_size


def expected_output(prompt_token_ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The `num_tokens` tokens that a request must get."""
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt_token_ids) :]


class OracleModel:
    """Takes the model's place in a `ModelRunner`.

    Attributes:
        fail_next: raise in the middle of the next forward, after half of its writes.
        num_forwards, num_reads: how much was checked; a test that checked nothing proves nothing.
        step_tokens: tokens computed by each forward.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.memory: dict[int, Slot] = {}
        self.fail_next = False
        self.num_forwards = 0
        self.num_reads = 0
        self.step_tokens: list[int] = []
        self.config = SimpleNamespace(_attn_implementation=None)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        attn_metadata: Any,
        use_cache: bool,
    ) -> SimpleNamespace:
        tokens, positions = input_ids[0].tolist(), position_ids[0].tolist()
        slots = attn_metadata.slots.tolist()
        starts = torch.as_tensor(attn_metadata.query_start_loc).tolist()
        context_lens = torch.as_tensor(attn_metadata.context_lens).tolist()
        tables = [torch.as_tensor(table).tolist() for table in attn_metadata.block_tables]
        block_size = attn_metadata.kv_cache.block_size
        self.num_forwards += 1
        self.step_tokens.append(len(tokens))
        if len(set(slots)) != len(slots):
            raise WrongMemory(f"two rows of one step write the same slot: {sorted(slots)}")

        # 1. Write. The hash goes on from what the slot before really holds, so that a wrong
        #    prefix cannot go unnoticed.
        for i, context_len in enumerate(context_lens):
            for row in range(starts[i], starts[i + 1]):
                position = context_len - (starts[i + 1] - row)
                if positions[row] != position:
                    raise WrongMemory(f"row {row} has position {positions[row]}, not {position}")
                slot = tables[i][position // block_size] * block_size + position % block_size
                if slots[row] != slot:
                    raise WrongMemory(
                        f"position {position} is written to slot {slots[row]}; the block table "
                        f"{tables[i]} puts it into {slot}"
                    )
                before = 0
                if position:
                    table_entry = tables[i][(position - 1) // block_size]
                    held = self.memory.get(table_entry * block_size + (position - 1) % block_size)
                    before = held.prefix_hash if held else -1
                self.memory[slot] = Slot(position, tokens[row], hash((before, tokens[row])))
            if self.fail_next and i == len(context_lens) // 2:
                self.fail_next = False
                raise ForwardFailed("the oracle was told to fail")

        # 2. Read every slice's context through its block table.
        contexts = [
            self._read(table, context_len, block_size)
            for table, context_len in zip(tables, context_lens, strict=False)
        ]

        # 3. One row of logits for each row that is asked for.
        logits = torch.zeros(1, len(logits_to_keep), self.vocab_size)
        for n, row in enumerate(logits_to_keep.tolist()):
            i = next(i for i in range(len(context_lens)) if starts[i] <= row < starts[i + 1])
            if row != starts[i + 1] - 1:
                raise WrongMemory(f"logits of row {row}, which is not the last of its slice")
            logits[0, n, next_token(contexts[i], self.vocab_size)] = 1.0
        return SimpleNamespace(logits=logits)

    def _read(self, table: list[int], context_len: int, block_size: int) -> list[int]:
        prefix_hash, token_ids = 0, []
        for position in range(context_len):
            slot = table[position // block_size] * block_size + position % block_size
            held = self.memory.get(slot)
            self.num_reads += 1
            if held is None:
                raise WrongMemory(f"slot {slot} (position {position}) is read but never written")
            prefix_hash = hash((prefix_hash, held.token_id))
            if held.position != position or held.prefix_hash != prefix_hash:
                raise WrongMemory(
                    f"slot {slot} should hold position {position} of this sequence, it holds "
                    f"position {held.position} of another: {held}"
                )
            token_ids.append(held.token_id)
        return token_ids


def install_oracle(engine: Any) -> OracleModel:
    """Put the oracle in the place of `engine`'s model and return it."""
    oracle = OracleModel(engine.model_runner.shape.vocab_size)
    engine.model_runner.model = oracle
    return oracle
