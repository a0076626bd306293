"""Stage 01, block manager: continuous batching over a paged KV cache."""

from .engine import EngineConfig, LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
