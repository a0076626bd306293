"""The doors between the rooms: who may import whom.

The rules are what makes the stages readable one file at a time: the bookkeeping (sequence, block
manager, scheduler) runs without a tensor, attention works without a sequence, and a stage folder
can be copied anywhere. Knows source text only: nothing is imported or run.

Run as a program it prints one line per broken rule and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOKKEEPING = ("sequence", "block_manager", "scheduler")
TENSOR_LIBRARIES = ("torch", "transformers", "triton")


@dataclass(frozen=True)
class Import:
    """One imported name. `module` is dotted and, if relative, has its leading dots."""

    module: str
    names: tuple[str, ...]
    line: int

    @property
    def level(self) -> int:
        """How many leading dots; 0 for an absolute import."""
        return len(self.module) - len(self.module.lstrip("."))

    @property
    def top(self) -> str:
        """First part of an absolute import; empty for a relative one."""
        return "" if self.level else self.module.split(".")[0]


def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a file, also those in functions and under TYPE_CHECKING.

    A hint is knowledge too: attention that names Sequence in an annotation knows of sequences.
    """
    return _imports(path.read_text(encoding="utf-8"))


@cache  # files are visited again and again, and most are copies of each other
def _imports(text: str) -> tuple[Import, ...]:
    found: list[Import] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = tuple(alias.name for alias in node.names)
            found.append(Import(module, names, node.lineno))
    return tuple(found)


def targets(root: Path, path: Path, each: Import) -> list[Path]:
    """The files of the checkout that an import in `path` brings in; none for other packages.

    Relative imports leave out the package's own __init__: it joins all rooms, whoever enters.
    """
    if each.level:
        folder = path.parents[each.level - 1]
    elif each.top == "shared":
        folder = root
    else:
        return []
    found = []
    for part in filter(None, each.module.lstrip(".").split(".")):
        found += [folder / f"{part}.py", folder / part / "__init__.py"]
        folder /= part
    found += [folder / f"{name}.py" for name in each.names]
    return [file for file in found if file.exists()]


def reached(root: Path, room: Path) -> dict[Path, tuple[Import, ...]]:
    """The imports of `room` and of every file that it brings in, by file."""
    rooms: dict[Path, tuple[Import, ...]] = {}
    waiting = [room]
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in rooms:
            rooms[path] = imports(path)
            for each in rooms[path]:
                waiting += targets(root, path, each)
    return rooms


def stage_violations(root: Path, stage: Path) -> Iterator[str]:
    """Broken rules inside one stage's folder. Its tests are free to join what they like."""

    def at(path: Path, each: Import) -> str:
        return f"{path.relative_to(root).as_posix()}:{each.line}"

    # 1. Bookkeeping imports nothing shared, and reaches no tensor even by way of others.
    for room in BOOKKEEPING:
        for path, found in reached(root, stage / f"{room}.py").items():
            for each in found:
                if each.top in TENSOR_LIBRARIES:
                    yield f"{at(path, each)}: {room} must not reach {each.top}"
                elif each.top == "shared" and path.stem == room and path.parent == stage:
                    yield f"{at(path, each)}: {room} must not import shared"

    # 2. Attention and the kernels it calls know block tables, but no sequence.
    for path, found in reached(root, stage / "attention.py").items():
        for each in found:
            for target in targets(root, path, each):
                if target.parent == stage and target.stem in BOOKKEEPING:
                    yield f"{at(path, each)}: attention must not reach {target.stem}"

    # 3. The engine joins scheduler and runner and knows no tensor.
    engine = stage / "engine.py"
    for each in imports(engine) if engine.exists() else ():
        if each.top in ("torch", "numpy"):
            yield f"{at(engine, each)}: engine must not import {each.top}"

    # 4. A stage can be copied anywhere: neighbours are named relatively, other stages not at all.
    files = [path for path in sorted(stage.glob("*.py")) if not path.name.startswith("test_")]
    neighbours = {path.stem for path in files}
    for path in files:
        for each in imports(path):
            if each.top == "stages" or "load_stage" in each.names or each.level > 1:
                yield f"{at(path, each)}: a stage must not leave its own folder"
            elif each.top in neighbours:
                yield f"{at(path, each)}: write .{each.top}, not {each.top}"


def shared_violations(root: Path) -> Iterator[str]:
    """Places where `shared` names a stage other than through load_stage."""
    for path in sorted((root / "shared").rglob("*.py")):
        if path.name.startswith("test_"):
            continue
        where = path.relative_to(root).as_posix()
        for each in imports(path):
            if each.top == "stages":
                yield f"{where}:{each.line}: use load_stage"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "load_stage"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node) not in allowed and _names_a_stage(node):
                yield f"{where}:{node.lineno}: use load_stage"


def _names_a_stage(call: ast.Call) -> bool:
    """Whether this is import_module("stages...") or __import__("stages...")."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if isinstance(call.func, ast.Name):
        function = call.func.id
    return function in ("import_module", "__import__") and any(
        isinstance(node, ast.Constant) and str(node.value).startswith("stages")
        for argument in call.args
        for node in ast.walk(argument)
    )


def violations(root: Path) -> list[str]:
    """Every broken rule of the checkout at `root`, one line each, without repetition."""
    found = list(shared_violations(root))
    for stage in sorted((root / "stages").glob("[0-9][0-9]_*")):
        found += stage_violations(root, stage)
    return list(dict.fromkeys(found))


def main() -> int:
    """Print the broken rules; returns 1 if there is any."""
    root = Path(__file__).resolve().parents[2]
    found = violations(root)
    for line in found:
        print(line)
    stages = len(list((root / "stages").glob("[0-9][0-9]_*")))
    print(f"doors: {len(found)} broken rules in shared/ and {stages} stages")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
