"""The trace viewer in a real browser: it loads, it moves, and it shows what the recordings say.

The page is the viewer's element alone, opened from the disk, so that no site need be built.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared.record.__main__ import DOCUMENT_TOKENS, MAX_BYTES, RECORDINGS, Pool, load, pools, save
from shared.draw.palette import stylesheet
from tools.site import macros as docs_macros
from tools.site import viewer as docs_viewer
from tests.browser import chromium

ASSETS = docs_viewer.ROOT / "docs" / "assets"
NAMES = [one["name"] for one in docs_viewer.recordings()]
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="assets/palette.css">
<link rel="stylesheet" href="assets/course.css">
<link rel="stylesheet" href="assets/viewer/viewer.css"></head>
<body class="md-typeset" data-md-color-scheme="default">{}
<script src="assets/viewer/drawing.js"></script>
<script src="assets/viewer/viewer.js"></script></body></html>"""


# --- the files, without a browser -------------------------------------------------------------


def recording(name: str) -> dict[str, Any]:
    return load(docs_viewer.FOLDER / f"{name}.json")


def test_every_recording_is_there_and_small() -> None:
    assert sorted(NAMES) == sorted(RECORDINGS)
    for path in docs_viewer.FOLDER.glob("*.json"):
        assert path.stat().st_size < MAX_BYTES, path.name


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_tells_the_whole_story(name: str) -> None:
    """Slices cover every token once, tokens are those that were asked for, times go forward."""
    content = recording(name)
    traffic, stage, chunk_size = RECORDINGS[name]
    assert (content["traffic"], content["stage"], content["chunk_size"]) == RECORDINGS[name]
    steps, requests = content["steps"], content["requests"]
    for before, step in pairwise(steps):
        assert before["start"] < before["end"] <= step["start"] < step["end"]
    tokens = [
        sum(r == who for step in steps for r, _ in step.get("sampled", []))
        for who in range(len(requests))
    ]
    for request, count in zip(requests, tokens, strict=True):
        assert count == request["max_tokens"] or request["reason"] in ("stop", "abort"), request
    if chunk_size:
        longest = max(n for step in steps for _, _, n in step["slices"])
        assert longest == chunk_size
    else:
        (document,) = (r for r in requests if r["id"] == "document")
        assert document["prompt_tokens"] == DOCUMENT_TOKENS
        longest = max(n for step in steps for _, _, n in step["slices"])
        assert longest == DOCUMENT_TOKENS - document["hit_tokens"]
    hits = sum(request["hit_tokens"] for request in requests)
    assert (hits > 0) == (stage >= 3)
    if traffic == "crowded":
        assert any(step.get("preempted") for step in steps)
        assert any(step.get("forgotten") for step in steps)
        assert [request["reason"] for request in requests].count("abort") == 1


def test_a_file_whose_blocks_do_not_add_up_is_refused(tmp_path: Path) -> None:
    content = recording("example-03")
    content["steps"][3]["free"] += 1
    with pytest.raises(ValueError, match=r"step 3: \d+ blocks held and \d+ free are not the 140"):
        save(tmp_path / "wrong.json", content)
    (tmp_path / "other.json").write_text('{"format": "mini-vllm-trace", "version": 1}')
    with pytest.raises(ValueError, match=r"other.json is not a mini-vllm-replay file"):
        load(tmp_path / "other.json")


# --- the page ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ASSETS / "viewer", folder / "assets" / "viewer")
    shutil.copy(ASSETS / "course.css", folder / "assets")
    (folder / "assets" / "palette.css").write_text(stylesheet())
    (folder / "assets" / "traces").mkdir()
    for path in docs_viewer.FOLDER.glob("*.json"):
        script = folder / "assets" / "traces" / f"{path.stem}.js"
        script.write_text(docs_viewer.script(path), encoding="utf-8")
    element = docs_viewer.viewer(docs_macros.read_data("words")["viewer"])
    (folder / "viewer.html").write_text(PAGE.format(element), encoding="utf-8")
    return folder / "viewer.html"


@pytest.fixture
def visit(browser: Any, site: Path) -> Iterator[Callable[..., Any]]:
    """Opens the viewer, at an address and a width. Whatever a test did, no page had an error."""
    contexts, errors = [], []

    def open_page(address: str = "", width: int = 1280) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(site.as_uri() + address)
        page.wait_for_selector(".viewer[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


def stop(page: Any) -> int:
    return int(page.input_value("input[type=range]"))


def test_it_opens_on_the_stall_of_stage_03_beside_stage_04(visit: Any) -> None:
    page = visit()
    chosen = page.eval_on_selector_all(".viewer__panel select", "all => all.map(s => s.value)")
    assert chosen == ["example-03", "example-04-256"]
    steps = page.eval_on_selector_all("[data-step]", "all => all.map(p => p.dataset.tokens)")
    longest = max(sum(n for *_, n in step["slices"]) for step in recording("example-03")["steps"])
    assert int(steps[0]) == longest > DOCUMENT_TOKENS - 40
    assert int(steps[1]) <= 256 + 4
    holes = page.eval_on_selector_all(
        ".hole", "all => all.map(hole => hole.getBoundingClientRect().width)"
    )
    assert holes[0] > 3 * holes[1], "the stall cannot be seen at a glance"


def test_slider_keys_buttons_and_play(visit: Any) -> None:
    page = visit("#example-03+example-04-64@10")
    assert stop(page) == 10
    slider = page.locator("input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert stop(page) == 11
    before = page.get_attribute(".viewer__step", "data-step")
    slider.fill("40")
    assert stop(page) == 40 and page.get_attribute(".viewer__step", "data-step") != before
    page.locator(".viewer__panel").first.click(position={"x": 2, "y": 60})
    for key, expected in [("ArrowRight", 41), ("ArrowLeft", 40), ("PageUp", 30), ("Home", 0)]:
        page.keyboard.press(key)
        assert stop(page) == expected, key
    page.click("[data-button=forward]")
    assert stop(page) == 1
    assert "chunked prefill" in page.inner_text("[role=status]"), "a screen reader hears nothing"
    page.keyboard.press("End")
    assert page.inner_text("[data-count=held] >> nth=0") == "0", "all requests have ended"
    page.keyboard.press("Home")
    page.click("[data-button=play]")
    page.wait_for_function("document.querySelector('input[type=range]').valueAsNumber > 3")
    page.click("[data-button=play]")
    there = stop(page)
    page.wait_for_timeout(100)
    assert stop(page) == there, "it plays on after a pause"


KINDS = ("held", "shared", "cached", "free")
EVERY_STEP = """() => {
    const slider = document.querySelector("input[type=range]");
    return Array.from({ length: +slider.max + 1 }, (_, step) => {
        slider.value = step;
        slider.dispatchEvent(new Event("input"));
        return [...document.querySelectorAll(".viewer__grid > *")].map(cell => cell.dataset.kind);
    });
}"""


def kinds(pool: Pool, num_blocks: int) -> Iterator[str]:
    """What each cell of the pool is in a step."""
    holders = Counter(block for table in pool.tables.values() for block in table)
    for block in range(num_blocks):
        if holders[block]:
            yield "held" if holders[block] == 1 else "shared"
        else:
            yield "cached" if block in pool.findable else "free"


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_the_recording(visit: Any, name: str) -> None:
    """One recording alone, so that stop i is its step i."""
    page, content = visit(f"#{name}+"), recording(name)
    steps, requests = content["steps"], content["requests"]
    all_pools = list(pools(content))
    all_kinds = [list(kinds(pool, content["num_blocks"])) for pool in all_pools]
    shown = page.evaluate(EVERY_STEP)
    assert len(shown) == len(steps) + 1, "the last one is when all is over"
    for index, expected in enumerate(all_kinds):
        wrong = [b for b in range(len(expected)) if shown[index][b] != expected[b]]
        assert not wrong, f"step {index}: blocks {wrong} are shown as something else"
        assert expected.count("cached") + expected.count("free") == steps[index]["free"]
    num_tokens = [0] * len(requests)
    names = page.eval_on_selector_all(
        "tbody th", "all => all.map(cell => cell.lastChild.textContent)"
    )
    shown_at = {0, 1, len(steps) // 4, len(steps) // 3, len(steps) // 2, len(steps) - 1}
    shown_at |= {i for i, step in enumerate(steps) if "preempted" in step}
    for index, step in enumerate(steps):
        if index in shown_at:
            page.locator("input[type=range]").fill(str(index))
            tables = all_pools[index].tables
            for kind in KINDS:
                assert page.inner_text(f"[data-count={kind}]") == str(all_kinds[index].count(kind))
            slices = page.eval_on_selector_all(
                "[data-tokens].viewer__slice", "all => all.map(one => +one.dataset.tokens)"
            )
            assert slices == [n for *_, n in step["slices"]]
            for queue in ("running", "waiting"):
                listed = ", ".join(names[r] for r in step.get(queue, [])) or "–"
                assert page.inner_text(f"[data-queue={queue}]") == listed, f"step {index}"
            column = page.locator("tbody [data-column=generated]").all_inner_texts()
            arrived = [request["arrived"] <= step["start"] for request in requests]
            assert column == [
                str(n) if a else "–" for n, a in zip(num_tokens, arrived, strict=True)
            ]
            blocks = page.locator("tbody [data-column=blocks]").all_inner_texts()
            assert blocks == [str(len(tables.get(r, []))) for r in range(len(requests))]
        for r, _ in step.get("sampled", []):
            num_tokens[r] += 1
    chats = [
        [s["end"] for s in steps if [r for r, _ in s.get("sampled", []) if r == c]]
        for c in range(4)
    ]
    longest = max(later - earlier for times in chats for earlier, later in pairwise(times))
    said = page.inner_text("[data-fact=longest-gap]")
    assert said == (f"{longest:.2f} s" if longest >= 0.9995 else f"{longest * 1000:.0f} ms")
    assert page.locator(".tick").count() == sum(num_tokens)


@pytest.mark.parametrize("address", ["", "#crowded-03+crowded-04-128@90"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(visit: Any, address: str, width: int) -> None:
    page = visit(address, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.eval_on_selector_all(
        ".viewer :is(td, th, li, dd, dt, h3, button, select)",
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
        ".map(e => e.textContent)",
    )
    assert not cut, "text is cut off"


def test_a_recording_that_is_missing_is_said(browser: Any, site: Path, tmp_path: Path) -> None:
    shutil.copytree(site.parent, tmp_path / "site")
    (tmp_path / "site" / "assets" / "traces" / "example-03.js").unlink()
    page = browser.new_page()
    page.goto((tmp_path / "site" / "viewer.html").as_uri())
    page.wait_for_selector(".viewer__live.failed")
    assert "example-03" in page.inner_text("[role=status]")
    page.close()
