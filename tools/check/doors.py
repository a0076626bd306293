"""Which module may import which, rule by rule: `RULES` below is the list.

The rules make the stages readable one file at a time: the bookkeeping (sequence, block manager,
scheduler) runs without tensors, attention works without sequences, and a stage folder can be
copied anywhere. In `shared` they keep what an engine needs apart from the programs around it.
Knows source text only: nothing is imported or run.

Run as a program it prints the packages of `shared` and the rules, a line for each broken one, and
exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOKKEEPING = ("sequence", "block_manager", "scheduler")
TENSOR_LIBRARIES = ("torch", "transformers", "triton")

# The packages of `shared`. One imports only those before it; programs do not import each other.
ROOMS = ("engine", "models", "measure", "draw", "programs")
PROGRAMS = ("bench", "demo", "notebook", "record", "serve")
OF_AN_ENGINE = ("engine", "models")
MOST_OF_AN_ENGINE = 20  # modules of `shared` that a stage may bring in, packages not counted


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

    Relative imports leave out the package's own __init__, which imports all of the package.
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


Violations = Iterator[str]


def stages(root: Path) -> list[Path]:
    """The folders of the stages."""
    return sorted((root / "stages").glob("[0-9][0-9]_*"))


def files_of(folder: Path) -> list[Path]:
    """The Python files below a folder, without tests."""
    found = sorted(folder.rglob("*.py"))
    return [path for path in found if not path.name.startswith("test_")]


def at(root: Path, path: Path, each: Import) -> str:
    """Where an import is: file and line."""
    return f"{path.relative_to(root).as_posix()}:{each.line}"


def room_of(root: Path, path: Path) -> str:
    """The package of `shared` that a file is in; "" for one in none of them."""
    parts = path.relative_to(root).parts
    return parts[1] if parts[0] == "shared" and len(parts) > 2 else ""


def bookkeeping_is_pure(root: Path) -> Violations:
    for stage in stages(root):
        for room in BOOKKEEPING:
            for path, found in reached(root, stage / f"{room}.py").items():
                for each in found:
                    if each.top in TENSOR_LIBRARIES:
                        yield f"{at(root, path, each)}: {room} must not reach {each.top}"
                    elif each.top == "shared" and path.stem == room and path.parent == stage:
                        yield f"{at(root, path, each)}: {room} must not import shared"


def attention_knows_no_sequence(root: Path) -> Violations:
    for stage in stages(root):
        for path, found in reached(root, stage / "attention.py").items():
            for each in found:
                for target in targets(root, path, each):
                    if target.parent == stage and target.stem in BOOKKEEPING:
                        yield f"{at(root, path, each)}: attention must not reach {target.stem}"


def the_engine_knows_no_tensor(root: Path) -> Violations:
    for stage in stages(root):
        path = stage / "engine.py"
        for each in imports(path) if path.exists() else ():
            if each.top in ("torch", "numpy"):
                yield f"{at(root, path, each)}: engine must not import {each.top}"


def a_stage_can_be_copied(root: Path) -> Violations:
    for stage in stages(root):
        files = [path for path in sorted(stage.glob("*.py")) if not path.name.startswith("test_")]
        neighbours = {path.stem for path in files}
        for path in files:
            for each in imports(path):
                if each.top == "stages" or "load_stage" in each.names or each.level > 1:
                    yield f"{at(root, path, each)}: a stage must not leave its own folder"
                elif each.top in neighbours:
                    yield f"{at(root, path, each)}: write .{each.top}, not {each.top}"


def a_stage_uses_two_rooms(root: Path) -> Violations:
    allowed = {f"shared.{room}" for room in OF_AN_ENGINE}
    for stage in stages(root):
        for path in files_of(stage):
            for each in imports(path):
                cli = path.name == "__main__.py" and each.module == "shared.programs.cli"
                name = ".".join(each.module.split(".")[:2])
                if each.top == "shared" and name not in allowed and not cli:
                    yield f"{at(root, path, each)}: a stage must not import {each.module}"


def of_an_engine(root: Path, stage: Path) -> list[str]:
    """The modules of `shared` that the engine of a stage brings in, packages not counted."""
    files: dict[Path, tuple[Import, ...]] = {}
    for path in files_of(stage):
        if path.name != "__main__.py":
            files |= reached(root, path)
    shared = [path.relative_to(root) for path in files if root / "shared" in path.parents]
    shared = [p for p in shared if len(p.parts) > 2 and p.stem != "__init__"]  # in a package
    return sorted(".".join(p.with_suffix("").parts) for p in shared)


def an_engine_is_small(root: Path) -> Violations:
    for stage in stages(root):
        found = of_an_engine(root, stage)
        if len(found) > MOST_OF_AN_ENGINE:
            yield f"{stage.name}: {len(found)} modules of shared, at most {MOST_OF_AN_ENGINE}"
        for name in found:
            if name.split(".")[1] not in OF_AN_ENGINE:
                yield f"{stage.name}: an engine must not reach {name}"


def rooms_are_in_order(root: Path) -> Violations:
    for path in files_of(root / "shared"):
        room = room_of(root, path)
        if room and room not in ROOMS + PROGRAMS:
            yield f"{path.relative_to(root).as_posix()}: {room} is no package of the list"
            continue
        before = ROOMS[: ROOMS.index(room)] if room in ROOMS else ROOMS if room else ("engine",)
        for each in imports(path):
            for target in targets(root, path, each):
                other = room_of(root, target)
                if other and other != room and other not in before:
                    yield f"{at(root, path, each)}: {room or 'shared'} must not import {other}"


def there_is_no_circle(root: Path) -> Violations:
    """Imports in functions count too. A package's __init__ is a module like any other."""
    edges = {
        path: {target for each in imports(path) for target in targets(root, path, each)} - {path}
        for path in files_of(root / "shared")
    }
    done: set[Path] = set()

    def walk(path: Path, way: tuple[Path, ...]) -> Violations:
        if path in way:
            circle = (*way[way.index(path) :], path)
            yield " -> ".join(p.relative_to(root).as_posix() for p in circle)
        elif path not in done:
            for target in sorted(edges.get(path, ())):
                yield from walk(target, (*way, path))
            done.add(path)

    for path in edges:
        yield from walk(path, ())


def stages_are_loaded_by_load_stage(root: Path) -> Violations:
    for path in files_of(root / "shared"):
        for each in imports(path):
            if each.top == "stages":
                yield f"{at(root, path, each)}: use load_stage"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "load_stage"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node) not in allowed and _names_a_stage(node):
                yield f"{path.relative_to(root).as_posix()}:{node.lineno}: use load_stage"


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


RULES: dict[str, Callable[[Path], Violations]] = {
    "sequence, block_manager and scheduler reach no tensor library and import no shared": bookkeeping_is_pure,  # noqa: E501
    "attention and its kernels know no sequences": attention_knows_no_sequence,
    "engine.py imports no tensor library": the_engine_knows_no_tensor,
    "inside a stage, imports are relative; no stage imports another": a_stage_can_be_copied,
    "a stage imports shared.engine and shared.models, its __main__ also the cli": a_stage_uses_two_rooms,  # noqa: E501
    f"an engine brings in at most {MOST_OF_AN_ENGINE} modules of these two packages": an_engine_is_small,  # noqa: E501
    "a package of shared imports only packages before it in the list": rooms_are_in_order,
    "no modules of shared import each other in a circle": there_is_no_circle,
    "shared finds stages by load_stage only": stages_are_loaded_by_load_stage,
}


def violations(root: Path) -> list[str]:
    """Every broken rule of the checkout at `root`, one line each, without repetition."""
    return list(dict.fromkeys(line for rule in RULES.values() for line in rule(root)))


def main() -> int:
    """Print packages, rules and what breaks them; returns 1 if anything does."""
    root = Path(__file__).resolve().parents[2]
    there = [name for name in PROGRAMS if (root / "shared" / name).is_dir()]
    print(f"packages of shared, in order: {', '.join(ROOMS)}; programs: {', '.join(there)}")
    found = violations(root)
    for sentence, rule in RULES.items():
        broken = list(dict.fromkeys(rule(root)))
        print(f"  {'BROKEN' if broken else 'kept':6}  {sentence}")
        for line in broken:
            print(f"          {line}")
    engine = of_an_engine(root, stages(root)[-1])
    print(f"an engine brings in {len(engine)} modules of shared:")
    print("  " + " ".join(name.removeprefix("shared.") for name in engine))
    print(f"imports: {len(found)} broken rules in shared/ and {len(stages(root))} stages")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
