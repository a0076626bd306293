"""Stage 01, block manager: continuous batching over a paged KV cache."""

from .block_manager import BlockManager
from .config import EngineConfig
from .engine import LLMEngine
from .model_runner import ModelRunner
from .scheduler import ScheduledBatch, Scheduler, Slice
from .sequence import Sequence, SequenceStatus

__all__ = [
    "BlockManager",
    "EngineConfig",
    "LLMEngine",
    "ModelRunner",
    "ScheduledBatch",
    "Scheduler",
    "Sequence",
    "SequenceStatus",
    "Slice",
]
