"""Stage 02, PagedAttention: kernels that read the KV cache through the block table."""

from .engine import EngineConfig, LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
