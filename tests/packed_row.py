"""Dense attention over a packed row: what the engines do with blocks, done with plain tensors.

A reference for tests. It keeps K and V per sequence and layer, so that a row may hold whole
prompts, chunks and single decode tokens of several sequences, as an engine's step does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "mini_vllm_test_dense"


@dataclass
class PackedRow:
    """The metadata of one step, and the cache. `slices` are (sequence, number of tokens)."""

    slices: list[tuple[int, int]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)  # tokens of each sequence seen so far
    cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    masks_seen: int = 0

    def run(self, model: Any, slices: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Feed the next tokens of some sequences in one row; returns each slice's logits."""
        self.slices = [(sequence, len(tokens)) for sequence, tokens in slices]
        starts = [self.lengths.get(sequence, 0) for sequence, _ in slices]
        positions = [
            torch.arange(start, start + len(tokens))
            for start, (_, tokens) in zip(starts, slices, strict=True)
        ]
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat([tokens for _, tokens in slices])[None],
                position_ids=torch.cat(positions)[None],
                use_cache=False,
                attn_metadata=self,
            ).logits[0]
        for sequence, count in self.slices:
            self.lengths[sequence] = self.lengths.get(sequence, 0) + count
        return list(logits.split([count for _, count in self.slices]))


def dense_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attn_metadata: PackedRow | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert attn_metadata is not None
    attn_metadata.masks_seen += attention_mask is not None
    outs, start = [], 0
    for sequence, count in attn_metadata.slices:
        q, k, v = (tensor[:, :, start : start + count] for tensor in (query, key, value))
        start += count
        place = (module.layer_idx, sequence)
        if place in attn_metadata.cache:
            old_k, old_v = attn_metadata.cache[place]
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        attn_metadata.cache[place] = (k, v)
        # Bottom-right aligned: the last query sees all keys.
        mask = torch.ones(count, k.shape[2], dtype=torch.bool).tril(k.shape[2] - count)
        gqa = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=gqa))
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def use_dense_attention(model: Any) -> None:
    """Make `model` run through `dense_attention`."""
    AttentionInterface.register(NAME, dense_attention)
    model.set_attn_implementation(NAME)
