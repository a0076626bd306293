"""A device guard for CUDA, which a CPU build of torch lacks and every operator asks for.

Compiled once with g++ and kept in the folder for temporary files.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
// A guard that remembers nothing: there is one device, and it is the current one.
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""


def obstacle() -> str | None:
    """Why the device cannot be had on this machine, if anything keeps it."""
    if torch.backends.cuda.is_built():
        return "this torch is built for CUDA and has a guard of its own"
    if shutil.which("g++") is None:
        return "the device that is not there needs g++"
    return None


@functools.cache
def register() -> None:
    """Compile and load the guard."""
    from torch.utils.cpp_extension import include_paths, library_paths

    options = [f"-I{path}" for path in include_paths()]
    options += [f"-L{path}" for path in library_paths()] + ["-lc10"]
    if not torch.compiled_with_cxx11_abi():
        options.append("-D_GLIBCXX_USE_CXX11_ABI=0")
    made_from = f"{SOURCE}{torch.__version__}{torch.__file__}{options}"
    name = f"mini_vllm_cuda_guard_{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir(), f"mini_vllm_{os.getuid()}", name)
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, made = Path(folder, "guard.cpp"), Path(folder, name)
            source.write_text(SOURCE)
            command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(source), "-o", str(made)]
            subprocess.run([*command, *options], check=True)
            os.replace(made, library)  # at once, as other processes may build it, too
    torch.ops.load_library(str(library))
