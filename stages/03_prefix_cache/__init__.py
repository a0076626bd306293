"""Stage 03, prefix cache: computed prefixes are found again and shared."""

from .engine import EngineConfig, LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
