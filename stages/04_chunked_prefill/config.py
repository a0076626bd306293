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
        max_num_batched_tokens: tokens of one step; None is a chunk plus `max_num_seqs` decodes.
        max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
        memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
        attention_backend: "auto", "plain", "gather", "numba" (CPU) or "triton" (CUDA).
        enforce_eager: do not record decode steps as CUDA graphs.
        enable_prefix_caching: let later requests find computed blocks by their content.
        max_prefill_chunk_size: prompt tokens of one sequence computed in one step; None is 512 on
            CUDA, 128 on CPU.
        max_decode_share: decode's part of `max_num_batched_tokens` while prompts wait; None is all.
        target_step_ms: choose chunks so that a step takes this long; None is off.
        reserve_full_prompt: allocate a prompt's blocks all at once, not chunk by chunk.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    memory_utilization: float | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    max_prefill_chunk_size: int | None = None
    max_decode_share: float | None = None
    target_step_ms: float | None = None
    reserve_full_prompt: bool = False

    def __post_init__(self) -> None:
        check_options(self, shares=("memory_utilization", "max_decode_share"))
