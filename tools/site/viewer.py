"""The trace viewer's place on a page, and its recordings as scripts.

The viewer itself is `docs/assets/viewer/viewer.js`. A recording becomes a script because a page
that is opened from the disk may load scripts, but not read files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tools.site.sources import ROOT

FOLDER = ROOT / "docs" / "assets" / "traces"


def recordings() -> list[dict[str, Any]]:
    """Name, traffic, stage and chunk size of every recording, in the order of the stages."""
    found = []
    for path in FOLDER.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        keys = ("traffic", "stage", "chunk_size")
        found.append({"name": path.stem, **{key: content[key] for key in keys}})
    return sorted(found, key=lambda one: (one["traffic"], one["stage"], one["chunk_size"] or 0))


def viewer(words: Mapping[str, Any]) -> str:
    """The element that the script fills, as HTML on one line."""
    data = {"words": words, "recordings": recordings()}
    attributes = " ".join(
        f'data-{name}="{escape(json.dumps(value, ensure_ascii=False))}"'
        for name, value in data.items()
    )
    return (
        f'\n<div class="viewer" data-search-exclude {attributes}>'
        f"<noscript>{escape(words['noscript'])}</noscript></div>\n"
    )


def script(path: Path) -> str:
    """A recording as a script that hands it to the viewer."""
    return f"miniVllmTrace({path.read_text(encoding='utf-8').strip()});\n"
