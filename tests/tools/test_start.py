"""`make start`: a reader's own folder, complete enough to be imported, and nothing overwritten."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.lab.faults import FAULTS
from tools.setup.start import ROOT, TAKEN_OUT, StartError, main, start

STAGES = sorted((ROOT / "stages").glob("[0-9][0-9]_*"))


@pytest.mark.parametrize("number", ["02", "03", "04"])
def test_the_stage_before_with_the_options_of_the_new_one(tmp_path: Path, number: str) -> None:
    start(ROOT, number, tmp_path / "mine")
    before, new = STAGES[int(number) - 2], STAGES[int(number) - 1]
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {p.name for p in new.glob("*.py") if not p.name.startswith("test_")}
    for name in names:
        origin = before / name if (before / name).is_file() and name != "config.py" else new / name
        same = filecmp.cmp(tmp_path / "mine" / name, origin, shallow=False)
        assert same != (name in TAKEN_OUT.get(number, {})), name


@pytest.mark.parametrize("number", ["01", "02"])
def test_what_is_taken_out_says_so_when_it_is_called(tmp_path: Path, number: str) -> None:
    start(ROOT, number.lstrip("0"), tmp_path / "mine")
    for name, functions in TAKEN_OUT[number].items():
        text = (tmp_path / "mine" / name).read_text(encoding="utf-8")
        compile(text, name, "exec")
        for function in functions:
            assert f'raise NotImplementedError("{function}: yours to write' in text
            assert f"def {function.split('.')[-1]}(" in text
        left = [
            one for one in (STAGES[int(number) - 1] / name).read_text().splitlines() if "#" in one
        ]
        assert text.count("#") > 0.3 * len(left), "comments in front of functions stay"


def test_a_fresh_copy_can_be_imported_from_anywhere(tmp_path: Path) -> None:
    names = [f"mine_{number}" for number in ("01", "02", "03", "04")]
    for name in names:
        start(ROOT, name[-2:], tmp_path / name)
    code = f"import {', '.join(names)}; print([m.LLMEngine for m in ({', '.join(names)})])"
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | paths, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1))
def test_a_fault_is_planted_in_a_copy_of_stage_04(tmp_path: Path, number: int) -> None:
    target = tmp_path / "patient"
    assert main(["04", str(target), str(number)]) == 0
    changed = [
        p.name for p in target.iterdir() if p.read_bytes() != (STAGES[3] / p.name).read_bytes()
    ]
    assert changed == [FAULTS[number - 1].file]
    compile((target / changed[0]).read_text(encoding="utf-8"), changed[0], "exec")
    assert number < len(FAULTS) or main(["04", str(tmp_path / "other"), str(number + 1)]) == 2
    assert number < len(FAULTS) or main(["03", str(tmp_path / "other"), str(number)]) == 2


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "work.py").write_text("mine")
    with pytest.raises(StartError, match="there is there already; take another DIR"):
        start(ROOT, "04", tmp_path / "there")
    assert (tmp_path / "there" / "work.py").read_text() == "mine"
    for stage in ("05", "four", "0"):
        with pytest.raises(StartError, match=f"one of 01, 02, 03, 04, got '{stage}'"):
            start(ROOT, stage, tmp_path / "new")
    with pytest.raises(StartError, match="inside of stages/"):
        start(ROOT, "04", ROOT / "stages" / "mine")
    with pytest.raises(StartError, match="DIR must name a new folder"):
        start(ROOT, "04", Path(""))
    assert not (tmp_path / "new").exists()
    for arguments in ([], ["04"], ["", ""]):
        assert main(arguments) == 2
        assert "usage: make start STAGE=04 DIR=my_stage" in capsys.readouterr().err
    assert main(["04", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert f"pytest stages/04_chunked_prefill --engine {tmp_path / 'new'} -x" in said
    assert "the files of stages/03_prefix_cache" in said and "config.py" in said
