"""The lab in a real browser: the stages' own scheduler runs in the page, offline, from the disk.

The pages are the lab's elements alone, so that no site need be built. One page with Python in it
serves all tests that do not need another.
"""

from __future__ import annotations

import functools
import http.server
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.lab import drive, faults, invariants, page as lab_page, pyodide
from tools.lab.faults import FAULTS
from tools.lab.presets import PRESETS
from tools.site import example, lab as docs_lab, macros as docs_macros

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ASSETS = docs_lab.ROOT / "docs" / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "/usr/bin/chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="assets/course.css">
<link rel="stylesheet" href="assets/viewer/viewer.css"></head>
<body class="md-typeset" data-md-color-scheme="default">{}
<script src="assets/viewer/viewer.js"></script>
<script src="assets/lab/loader.js"></script></body></html>"""
RUNS = "document.querySelector('[data-lab]').dataset.runs"


def random_setting(rng: random.Random) -> dict[str, Any]:
    """Small pools, chunks of any size, prefixes that are shared: whatever a reader may set."""
    block_size = rng.choice([1, 4, 7, 16])
    options = {
        "block_size": block_size,
        "num_blocks": -(-rng.randint(90, 250) // block_size),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.choice([64, 80, 128, 256]),
        "max_prefill_chunk_size": rng.choice([1, 5, 16, 23, 64]),
        "max_decode_share": rng.choice([None, 0.1, 0.5]),
    }
    requests = [
        faults.request(name, rng.randint(0, 15), rng.randint(1, 50), rng.randint(1, 20))
        | {"shared": rng.choice([0, 16, 40])}
        for name in "ABCDE"[: rng.randint(1, 5)]
    ]
    return {"stage": rng.randint(1, 4), "options": options, "requests": requests}


def slices_here(setting: dict[str, Any]) -> list[list[tuple[str, int, int]]]:
    """The same traffic, driven by the code that makes the site's figures."""
    options = {key: value for key, value in setting["options"].items() if value is not None}
    known = example.rooms(setting["stage"]).config.EngineConfig.__dataclass_fields__
    options = {key: value for key, value in options.items() if key in known}
    keeper = example.Bookkeeper(setting["stage"], **options)
    pending = sorted(setting["requests"], key=lambda one: one["arrival"])
    order = {one["id"]: r for r, one in enumerate(pending)}
    step, found = 0, []
    while pending or keeper.scheduler.has_unfinished():
        if not keeper.scheduler.has_unfinished():
            step = max(step, pending[0]["arrival"])
        while pending and pending[0]["arrival"] <= step:
            one = pending.pop(0)
            shared = min(one["shared"], one["prompt"])
            own = 10_000 * (1 + order[one["id"]])
            tokens = [*range(shared), *range(own, own + one["prompt"] - shared)]
            keeper.add(one["id"], tokens, one["max_tokens"])
        found.append(keeper.step().slices)
        step += 1
    return found


# --- without a browser ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_preset_runs_to_its_end(name: str, stage: int) -> None:
    """Whatever the stage, unless it refuses a prompt over its budget; nothing is ever broken."""
    result = lab_page.run(PRESETS[name] | {"stage": stage})
    assert result["error"] is None and result["broken"] == []
    budget = PRESETS[name]["options"]["max_num_batched_tokens"]
    long = [one["id"] for one in PRESETS[name]["requests"] if one["prompt"] > budget]
    assert [one["id"] for one in result["refused"]] == (long if stage < 4 else [])
    reasons = {
        request["reason"] for request in (result["recording"] or {"requests": []})["requests"]
    }
    assert reasons <= {"length"}


def test_presets_show_what_they_are_called_after() -> None:
    steps = {name: lab_page.run(preset)["recording"]["steps"] for name, preset in PRESETS.items()}
    assert any(step["preempted"] for step in steps["tiny"])
    assert any(step["preempted"] for step in steps["deadlock"])
    shared = lab_page.run(PRESETS["shared"])["recording"]["requests"]
    assert [request["hit_tokens"] for request in shared] == [0, 192, 192, 192, 192, 192]
    twins = [s for s in steps["documents"] if sum(n > 1 for _, _, n in s["slices"]) > 1]
    assert twins, "the two documents are never computed in one step"


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1))
def test_a_fault_breaks_its_invariant_and_the_stage_does_not(number: int) -> None:
    fault, files = FAULTS[number - 1], lab_page.files(4)
    good = drive.run(fault.setting, files)
    assert good["broken"] == [] and good["error"] is None and good["refused"] == []
    broken = drive.run(fault.setting, fault.plant(files))["broken"]
    assert broken[0]["key"] == fault.invariant
    assert fault.invariant in invariants.sentences()


def test_a_fault_whose_text_has_changed_is_refused() -> None:
    files = dict(lab_page.files(4))
    files["scheduler.py"] = files["scheduler.py"].replace("self.running.pop()", "self._youngest()")
    with pytest.raises(ValueError, match=r"fault 3: its text is 0 times in scheduler.py"):
        FAULTS[2].plant(files)


def test_a_package_with_another_checksum_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / pyodide.FILE).write_bytes(b"something else")
    monkeypatch.setattr(pyodide, "_by_npm", lambda: b"not it")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    data, line = pyodide.package(tmp_path)
    assert data is None and "no Pyodide" in line and "checksum" in line


# --- in the browser ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = docs_macros.read_data("words")
    shutil.copytree(ASSETS, folder / "assets", ignore=shutil.ignore_patterns("vendor", "bench"))
    scripts, line = docs_lab.scripts(words)
    if "no Pyodide" in line:
        pytest.skip(line)
    for name, content in scripts.items():
        (folder / name).write_text(content, encoding="utf-8")
    element = docs_lab.element("sandbox", words["lab"], open="yes")
    (folder / "lab.html").write_text(PAGE.format(element), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def opened(browser: Any, site: Path) -> Iterator[Any]:
    """The sandbox from the disk, on stage 04 alone. No page had an error in the end."""
    page, errors = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "lab.html").as_uri())
    page.wait_for_selector("[data-lab][data-state=ready]")
    yield page
    page.close()
    assert not errors


@pytest.fixture
def sandbox(opened: Any) -> Callable[[dict[str, Any]], Any]:
    """Puts a setting into the open sandbox and waits until it has run."""

    def put(setting: dict[str, Any]) -> Any:
        before = opened.evaluate(RUNS)
        opened.evaluate(
            "setting => { location.hash = miniVllmSandbox.encode([setting]) + '&'; }", setting
        )
        opened.wait_for_function(f"{RUNS} !== '{before}'")
        return opened

    return put


def shown(page: Any) -> list[list[list[int]]]:
    return page.evaluate(
        "document.querySelector('[data-lab]').lab.results[0].recording.steps.map(s => s.slices)"
    )


def test_the_sandbox_opens_on_the_running_example_in_two_stages(opened: Any) -> None:
    assert opened.locator(".viewer__title").all_inner_texts() == [
        "03 · prefix cache",
        "04 · chunked prefill",
    ]
    results = opened.evaluate("document.querySelector('[data-lab]').lab.results")
    for stage, result in zip((3, 4), results, strict=True):
        recording = result["recording"]
        names = [request["id"].replace("document", "doc") for request in recording["requests"]]
        found = [[(names[r], a, n) for r, a, n in s["slices"]] for s in recording["steps"]]
        assert found == [step.slices for step in example.run(stage)]


def test_slices_are_those_of_the_same_files_run_here(opened: Any) -> None:
    rng = random.Random(20)
    settings = [random_setting(rng) for _ in range(200)]
    there = opened.evaluate("settings => miniVllmLab.call('slices', settings)", settings)
    hits = 0
    for setting, found in zip(settings, there, strict=True):
        expected = [[list(one) for one in step] for step in slices_here(setting)]
        assert found == expected, setting
        hits += setting["stage"] > 2 and any(s[0][1] for s in expected)
    assert hits > 10 and len({setting["stage"] for setting in settings}) == 4
