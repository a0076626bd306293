"""Stages stay small steps apart: the repository keeps the rules, the checker sees breaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check.stage_diff import Rule, changed_lines, compare, measure, reports, without_docstring

ROOT = Path(__file__).resolve().parents[2]
RULE = Rule(max_changed=4, may_change=("engine.py",), may_add=("paged_attention_*.py",))


@pytest.fixture
def stages(tmp_path: Path) -> tuple[Path, Path]:
    """Two stages that are alike but for the docstring of the package."""
    for name in ("01_a", "02_b"):
        stage = tmp_path / "stages" / name
        stage.mkdir(parents=True)
        (stage / "__init__.py").write_text(f'"""Stage {name}."""\n\nX = 1\n')
        (stage / "engine.py").write_text("a = 1\nb = 2\nc = 3\n")
        (stage / "sequence.py").write_text("s = 1\n")
    return tmp_path / "stages/01_a", tmp_path / "stages/02_b"


def test_repository_keeps_the_rules() -> None:
    broken = [f"{each.stage}: {line}" for each in reports(ROOT) for line in each.problems]
    assert broken == []


def test_docstring_and_allowed_file_may_change(stages: tuple[Path, Path]) -> None:
    (stages[1] / "engine.py").write_text("a = 1\nb = 5\nc = 3\n")
    report = compare(*stages, RULE)
    assert report.problems == []
    assert report.by_file == {"__init__.py": 2, "engine.py": 2}
    assert report.changed == 4


@pytest.mark.parametrize("content", [b"s = 1 \n", b"s = 1\r\n"])
def test_not_a_byte_of_another_file_may_change(stages: tuple[Path, Path], content: bytes) -> None:
    (stages[1] / "sequence.py").write_bytes(content)
    (problem,) = compare(*stages, RULE).problems
    assert problem.startswith("sequence.py differs")


def test_package_may_change_in_its_docstring_only(stages: tuple[Path, Path]) -> None:
    (stages[1] / "__init__.py").write_text('"""Stage 02."""\n\nX = 2\n')
    (problem,) = compare(*stages, RULE).problems
    assert problem.startswith("__init__.py may differ")


def test_too_many_changed_lines(stages: tuple[Path, Path]) -> None:
    (stages[1] / "engine.py").write_text("a = 1\nb = 5\nc = 6\n")
    (problem,) = compare(*stages, RULE).problems
    assert problem == "6 changed lines, at most 4 are allowed"


def test_missing_and_new_files(stages: tuple[Path, Path]) -> None:
    (stages[1] / "sequence.py").unlink()
    (stages[1] / "helper.py").write_text("")
    assert compare(*stages, RULE).problems == [
        "helper.py is new, this stage may not add it",
        "sequence.py of 01_a is missing",
    ]


def test_kernels_and_tests_are_free(stages: tuple[Path, Path]) -> None:
    lines = measure(stages[1]).lines
    (stages[1] / "paged_attention_cpu.py").write_text("x = 1\n" * 900)
    (stages[1] / "test_stage.py").write_text("x = 1\n" * 900)
    report = compare(*stages, RULE)
    assert report.problems == []
    assert report.lines == lines


def test_size_limits(stages: tuple[Path, Path]) -> None:
    for name in ("b.py", "c.py", "d.py"):
        (stages[0] / name).write_text("x = 1\n" * 260)
    assert measure(stages[0]).problems == []
    (stages[0] / "b.py").write_text("x = 1\n" * 281)
    assert measure(stages[0]).problems == [
        "808 lines, at most 800 are allowed",
        "b.py has 281 lines, at most 260 are allowed",
    ]


def test_stage_alone_is_only_measured(stages: tuple[Path, Path]) -> None:
    root = stages[0].parent.parent
    assert [each.changed for each in reports(root)] == [None, 2]
    (stages[0]).rename(stages[0].parent / "elsewhere")
    assert [each.changed for each in reports(root)] == [None]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("abc", "", 3),
        ("", "abc", 3),
        ("abc", "axc", 2),
        ("abcabba", "cbabac", 5),  # the example of Myers' paper
        ("xabcx", "xx", 3),
    ],
)
def test_changed_lines_is_the_smallest_number(
    tmp_path: Path, old: str, new: str, expected: int
) -> None:
    for name, lines in (("old", old), ("new", new)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    assert changed_lines(tmp_path / "old", tmp_path / "new") == expected


def test_docstring_of_several_lines_is_taken_out() -> None:
    assert without_docstring('# c\n"""One.\n\nTwo.\n"""\nx = 1\n') == "# c\nx = 1\n"
    assert without_docstring("x = 1\n") == "x = 1\n"
    assert without_docstring("") == ""
