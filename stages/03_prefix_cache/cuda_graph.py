"""Decode steps recorded as CUDA graphs, so that a step costs one launch instead of hundreds.

The GPU finishes a decode step of a small model sooner than Python can launch its kernels. A graph
records the launches once and replays them, always with the same tensors: the inputs of a step are
copied into them first. There are graphs for a ladder of batch sizes. A batch takes the next larger
one, with rows of padding that write nothing and attend to nothing.

Knows the model's inputs, not sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .attention import AttentionMetadata
from .config import EngineConfig
from .kv_cache import KVCache

Forward = Callable[[dict[str, Any]], Tensor]
logger = logging.getLogger(__name__)


def record_cuda_graph(forward: Forward, inputs: dict[str, Any], pool: Any) -> Callable[[], Tensor]:
    """Record `forward(inputs)`; the returned function replays it and returns its output tensor.

    Args:
        pool: memory pool that graphs share, since never two of them run at once.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile kernels and grow workspaces before recording
        forward(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = forward(inputs)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, then every 8; the largest is `max_num_seqs`."""
    steps = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted(size for size in steps if size <= max_num_seqs)


class DecodeGraphs:
    """Graphs of one model's decode step.

    Args:
        forward: computes logits from the model's keyword arguments.
        config: with `max_num_seqs`, `max_model_len` and `block_size`.
        kv_cache, kernels: as in `AttentionMetadata`.
        record: how one graph is made; tests without a GPU pass their own.
    """

    def __init__(
        self,
        forward: Forward,
        config: EngineConfig,
        kv_cache: KVCache,
        kernels: ModuleType,
        record: Callable[..., Callable[[], Tensor]] = record_cuda_graph,
    ) -> None:
        assert config.max_model_len is not None
        size, device = config.max_num_seqs, kv_cache.pool.device
        width = -(-config.max_model_len // config.block_size)
        self.rows = torch.zeros(3, size, dtype=torch.long, device=device)
        self.context_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(size, width, dtype=torch.int32, device=device)
        self.rows[2] = -1
        ordinals = torch.arange(size + 1, device=device)
        metadata = AttentionMetadata(
            kv_cache=kv_cache,
            slots=self.rows[2],
            query_start_loc=ordinals.int(),
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            num_decodes=size,
            max_query_len=1,
            max_context_len=config.max_model_len,
            kernels=kernels,
        )
        # From the largest down, so that smaller graphs can reuse the memory of larger ones.
        self.replays: dict[int, Callable[[], Tensor]] = {}
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        sizes = ladder(size)
        with torch.inference_mode():
            for n in tqdm(sizes[::-1], desc="recording decode graphs", disable=len(sizes) < 2):
                inputs = {
                    "input_ids": self.rows[0:1, :n],
                    "position_ids": self.rows[1:2, :n],
                    "logits_to_keep": ordinals[:n],
                    "attn_metadata": replace(
                        metadata,
                        slots=self.rows[2, :n],
                        query_start_loc=metadata.query_start_loc[: n + 1],
                        context_lens=self.context_lens[:n],
                        block_tables=self.block_tables[:n],
                        num_decodes=n,
                    ),
                }
                self.replays[n] = record(forward, inputs, pool)

    def fit(self, inputs: dict[str, Any]) -> bool:
        """Whether `inputs` are a decode step, every row sampling, that a graph exists for."""
        num_rows = inputs["input_ids"].shape[1]
        num_decodes = inputs["attn_metadata"].num_decodes
        return num_rows == num_decodes == len(inputs["logits_to_keep"]) <= max(self.replays)

    def replay(self, inputs: dict[str, Any]) -> Tensor:
        """Logits `[n, vocab_size]` of n decodes; valid until the next replay."""
        n = inputs["input_ids"].shape[1]
        size = min(size for size in self.replays if size >= n)
        meta = inputs["attn_metadata"]
        self.rows[0, :n] = inputs["input_ids"][0]
        self.rows[1, :n] = inputs["position_ids"][0]
        self.rows[2, :n] = meta.slots
        self.context_lens[:n] = meta.context_lens
        self.block_tables[:n, : meta.block_tables.shape[1]] = meta.block_tables
        # A larger batch has left its values here. Padding must not write or read with them.
        self.rows[2, n:size] = -1
        self.context_lens[n:size] = 0
        return self.replays[size]()[:n]


def record_graphs(
    forward: Forward, config: EngineConfig, kv_cache: KVCache, kernels: ModuleType
) -> DecodeGraphs | None:
    """Graphs of the decode step, or None: not wanted, not possible, or recording failed.

    A model's forward may do what cannot be recorded, such as waiting for the device, or there may
    be too little memory. Then a warning says so, and every step launches its kernels one by one.
    """
    if config.enforce_eager or not getattr(kernels, "CUDA_GRAPHS", False):
        return None
    try:
        return DecodeGraphs(forward, config, kv_cache, kernels, record_cuda_graph)
    except RuntimeError as error:
        logger.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])
        return None
