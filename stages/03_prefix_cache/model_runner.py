"""Turns a scheduled batch into one forward. The only module that knows sequences and tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.backends import load_kernels
from shared.engine.memory import choose_num_blocks, to_device
from shared.models import attention_set_to, inspect_model

from .attention import IMPLEMENTATION, AttentionMetadata
from .block_manager import slot_mapping
from .config import EngineConfig
from .cuda_graph import DecodeGraphs, record_graphs
from .kv_cache import KVCache
from .scheduler import ScheduledBatch, Slice
from .sequence import Sequence


class ModelRunner:
    """Owns the KV cache and calls the model.

    `config` is the given one with every None resolved. Raises ValueError if the model needs more
    than our attention can do, or if there is no memory for a block.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.model = model
        self.shape = inspect_model(model, config.max_model_len)
        backend, block_size = config.attention_backend, config.block_size
        self.kernels = load_kernels(__package__, backend, self.shape, block_size)
        self.graphs: DecodeGraphs | None = None
        self.config = dataclasses.replace(config, max_model_len=self.shape.max_model_len)
        num_blocks = choose_num_blocks(self.shape, self.config, self._profile)
        self.config = dataclasses.replace(self.config, num_blocks=num_blocks)
        self.kv_cache = KVCache(self.shape, num_blocks, config.block_size)
        self.graphs = record_graphs(self._forward, self.config, self.kv_cache, self.kernels)

    def _profile(self) -> None:
        """Run the largest possible forward, with a cache of its own."""
        num_tokens = min(self.config.max_num_batched_tokens, self.shape.max_model_len)
        sequence = Sequence("profile", [0] * num_tokens, max_tokens=1)
        sequence.block_table = list(range(-(-num_tokens // self.config.block_size)))
        self.kv_cache = KVCache(self.shape, len(sequence.block_table), self.config.block_size)
        self.run(ScheduledBatch([Slice(sequence, 0, num_tokens)]))
        del self.kv_cache

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Tensor:
        """Compute all slices of `batch` in one forward; their keys and values go to the cache.

        Returns logits `[len(batch.sampling), vocab_size]`, in that order.
        """
        inputs = self._prepare(batch.slices)
        if self.graphs and self.graphs.fit(inputs):
            return self.graphs.replay(inputs)
        return self._forward(inputs)

    def _forward(self, inputs: dict[str, Any]) -> Tensor:
        with attention_set_to(IMPLEMENTATION, self.model):  # others may use the model, too
            return self.model(**inputs, use_cache=False).logits[0]

    # Each slice is a run of rows; the position of a row is its token's index in its own sequence.
    #
    #     slices            A 0..3         | B 7..8 | C 0..2           (start_pos..end_pos)
    #     input_ids         a0   a1   a2   | b7     | c0   c1
    #     position_ids      0    1    2    | 7      | 0    1
    #     query_start_loc   0                3        4        6
    #     context_lens      3                8        2
    def _prepare(self, slices: list[Slice]) -> dict[str, Any]:
        """Concatenate the slices into one row of T tokens: the model's keyword arguments."""
        input_ids: list[int] = []
        position_ids: list[int] = []
        slots, block_tables, query_start_loc, context_lens, logit_rows = [], [], [0], [], []
        width = max(len(s.sequence.block_table) for s in slices)
        for s in slices:
            table = s.sequence.block_table
            input_ids += s.sequence.token_ids[s.start_pos : s.end_pos]
            position_ids += range(s.start_pos, s.end_pos)
            slots += slot_mapping(table, s.start_pos, s.num_tokens, self.config.block_size)
            block_tables.append(table + [0] * (width - len(table)))
            query_start_loc.append(len(input_ids))
            context_lens.append(s.end_pos)
            if s.end_pos == s.sequence.num_tokens:  # a token is sampled here
                logit_rows.append(len(input_ids) - 1)

        rows = self._tensor([input_ids, position_ids, slots])
        metadata = AttentionMetadata(
            kv_cache=self.kv_cache,
            slots=rows[2],
            query_start_loc=self._tensor(query_start_loc, torch.int32),
            context_lens=self._tensor(context_lens, torch.int32),
            block_tables=self._tensor(block_tables, torch.int32),
            num_decodes=next((i for i, s in enumerate(slices) if s.num_tokens > 1), len(slices)),
            max_query_len=max(s.num_tokens for s in slices),
            max_context_len=max(context_lens),
            kernels=self.kernels,
        )
        return {
            "input_ids": rows[0:1],
            "position_ids": rows[1:2],
            "logits_to_keep": self._tensor(logit_rows),
            "attn_metadata": metadata,
        }

    def _tensor(self, values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return to_device(values, self.shape.device, dtype)
