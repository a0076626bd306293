"""How long a step takes on a GPU that one may not have, from its data sheet and a model's shape.

The roofline model: a step takes as long as computing or as reading, whichever is slower. For
`shared.measure.simulator`; knows slices and shapes, no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shared.models import configs


@dataclass(frozen=True)
class Gpu:
    """flops: dense FLOP/s of 16-bit matrix products; bandwidth: bytes/s; memory: bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets, "Tensor Core" rows without sparsity (half of what is printed with it).
GPUS = {
    "h100": Gpu("H100 SXM 80 GB", 989.4e12, 3.35e12, 80e9),  # "H100 Tensor Core GPU", 2023
    "h200": Gpu("H200 SXM 141 GB", 989.4e12, 4.8e12, 141e9),  # "H200 Tensor Core GPU", 2024
    "a100": Gpu("A100 SXM 80 GB", 312e12, 2.039e12, 80e9),  # "A100 Tensor Core GPU", 2021
    "l4": Gpu("L4 24 GB", 121e12, 300e9, 24e9),  # "L4 Tensor Core GPU", 2023
    "t4": Gpu("T4 16 GB", 65e12, 320e9, 16e9),  # "T4 Tensor Core GPU", 2019; float16
}


@dataclass(frozen=True)
class ModelSize:
    """What a decoder costs, from its shape. A weight or a number in the cache takes 2 bytes.

    Attributes:
        linear: weights of all layers, each multiplied once per token.
        head: weights of the output layer, for tokens that are sampled.
        total: all weights, an untied embedding included.
        attention: FLOPs for one token and one token of its context.
        kv_bytes: of one token in the cache.
    """

    linear: int
    head: int
    total: int
    attention: int
    kv_bytes: int

    @property
    def matrices(self) -> int:
        """Weights that a step multiplies and so reads: all but the input embedding's table."""
        return self.linear + self.head

    @classmethod
    def named(cls, name: str) -> ModelSize:
        """Of a model in `shared/models/configs`. Raises ValueError if there is no such file."""
        c = configs.read(name)
        hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
        queries, kv = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        linear = layers * hidden * (2 * queries + 2 * kv + 3 * c["intermediate_size"])
        head = c["vocab_size"] * hidden
        total = linear + head * (1 if c["tie_word_embeddings"] else 2)
        return cls(linear, head, total, 4 * layers * queries, 2 * 2 * layers * kv)


@dataclass(frozen=True)
class Roofline:
    """Step times of a model on a GPU: the slower of computing and reading, plus an overhead.

    The linear layers of a step multiply all its tokens and read the weights once; the attention of
    each slice multiplies its tokens with their contexts and reads the context once.

    Attributes:
        flop_share: what real kernels reach of the data sheet's FLOP/s; assumed, like the next two.
        byte_share: the same of its bytes per second.
        overhead: seconds of a step that no kernel accounts for.
    """

    gpu: Gpu
    model: ModelSize
    flop_share: float = 0.6
    byte_share: float = 0.8
    overhead: float = 0.5e-3

    def __call__(self, slices: Iterable[Any]) -> float:
        flops = self.gpu.flops * self.flop_share
        bandwidth = self.gpu.bandwidth * self.byte_share
        model = self.model
        tokens = rows = 0
        attention = 0.0
        for s in slices:
            tokens += s.num_tokens
            rows += 1  # at most one token of a slice goes through the output layer
            context = s.start_pos + (s.num_tokens + 1) / 2
            attention += max(
                s.num_tokens * context * model.attention / flops,
                (s.start_pos + s.num_tokens) * model.kv_bytes / bandwidth,
            )
        linear = max(
            2 * (tokens * model.linear + rows * model.head) / flops,
            2 * model.matrices / bandwidth,
        )
        return self.overhead + linear + attention

    def num_blocks(self, block_size: int, utilization: float = 0.9) -> int:
        """Blocks that fit beside the weights. Raises ValueError if not even one does."""
        room = self.gpu.memory * utilization - 2 * self.model.total
        if room < block_size * self.model.kv_bytes:
            raise ValueError(
                f"{2 * self.model.total / 1e9:.1f} GB of weights leave no room for a KV cache: "
                f"{self.gpu.name}, {100 * utilization:.0f} % of it"
            )
        return int(room // (block_size * self.model.kv_bytes))
