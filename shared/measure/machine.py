"""The machine that something is measured on, and the time that a call takes there."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch


def machine_facts() -> dict[str, Any]:
    """What the numbers depend on, without anything that names the machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _num_cores() -> int | None:
    """Cores that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def place(machine: Mapping[str, Any], cores: str = "cores") -> str:
    """On what something was measured: the GPU, or the CPU and how many of its `cores`."""
    return machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} {cores}"


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds until what `call` does is done."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000
