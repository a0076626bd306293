"""What `load_stage` returns, for editors and type checkers.

Stage folders begin with a digit, so no type can be imported from them. The options are those of
each stage's `EngineConfig`; tests/engine/test_stage_types.py compares the two.
"""

from types import ModuleType
from typing import Any, Literal, overload

from .engine.base import EngineBase, Prompt
from .engine.sampling_params import SamplingParams

STAGES: dict[int, str]

class Engine1(EngineBase):
    config: Any
    model_runner: Any
    sampler: Any
    def __init__(
        self,
        model: Any = "smollm2",
        *,
        device: Any = "auto",
        dtype: Any = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        memory_utilization: float | None = None,
    ) -> None:
        """An engine of stage 01, block manager.

        Args:
            model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair.
            device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
            dtype: "auto", "float32", "bfloat16" or "float16".
            block_size: token slots in one block of the KV cache.
            num_blocks: blocks in the pool; None sizes it from the free memory.
            max_num_seqs: sequences that may hold blocks at the same time.
            max_num_batched_tokens: tokens computed in one step; a longer prompt is refused.
            max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
            memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
        """
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id."""

class Stage1(ModuleType):
    LLMEngine: type[Engine1]
    EngineConfig: Any

class Engine2(EngineBase):
    config: Any
    model_runner: Any
    sampler: Any
    def __init__(
        self,
        model: Any = "smollm2",
        *,
        device: Any = "auto",
        dtype: Any = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        memory_utilization: float | None = None,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
    ) -> None:
        """An engine of stage 02, paged attention.

        Args:
            model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair.
            device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
            dtype: "auto", "float32", "bfloat16" or "float16".
            block_size: token slots in one block of the KV cache.
            num_blocks: blocks in the pool; None sizes it from the free memory.
            max_num_seqs: sequences that may hold blocks at the same time.
            max_num_batched_tokens: tokens computed in one step; a longer prompt is refused.
            max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
            memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
            attention_backend: "auto", "plain", "gather", "numba" (CPU) or "triton" (CUDA).
            enforce_eager: do not record decode steps as CUDA graphs.
        """
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id."""

class Stage2(ModuleType):
    LLMEngine: type[Engine2]
    EngineConfig: Any

class Engine3(EngineBase):
    config: Any
    model_runner: Any
    sampler: Any
    def __init__(
        self,
        model: Any = "smollm2",
        *,
        device: Any = "auto",
        dtype: Any = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        memory_utilization: float | None = None,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
    ) -> None:
        """An engine of stage 03, prefix cache.

        Args:
            model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair.
            device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
            dtype: "auto", "float32", "bfloat16" or "float16".
            block_size: token slots in one block of the KV cache.
            num_blocks: blocks in the pool; None sizes it from the free memory.
            max_num_seqs: sequences that may hold blocks at the same time.
            max_num_batched_tokens: tokens computed in one step; a longer prompt is refused.
            max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
            memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
            attention_backend: "auto", "plain", "gather", "numba" (CPU) or "triton" (CUDA).
            enforce_eager: do not record decode steps as CUDA graphs.
            enable_prefix_caching: let later requests find computed blocks by their content.
        """
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id. Only requests of one `cache_salt` share prefixes."""
    def reset_prefix_cache(self) -> int:
        """Forget the cached blocks that nobody holds; return how many those were."""

class Stage3(ModuleType):
    LLMEngine: type[Engine3]
    EngineConfig: Any

class Engine4(EngineBase):
    config: Any
    model_runner: Any
    sampler: Any
    def __init__(
        self,
        model: Any = "smollm2",
        *,
        device: Any = "auto",
        dtype: Any = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        memory_utilization: float | None = None,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        max_prefill_chunk_size: int | None = None,
        max_decode_share: float | None = None,
        target_step_ms: float | None = None,
        reserve_full_prompt: bool = False,
    ) -> None:
        """An engine of stage 04, chunked prefill.

        Args:
            model: a name for `shared.models.load_model`, or a loaded `(model, tokenizer)` pair.
            device: "auto", "cpu" or "cuda"; like `dtype` only for a model given by name.
            dtype: "auto", "float32", "bfloat16" or "float16".
            block_size: token slots in one block of the KV cache.
            num_blocks: blocks in the pool; None sizes it from the free memory.
            max_num_seqs: sequences that may hold blocks at the same time.
            max_num_batched_tokens: tokens of one step; None is a chunk plus `max_num_seqs` decodes.
            max_model_len: prompt plus generated tokens of one sequence; None is the model's context.
            memory_utilization: share of memory that `num_blocks=None` may use (`shared.engine.memory`).
            attention_backend: "auto", "plain", "gather", "numba" (CPU) or "triton" (CUDA).
            enforce_eager: do not record decode steps as CUDA graphs.
            enable_prefix_caching: let later requests find computed blocks by their content.
            max_prefill_chunk_size: prompt tokens of one sequence computed in one step; None is 512 on
                CUDA, 128 on CPU.
            max_decode_share: decode's part of `max_num_batched_tokens` while prompts wait; None is all.
            target_step_ms: choose chunks so that a step takes this long; None is off.
            reserve_full_prompt: allocate a prompt's blocks all at once, not chunk by chunk.
        """
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id. Only requests of one `cache_salt` share prefixes."""
    def reset_prefix_cache(self) -> int:
        """Forget the cached blocks that nobody holds; return how many those were."""

class Stage4(ModuleType):
    LLMEngine: type[Engine4]
    EngineConfig: Any

@overload
def load_stage(number: Literal[1]) -> Stage1: ...
@overload
def load_stage(number: Literal[2]) -> Stage2: ...
@overload
def load_stage(number: Literal[3]) -> Stage3: ...
@overload
def load_stage(number: Literal[4]) -> Stage4: ...
@overload
def load_stage(number: int) -> ModuleType: ...
