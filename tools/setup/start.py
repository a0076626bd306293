"""Make a folder in which a reader builds a stage: the stage before it, and the new stage's options.

    python tools/setup/start.py 04 my_stage

The copy has the options of the stage that is to be built, so that the tests can make its engine,
and the files that only this stage has. Stage 01 has none before it: its copy is stage 01 itself
with the bodies of its bookkeeping taken out. In the same way stage 02 gets its kernels without the
loop that is their heart. Nothing is ever overwritten.
"""

from __future__ import annotations

import ast
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a program, it finds its neighbours like the tests do

from shared.programs.program import finish  # noqa: E402
from tools.lab.faults import FAULTS  # noqa: E402

# Functions whose bodies the reader writes: docstrings and comments stay.
TAKEN_OUT: dict[str, dict[str, tuple[str, ...]]] = {
    "01": {
        "block_manager.py": (
            "slot_mapping",
            "BlockManager.can_allocate",
            "BlockManager.allocate",
            "BlockManager.free",
        ),
        "scheduler.py": (
            "Scheduler._schedule_prefills",
            "Scheduler._schedule_decodes",
            "Scheduler._preempt_youngest",
        ),
    },
    "02": {"paged_attention_cpu.py": ("_attend", "_merge")},
}


class StartError(ValueError):
    """The stage or the folder cannot be used."""


def start(root: Path, stage: str, target: Path, fault: int | None = None) -> list[str]:
    """Make `target`; return what is in it, a line each.

    Args:
        root: of the repository.
        stage: number of the stage that the reader will build, with or without the zero.
        fault: number of a fault of `tools.lab.faults`: all of stage 04, with that one planted.

    Raises:
        StartError: there is no such stage or fault, or something is at `target` already.
    """
    # 1. Everything is asked before anything is written.
    stages = {path.name[:2]: path for path in sorted((root / "stages").glob("[0-9][0-9]_*"))}
    number = stage.strip().zfill(2)
    if number not in stages:
        raise StartError(f"STAGE must be one of {', '.join(stages)}, got {stage!r}")
    if not str(target).strip() or target == Path():
        raise StartError("DIR must name a new folder, for instance DIR=my_stage")
    if target.exists():
        raise StartError(f"{target} is there already; take another DIR, or move it away first")
    if (root / "stages") in target.resolve().parents:
        raise StartError(f"{target} is inside of stages/, which is the course's own; take another")

    if fault is not None and (number != "04" or not 1 <= fault <= len(FAULTS)):
        raise StartError(
            f"FAULT must be from 1 to {len(FAULTS)} with STAGE=04, got {fault} with {stage!r}"
        )

    new = stages[number]
    try:
        if fault is not None:
            return plant(target, new, fault)
        return fill(target, stages.get(f"{int(number) - 1:02d}", new), new)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # no half-made folder is left behind
        raise


def plant(target: Path, stage: Path, number: int) -> list[str]:
    """Put the whole of `stage` into `target`, with a fault in it; return what that is."""
    shutil.copytree(stage, target, ignore=shutil.ignore_patterns("test_*.py", "__pycache__"))
    fault = FAULTS[number - 1]
    path = target / fault.file
    files = fault.plant({fault.file: path.read_text(encoding="utf-8")})
    path.write_text(files[fault.file], encoding="utf-8")
    return [
        f"the files of stages/{stage.name}, with fault {number} in one of them: {fault.symptom}"
    ]


def fill(target: Path, before: Path, new: Path) -> list[str]:
    """Put into `target` what a reader of stage `new` begins with; return what that is."""
    # 2. The stage before, without its tests.
    number = new.name[:2]
    shutil.copytree(before, target, ignore=shutil.ignore_patterns("test_*.py", "__pycache__"))
    said = [f"the files of stages/{before.name}"]

    # 3. What would only be typing: options, and files that no earlier stage has.
    if before is not new:
        added = {path.name for path in new.glob("*.py")} - {path.name for path in before.glob("*")}
        files = ["config.py", *sorted(name for name in added if not name.startswith("test_"))]
        for name in files:
            shutil.copy(new / name, target / name)
        said.append(f"from stages/{new.name}: {', '.join(files)}")

    # 4. What the reader writes.
    for name, functions in TAKEN_OUT.get(number, {}).items():
        take_out(target / name, functions, number)
        said.append(f"{name}, yours to write: {', '.join(functions)}")
    return said


def take_out(path: Path, functions: Sequence[str], number: str) -> None:
    """Replace the bodies of functions ("name" or "Class.name") by an error that says so."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            members = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{one.name}": one for one in members}
    for name in sorted(functions, key=lambda name: -found[name].lineno):
        body = found[name].body
        has_docstring = ast.get_docstring(found[name]) is not None
        first = body[0].end_lineno if has_docstring else body[0].lineno - 1
        indent = " " * body[0].col_offset
        error = (
            f'{indent}raise NotImplementedError("{name}: yours to write, chapter {int(number)}")'
        )
        lines[first : found[name].end_lineno] = [error + "\n"]
    path.write_text("".join(lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns the exit code: 0, 1 if it failed, 2 if it was called wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    numbered = len(arguments) == 3 and arguments[2].isdecimal()
    if not (len(arguments) == 2 or numbered) or not arguments[0]:
        print("usage: make start STAGE=04 DIR=my_stage [FAULT=1]", file=sys.stderr)
        return 2
    fault = int(arguments[2]) if numbered else None
    return finish(lambda: tell(arguments[0], Path(arguments[1]), fault), usage_errors=StartError)


def tell(stage: str, folder: Path, fault: int | None = None) -> int:
    """Make the folder and say what is in it; returns 0."""
    said = start(ROOT, stage, folder, fault)
    number = stage.strip().zfill(2)
    [target] = (ROOT / "stages").glob(f"{number}_*")
    print(f"{folder} has")
    for line in said:
        print(f"  {line}")
    if fault is None:
        print("The exercise of the chapter says what to do first. Your tests:")
    else:
        print("Find out which invariant is broken, and by which line. The tests:")
    print(
        f"  .venv/bin/python -m pytest stages/{target.name} --engine {shlex.quote(str(folder))} -x"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
