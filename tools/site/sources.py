"""Code on the site, taken from the repository when the site is built, never pasted.

`listing` shows a function, a class or a part of one, found by name; `stage_diff` shows what a stage
changes, with a sentence on why above each hunk. A name that is gone, a note whose line is gone, a
hunk without its sentence and a sentence without its hunk are errors, so the pages cannot fall
behind the code.

Knows source text only: nothing is imported or run.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 3  # unchanged lines around a change
MAX_NEW_FILE = 60  # a longer new file is described, not shown: its page embeds the parts
KERNELS = ("paged_attention_", "cuda_graph")  # shown as new files only: stages copy them

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class DocsError(ValueError):
    """Something that the pages name is not in the code."""


# --- finding things by name -------------------------------------------------------------------


@cache
def _source(path: str) -> tuple[str, ...]:
    file = ROOT / path
    if not file.is_file():
        raise DocsError(f"there is no file {path}")
    return tuple(file.read_text(encoding="utf-8").splitlines())


def definitions(path: str) -> dict[str, Definition]:
    """Everything that a Python file defines at top level or in a class, by qualified name."""
    found: dict[str, Definition] = {}

    def visit(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(prefix + node.name, node)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    assert isinstance(node, (ast.Assign, ast.AnnAssign))
                    found.setdefault(prefix + target.id, node)

    visit(ast.parse("\n".join(_source(path))).body, "")
    return found


def span(path: str, name: str) -> tuple[int, int]:
    """First and last line, from 1, of a definition with its decorators and the comment above."""
    known = definitions(path)
    if name not in known:
        raise DocsError(f"{path} defines no {name}; it defines {', '.join(known)}")
    node = known[name]
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    lines = _source(path)
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    assert node.end_lineno is not None
    return first, node.end_lineno


def paragraphs(path: str, name: str) -> dict[str, tuple[int, int]]:
    """First and last line of each paragraph that a comment numbers, `# 1.` and so on, in order.

    The last one ends where the definition does. Raises DocsError if there are fewer than two.
    """
    lines, (first, last) = _source(path), span(path, name)
    starts = [
        (found[1], n)
        for n in range(first, last + 1)
        if (found := re.match(r" +# (\d+)\. ", lines[n - 1]))
    ]
    if [number for number, _ in starts] != [str(i + 1) for i in range(len(starts))]:
        raise DocsError(f"{path}: the paragraphs of {name} are not numbered from 1")
    if len(starts) < 2:
        raise DocsError(f"{path}: {name} has {len(starts)} numbered paragraphs")
    found_spans = {}
    for (number, start), (_, end) in zip(starts, [*starts[1:], ("", last + 1)], strict=True):
        end -= 1
        while not lines[end - 1].strip():
            end -= 1
        found_spans[number] = (start, end)
    return found_spans


def _line_with(path: str, first: int, last: int, fragment: str) -> int:
    """The one line of `first .. last` that contains `fragment`."""
    lines = _source(path)
    hits = [n for n in range(first, last + 1) if fragment in lines[n - 1]]
    if not hits:
        raise DocsError(f"{path}, lines {first} to {last}: no line contains {fragment!r}")
    return hits[0]


def listing(
    path: str,
    name: str,
    start: str = "",
    end: str = "",
    notes: Sequence[Sequence[str]] = (),
    docstring: bool = True,
) -> str:
    """A fenced block of code, as Markdown.

    Args:
        path: file, from the root of the repository.
        name: qualified name of what to show.
        start, end: show from the line that contains `start` to the one before that with `end`.
        notes: pairs of a fragment of a line and a sentence; the line gets a mark that opens it.
        docstring: False leaves the definition's docstring out.
    """
    lines = _source(path)
    first, last = span(path, name)
    if start:
        first = _line_with(path, first, last, start)
    if end:
        last = _line_with(path, first + 1, last, end) - 1
    numbers = list(range(first, last + 1))
    if not docstring and not start:
        hidden = _docstring_lines(definitions(path)[name])
        numbers = [n for n in numbers if n not in hidden]
    while numbers and not lines[numbers[-1] - 1].strip():
        numbers.pop()

    marks: dict[int, int] = {}
    for i, (fragment, _) in enumerate(notes, 1):
        line = _line_with(path, first, last, fragment)
        if line in marks:
            raise DocsError(f"{path}, line {line} has two notes")
        marks[line] = i
    shown = [_marked(lines[n - 1], marks.get(n)) for n in numbers]
    indent = min((len(s) - len(s.lstrip()) for s in shown if s.strip()), default=0)
    options = [f'title="{path}, from line {first}"']
    if docstring or start:
        options.append(f'linenums="{first}"')
    block = ["```{ .python .annotate " + " ".join(options) + " }"]
    block += [s[indent:] for s in shown]
    block.append("```")
    if notes:
        block += ["", *(f"{i}.  {text}" for i, (_, text) in enumerate(notes, 1))]
    return "\n".join(["", *block, ""])


def _marked(line: str, mark: int | None) -> str:
    """A line with a mark that the theme makes a button of. With "!" the comment sign goes."""
    if mark is None:
        return line
    has_comment = line.lstrip().startswith("#") or "  # " in line
    return f"{line} ({mark})" if has_comment else f"{line}  # ({mark})!"


def _docstring_lines(node: Definition) -> range:
    body = getattr(node, "body", None)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        assert body[0].end_lineno is not None
        return range(body[0].lineno, body[0].end_lineno + 1)
    return range(0)


# --- what a stage changes ---------------------------------------------------------------------


@dataclass(frozen=True)
class Hunk:
    """Changed lines that stand together, with the names of what they change."""

    lines: tuple[str, ...]  # with " ", "-" or "+" in front
    scopes: tuple[str, ...]


def stage_folder(number: int) -> Path:
    """The folder of a stage."""
    return next((ROOT / "stages").glob(f"{number:02d}_*"))


def _scopes(path: str) -> list[str]:
    """For each line of a file the innermost definition that it belongs to; "" at top level."""
    lines = _source(path)
    names = [""] * (len(lines) + 1)
    for name, node in definitions(path).items():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first, last = span(path, name)
            for n in range(first, last + 1):
                names[n] = name
    return names


def hunks(old_path: str, new_path: str) -> list[Hunk]:
    """The differences of two files, each with the definitions in which its changes are."""
    old, new = _source(old_path), _source(new_path)
    old_scopes, new_scopes = _scopes(old_path), _scopes(new_path)
    found = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        lines: list[str] = []
        scopes: list[str] = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in old[i1:i2]]
                continue
            lines += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
            scopes += [old_scopes[n + 1] for n in range(i1, i2) if old[n].strip()]
            scopes += [new_scopes[n + 1] for n in range(j1, j2) if new[n].strip()]
        found.append(Hunk(tuple(lines), tuple(dict.fromkeys(scopes))))
    return found


Sentences = Mapping[str, Mapping[str, str]]


def stage_diff(before: int, after: int, sentences: Sentences, words: Mapping[str, str]) -> str:
    """What stage `after` changes against stage `before`, foldable file by file, as Markdown.

    Args:
        sentences: file name to {"file": why this file, scope: why this change, ...}. A scope is
            the qualified name of what a hunk changes, or "top" for the top of a file.
        words: "new_file" and "lines", as they are said in the language of the page.

    Raises:
        DocsError: a changed file or hunk has no sentence, or a sentence has no hunk.
    """
    old, new = stage_folder(before), stage_folder(after)
    names = sorted(p.name for p in new.glob("*.py") if not p.name.startswith("test_"))
    gone = {p.name for p in old.glob("*.py")} - set(names)
    gone = {name for name in gone if not name.startswith(("test_", *KERNELS))}
    if gone:
        raise DocsError(f"stage {after} lacks files of stage {before}: {sorted(gone)}")
    parts: list[str] = [""]
    left = dict(sentences)
    for name in names:
        new_path = f"stages/{new.name}/{name}"
        old_path = f"stages/{old.name}/{name}"
        is_old = (ROOT / old_path).is_file()
        if is_old and (name.startswith(KERNELS) or _source(old_path) == _source(new_path)):
            continue
        if name not in left:
            raise DocsError(f"stage {after} changes {name}, and the page does not say why")
        why = left.pop(name)
        if is_old:
            parts += _changed_file(old_path, new_path, why)
        else:
            parts += _new_file(new_path, why, words)
    if left:
        raise DocsError(f"stage {after} does not change {', '.join(left)}; the page says it does")
    return "\n".join(parts)


def _changed_file(old_path: str, new_path: str, why: Mapping[str, str]) -> list[str]:
    name = Path(new_path).name
    found = hunks(old_path, new_path)
    added = sum(line.startswith("+") for hunk in found for line in hunk.lines)
    removed = sum(line.startswith("-") for hunk in found for line in hunk.lines)
    parts = [f'??? abstract "`{name}` &nbsp; +{added} −{removed}"', "", f"    {why['file']}", ""]
    left = {scope: text for scope, text in why.items() if scope != "file"}
    for hunk in found:
        scopes = [scope or "top" for scope in hunk.scopes]
        told = [scope for scope in scopes if scope in why]
        if not told and len(found) > 1:
            raise DocsError(f"{new_path}: no sentence for the hunk in {', '.join(scopes)}")
        said = [left.pop(scope) for scope in told if scope in left]
        parts += [f"    {text}\n" for text in said]
        parts += ["    ```diff", *(f"    {line}".rstrip() for line in hunk.lines), "    ```", ""]
    if left:
        raise DocsError(f"{new_path}: nothing changes in {', '.join(left)}")
    return parts


def _new_file(path: str, why: Mapping[str, str], words: Mapping[str, str]) -> list[str]:
    name, lines = Path(path).name, _source(path)
    if set(why) != {"file"}:
        raise DocsError(f"{path} is new: one sentence, under `file`, is all that it can have")
    title = f'"`{name}` &nbsp; {words["new_file"]}, {len(lines)} {words["lines"]}"'
    if len(lines) > MAX_NEW_FILE:
        return [f"!!! abstract {title}", "", f"    {why['file']}", ""]
    code = ["    ```python", *(f"    {line}".rstrip() for line in lines), "    ```", ""]
    return [f"??? abstract {title}", "", f"    {why['file']}", "", *code]
