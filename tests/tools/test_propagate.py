"""The tool that carries a fix from an early stage into the later ones, on a small repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.check.propagate import propagate

TEXT = "".join(f"line {i}\n" for i in range(12))


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three stages with one file alike in all, and one that stage 03 changed at its end."""
    for stage in ("01_a", "02_b", "03_c"):
        folder = tmp_path / "stages" / stage
        folder.mkdir(parents=True)
        (folder / "alike.py").write_text(TEXT)
        (folder / "grown.py").write_text(TEXT)
    (tmp_path / "stages/03_c/grown.py").write_text(TEXT.replace("line 11", "stage 03"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "start")
    return tmp_path


def outcomes(root: Path, number: str = "01") -> dict[str, str]:
    return {each.path.removeprefix("stages/"): each.what for each in propagate(root, number)}


def test_nothing_changed_nothing_done(root: Path) -> None:
    assert outcomes(root) == {}


def test_change_of_a_copy_stays_a_copy(root: Path) -> None:
    changed = TEXT.replace("line 0", "fixed")
    (root / "stages/01_a/alike.py").write_text(changed)
    assert outcomes(root) == {"02_b/alike.py": "same", "03_c/alike.py": "same"}
    assert (root / "stages/02_b/alike.py").read_text() == changed
    assert (root / "stages/03_c/alike.py").read_text() == changed


def test_change_is_merged_with_what_the_later_stage_changed(root: Path) -> None:
    (root / "stages/01_a/grown.py").write_text(TEXT.replace("line 0", "fixed"))
    assert outcomes(root) == {"02_b/grown.py": "same", "03_c/grown.py": "merged"}
    merged = (root / "stages/03_c/grown.py").read_text()
    assert merged == TEXT.replace("line 0", "fixed").replace("line 11", "stage 03")


def test_second_run_changes_nothing(root: Path) -> None:
    (root / "stages/01_a/grown.py").write_text(TEXT.replace("line 0", "fixed"))
    outcomes(root)
    before = (root / "stages/03_c/grown.py").read_text()
    assert outcomes(root) == {"02_b/grown.py": "same", "03_c/grown.py": "merged"}
    assert (root / "stages/03_c/grown.py").read_text() == before


def test_only_later_stages_are_touched(root: Path) -> None:
    (root / "stages/02_b/alike.py").write_text(TEXT + "more\n")
    assert outcomes(root, "2") == {"03_c/alike.py": "same"}
    assert (root / "stages/01_a/alike.py").read_text() == TEXT


def test_staged_change_counts_as_uncommitted(root: Path) -> None:
    (root / "stages/01_a/alike.py").write_text(TEXT + "more\n")
    git(root, "add", ".")
    assert set(outcomes(root).values()) == {"same"}
    assert (root / "stages/02_b/alike.py").read_text() == TEXT + "more\n"


def test_conflict_is_marked_and_not_merged_twice(root: Path) -> None:
    (root / "stages/01_a/grown.py").write_text(TEXT.replace("line 11", "stage 01"))
    assert outcomes(root) == {"02_b/grown.py": "same", "03_c/grown.py": "conflict"}
    marked = (root / "stages/03_c/grown.py").read_text()
    assert "<<<<<<< stages/03_c/grown.py" in marked
    assert "stage 03" in marked and "stage 01" in marked
    assert outcomes(root)["03_c/grown.py"] == "conflict"
    assert (root / "stages/03_c/grown.py").read_text() == marked


def test_new_file_is_added(root: Path) -> None:
    (root / "stages/01_a/new.py").write_text("x = 1\n")
    (root / "stages/03_c/new.py").write_text("x = 2\n")
    assert outcomes(root) == {"02_b/new.py": "added", "03_c/new.py": "conflict"}
    assert (root / "stages/02_b/new.py").read_text() == "x = 1\n"


def test_deleted_file_is_deleted_where_it_was_a_copy(root: Path) -> None:
    (root / "stages/01_a/grown.py").unlink()
    assert outcomes(root) == {"02_b/grown.py": "deleted", "03_c/grown.py": "conflict"}
    assert not (root / "stages/02_b/grown.py").exists()
    assert (root / "stages/03_c/grown.py").exists()


def test_file_that_the_later_stage_lacks_is_a_conflict(root: Path) -> None:
    (root / "stages/02_b/alike.py").unlink()
    (root / "stages/01_a/alike.py").write_text(TEXT + "more\n")
    assert outcomes(root) == {"02_b/alike.py": "conflict", "03_c/alike.py": "same"}
    assert not (root / "stages/02_b/alike.py").exists()


@pytest.mark.parametrize("number", ["", "07", "one"])
def test_unknown_stage_is_refused(root: Path, number: str) -> None:
    with pytest.raises(ValueError, match="there are 01, 02, 03"):
        propagate(root, number)
