"""What each stage changes against the stage before, and whether that is allowed.

A file that a stage does not change is byte-identical to the stage before, so that `diff -ru` of
two neighbours shows the lesson and nothing else. This tool counts the changed lines, checks which
files changed against the table below, and checks the sizes. Works while only some stages exist.

Run as a program it prints a table and the broken rules, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

MAX_STAGE_LINES = 800
# The last stage has three options besides its subject (a share for decodes, whole prompts reserved
# at once, a target for the time of a step), which no later stage copies.
MAX_LAST_STAGE_LINES = 880
LAST_STAGE = "04"
MAX_FILE_LINES = 260

# Neither counted nor held to the file limit: compiled kernels, CUDA graphs, tests.
KERNELS = ("paged_attention_*.py", "cuda_graph*.py")
TESTS = ("test_*.py",)


@dataclass(frozen=True)
class Rule:
    """What a stage may do to the files of the stage before."""

    max_changed: int  # lines added plus lines removed
    may_change: tuple[str, ...]
    may_add: tuple[str, ...] = ()


BOOKKEEPING = ("sequence.py", "block_manager.py", "scheduler.py")
JOINTS = ("config.py", "engine.py", "model_runner.py")
RULES = {
    "02": Rule(120, (*JOINTS, "attention.py", "kv_cache.py"), may_add=KERNELS),
    "03": Rule(180, (*JOINTS, *BOOKKEEPING)),
    "04": Rule(180, (*JOINTS, *BOOKKEEPING, "attention.py")),
}
# In every stage these may differ in their docstring, which names the stage, and in nothing else.
DOCSTRING_ONLY = ("__init__.py", "__main__.py")


@dataclass
class Report:
    """The measures of one stage. `changed` counts lines; None for the first stage."""

    stage: str
    lines: int
    longest: tuple[int, str]
    changed: int | None = None
    by_file: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def max_lines(stage: str) -> int:
    """Lines that a stage may have, without kernels, graphs and tests."""
    return MAX_LAST_STAGE_LINES if stage.startswith(LAST_STAGE) else MAX_STAGE_LINES


def changed_lines(old: Path, new: Path) -> int:
    """Lines removed plus lines added by a smallest possible diff of two files."""
    command = ["git", "diff", "--no-index", "--minimal", "--numstat", "--", str(old), str(new)]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    return sum(map(int, printed.split()[:2]))  # nothing is printed if they are equal


def without_docstring(source: str) -> str:
    """The source text with the lines of the module's docstring taken out."""
    body = ast.parse(source).body
    lines = source.splitlines(keepends=True)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        first, last = body[0].lineno, body[0].end_lineno
        lines = lines[: first - 1] + lines[last:]
    return "".join(lines)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _read(stage: Path) -> dict[str, str]:
    """The stage's Python files but for its tests, by name."""
    return {
        path.name: path.read_bytes().decode("utf-8")
        for path in sorted(stage.glob("*.py"))
        if not _matches(path.name, TESTS)
    }


def measure(stage: Path) -> Report:
    """Sizes of one stage, checked against the limits."""
    sizes = {
        name: len(text.splitlines())
        for name, text in _read(stage).items()
        if not _matches(name, KERNELS)
    }
    longest = max(((size, name) for name, size in sizes.items()), default=(0, "-"))
    report = Report(stage.name, sum(sizes.values()), longest)
    allowed = max_lines(report.stage)
    if report.lines > allowed:
        report.problems.append(f"{report.lines} lines, at most {allowed} are allowed")
    for name, size in sizes.items():
        if size > MAX_FILE_LINES:
            report.problems.append(f"{name} has {size} lines, at most {MAX_FILE_LINES} are allowed")
    return report


def compare(before: Path, stage: Path, rule: Rule) -> Report:
    """Sizes of `stage`, and its changes against the stage before, checked against `rule`."""
    report = measure(stage)
    old_files, new_files = _read(before), _read(stage)
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files:
            report.problems.append(f"{name} of {before.name} is missing")
            continue
        if name not in old_files:
            if not _matches(name, rule.may_add):
                report.problems.append(f"{name} is new, this stage may not add it")
            continue
        old, new = old_files[name], new_files[name]
        if old == new:
            continue
        report.by_file[name] = changed_lines(before / name, stage / name)
        if name in DOCSTRING_ONLY:
            if without_docstring(old) != without_docstring(new):
                report.problems.append(
                    f"{name} may differ from {before.name} in its docstring only"
                )
        elif name not in rule.may_change:
            report.problems.append(
                f"{name} differs from {before.name}, this stage may not change it"
            )
    report.changed = sum(report.by_file.values())
    if report.changed > rule.max_changed:
        report.problems.append(
            f"{report.changed} changed lines, at most {rule.max_changed} are allowed"
        )
    return report


def reports(root: Path) -> list[Report]:
    """One report per stage that exists, in order. A stage without the one before is only measured.

    Args:
        root: the checkout, which holds `stages/`.
    """
    stages = {path.name[:2]: path for path in sorted((root / "stages").glob("[0-9][0-9]_*"))}
    found = []
    for number, stage in stages.items():
        before = stages.get(f"{int(number) - 1:02d}")
        if before is None or number not in RULES:
            found.append(measure(stage))
        else:
            found.append(compare(before, stage, RULES[number]))
    return found


def main() -> int:
    """Print the table and the broken rules; returns 1 if there is any."""
    found = reports(Path(__file__).resolve().parents[2])
    print(f"{'stage':20}{'lines':>12}{'longest file':>24}{'changed lines':>16}")
    for report in found:
        lines = f"{report.lines} of {max_lines(report.stage)}"
        longest = f"{report.longest[1]} {report.longest[0]}"
        changed = "-"
        if report.changed is not None:
            changed = f"{report.changed} of {RULES[report.stage[:2]].max_changed}"
        print(f"{report.stage:20}{lines:>12}{longest:>24}{changed:>16}")
    for report in found:
        if report.by_file:
            by_file = ", ".join(f"{name} {count}" for name, count in report.by_file.items())
            print(f"{report.stage[:2]} changes: {by_file}")
    problems = [f"{report.stage}: {line}" for report in found for line in report.problems]
    for line in problems:
        print(line)
    print(f"stage diffs: {len(problems)} broken rules in {len(found)} stages")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
