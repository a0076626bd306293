"""What a page can ask: each function takes and gives what JSON can hold.

In a page the files of the course are under `/course`, in a checkout in its folders.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tools.lab import drive, faults, questions

ROOT = Path(__file__).resolve().parents[2]


@cache
def files(stage: int) -> dict[str, str]:
    """The sources of a stage by name."""
    [folder] = ROOT.glob(f"stages/{stage:02d}_*")
    return {name: (folder / name).read_text(encoding="utf-8") for name in drive.FILES}


def run(setting: Mapping[str, Any], edited: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a setting on a stage's files, some of them edited."""
    return drive.run(setting, {**files(setting["stage"]), **(edited or {})})


def slices(settings: list[Mapping[str, Any]]) -> list[list[list[tuple[str, int, int]]]]:
    """Only the slices of each step, for several settings."""
    found = []
    for setting in settings:
        recording = run(setting)["recording"] or {"requests": [], "steps": []}
        names = [request["id"] for request in recording["requests"]]
        found.append(
            [[(names[r], start, n) for r, start, n in s["slices"]] for s in recording["steps"]]
        )
    return found


def fault(number: int) -> dict[str, Any]:
    """A broken engine of the ward: its files and what it is run on; not what is wrong."""
    one = faults.FAULTS[number - 1]
    planted = one.plant(files(4))
    return {
        "symptom": one.symptom,
        "setting": one.setting,
        "files": planted,
        "run": drive.run(one.setting, planted),
        "well": drive.run(one.setting, files(4)),
    }


def diagnose(number: int, invariant: str, file: str, line: int) -> dict[str, Any]:
    """Whether a reader's diagnosis is right, and why. A line beside the fault counts."""
    one = faults.FAULTS[number - 1]
    first, last = one.line(files(4))
    found = drive.run(one.setting, one.plant(files(4)))["broken"]
    also = {broken["key"] for broken in found[:2]}
    right_invariant = invariant == one.invariant or invariant in also
    right_line = file == one.file and first - 1 <= line <= last + 1
    answer: dict[str, Any] = {"invariant": right_invariant, "line": right_line}
    if right_invariant and right_line:
        answer |= {"why": one.why, "test": one.test, "old": one.old, "new": one.new}
        answer |= {"file": one.file, "first": first, "last": last}
    return answer


def hint(number: int) -> dict[str, str]:
    """Where the fault of a broken engine is: its file, and the function or class in it."""
    one = faults.FAULTS[number - 1]
    line, _ = one.line(files(4))
    place, inner = "", 0
    for node in ast.walk(ast.parse(one.plant(files(4))[one.file])):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno:
            if inner < node.lineno <= line <= node.end_lineno:
                place, inner = node.name, node.lineno
    return {"file": one.file, "place": place}


def ask(chapter: int, kind: int, seed: int) -> dict[str, Any]:
    """A question of a chapter."""
    return questions.ask(chapter, kind, seed, files)


def ask_about(
    setting: Mapping[str, Any], index: int, what: str, seed: int
) -> dict[str, Any] | None:
    """A question about a step of the sandbox's run; None if there is nothing to ask."""
    sources = files(setting["stage"])
    steps = questions.history(setting, sources)
    if not steps:
        return None
    index = min(index, len(steps) - 1)
    if what == "victim":
        chosen = [i for i, s in enumerate(steps) if s["preempted"] and i >= index]
        index = next(iter(chosen), -1)
        return None if index < 0 else {**questions.victim(setting, sources, index), "step": index}
    if what == "where":
        rng = questions.Random(seed)
        return {**questions.where(setting, sources, index, rng), "step": index}
    return {**questions.next_slices(setting, sources, index), "step": index}


CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (files, run, slices, fault, diagnose, hint, ask, ask_about, questions.judge)
}


def answer(request: str) -> str:
    """Call a function by name: JSON in, JSON out."""
    name, args = json.loads(request)
    return json.dumps(CALLS[name](*args))
