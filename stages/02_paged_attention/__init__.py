"""Stage 02, PagedAttention: kernels that read the KV cache through the block table."""

from .config import EngineConfig
from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
