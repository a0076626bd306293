"""The engine's options, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. Every number is checked here, so nothing behind the door has to.

    Attributes:
        block_size: token slots in one block of the KV cache.
        num_blocks: blocks in the pool; None sizes it from the memory that is left.
        max_num_seqs: sequences that may hold blocks at the same time.
        max_num_batched_tokens: tokens computed in one step; a longer prompt is refused.
        max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
        memory_utilization: share of memory that `num_blocks=None` may use: on CUDA of the whole
            device, weights and activations included; on CPU of the memory now available.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    memory_utilization: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, kind, value = field.name, str(field.type).split()[0], getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if kind == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if kind == "float" and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
            if kind in ("bool", "str") and type(value).__name__ != kind:
                raise ValueError(f"{name} must be a {kind}, got {value!r}")
        if self.memory_utilization is not None and self.memory_utilization > 1:
            raise ValueError(f"memory_utilization is a share, got {self.memory_utilization}")
