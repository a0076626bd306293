"""What the contract says to a wrong engine: four faults that everybody makes, each named.

A copy of stage 04 is broken in one place and tested as a reader's own folder would be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sections import OF_A_FILE, OF_THE_CONTRACT, section

ROOT = Path(__file__).resolve().parents[2]
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
        "position_ids += range(s.start_pos, s.end_pos)",
        "position_ids += range(s.num_tokens)",
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
            "Progress before the first token",
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The tests of every wrong copy, all at once: most of their time is importing."""
    started = {}
    for fault, (name, right, wrong, words, _) in WRONG.items():
        copy = tmp_path_factory.mktemp("wrong") / "my_stage"
        shutil.copytree(STAGE, copy, ignore=shutil.ignore_patterns("test_*", "__pycache__"))
        source = (copy / name).read_text(encoding="utf-8")
        assert source.count(right) == 1, f"{name} has no longer what is broken here"
        (copy / name).write_text(source.replace(right, wrong), encoding="utf-8")
        # The kernels of a new folder would be compiled first, which takes longer than the tests.
        config = (copy / "config.py").read_text(encoding="utf-8")
        config = config.replace(
            'attention_backend: str = "auto"', 'attention_backend: str = "gather"'
        )
        (copy / "config.py").write_text(config, encoding="utf-8")
        tests = "stages/04_chunked_prefill/test_chunked_prefill.py"
        options = ["--engine", str(copy), "-x", "-q", "-k", words, "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", tests, *options]
        started[fault] = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_engine_is_told_what_is_wrong(runs: dict[str, Any], fault: str) -> None:
    said = WRONG[fault][-1]
    printed, _ = runs[fault].communicate()
    message = " ".join(printed.replace("\nE  ", " ").split())
    assert runs[fault].returncode == 1, printed
    missing = [part for part in said if " ".join(part.split()) not in message]
    assert not missing, f"{fault}: the failure does not say {missing}:\n{printed}"


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
        paths += (ROOT / "tests" / "contract").glob(f"{file.removeprefix('test_')}.py")
    names = [
        line[4:].split("(")[0]
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def test_")
    ]
    assert len(names) > 20
    assert not [name for name in names if section(file, name) is None]
