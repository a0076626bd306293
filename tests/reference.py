"""What `transformers` itself answers: the tokens that every engine must reproduce."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig


class Reference(NamedTuple):
    """Greedy tokens of one prompt, alone.

    margins: by how much each token's logit was above the second best, as a share of the largest.
    """

    token_ids: list[int]
    margins: list[float]


_known: dict[tuple[int, tuple[int, ...]], Reference] = {}
_models: dict[int, Any] = {}  # kept alive, so that no other model gets one of these ids


def reference(model: Any, prompt_token_ids: list[int], num_tokens: int) -> Reference:
    """The first `num_tokens` tokens of `generate(do_sample=False)`; EOS does not end them.

    Remembered, since many tests ask for the same prompts.
    """
    key = (id(model), tuple(prompt_token_ids))
    known = _known.get(key)
    if known is None or len(known.token_ids) < num_tokens:
        _models[id(model)] = model
        known = _known[key] = _generate(model, prompt_token_ids, num_tokens)
    return Reference(known.token_ids[:num_tokens], known.margins[:num_tokens])


def reference_tokens(model: Any, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """Only the tokens of `reference`."""
    return reference(model, prompt_token_ids, num_tokens).token_ids


@torch.no_grad()
def _generate(model: Any, prompt_token_ids: list[int], num_tokens: int) -> Reference:
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # an engine may have left its own
    try:
        output = model.generate(
            torch.tensor([prompt_token_ids], device=model.device),
            attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.long),
            generation_config=GenerationConfig(
                do_sample=False,
                use_cache=True,
                max_new_tokens=num_tokens,
                eos_token_id=model.config.vocab_size,  # none; None would mean the model's
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
    finally:
        model.set_attn_implementation(before)
    token_ids = output.sequences[0, len(prompt_token_ids) :].tolist()
    assert len(token_ids) == num_tokens, f"generate() ended after {len(token_ids)} tokens"
    margins = []
    for logits in output.logits:
        first, second = logits[0].topk(2).values.tolist()
        margins.append((first - second) / logits.abs().max().item())
    return Reference(token_ids, margins)
