"""The lab's generated scripts: the course's Python files as text, and CPython for the browser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from shared.measure import roofline
from shared.models import configs
from tools.lab import drive, invariants, pyodide, questions
from tools.lab.faults import FAULTS
from tools.lab.presets import PRESETS
from tools.site.sources import ROOT

FOLDER = "assets/lab"
KINDS = {chapter: len(kinds) for chapter, kinds in questions.CHAPTERS.items()}
EMPTY = ("shared/__init__.py", "shared/engine/__init__.py", "tools/__init__.py")
COURSE = (
    "shared/engine/checks.py",
    "tools/lab/__init__.py",
    "tools/lab/drive.py",
    "tools/lab/faults.py",
    "tools/lab/page.py",
    "tools/lab/questions.py",
)


def course() -> dict[str, Any]:
    """What the worker needs of the course. Raises ValueError if a fault's text has changed."""
    files = dict.fromkeys(EMPTY, "")
    files |= {name: (ROOT / name).read_text(encoding="utf-8") for name in COURSE}
    for stage in sorted((ROOT / "stages").glob("[0-9][0-9]_*")):
        for name in drive.FILES:
            path = stage / name
            files[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    [last] = (ROOT / "stages").glob("04_*")
    sources = {name: (last / name).read_text(encoding="utf-8") for name in drive.FILES}
    for fault in FAULTS:
        fault.plant(sources)
    return {
        "files": files,
        "invariants": invariants.sentences(),
        "presets": PRESETS,
        "kinds": KINDS,
        "faults": len(FAULTS),
    }


@cache
def _pyodide() -> tuple[str, str]:
    data, line = pyodide.package()
    return (pyodide.script(data) if data else "miniVllmPyodide(null);\n"), line


def element(kind: str, words: Mapping[str, Any], **data: str) -> str:
    """A place for a part of the lab, with the button that opens it; on one line of HTML."""
    if kind == "steppers":
        data = {**data, **_shapes(), "words": json.dumps(words["steppers"], ensure_ascii=False)}
    attributes = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    button = (
        "" if "open" in data else f'<button type="button">{escape(words["open"][kind])}</button>'
    )
    return (
        f'\n<div class="lab" data-search-exclude data-lab="{kind}"{attributes}>{button}'
        f"<noscript>{escape(words['noscript'])}</noscript></div>\n"
    )


def _shapes() -> dict[str, str]:
    """GPUs and models of the roofline, as JSON."""
    gpus, models = [], []
    for gpu in roofline.GPUS.values():
        line = roofline.Roofline(gpu, roofline.ModelSize.named("smollm2-135m"))
        assumed = {key: getattr(line, key) for key in ("flop_share", "byte_share", "overhead")}
        gpus.append(asdict(gpu) | assumed)
    for path in sorted(Path(configs.__file__).parent.glob("*.json")):
        models.append({"name": path.stem, **asdict(roofline.ModelSize.named(path.stem))})
    return {"gpus": json.dumps(gpus), "models": json.dumps(models)}


def scripts(words: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Address -> content of the generated scripts, and a line about Pyodide.

    Args:
        words: the page's words, of which the lab needs its own and the viewer's.
    """
    text, line = _pyodide()
    content = course() | {"words": words["lab"], "viewer": words["viewer"]}
    return {
        f"{FOLDER}/course.js": f"miniVllmCourse({json.dumps(content, ensure_ascii=False)});\n",
        f"{FOLDER}/pyodide.js": text,
    }, line
