"""What the contract says to a wrong engine: four faults that everybody makes, each named.

A copy of stage 04 is broken in one place and tested as a reader's own folder would be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sections import OF_A_FILE, OF_THE_CONTRACT, section

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "stages" / "04_chunked_prefill"

# Fault -> file, what is replaced, by what; the tests that are run; what the failure must say.
WRONG = {
    "slots from the chunk index": (
        "model_runner.py",
        "slot_mapping(table, s.start_pos, s.num_tokens,",
        "slot_mapping(table, 0, s.num_tokens,",
        "C3",
        (
            "step 1: 'a' 3..6: expected that each token reads all tokens before it",
            "Are the slots of a chunk taken from the index in the whole sequence?",
            "Where a chunk's tokens go",
        ),
    ),
    "positions restart at 0": (
        "model_runner.py",
        "for s in slices for pos in range(s.start_pos, s.end_pos)",
        "for s in slices for pos in range(s.num_tokens)",
        "C3",
        (
            "step 1: 'a' 4..8: the positions of this chunk",
            "they do not restart at 0 with each chunk",
            "expected [4, 5, 6, 7]",
            "came     [0, 1, 2, 3]",
            "Where a chunk's tokens go",
        ),
    ),
    "sample at every chunk": (
        "scheduler.py",
        "for s in self.slices if s.end_pos == s.sequence.num_tokens]",
        "for s in self.slices]",
        "C4_intermediate",
        (
            "step 0 returned; it computes tokens 0..4 of the 12 of request 'a'",
            "Only the chunk that reaches the prompt's end samples a token",
            "expected []",
            "came     ['a']",
            "Inside and outside",
        ),
    ),
    "abort forgets PREFILLING": (
        "scheduler.py",
        "        self.block_manager.free(sequence)\n"
        "        sequence.status = SequenceStatus.FINISHED",
        "        if sequence.status is SequenceStatus.RUNNING:\n"
        "            self.block_manager.free(sequence)\n"
        "        sequence.status = SequenceStatus.FINISHED",
        "A1_abort_in_every_state",
        (
            "aborted while PREFILLING with 2 blocks: its blocks come back at once",
            "expected 64",
            "came     62",
            "An abort in the middle",
        ),
    ),
}


def run_tests(engine: Path, words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "stages/04_chunked_prefill/test_chunked_prefill.py"]
    options = ["--engine", str(engine), "-x", "-q", "-k", words, "-p", "no:cacheprovider"]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_engine_is_told_what_is_wrong(tmp_path: Path, fault: str) -> None:
    name, right, wrong, words, said = WRONG[fault]
    copy = tmp_path / "my_stage"
    shutil.copytree(STAGE, copy, ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    source = (copy / name).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{name} has no longer what is broken here"
    (copy / name).write_text(source.replace(right, wrong), encoding="utf-8")
    done = run_tests(copy, words)
    message = " ".join(done.stdout.replace("\nE  ", " ").split())
    assert done.returncode == 1, done.stdout + done.stderr
    missing = [part for part in said if " ".join(part.split()) not in message]
    assert not missing, f"{fault}: the failure does not say {missing}:\n{done.stdout}"


def headings(chapter: str) -> list[str]:
    text = (ROOT / "docs" / "chapters" / f"{chapter}.md").read_text(encoding="utf-8")
    return [line.lstrip("# ") for line in text.splitlines() if line.startswith("##")]


def test_the_sections_that_failures_name_exist() -> None:
    tables = [*OF_A_FILE.values(), OF_THE_CONTRACT]
    for _, chapter, heading in [row for table in tables for row in table]:
        assert heading in headings(chapter), f"{chapter} has no section {heading!r}"


@pytest.mark.parametrize("file", [*OF_A_FILE, "test_stage"])
def test_every_test_of_a_stage_has_a_section(file: str) -> None:
    if file == "test_stage":
        paths = list((ROOT / "tests" / "contract").glob("*.py"))
    else:
        paths = list((ROOT / "stages").glob(f"*/{file}.py"))
    names = [
        line[4:].split("(")[0]
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def test_")
    ]
    assert len(names) > 20
    assert not [name for name in names if section(file, name) is None]
