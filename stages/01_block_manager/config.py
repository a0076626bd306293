"""The engine's options, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.checks import check_options


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, checked when they are set.

    Attributes:
        block_size: token slots in one block of the KV cache.
        num_blocks: blocks in the pool; None sizes it from the free memory.
        max_num_seqs: sequences that may hold blocks at the same time.
        max_num_batched_tokens: tokens computed in one step; a longer prompt is refused.
        max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
        memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    memory_utilization: float | None = None

    def __post_init__(self) -> None:
        check_options(self, shares=("memory_utilization",))
