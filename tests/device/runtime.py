"""What `torch.cuda` answers on the device that is not there; its memory, streams and graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import guard
from .launches import replace_kernels
from .tensors import CUDA, Device


class Stream:
    """Work on one device in order: a stream has nothing to wait for."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Graph:
    """Operations that were recorded. A replay does them again, on the tensors that they had."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []


@contextmanager
def cuda_device(**options: Any) -> Iterator[Device]:
    """Within, `torch.cuda` finds the device, and the stages' Triton kernels run on it.

    Args:
        options: of `Device`.
    """
    guard.register()
    device = Device(**options)
    real_tensor, real_generator = torch.tensor, torch.Generator

    @functools.wraps(real_tensor)
    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> Tensor:
        """torch fills pinned memory where no mode sees it."""
        made = real_tensor(data, **options)
        return current.pin(made) if pin_memory else made

    class Generator(real_generator):  # type: ignore[valid-type, misc]
        """A generator says where it is. The numbers are those of a CPU's."""

        def __new__(cls, where: Any = "cpu") -> Any:
            if torch.device(where).type == "cpu":
                return real_generator(where)
            made = super().__new__(cls)
            current.generators.add(made._cdata)
            return made

        @property
        def device(self) -> torch.device:
            return CUDA

    @contextmanager
    def recording(graph: Graph, pool: Any = None, **_: Any) -> Iterator[None]:
        if current.recording is not None:
            raise RuntimeError("a graph is being recorded already")
        torch.cuda.synchronize()
        current.recording = graph.operations
        try:
            yield
        finally:
            current.recording = None

    def replay(graph: Graph) -> None:
        if not graph.operations:
            raise RuntimeError("a graph without operations is replayed")
        current.replays += 1
        with _disable_current_modes():
            for operation in graph.operations:
                operation()

    current = device
    Graph.replay = replay  # type: ignore[attr-defined]
    stream = Stream()
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "a device that is not there",
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: SimpleNamespace(
            multi_processor_count=device.num_processors,
            total_memory=device.total_memory,
            major=device.capability[0],
            minor=device.capability[1],
        ),
        "mem_get_info": lambda *_: (
            device.total_memory - device.taken - device.allocated,
            device.total_memory,
        ),
        "memory_allocated": lambda *_: device.allocated,
        "memory_reserved": lambda *_: device.allocated,
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": lambda *_: setattr(device, "peak", device.allocated),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: device.wait("synchronize"),
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "Stream": Stream,
        "current_stream": lambda *_: stream,
        "stream": lambda stream: stream,
        "CUDAGraph": Graph,
        "graph": recording,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: device.recording is not None,
    }
    with pytest.MonkeyPatch.context() as patch, replace_kernels(device):
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "Generator", Generator)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with device:
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
