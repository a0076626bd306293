"""Triton's kernels on the device that is not there.

The wrappers around them run as they are, with their checks and their grids. A launch is checked as
Triton and CUDA would, what Triton would compile for it is noted, and then the result is computed by
the gather backend, from the pointers, strides and numbers that the kernel was given.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shared.stages import STAGES, load_stage

from .tensors import CudaTensor, Device


def _rows(values: Tensor, *sizes: int, strides: tuple[int, ...]) -> Tensor:
    """What a kernel finds behind a pointer, by the strides that it was given."""
    return values.as_strided(sizes, strides, values.storage_offset())


def _store(gather: ModuleType, grid: tuple[int, ...], a: SimpleNamespace) -> None:
    sizes = (grid[0], a.KV_HEADS, a.HEAD_DIM)
    key = _rows(a.key, *sizes, strides=(a.key_stride_t, a.key_stride_h, 1))
    value = _rows(a.value, *sizes, strides=(a.value_stride_t, a.value_stride_h, 1))
    gather.store_kv(key, value, a.k_cache, a.v_cache, a.slots[: grid[0]])


def _decode(gather: ModuleType, grid: tuple[int, ...], a: SimpleNamespace) -> None:
    batch, kv_heads, num_splits = grid
    assert (kv_heads, num_splits) == (a.KV_HEADS, a.num_splits)
    strides = (a.query_stride_b, a.query_stride_h, 1)
    query = _rows(a.query, batch, a.HEADS, a.HEAD_DIM, strides=strides)
    width = a.block_tables.shape[1]
    tables = _rows(a.block_tables, batch, width, strides=(a.table_stride, 1))
    answer = gather.paged_decode(
        query, a.k_cache, a.v_cache, tables, a.context_lens[:batch], 0, a.scale / LOG2E
    )
    if a.ONE_SPLIT:
        assert num_splits == 1
        a.out.copy_(answer)
        return
    for left in (a.out, a.split_maximum, a.split_total):  # what is left unwritten holds anything
        left.fill_(torch.nan)
    a.out[:, :, 0] = answer.float()  # as if the first split were all


def _merge(gather: ModuleType, grid: tuple[int, ...], a: SimpleNamespace) -> None:
    assert grid == (len(a.out), a.HEADS)
    a.out.copy_(a.split_acc[:, :, 0])


def _prefill(gather: ModuleType, grid: tuple[int, ...], a: SimpleNamespace) -> None:
    row_tiles, kv_heads, batch = grid
    assert kv_heads == a.KV_HEADS
    starts = a.query_start_loc[: batch + 1]
    longest = int(starts.diff().max())
    assert row_tiles * a.M >= longest * (a.HEADS // a.KV_HEADS), "the grid leaves rows out"
    strides = (a.query_stride_t, a.query_stride_h, 1)
    query = _rows(a.query, int(starts[-1]), a.HEADS, a.HEAD_DIM, strides=strides)
    tables = _rows(a.block_tables, batch, a.block_tables.shape[1], strides=(a.table_stride, 1))
    answer = gather.paged_prefill(
        query, query, query, a.k_cache, a.v_cache, tables, a.context_lens[:batch], starts, longest,
        a.scale / LOG2E,
    )  # fmt: skip
    a.out[: len(answer)] = answer


LOG2E = math.log2(math.e)
KERNELS: dict[str, Callable[[ModuleType, tuple[int, ...], SimpleNamespace], None]] = {
    "_store_kernel": _store,
    "_decode_kernel": _decode,
    "_merge_kernel": _merge,
    "_prefill_kernel": _prefill,
}


class Kernel:
    """Stands where a `@triton.jit` function stood, and is launched like it."""

    def __init__(self, device: Device, module: ModuleType, name: str) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.device, self.name, self.compute = device, name, KERNELS[name]
        self.jit = getattr(module, name)
        self.gather = importlib.import_module(".paged_attention_gather", module.__package__)
        arch = 10 * device.capability[0] + device.capability[1]
        backend = make_backend(GPUTarget("cuda", arch, 32))
        self.bind = create_function_from_signature(self.jit.signature, self.jit.params, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launch(grid, args, options)

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        device = self.device
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
                raise ValueError(
                    f"Pointer argument (at {i}) cannot be accessed from Triton (cpu tensor?): "
                    f"{self.name}"
                )
        most = (2**31 - 1, 65535, 65535)
        if not all(0 < n <= limit for n, limit in zip(grid, most, strict=False)):
            raise RuntimeError(f"Triton Error [CUDA]: invalid argument, grid {grid} of {self.name}")

        # What is compiled follows from the types, from the alignment of pointers and numbers, and
        # from the constants; the values' memory is aligned as it would be on a GPU.
        values = [x.values if isinstance(x, CudaTensor) else x for x in args]
        with _disable_current_modes():
            bound, specialisation, options = self.bind(*values, **options)
            constants = [bound[param.name] for param in self.jit.params if param.is_constexpr]
        variant = (self.jit.fn.__module__, self.name, str(specialisation), *constants)
        key = (*variant, str(sorted(options.items())))
        if key not in device.specialisations:
            if device.recording is not None:
                raise RuntimeError(
                    f"CUDA error: {self.name} is compiled and loaded while capturing"
                )
            device.specialisations[key] = f"launch {len(device.launches)}, {self.name}"
        device.launches.append(self.name)

        arguments = SimpleNamespace(**bound)
        device.do_launch(lambda: self.compute(self.gather, grid, arguments))


@contextmanager
def replace_kernels(device: Device) -> Iterator[None]:
    """Within, the Triton kernels of all stages run on `device`."""
    with pytest.MonkeyPatch.context() as patch:
        modules = []
        for number in range(2, len(STAGES) + 1):
            package = load_stage(number).__name__
            modules.append(importlib.import_module(f"{package}.paged_attention_triton"))
        for module in modules:
            for name in KERNELS:
                patch.setattr(module, name, Kernel(device, module, name))
        try:
            forget(modules)
            yield
        finally:
            forget(modules)


def forget(modules: list[ModuleType]) -> None:
    """What the wrappers remember of a device was another one's."""
    for module in modules:
        module._num_processors.cache_clear()
        module._arch.cache_clear()
