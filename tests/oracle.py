"""The memory oracle: a model with perfect memory instead of weights.

A real model forgives: it answers something even if it reads the wrong slot. This one has two
layers whose keys and values say exactly what they stand for, so that each row of a step can tell
what the engine let it read:

    layer 0   the value of a token is the token itself, put into the channel of its position;
    layer 1   the value is a hash of the whole prefix that the token was computed from.

All keys are zero, so attention is the plain mean of the values, and a row at position p sees
exactly the positions 0 .. p, or something is wrong. A read is right only if the slot was written
with the token of that position, after exactly that prefix. The next token is a function of the
tokens *as read*: what a request must get is known beforehand, whatever its schedule was.

It is called like any model and reaches the cache only through the engine's own attention, so it
works with every engine and every attention kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VOCAB_SIZE = 997
MAX_MODEL_LEN = 32


class ForwardFailed(Exception):
    """Raised in the middle of a forward on request, as a failing kernel would."""


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """The hash of a prefix with one more token. Python hashes integers alike in every process."""
    return hash((prefix_hash, token_id))


def next_token(prefix_hash: int) -> int:
    """The oracle's language: the token that follows a prefix."""
    return (prefix_hash >> 20) % VOCAB_SIZE


def expected_output(prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that a request must get."""
    prefix_hash = 0
    for token_id in prompt_token_ids:
        prefix_hash = extend_hash(prefix_hash, token_id)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(prefix_hash))
        prefix_hash = extend_hash(prefix_hash, output[-1])
    return output


class OracleModel(LlamaForCausalLM):
    """Takes a model's place: `LLMEngine(model=(OracleModel(), None))`.

    Attributes:
        faults: what was wrong, in words. An exception would only end the requests of the step.
        fail_next: raise in the middle of the next forward: layer 0 is written, layer 1 is not.
        step_rows: tokens computed by each forward; a test that checked nothing proves nothing.
    """

    def __init__(self) -> None:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=MAX_MODEL_LEN,
            intermediate_size=1,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=MAX_MODEL_LEN,
            max_position_embeddings=MAX_MODEL_LEN,
        )
        super().__init__(config)
        self.eval().requires_grad_(False)
        self.reset()

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name  # it keeps what the real one asks the sources for

    def reset(self) -> None:
        self.faults: list[str] = []
        self.fail_next = False
        self.step_rows: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> SimpleNamespace:
        tokens = input_ids[0].tolist()
        positions = list(range(len(tokens))) if position_ids is None else position_ids[0].tolist()
        self.step_rows.append(len(tokens))
        if isinstance(logits_to_keep, int):
            kept_rows = list(range(len(tokens)))[-logits_to_keep:]
        else:
            kept_rows = logits_to_keep.tolist()
        logits = torch.zeros(1, len(kept_rows), VOCAB_SIZE)
        if max(positions) >= MAX_MODEL_LEN:
            self.faults.append(f"position {max(positions)} is over max_model_len {MAX_MODEL_LEN}")
            return SimpleNamespace(logits=logits)

        # 1. Each row reads the tokens up to itself.
        contexts = self._attend(0, positions, [token + 1 for token in tokens], kwargs)
        if self.fail_next:
            self.fail_next = False
            raise ForwardFailed("the oracle was told to fail")
        chains = []
        for row, context in enumerate(contexts):
            if fault := self._fault(positions[row], tokens[row], context):
                self.faults.append(f"row {row} (position {positions[row]}): {fault}")
            chain = [0]
            for token in context[: positions[row] + 1]:
                chain.append(extend_hash(chain[-1], token - 1))
            chains.append(chain[1:])

        # 2. Each row reads after which prefixes those tokens were computed.
        wanted = [[_code(prefix_hash) for prefix_hash in chain] for chain in chains]
        found = self._attend(1, positions, [codes[-1] for codes in wanted], kwargs)
        for row, codes in enumerate(wanted):
            if found[row][: len(codes)] != codes and not self.faults:
                position = next(p for p, code in enumerate(codes) if found[row][p] != code)
                self.faults.append(
                    f"row {row} (position {positions[row]}): the slot of position {position} has "
                    "the right token, but its key and value were computed after another prefix, "
                    "or not at all"
                )
        for i, row in enumerate(kept_rows):
            logits[0, i, next_token(chains[row][-1])] = 1.0
        return SimpleNamespace(logits=logits)

    def _attend(
        self, layer: int, positions: list[int], codes: list[int], kwargs: dict[str, Any]
    ) -> list[list[int]]:
        """Put each row's code into its position's channel; return what each row reads, by position.

        0 where it reads nothing; -1 where it reads a slot that was never written, or several codes
        at one position.
        """
        module = self.model.layers[layer].self_attn
        value = np.zeros((1, 1, len(positions), MAX_MODEL_LEN), np.float32)
        for row, position in enumerate(positions):
            value[0, 0, row, position] = codes[row]
        key = torch.zeros(value.shape)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _one_sequence_attention
        )
        value = torch.from_numpy(value)
        mean, _ = attention(module, key, key, value, None, scaling=1.0, dropout=0.0, **kwargs)
        read = mean.reshape(-1, MAX_MODEL_LEN).numpy()
        read = read * (np.array(positions, np.float32)[:, None] + 1)
        rounded = np.rint(read)
        is_code = np.abs(read - rounded) < 0.1  # false for NaN, too
        if not is_code.all():
            rounded[~is_code] = -1
        return rounded.astype(np.int64).tolist()

    def _fault(self, position: int, token: int, context: list[int]) -> str | None:
        """What is wrong with what a row reads from the cache, by position; None if nothing is."""
        past, future = context[: position + 1], context[position + 1 :]
        if -1 in context:
            return "it reads a slot that was never written, or one position twice"
        if any(future):
            also = [position + 1 + i for i, code in enumerate(future) if code]
            return f"it also reads the positions {also}, which are not its past"
        if 0 in past:
            missing = [i for i, code in enumerate(past) if not code]
            return f"it does not read the positions {missing}"
        if past[-1] != token + 1:
            return f"it reads token {past[-1] - 1} in its own slot, not its own token {token}"
        return None


def _one_sequence_attention(
    module: Any, query: Any, key: Any, value: Any, mask: None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Without an engine: what "eager" means when the model is looked at on its own."""
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.transpose(1, 2), None


def _code(prefix_hash: int) -> int:
    """A part of the hash, small enough to survive a mean in float32; 0 is for nothing."""
    return prefix_hash % 60_000 + 1
