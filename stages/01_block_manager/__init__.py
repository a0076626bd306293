"""Stage 01, block manager: continuous batching over a paged KV cache."""

from .config import EngineConfig
from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
