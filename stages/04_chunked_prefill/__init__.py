"""Stage 04, chunked prefill: long prompts are computed piece by piece between decodes."""

from .engine import EngineConfig, LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
