"""Stage 03, prefix cache: computed prefixes are found again and shared."""

from .config import EngineConfig
from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine"]
