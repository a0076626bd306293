"""Stage 04, chunked prefill: long prompts are computed piece by piece between decodes."""

from .config import EngineConfig
from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
