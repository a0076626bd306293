"""Carry uncommitted changes of one stage into the later stages.

Stages are copies, so a fix in an early stage must travel. For every file that differs from HEAD in
the given stage, each later stage gets a three-way merge: base is the early stage's file at HEAD,
ours the later stage's file, theirs the early stage's file as it is in the working tree. A file
that the later stage never changed simply stays a copy. Knows git and files, nothing of Python.

    python tools/check/propagate.py 01

Run again at any time: a change that has already arrived merges to itself. Exits with 1 if a file
is left in conflict, with 2 if it was called wrongly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a program, it finds its neighbours like the tests do

from shared.programs.program import finish  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """What became of one file in one later stage.

    `what` is same (the later stage's file was a copy, and is one again), merged, conflict,
    added, or deleted; `note` says what to do about a conflict.
    """

    path: str
    what: str
    note: str = ""


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]} failed: {done.stderr.decode().strip()}")
    return done.stdout


def _at_head(root: Path, path: Path) -> bytes | None:
    """A file as HEAD has it, or None."""
    name = f"HEAD:{path.relative_to(root).as_posix()}"
    found = subprocess.run(["git", "show", name], cwd=root, capture_output=True)
    return found.stdout if found.returncode == 0 else None


def changed_files(root: Path, stage: Path) -> list[Path]:
    """The stage's Python files that differ from HEAD: changed, new, and deleted ones."""
    folder = stage.relative_to(root).as_posix()
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD", "--", folder)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", folder)
    names = {name.decode() for name in (changed + new).split(b"\0") if name.endswith(b".py")}
    return [root / name for name in sorted(names) if (root / name).parent == stage]


def _merge(ours: bytes, base: bytes, theirs: bytes, labels: list[str]) -> tuple[bytes, bool]:
    """Three-way merge. Returns the text and whether conflicts are marked in it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_bytes(text)
        flags = [part for label in labels for part in ("-L", label)]
        merged = subprocess.run(
            ["git", "merge-file", "-p", *flags, *map(str, paths)], capture_output=True
        )
    if merged.returncode > 127:  # otherwise it is the number of conflicts
        raise RuntimeError(f"git merge-file failed: {merged.stderr.decode().strip()}")
    return merged.stdout, merged.returncode > 0


def carry(root: Path, source: Path, target: Path) -> Outcome:
    """Bring the uncommitted change of one file into the file of the same name of a later stage.

    Args:
        root: the checkout.
        source: the early stage's file; it may be gone.
        target: the later stage's file; written, created, or deleted.
    """
    path = target.relative_to(root).as_posix()
    base = _at_head(root, source)
    theirs = source.read_bytes() if source.exists() else None
    ours = target.read_bytes() if target.exists() else None

    if ours == theirs:
        return Outcome(path, "same")
    if theirs is None:
        if ours == base:
            target.unlink()
            return Outcome(path, "deleted")
        return Outcome(path, "conflict", "deleted early, changed here: delete or keep it")
    if ours is None:
        if base is None:
            target.write_bytes(theirs)
            return Outcome(path, "added")
        return Outcome(path, "conflict", "this stage has no such file: nothing was written")
    if ours == base:
        target.write_bytes(theirs)
        return Outcome(path, "same")
    if any(line.startswith(b"<<<<<<< ") for line in ours.splitlines()):
        return Outcome(path, "conflict", "still has markers of an earlier merge: left as it is")

    name = source.relative_to(root).as_posix()
    labels = [path, f"{name} at HEAD", f"{name} now"]
    text, conflict = _merge(ours, base or b"", theirs, labels)
    target.write_bytes(text)
    return Outcome(path, "conflict", "resolve the markers") if conflict else Outcome(path, "merged")


def propagate(root: Path, number: str) -> list[Outcome]:
    """Carry all uncommitted changes of stage `number` ("01" or "1") into every later stage.

    Raises:
        ValueError: there is no such stage.
    """
    stages = sorted((root / "stages").glob("[0-9][0-9]_*"))
    early = [stage for stage in stages if number.isdecimal() and int(stage.name[:2]) == int(number)]
    if not early:
        names = ", ".join(stage.name[:2] for stage in stages)
        raise ValueError(f"there is no stage {number!r}; there are {names}: make propagate FROM=01")
    stage = early[0]
    return [
        carry(root, source, later / source.name)
        for source in changed_files(root, stage)
        for later in stages
        if later.name[:2] > stage.name[:2]
    ]


def main(arguments: list[str]) -> int:
    """The program. Returns the exit code, see above."""
    return finish(lambda: tell(" ".join(arguments)), usage_errors=ValueError)


def tell(number: str) -> int:
    """Carry, and say what became of each file; returns 1 if one is in conflict."""
    found = propagate(ROOT, number)
    for outcome in found:
        note = f"  ({outcome.note})" if outcome.note else ""
        print(f"{outcome.what:9} {outcome.path}{note}")
    conflicts = sum(outcome.what == "conflict" for outcome in found)
    print(f"propagate: {len(found)} files, {conflicts} in conflict")
    return bool(conflicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
