"""Linear layers with weights packed once for oneDNN: faster small batches on the CPU.

Decoding multiplies a few rows by every weight of the model, so its speed is the speed of reading
weights. `torch.nn.functional.linear` reads them in their plain layout, and slowly when the rows are
few; oneDNN reads a blocked layout faster, but would have to make it at every call. Here it is made
once, with the two operators that torch's compiler emits for the same purpose.

Knows nothing about models: it replaces `nn.Linear` modules wherever they are.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger("mini_vllm")


class PackedLinear(nn.Module):
    """`nn.Linear` for inference in float32 on the CPU: `[..., in_features] -> [..., out_features]`.

    The packed weight is opaque: it cannot be read back, saved, moved or trained.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.train(linear.training)  # else it would be the one part of the model in training mode
        self.bias = None if linear.bias is None else linear.bias.detach()
        # Not a buffer: an opaque tensor has no storage that `state_dict` or `to` could handle.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features] -> [..., out_features]`, float32."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        """What `print(model)` says of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, packed for oneDNN"
        )


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of `model` by a `PackedLinear`, in place; returns how many.

    Each weight is freed as soon as it is packed, unless something else holds it: an output layer
    tied to the embedding gets a packed copy, and the embedding keeps its table. Layers that are not
    float32 on the CPU stay as they are, and so does everything (with one log line) where this torch
    has no oneDNN.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _packable(child)
    ]
    if places and not can_pack():
        logger.warning("this torch has no oneDNN: linear layers stay unpacked, decoding is slower")
        return 0
    for parent, name in places:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    return len(places)


def _packable(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear  # a subclass may compute something else
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    )


def can_pack() -> bool:
    """True if this torch has oneDNN and the two operators used here."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
