"""Compile the Triton kernels ahead of time, for GPUs that need not be there, and see what came out.

    python -m tests.kernels.compile_triton stages/02_paged_attention/paged_attention_triton.py
    python -m tests.kernels.compile_triton stages/02_paged_attention/paged_attention_triton.py --all

Prints of each what it takes (shared memory, registers, bytes of stack that registers spilled to),
whether its products are on tensor cores, and how many of its loads from memory are of 16 bytes for
each thread. `--all` goes over all groups, too, and writes `emitted.csv` beside this file.
Exits with 1 if a kernel does not fit, or if a decode kernel spills. The interpreter accepts kernels
that no GPU can run; this does not. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import csv
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
KV_HEADS, BLOCK_SIZE = 8, 64  # the block size on CUDA
GROUP, GROUPS = 3, (1, 3, 4, 8)  # query heads per KV head
ALL = [
    (arch, "fp16" if arch < 80 else "bf16", dim)
    for arch in (75, 80, 90, 100)
    for dim in (64, 80, 96, 128)
]
EMITTED = Path(__file__).with_name("emitted.csv")


class Compiled(NamedTuple):
    """What became of one kernel.

    Attributes:
        group: query heads per KV head.
        products: the instruction of its dots: mma, wgmma, tcgen05, or fma, which is no tensor core.
        wide_loads: of its loads from memory, "16-byte ones/all".
    """

    kernel: str
    arch: int
    dtype: str
    head_dim: int
    group: int
    shared_memory: int
    registers: int
    spilled: int
    products: str
    wide_loads: str


def argument_type(name: str, dtype: str, constants: dict[str, int]) -> str:
    """As the wrappers in `paged_attention_triton` pass it."""
    if name == "out" and constants.get("ONE_SPLIT") == 0:
        return "*fp32"
    if name == "scale":
        return "fp32"
    if "stride" in name or name == "num_splits":
        return "i32"
    if name == "slots":
        return "*i64"
    if name in ("block_tables", "context_lens", "query_start_loc"):
        return "*i32"
    if name.startswith("split_") and constants.get("ONE_SPLIT") != 1:
        return "*fp32"
    return f"*{dtype}"


def compile_kernel(kernel: Any, arch: int, dtype: str, constants: dict[str, int]) -> Any:
    """Compile as a launch would: what it may look at is a multiple of 16."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = {
        name: "constexpr" if name in constants else argument_type(name, dtype, constants)
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, param in enumerate(kernel.params)
        if types[param.name].startswith("*") and not param.do_not_specialize_on_alignment
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


def loads_of(ptx: str) -> tuple[str, str]:
    """Its kind of products, and how many of its loads from memory are of 16 bytes."""
    kinds = [kind for kind in ("tcgen05.mma", "wgmma", "mma.sync") if kind in ptx]
    products = kinds[0].partition(".")[0] if kinds else "fma"
    loads = re.findall(r"^.*(?:ld\.global|cp\.async\.c[ag]).*$", ptx, re.MULTILINE)
    wide = [
        x for x in loads if ".v4.b32" in x or ".v2.b64" in x or re.search(r"\], (?:0x10|16)[,;]", x)
    ]
    return products, f"{len(wide)}/{len(loads)}"


def jobs_of(module: Any, arch: int, dtype: str, dim: int, group: int) -> dict[str, dict[str, int]]:
    """The kernels that one model needs, and their constants."""
    shape = {
        "HEADS": KV_HEADS * group, "KV_HEADS": KV_HEADS, "BLOCK_SIZE": BLOCK_SIZE, "HEAD_DIM": dim
    }  # fmt: skip
    decode = module.decode_config(group, dim, DTYPES[dtype], arch)
    prefill = module.prefill_config(dim, DTYPES[dtype], arch)
    same = {name: decode[name] for name in ("D", "TILE", "MIN_LEN")}
    return {
        "decode": shape | decode | {"ONE_SPLIT": 1},
        "decode-split": shape | decode | {"ONE_SPLIT": 0},
        "prefill": shape | prefill,
        "prefill-small": shape | prefill | module.small(prefill),
        "merge": shape | same | {"MERGE_TILE": module.MERGE_TILE},
        "store": shape | {"PADDED": triton.next_power_of_2(KV_HEADS * dim)},
    }


def compile_all(path: Path, all_groups: bool = False) -> list[Compiled]:
    module, rows = load(path), []
    todo = [(*point, group) for point in ALL for group in GROUPS] if all_groups else []
    for arch, dtype, dim, group in todo or [(*point, GROUP) for point in COMPILED]:
        for name, constants in jobs_of(module, arch, dtype, dim, group).items():
            if name in ("merge", "store") and (dim != 64 or group != GROUP):
                continue  # there is nothing in them
            kernel = getattr(module, f"_{name.partition('-')[0]}_kernel")
            compiled = compile_kernel(kernel, arch, dtype, constants)
            usage = resources(compiled.asm["cubin"])
            loads = loads_of(compiled.asm["ptx"])
            case = (name, arch, dtype, dim, group)
            rows.append(Compiled(*case, compiled.metadata.shared, *usage, *loads))
    return rows


def main() -> int:
    all_groups = "--all" in sys.argv
    rows = compile_all(Path(sys.argv[1]), all_groups)
    line = "{:15}{:>6}{:>7}{:>10}{:>7}{:>15}{:>11}{:>9}{:>10}{:>12}".format
    print(line(*(name.replace("_", " ") for name in Compiled._fields)))
    too_big = []
    for row in rows:
        print(line(row.kernel, f"sm_{row.arch}", *row[2:]))
        most = 0 if row.kernel.startswith("decode") else MAX_SPILL
        if row.shared_memory > SHARED_MEMORY[row.arch] or row.spilled > most:
            too_big.append(row)
    for row in too_big:
        print(f"does not fit {SHARED_MEMORY[row.arch]} bytes and {MAX_SPILL} spilled: {row}")
    if all_groups:
        with EMITTED.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Compiled._fields, *rows])
    return 1 if too_big else 0


if __name__ == "__main__":
    sys.exit(main())
