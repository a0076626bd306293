"""What mkdocs does in addition: notebooks become pages, and the finished site is checked.

A notebook in `notebooks/` becomes a page with its text, code and outputs as they were committed.
After the build every link, anchor and resource of every page is looked up; what leads nowhere, or
to another host for a script, style, font or picture, ends the build.

mkdocs is imported where it is needed: the checks are tested, and types are checked, without it.
"""

from __future__ import annotations

import base64
import html
import importlib
import json
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from shared.draw import palette  # noqa: E402
from tools.site import lab as docs_lab, macros as docs_macros, viewer as docs_viewer  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
WIDGET = "application/vnd.jupyter.widget-view+json"


# --- notebooks --------------------------------------------------------------------------------


def notebook_page(path: Path) -> str:
    """A notebook as Markdown. Formulas and headings stay as they are written in its cells.

    Links lead to files there, and here to pages: chapters are one folder up, notebooks beside.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace("](../docs/", "](../")
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source))
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source}\n```")
            parts += [text for output in cell["outputs"] if (text := _output(output))]
    name = path.relative_to(ROOT)
    parts.insert(1, f"*From `{name}`, with the outputs of its last run.*")
    return "{% raw %}\n" + "\n\n".join(parts) + "\n{% endraw %}\n"


def _output(output: dict[str, Any]) -> str:
    """One output of a cell: a picture, HTML, or text; the richest that there is."""
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output.get("data", {})
    if WIDGET in data:
        return ""  # a slider moves only where the notebook runs
    if "image/svg+xml" in data:
        svg = " ".join("".join(data["image/svg+xml"]).split())
        return f'<div class="notebook-output">{svg[svg.index("<svg") :]}</div>'
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        base64.b64decode(picture, validate=True)
        return f'<img class="notebook-output" alt="" src="data:image/png;base64,{picture}">'
    if "text/html" in data:
        inside = " ".join("".join(data["text/html"]).split())
        return f'<div class="notebook-output">{inside}</div>'
    return _text("".join(data.get("text/plain", "")))


def _text(text: str) -> str:
    lines = [line.split("\r")[-1] for line in ANSI.sub("", text).rstrip().splitlines()]
    return f'<pre class="notebook-output">{html.escape(chr(10).join(lines))}</pre>' if lines else ""


def notebooks() -> dict[str, Path]:
    """Page -> notebook, in order."""
    return {f"notebooks/{path.stem}.md": path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def on_config(config: Any) -> Any:
    """Put the notebooks into the navigation, before what is looked up."""
    if notebooks() and not any("Notebooks" in entry for entry in config["nav"]):
        config["nav"].insert(-1, {"Notebooks": list(notebooks())})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the colours, a page for each notebook, a script for each recording, those of the lab."""
    File = importlib.import_module("mkdocs.structure.files").File
    for page, path in notebooks().items():
        file = File.generated(config, page, content=notebook_page(path))
        # What the i18n plugin gives to files that it finds on the disk.
        for name, value in {"locale": "en", "locale_alternate_of": "en", "alternates": {}}.items():
            setattr(file, name, value)
        files.append(file)
    for path in sorted(docs_viewer.FOLDER.glob("*.json")):
        uri = path.relative_to(ROOT / "docs").with_suffix(".js").as_posix()
        files.append(File.generated(config, uri, content=docs_viewer.script(path)))
    files.append(File.generated(config, "assets/palette.css", content=palette.stylesheet()))
    scripts, line = docs_lab.scripts(docs_macros.read_data("words"))
    logging.getLogger("mkdocs.lab").info(line)  # without Pyodide the build goes on
    for uri, content in scripts.items():
        files.append(File.generated(config, uri, content=content))
    return files


# After the i18n plugin, which sorts files by the language in their names and takes no others.
on_files.mkdocs_priority = -100  # type: ignore[attr-defined]


# --- folded answers ----------------------------------------------------------------------------

ANSWER = re.compile(r"^\?\?\?\+? question .*\n(?:[ \t]*\n)* {4,}((?:\d+\.|[-*+])(?:[ \t].*)?$)", re.M)


def swallowed_answers(markdown: str) -> list[str]:
    """The first lines of folded answers that begin with a list.

    Markdown takes "254. Six tokens ..." for a list and shows its first item as "1.".
    """
    return ANSWER.findall(markdown)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """End the build when an answer would lose its number."""
    swallowed = swallowed_answers(markdown)
    if swallowed:
        error = importlib.import_module("mkdocs.exceptions").PluginError
        lines = [f"{page.file.src_uri}: an answer begins with a list: {s!r}" for s in swallowed]
        raise error("\n".join(lines))
    return markdown


# --- the finished site ------------------------------------------------------------------------

RESOURCES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """The links, resources and anchors of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in RESOURCES and values.get(RESOURCES[tag]):
            relation = values.get("rel", "")
            if tag != "link" or not {"canonical", "next", "prev", "alternate"} & {relation}:
                self.resources.append(values[RESOURCES[tag]])


def broken_links(site: Path) -> Iterator[str]:
    """What is wrong with the built site, one line each."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path.relative_to(site).as_posix()] = page
    for name, page in pages.items():
        for url in page.resources:
            if urlsplit(url).netloc:
                yield f"{name}: {url} comes from another host"
        for url in [*page.links, *page.resources]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = name
            if parts.path:
                folder = "" if parts.path.startswith("/") else posixpath.dirname(name)
                target = posixpath.normpath(posixpath.join(folder, unquote(parts.path.lstrip("/"))))
                if (site / target).is_dir():
                    target = posixpath.normpath(posixpath.join(target, "index.html"))
            if not (site / target).is_file():
                yield f"{name}: {url} leads nowhere"
            elif parts.fragment and target in pages:
                if unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
                    yield f"{name}: {url}: there is no such place on the page"
    for path in [*site.rglob("*.css")]:
        for url in re.findall(r"url\(\s*[\"']?([^\"')]+)", path.read_text(encoding="utf-8")):
            if (
                not url.startswith(("data:", "#"))
                and not (path.parent / url.split("?")[0]).is_file()
            ):
                yield f"{path.relative_to(site)}: {url} is not there"


def on_post_build(config: Any) -> None:
    """Check the built site, when all its languages are there."""
    if config.plugins["i18n"].building:  # inside of it the other languages are built
        return
    broken = list(broken_links(Path(config["site_dir"])))
    if broken:
        error = importlib.import_module("mkdocs.exceptions").PluginError
        raise error("\n".join(["broken links:", *broken]))


on_post_build.mkdocs_priority = -200  # type: ignore[attr-defined]
