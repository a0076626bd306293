"""Which attention backend runs on this machine, and why another one does not.

A backend is a module of a stage, with `store_kv`, `paged_decode` and `paged_prefill`, called alike
in all backends.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

from .model_shape import ModelShape

# Name -> module, the device it runs on, the package it needs. "auto" takes the first that runs.
BACKENDS = {
    "triton": ("paged_attention_triton", "cuda", "triton"),
    "numba": ("paged_attention_cpu", "cpu", "numba"),
    "gather": ("paged_attention_gather", None, "torch"),
    "plain": ("paged_attention_plain", None, "torch"),  # to be read; "auto" never chooses it
}


def load_kernels(
    package: str | None, backend: str, shape: ModelShape, block_size: int = 16
) -> ModuleType:
    """The kernels of `backend`, or, for "auto", of the fastest that runs here; ready to call.

    Args:
        package: of the stage whose kernels these are.

    Raises:
        ValueError: `backend` cannot run here; the message says why.
    """
    if backend == "auto":
        backend = next(name for name in BACKENDS if not _obstacle(name, shape.device))
    if obstacle := _obstacle(backend, shape.device):
        raise ValueError(f"attention_backend {backend!r} cannot run here: {obstacle}")
    kernels = importlib.import_module(f".{BACKENDS[backend][0]}", package)
    if hasattr(kernels, "warm_up"):
        kernels.warm_up(shape, block_size)
    return kernels


def _obstacle(backend: str, device: torch.device) -> str | None:
    """What keeps `backend` from running, if anything does."""
    if backend not in BACKENDS:
        return f"there are auto, {', '.join(BACKENDS)}"
    _, needed_device, package = BACKENDS[backend]
    if needed_device not in (None, device.type):
        return f"it runs on {needed_device}, the model is on {device.type}"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed; run: pip install {package}"
    return None
