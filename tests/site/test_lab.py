"""The lab in a real browser: the stages' own scheduler runs in the page, offline, from the disk.

The pages are the lab's elements alone, so that no site need be built. One page with Python in it
serves all tests that do not need another.
"""

from __future__ import annotations

import functools
import html
import http.server
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.draw.palette import stylesheet
from shared.engine.step_time import Chunk
from shared.measure import roofline
from shared.models import configs
from tools.lab import drive, faults, invariants, pyodide, questions
from tools.lab import page as lab_page
from tools.lab.faults import FAULTS
from tools.lab.presets import PRESETS
from tools.site import example, figures, hero, sources
from tools.site import lab as docs_lab
from tools.site import macros as docs_macros
from tests.browser import chromium

ROOT = docs_lab.ROOT
ASSETS = ROOT / "docs" / "assets"
# The scripts that the site's pages load first: the search's shim replaces `Worker` on the disk.
MKDOCS = (docs_lab.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
POLYFILLS = re.findall(r"(?<=- )assets/\S+\.js", MKDOCS[: MKDOCS.index("\nextra_css")])
FIRST = "\n".join(f'<script src="{name}"></script>' for name in POLYFILLS)
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="assets/palette.css">
<link rel="stylesheet" href="assets/course.css">
<link rel="stylesheet" href="assets/viewer/viewer.css"></head>
<body class="md-typeset" data-md-color-scheme="default">{{}}
{FIRST}
<script src="assets/viewer/drawing.js"></script>
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
    tests = [*ROOT.glob("tests/contract/*.py"), *ROOT.glob("stages/04_*/test_*.py")]
    assert any(f"def {fault.test}(" in path.read_text() for path in tests), "not one of stage 04"


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
    with chromium() as running:
        new_page = running.new_page

        def patient(**options: Any) -> Any:
            page = new_page(**options)
            page.set_default_timeout(200_000)  # ms: a busy machine takes long to start Python
            return page

        running.new_page = patient
        yield running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = docs_macros.read_data("words")
    shutil.copytree(ASSETS, folder / "assets", ignore=shutil.ignore_patterns("vendor", "bench"))
    for name in POLYFILLS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(docs_lab.ROOT / "docs" / name, folder / name)
    (folder / "assets" / "palette.css").write_text(stylesheet())
    scripts, line = docs_lab.scripts(words)
    if "no Pyodide" in line:
        pytest.skip(line)
    for name, content in scripts.items():
        (folder / name).write_text(content, encoding="utf-8")
    element = docs_lab.element("sandbox", words["lab"], open="yes")
    (folder / "lab.html").write_text(PAGE.format(element), encoding="utf-8")
    pages = {"ward": {"open": "yes"}, "questions": {"chapter": "4"}, "steppers": {"open": "yes"}}
    for kind, data in pages.items():
        element = docs_lab.element(kind, words["lab"], **data)
        (folder / f"{kind}.html").write_text(PAGE.format(element), encoding="utf-8")
    element = hero.element(words["hero"])
    (folder / "hero.html").write_text(PAGE.format(element), encoding="utf-8")
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


def test_slices_are_those_of_the_same_files_run_here(
    opened: Any, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(20)
    count = 200 if request.config.getoption("--long") else 60
    settings = [random_setting(rng) for _ in range(count)]
    there = opened.evaluate("settings => miniVllmLab.call('slices', settings)", settings)
    hits = 0
    for setting, found in zip(settings, there, strict=True):
        expected = [[list(one) for one in step] for step in slices_here(setting)]
        assert found == expected, setting
        hits += setting["stage"] > 2 and any(s[0][1] for s in expected)
    assert hits > count // 20 and len({setting["stage"] for setting in settings}) == 4


def test_an_edited_schedule_changes_the_slices_and_restore_brings_them_back(sandbox: Any) -> None:
    page = sandbox(PRESETS["example"])
    before = shown(page)
    assert max(n for step in before for _, _, n in step) == 256
    page.click("summary:has-text('Change the code')")
    area = page.locator(".lab__area")
    source = area.input_value()
    area.fill(source.replace("self.max_prefill_chunk_size, budget)", "50, budget)"))
    runs = page.evaluate(RUNS)
    page.click("[data-button=run]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    assert max(n for step in shown(page) for _, _, n in step) == 50
    assert "edited" in page.inner_text(".viewer__title >> nth=0")
    # An error is shown at its line.
    line = source[: source.index("slices: list[Slice] = []")].count("\n") + 1
    area.fill(source.replace("slices: list[Slice] = []", "slices: list[Slice] = nothing"))
    runs = page.evaluate(RUNS)
    page.click("[data-button=run]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    assert f"scheduler.py, line {line}: NameError" in page.inner_text(".lab__said")
    assert page.inner_text(".lab__gutter .wrong") == str(line)
    area.fill("def :")
    runs = page.evaluate(RUNS)
    page.click("[data-button=run]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    assert "scheduler.py, line 1: SyntaxError" in page.inner_text(".lab__said")
    runs = page.evaluate(RUNS)
    page.click("[data-button=restore]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    assert shown(page) == before and area.input_value() == source


@pytest.mark.parametrize("number", [3, 5])
def test_a_planted_fault_is_told_with_the_chapters_sentence(sandbox: Any, number: int) -> None:
    fault = FAULTS[number - 1]
    page = sandbox(fault.setting)
    assert page.locator(".lab__broken").count() == 0 and page.locator(".lab__fine").count() == 1
    page.evaluate("file => document.querySelector('[data-lab]').lab.editor.open(file)", fault.file)
    page.eval_on_selector("details:has(.lab__area)", "details => { details.open = true; }")
    area = page.locator(".lab__area")
    area.fill(area.input_value().replace(fault.old, fault.new))
    runs = page.evaluate(RUNS)
    page.click("[data-button=run]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    said = page.inner_text(f"[data-invariant={fault.invariant}]")
    assert str(invariants.sentences()[fault.invariant]["holds"]).replace("`", "") in said
    runs = page.evaluate(RUNS)
    page.click("[data-button=restore]")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    assert page.locator(".lab__broken").count() == 0


def test_a_setting_goes_through_the_address_and_back(opened: Any) -> None:
    rng = random.Random(7)
    settings = [random_setting(rng) for _ in range(20)]
    settings[3]["requests"][0] |= {"abort": 9, "id": "document 2"}
    for setting in settings:
        setting["options"] = {k: v for k, v in setting["options"].items() if v is not None}
    for one, other in zip(settings, settings[1:], strict=False):
        pair = [one, {**other, "requests": one["requests"]}]
        there = opened.evaluate(
            "pair => miniVllmSandbox.decode(miniVllmSandbox.encode(pair))", pair
        )
        assert there == pair
    for wrong in ("", "s=4", "s=9&n=4&k=4&r=A.0.5..5.", "s=4&n=4&k=4&r=A.0.0..5."):
        assert opened.evaluate("text => miniVllmSandbox.decode(text)", wrong) is None


def test_arrow_keys_move_a_request_and_the_address_follows(sandbox: Any) -> None:
    page = sandbox(PRESETS["tiny"])
    before, runs = shown(page), page.evaluate(RUNS)
    page.focus(".lab__timeline .request >> nth=3")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(f"{RUNS} !== '{runs}'")
    page.wait_for_function("location.hash.includes('D.7.40')")
    assert shown(page) != before


@pytest.mark.parametrize("chapter", questions.CHAPTERS)
def test_questions_know_their_answers_and_every_usual_mistake(chapter: int) -> None:
    def typed(answer: list[Any]) -> str:
        return ", ".join(" ".join(map(str, a)) if isinstance(a, list) else str(a) for a in answer)

    assert len(questions.CHAPTERS[chapter]) >= 5
    reasons = set()
    for kind in range(len(questions.CHAPTERS[chapter])):
        asked = [lab_page.ask(chapter, kind, seed) for seed in range(6)]
        assert len({one["ask"] for one in asked}) > 1, "no new numbers"
        for one in asked:
            assert questions.judge(one, typed(one["right"]))["right"], one
            said = [one["ask"], one["praise"], one["hint"], *(why for _, why in one["mistakes"])]
            assert not any("{" in text for text in said), "a number that was not filled in"
            for wrong, _ in one["mistakes"]:
                verdict = questions.judge(one, typed(wrong)) if wrong else {"right": None}
                assert not verdict["right"], one
                reasons.add(verdict.get("why"))
            assert questions.judge(one, "")["right"] is None
    assert len(reasons) > 10


def test_the_sandbox_asks_and_then_shows(sandbox: Any) -> None:
    page = sandbox(PRESETS["example"])
    page.locator("input[type=range]").fill("11")
    page.click("[data-ask=slices]")
    page.wait_for_selector(".lab__predict [data-state=asked]")
    place = page.locator(".lab__predict input")
    place.fill("document 256")
    page.keyboard.press("Enter")
    page.wait_for_selector(".lab__verdict.wrong")
    assert "The streams decode in this step as well" in page.inner_text(".lab__verdict")
    place.fill("A 1, B 1, C 1, D 1, doc 256")
    page.keyboard.press("Enter")
    page.wait_for_selector(".lab__verdict.right")
    assert page.get_attribute(".viewer__step", "data-step") == "12"
    assert "0 of 1" in page.inner_text(".lab__predict >> css=.lab__hint >> nth=1")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The same pages from a server."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


RUN = ("run", "well")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two steps, but for their times."""
    keys = (one.keys() | other.keys()) - {"start", "end"}
    return all(one.get(key) == other.get(key) for key in keys)


def test_a_hint_names_the_function_of_the_fault() -> None:
    places = [lab_page.hint(number)["place"] for number in range(1, len(FAULTS) + 1)]
    for fault, place in zip(FAULTS, places, strict=True):
        assert f"def {place}(" in lab_page.files(4)[fault.file]
    assert places[0] == "slot_mapping" and places[2] == "_preempt_youngest"


def test_the_ward_from_a_server_all_eight_solved(browser: Any, address: str) -> None:
    """Wrong invariant, wrong line, then right: each is told, and why."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/ward.html")
    for number, fault in enumerate(FAULTS, 1):
        page.click(f"[data-case='{number}']")
        page.wait_for_selector(f"[data-lab][data-case='{number}'][data-state=ready]")
        assert page.locator(".viewer__title").count() == 2
        first, _ = fault.line(lab_page.files(4))
        parts = [run["recording"]["steps"] for run in (lab_page.fault(number)[k] for k in RUN)]
        differ = [i for i, (a, b) in enumerate(zip(*parts, strict=False)) if not same(a, b)]
        assert page.get_attribute(".lab__hint[data-step]", "data-step") == (
            str(differ[0]) if differ else ""
        )
        for said in (fault.file, f"It is in {lab_page.hint(number)['place']}."):
            page.click("[data-button=hint]")
            page.wait_for_function("text => document.body.innerText.includes(text)", arg=said)
        form = page.locator(".lab__diagnosis")
        form.locator("select >> nth=1").select_option(fault.file)
        for key, line, verdict in [
            ("full", first, "false:true"),
            (fault.invariant, first + 9, "true:false"),
            (fault.invariant, first, "true:true"),
        ]:
            form.locator("select >> nth=0").select_option(key)
            form.locator("input").fill(str(line))
            form.locator("button").click()
            page.wait_for_selector(f"[data-verdict='{number}:{verdict}']")
        assert fault.why in page.inner_text(".lab__findings")
        assert "✓" in page.inner_text(f"[data-case='{number}']")
    page.close()


def test_a_chapters_questions_load_nothing_before_they_are_opened(browser: Any, site: Path) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.split("/assets/")[-1]))
    page.goto((site / "questions.html").as_uri())
    page.wait_for_timeout(100)
    before = [name for name in asked if name.startswith("lab/")]
    assert sorted(before) == ["lab/loader.js", "lab/native.js"]
    page.click(".lab > button")
    page.wait_for_selector(".lab__predict[data-state=asked]")
    page.click("[data-button=give]")
    page.wait_for_selector(".lab__predict[data-state=given]")
    page.click("[data-button=next]")
    page.wait_for_selector("[data-kind='1'] .lab__predict[data-state=asked]")
    kept = page.evaluate("JSON.parse(localStorage.getItem('mini-vllm-score'))")
    assert kept["4"] == [0, 1]
    page.close()


# --- the steppers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steppers(browser: Any, site: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((site / "steppers.html").as_uri())
    page.wait_for_selector("[data-lab][data-state=ready]")
    yield page
    page.close()


def test_the_slot_stepper_and_slot_mapping_agree(steppers: Any) -> None:
    slot_mapping = example.rooms(4).block_manager.slot_mapping
    there = steppers.evaluate(
        "() => Array.from({ length: 37 }, (_, t) => miniVllmSteppers.slot([7, 2, 5, 0, 9], t, 8).slot)"
    )
    assert there == slot_mapping([7, 2, 5, 0, 9], 0, 37, 8)
    steppers.locator("[data-step=slot] input").fill("20")
    assert "= 44" in steppers.inner_text("[data-step=slot] [role=status]")
    lit = steppers.locator("[data-step=slot] .step__block.on .on")
    assert lit.count() == 1
    assert steppers.get_attribute("[data-step=slot] .step__block.on", "data-block") == "5"


def test_the_softmax_stepper_ends_where_the_softmax_does(steppers: Any) -> None:
    rng = random.Random(3)
    for _ in range(10):
        scores = [rng.uniform(-4, 6) for _ in range(6)]
        values = [rng.uniform(0, 10) for _ in range(6)]
        steps = steppers.evaluate(
            "([scores, values]) => miniVllmSteppers.softmax(scores, values, 2)", [scores, values]
        )
        for i, step in enumerate(steps):
            seen = 2 * (i + 1)
            weights = torch.softmax(torch.tensor(scores[:seen], dtype=torch.float64), 0)
            expected = weights @ torch.tensor(values[:seen], dtype=torch.float64)
            assert step["output"] == pytest.approx(float(expected))
            assert step["maximum"] == max(scores[:seen])
    for _ in range(3):
        steppers.click("[data-step=softmax] [data-button=next]")
    before = float(steppers.get_attribute("[data-step=softmax] [role=status]", "data-output"))
    steppers.locator("[data-step=softmax] input >> nth=4").fill("6")
    after = float(steppers.get_attribute("[data-step=softmax] [role=status]", "data-output"))
    assert before < after < 10, "token 4 has the largest value, and now the largest weight"


def test_the_roofline_stepper_and_the_roofline_agree(steppers: Any) -> None:
    for name, gpu in roofline.GPUS.items():
        for model in configs.names():
            size = roofline.ModelSize.named(model)
            line = roofline.Roofline(gpu, size)
            there = steppers.evaluate(
                """([gpu, model]) => {
                    const { gpus, models } = document.querySelector("[data-lab]").dataset;
                    return miniVllmSteppers.roofline(
                        JSON.parse(gpus).find((one) => one.name === gpu),
                        JSON.parse(models).find((one) => one.name === model));
                }""",
                [gpu.name, model],
            )
            assert there["kv_bytes"] == size.kv_bytes, (name, model)
            if 0.9 * gpu.memory > 2 * size.total:
                assert there["tokens"] == 16 * line.num_blocks(16) > 0
            else:
                assert there["tokens"] == 0
            decodes = [Chunk(1000, 1)] * 16
            assert there["decode"] == pytest.approx(line(decodes))
            chunk = there["chunk"] or 0  # None: one token is too long already
            assert line([*decodes, Chunk(0, chunk + 1)]) > 0.05
            assert not chunk or line([*decodes, Chunk(0, chunk)]) <= 0.05
            weights = 2 * size.linear / (gpu.bandwidth * line.byte_share)
            work = 2 * size.linear / (gpu.flops * line.flop_share)
            assert (there["batch"] - 1) * work < weights <= there["batch"] * work
    assert steppers.evaluate("document.documentElement.scrollWidth") <= 390


# --- the hero ---------------------------------------------------------------------------------


def hero_page(browser: Any, site: Path, **how: Any) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **how).new_page()
    page.goto((site / "hero.html").as_uri())
    return page


LINES = "[...document.querySelectorAll('.hero__text')].map(line => line.textContent)"


def test_the_hero_shows_what_was_recorded_when_it_was(browser: Any, site: Path) -> None:
    page = hero_page(browser, site)
    page.wait_for_selector(".hero[data-ready]")
    page.click(".hero button")  # it plays by itself: now it stands
    left, right = hero.sides()
    _, start, end = left.wait
    for time in (-0.2, start + 0.01, (start + end) / 2, end + 0.01, hero.last(hero.sides())):
        page.evaluate("time => document.querySelector('.hero').hero.show(time)", time)
        expected = [
            hero.text_at(tokens, time)
            or ("computing its prompt" if name == hero.DOCUMENT and time >= 0 else "")
            for one in (left, right)
            for name, tokens in zip(one.names, one.tokens, strict=True)
        ]
        assert page.evaluate(LINES) == expected
    # In the middle of the stall the left chats wait, those on the right do not.
    page.evaluate("time => document.querySelector('.hero').hero.show(time)", (start + end) / 2)
    waits = page.locator(".hero__side").evaluate_all(
        "sides => sides.map(side => side.querySelectorAll('.waits').length)"
    )
    assert waits == [4, 0]
    page.context.close()


def test_the_hero_moves_and_stands_when_asked(browser: Any, site: Path) -> None:
    page = hero_page(browser, site)
    page.wait_for_function("document.querySelector('.hero')?.dataset.time > 0")
    page.focus(".hero button")
    page.keyboard.press("Enter")
    assert page.inner_text(".hero button") == "Play"
    before = page.evaluate("document.querySelector('.hero').dataset.time")
    page.wait_for_timeout(200)
    assert page.evaluate("document.querySelector('.hero').dataset.time") == before
    page.context.close()


@pytest.mark.parametrize("how", [{"reduced_motion": "reduce"}, {"java_script_enabled": False}])
def test_the_still_is_the_stall(browser: Any, site: Path, how: dict[str, Any]) -> None:
    """For those who want no motion, and where scripts are off: a picture, in the page's markup."""
    page = hero_page(browser, site, **how)
    page.wait_for_timeout(300)
    left, right = hero.sides()
    now = hero.freeze(hero.sides())
    texts = page.locator(".hero__text").all_text_contents()
    chats = [hero.text_at(tokens, now) for one in (left, right) for tokens in one.tokens[:4]]
    assert texts[:4] + texts[5:9] == chats and all(chats)
    assert all(len(a) < len(b) for a, b in zip(texts[:4], texts[5:9], strict=True))
    assert page.locator(".hero__line.waits").count() == 4
    assert page.locator(".hero button").count() == ("reduced_motion" in how)
    page.context.close()


def test_the_readmes_pictures_are_those_of_the_recordings() -> None:
    for path, content in hero.pictures(docs_macros.read_data("words")["hero"]).items():
        assert path.read_text(encoding="utf-8") == content, "run python -m tools.site.hero"
        said = "".join(re.findall(r">([^<]+)</text>", html.unescape(content))).replace(" ", "")
        for one in hero.sides():
            assert hero.text_at(one.tokens[0], 0).replace(" ", "")[:40] in said
        assert ("@keyframes" in content) != path.stem.endswith("still")


# --- code and picture together ----------------------------------------------------------------


@pytest.fixture(scope="module")
def together(browser: Any, site: Path) -> Iterator[Any]:
    """The figure and the listing of `schedule`, marked up as the site's highlighter does it."""
    path, name = figures.LINKED["steps_4"]
    first, last = sources.span(path, name)
    lines = (docs_lab.ROOT / path).read_text(encoding="utf-8").splitlines()
    code = "\n".join(
        f'<a id="__codelineno-3-{n}" name="__codelineno-3-{n}"></a>{html.escape(lines[n - 1])}'
        for n in range(first, last + 1)
    )
    listing = (
        f'<div class="highlight"><span class="filename">{path}, from line {first}</span>'
        f"<pre><code>{code}\n</code></pre></div>"
    )
    element = figures.figure("steps_4", docs_macros.read_data("words")["figures"])
    (site / "together.html").write_text(PAGE.format(element + listing), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 2000})
    page.goto((site / "together.html").as_uri())
    page.wait_for_selector("figure[data-ready]")
    yield page
    page.close()


def test_a_paragraph_lights_its_slices(together: Any) -> None:
    """Decodes are those of one token; the document's first chunk is a new prompt, the others not."""
    steps = example.run(4)[6:20]
    chunks = [n for step in steps for who, _, n in step.slices if who == "doc" and n > 1]
    decodes = sum(n == 1 for step in steps for _, _, n in step.slices)
    new = [n for step in steps for who, _, n in step.slices if who != "doc" and n > 1]
    together.focus("[data-part='2'].linked")
    assert together.locator(".fig__wide .lit text").all_text_contents() == [
        str(n) for n in chunks[1:]
    ]
    assert "PREFILLING" in together.inner_text(".linked.lit")
    together.keyboard.press("Tab")
    lit = together.locator(".fig__wide .lit text").all_text_contents()
    assert sorted(lit) == sorted(str(n) for n in [*new, chunks[0]])
    together.hover("[data-part='1'].linked")
    assert together.locator(".fig__wide .lit").count() == decodes
    text = "".join(together.locator(".highlight code").all_text_contents())
    first, last = sources.span(*figures.LINKED["steps_4"])
    assert text.count("\n") == last - first + 1, "lines have moved"


def test_a_slice_lights_its_paragraph_and_a_button_keeps_it(together: Any) -> None:
    together.mouse.move(0, 0)
    for part, fragment in (("1", "# 1."), ("2", "# 2."), ("3", "# 3.")):
        together.hover(f"svg [data-part='{part}'] >> nth=0")
        assert together.locator(".linked.lit").count() == 1
        assert fragment in together.inner_text(".linked.lit")
    together.click(".linked__bar button >> nth=1")
    together.mouse.move(0, 0)
    together.locator(".linked__bar button >> nth=1").blur()
    assert "# 2." in together.inner_text(".linked.lit")
    assert together.get_attribute(".linked__bar button >> nth=1", "aria-pressed") == "true"
    together.click(".linked__bar button >> nth=1")
    together.mouse.move(0, 0)
    together.locator(".linked__bar button >> nth=1").blur()
    assert together.locator(".linked.lit").count() == 0


def test_paragraphs_are_those_that_a_comment_numbers() -> None:
    path, name = figures.LINKED["steps_4"]
    lines = (docs_lab.ROOT / path).read_text(encoding="utf-8").splitlines()
    found = sources.paragraphs(path, name)
    assert [lines[first - 1].split()[1] for first, _ in found.values()] == ["1.", "2.", "3."]
    assert all(lines[last - 1].strip() for _, last in found.values())
    assert found["3"][1] == sources.span(path, name)[1]
    with pytest.raises(sources.DocsError, match="0 numbered paragraphs"):
        sources.paragraphs(path, "Scheduler.add")


# --- where Python cannot run, and who cannot see or point -------------------------------------


@pytest.mark.parametrize("kind", ["no_wasm", "no_pyodide"])
def test_a_page_says_why_python_cannot_run(browser: Any, site: Path, kind: str) -> None:
    page = browser.new_page()
    if kind == "no_wasm":
        page.add_init_script("delete globalThis.WebAssembly")
    else:
        nothing = {"content_type": "text/javascript", "body": "miniVllmPyodide(null);"}
        page.route("**/lab/pyodide.js", lambda route: route.fulfill(**nothing))
    page.goto((site / "lab.html").as_uri())
    text = docs_macros.read_data("words")["lab"][kind]
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)
    page.close()


UNNAMED = """() => [...document.querySelectorAll("button, select, input, textarea, [tabindex='0']")]
    .filter(one => one.checkVisibility() && !(one.getAttribute("aria-label")?.trim()
        || one.labels?.length && [...one.labels].some(l => l.textContent.trim())
        || (one.matches("button, [tabindex='0']") && one.textContent.trim())))
    .map(one => one.outerHTML.slice(0, 120))"""


def test_whoever_hears_the_sandbox_is_told_what_everything_is(sandbox: Any) -> None:
    page = sandbox(PRESETS["example"])
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert page.locator("button, select, input, textarea").count() > 40
    assert page.evaluate(UNNAMED) == []
    images = page.locator("svg[role=img], [role=img]").evaluate_all(
        "all => all.filter(one => !one.getAttribute('aria-label')).length"
    )
    assert images == 0
    assert page.locator("[role=status]").count() >= 2


def test_whoever_hears_the_steppers_is_told_what_everything_is(steppers: Any) -> None:
    assert steppers.locator("button, select, input").count() > 15
    assert steppers.evaluate(UNNAMED) == []
    steppers.focus("[data-step=slot] input")
    before = steppers.inner_text("[data-step=slot] [role=status]")
    steppers.keyboard.press("ArrowRight")
    assert steppers.inner_text("[data-step=slot] [role=status]") != before
