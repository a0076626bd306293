"""Compile the Triton kernels ahead of time, for GPUs that need not be there.

    python -m tests.kernels.compile_triton stages/02_paged_attention/paged_attention_triton.py

Prints what each takes: shared memory, registers, and the bytes of stack that registers spilled to.
Exits with 1 if a kernel does not fit. The interpreter accepts kernels that no GPU can run; this
does not. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.cases import load

KIB = 1024
# What one program may have. sm_80 itself has 163 KiB; its consumer relatives sm_86 and sm_89, for
# which the same configurations are used, have 99. So do those of sm_100.
SHARED_MEMORY = {75: 64 * KIB, 80: 99 * KIB, 90: 99 * KIB, 100: 99 * KIB}
MAX_SPILL = 64  # bytes per thread

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COMPILED = [
    *((75, "fp16", dim) for dim in (64, 96, 128, 256)),
    *((80, "bf16", dim) for dim in (64, 80, 128, 256)),
    *((80, "fp32", dim) for dim in (64, 128, 256)),
    *((90, "bf16", dim) for dim in (64, 128, 256)),
    *((90, "fp32", dim) for dim in (64, 256)),
    *((100, "bf16", dim) for dim in (64, 128, 256)),
]
HEADS, KV_HEADS, BLOCK_SIZE = 24, 8, 16


class Compiled(NamedTuple):
    kernel: str
    arch: int
    dtype: str
    head_dim: int
    shared_memory: int
    registers: int
    spilled: int


def argument_type(name: str, dtype: str) -> str:
    """As the wrappers in `paged_attention_triton` pass it."""
    if name == "scale":
        return "fp32"
    if "stride" in name or name == "num_splits":
        return "i32"
    if name == "slots":
        return "*i64"
    if name in ("block_tables", "context_lens", "query_start_loc"):
        return "*i32"
    return "*fp32" if name.startswith("split_") else f"*{dtype}"


def compile_kernel(kernel: Any, arch: int, dtype: str, constants: dict[str, int]) -> Any:
    """Compile as a launch would: pointers and strides of K, V and query are multiples of 16."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = {
        name: "constexpr" if name in constants else argument_type(name, dtype)
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (kind == "i32" and name not in ("num_splits", "table_stride"))
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack, which hold spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def compile_all(path: Path) -> list[Compiled]:
    module = load(path)
    group, rows = HEADS // KV_HEADS, []
    for arch, dtype, dim in COMPILED:
        shape = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": BLOCK_SIZE, "HEAD_DIM": dim}
        decode = module.decode_config(group, dim, DTYPES[dtype], arch)
        jobs = {
            "decode": shape | decode,
            "prefill": shape | module.prefill_config(dim, DTYPES[dtype], arch),
        }
        if dim == 64:
            same = {name: decode[name] for name in ("D", "TILE", "MIN_LEN")}
            jobs["merge"] = shape | same | {"MERGE_TILE": module.MERGE_TILE}
            jobs["store"] = shape | {"PADDED": triton.next_power_of_2(KV_HEADS * dim)}
        for name, constants in jobs.items():
            compiled = compile_kernel(getattr(module, f"_{name}_kernel"), arch, dtype, constants)
            usage = resources(compiled.asm["cubin"])
            rows.append(Compiled(name, arch, dtype, dim, compiled.metadata.shared, *usage))
    return rows


def main() -> int:
    rows = compile_all(Path(sys.argv[1]))
    line = "{:10}{:>8}{:>7}{:>10}{:>15}{:>11}{:>9}".format
    print(line("kernel", "arch", "dtype", "head_dim", "shared memory", "registers", "spilled"))
    too_big = []
    for row in rows:
        print(line(row.kernel, f"sm_{row.arch}", *row[2:]))
        if row.shared_memory > SHARED_MEMORY[row.arch] or row.spilled > MAX_SPILL:
            too_big.append(row)
    for row in too_big:
        print(f"does not fit {SHARED_MEMORY[row.arch]} bytes and {MAX_SPILL} spilled: {row}")
    return 1 if too_big else 0


if __name__ == "__main__":
    sys.exit(main())
