"""The notebooks as they are committed, their pictures and their puzzles."""

from __future__ import annotations

import ast
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.draw import notebook as draw
from shared.draw.palette import COLOURS, stylesheet
from shared.engine.trace import StepRecord, Trace
from shared.notebook import committed, decode_ms, first_step, play, puzzles, race, slider
from shared.notebook.puzzles import OPEN, Verdict
from tools.site.hooks import WIDGET

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in PATHS]
STAGES = ["01_block_manager", "02_paged_attention", "03_prefix_cache", "04_chunked_prefill"]


# --- as they are committed --------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def test_there_is_one_for_each_stage_and_one_for_the_benchmark() -> None:
    assert [*STAGES, "05_benchmark"] == NAMES


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_it_was_run_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) // 2


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_what_it_imports_is_there(path: Path) -> None:
    found = 0
    for cell in code_cells(path):
        python = [line for line in cell["source"] if not line.lstrip().startswith(("!", "%"))]
        for node in ast.walk(ast.parse("".join(python))):
            if isinstance(node, ast.ImportFrom):
                exec(ast.unparse(node), {})
                found += 1
    assert found > 3


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_its_outputs_are_results_and_no_noise(path: Path) -> None:
    for output in outputs(path):
        assert output["output_type"] in ("stream", "display_data", "execute_result")
        assert output.get("name") != "stderr", "".join(output["text"])
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"it/s\]|Warning|/home/|/Users/|/root/|/tmp/|site-packages", text)
    assert str(ROOT) not in text


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_it_is_small_and_has_no_trace_of_who_ran_it(path: Path) -> None:
    notebook = read(path)
    assert path.stat().st_size < 400_000
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for number, cell in enumerate(notebook["cells"], 1):
        assert not cell["metadata"], f"cell {number}: {cell['metadata']}"
        if cell["cell_type"] == "code":
            assert len(cell["source"]) <= 22, f"cell {number} is long"


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "".join("".join(c["source"]) for c in read(path)["cells"] if c["cell_type"] != "code")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert any(link.startswith("../docs/chapters/") for link in links)
    missing = [link for link in links if not (path.parent / link).is_file()]
    assert not missing


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_its_puzzles_are_open(path: Path) -> None:
    """Two to four of them, whose checks exist, without their answers."""
    checks = []
    for cell in code_cells(path):
        source = "".join(cell["source"])
        found = re.findall(r"^(check_\w+)\(", source, flags=re.MULTILINE)
        if found:
            assert "..." in source
            assert "`...`" in str(cell["outputs"]) or "the body" in str(cell["outputs"])
        checks += found
    assert 2 <= len(checks) <= 4
    assert all(hasattr(puzzles, check) for check in checks)


def test_every_puzzle_is_asked() -> None:
    asked = "".join(path.read_text(encoding="utf-8") for path in PATHS)
    checks = [name for name in vars(puzzles) if name.startswith("check_")]
    assert len(checks) >= 12
    assert [name for name in checks if f"{name}(" not in asked] == []


@pytest.mark.parametrize("path", [p for p in PATHS if p.stem in STAGES], ids=STAGES)
def test_where_one_thing_is_changed_there_is_a_slider(path: Path) -> None:
    """And where nothing moves there is still a picture or a table, and a line for the slider."""
    cells = [cell for cell in code_cells(path) if "\nslider(" in "\n" + "".join(cell["source"])]
    assert cells
    for cell in cells:
        moving, shown = cell["outputs"]
        assert WIDGET in moving["data"]
        assert re.fullmatch(r"[\w ]+: \d+ \(a slider, .*\)", "".join(moving["data"]["text/plain"]))
        assert {"image/svg+xml", "text/html"} & set(shown["data"])


# --- puzzles ----------------------------------------------------------------------------------

TABLE = [7, 2, 5, 9]
SLOTS = {"block_table": TABLE, "tokens": [0, 17, 50]}
COUNTERS = {"prompt_tokens": 64, "num_decodes": 16}
VICTIM = {"arrived": ["A", "B", "C", "D"], "asking": "B"}
MERGE = {"one": (3, 1.5, 6), "other": (1, 2, 4)}
E2 = math.exp(-2)
FOUND = {"num_common": 53, "num_tokens": 100}
TWICE = {"num_common": 64, "num_tokens": 64}
RENAMED = {"changed": 20, "num_tokens": 70}
REUSE = {"table": [9, 4, 7, 2], "num_tokens": 56}
CHUNKS = {"num_tokens": 1500, "chunk_size": 256, "found": 32}
CHUNK_SLOT = {"start_pos": 300, "index_in_chunk": 5}
CHUNK_LEN = {"budget": 256, "chunk_size": 256, "num_streams": 6, "num_left": 1000}
MEASURES = {"arrival": 50, "token_times": [250, 290, 330, 1530, 1570]}
QUANTILE = {"num_gaps": 64_000, "num_stalls": 128}

# check, its arguments, the right answer, and wrong ones with a word of the hint for each.
PUZZLES: list[tuple[Callable[..., Verdict], dict[str, Any], Any, list[tuple[Any, str]]]] = [
    (
        puzzles.check_slots,
        SLOTS,
        [112, 33, 146],
        [
            ([0, 17, 50], "tokens themselves"),
            ([7, 2, 9], "are blocks"),
            ([112, 32, 144], "first slots"),
            ([7, 3, 11], "multiply"),
            ([113, 34, 147], "too far to the back"),
            ([112, 32, 145], "too far to the front"),
            ([112, 33], "3 values"),
            ([112, 33, 147], "Which physical block"),
        ],
    ),
    (
        puzzles.check_counters,
        COUNTERS,
        (80, 17, 5),
        [
            ((81, 17, 6), "next input"),
            ((80, 16, 5), "prefill generates"),
            ((17, 80, 5), "exchanged"),
            ((16, 17, 2), "prompt's keys"),
            ((80, 17, 6), "no place yet"),
            ((80, 17, 9), "Begin with the prefill"),
        ],
    ),
    (
        puzzles.check_counters,
        {"prompt_tokens": 64, "num_decodes": 17},
        (81, 18, 6),
        [((81, 18, 5), "held all the same")],
    ),
    (
        puzzles.check_victim,
        VICTIM,
        "D",
        [("B", "not the youngest"), ("A", "forever"), ("C", "arrived last"), (3, "a name")],
    ),
    (
        puzzles.check_reads,
        {"context_len": 80},
        (5, 16),
        [((5, 0), "remainder is 0"), ((6, 16), "how many blocks"), (5, "2 values")],
    ),
    (
        puzzles.check_reads,
        {"context_len": 67},
        (5, 3),
        [
            ((4, 3), "read as well"),
            ((5, 16), "old memory"),
            ((5, 13), "are empty"),
        ],
    ),
    (
        puzzles.check_merge,
        MERGE,
        (3, 1.5 + 2 * E2, 6 + 4 * E2),
        [
            ((3, 3.5, 10), "different maxima"),
            ((3, 1.5 + 2 / E2, 6 + 4 / E2), "wrong way round"),
            ((3, 1.5 * E2 + 2, 6 * E2 + 4), "wrong parts"),
            ((3, 1.5 + 2 * E2, 10), "`acc` is off"),
            ((4, 1.5 + 2 * E2, 6 + 4 * E2), "not their sum"),
            ((2, 1, 1), "common maximum"),
        ],
    ),
    (
        puzzles.check_found,
        FOUND,
        48,
        [
            (53, "Only full blocks"),
            (99, "last token is computed"),
            (64, "One block too many"),
            (3, "Those are blocks"),
            (0, "found again"),
            (50, "Count the full blocks"),
        ],
    ),
    (puzzles.check_found, TWICE, 48, [(64, "no logits"), (63, "whole block with it")]),
    (
        puzzles.check_renamed,
        RENAMED,
        [1, 2, 3],
        [
            ([1], "Which blocks come after"),
            ([1, 2, 3, 4], "not full"),
            ([0, 1, 2, 3], "does not depend"),
            ([2, 3], "Follow the chain"),
            (1, "3 values"),
        ],
    ),
    (
        puzzles.check_reuse,
        REUSE,
        [2, 7, 4, 9],
        [
            ([2, 9, 4, 7], "Which end"),
            ([9, 4, 7, 2], "the head goes first"),
            ([7, 4, 9, 2], "costs nothing"),
            ([4, 2, 7, 9], "Two questions"),
        ],
    ),
    (
        puzzles.check_chunks,
        CHUNKS,
        (6, 188, 1),
        [
            ((6, 188, 6), "in the middle"),
            ((6, 188, 0), "ends the prompt"),
            ((6, 220, 1), "prefix cache"),
            ((5, 188, 1), "counts"),
            ((6, 256, 1), "what is left"),
            ((7, 1, 1), "Cut them"),
        ],
    ),
    (
        puzzles.check_chunk_slot,
        CHUNK_SLOT,
        (19, 1),
        [
            ((0, 5), "overwritten"),
            ((19, 5), "continues where"),
            ((19, 2), "One too far"),
            ((1, 19), "Exchanged"),
            ((18, 1), "First the index"),
        ],
    ),
    (
        puzzles.check_chunk_len,
        CHUNK_LEN,
        250,
        [(256, "before any chunk"), (1000, "That much of the prompt"), (2, "Three limits")],
    ),
    (
        puzzles.check_chunk_len,
        {"budget": 512, "chunk_size": 256, "num_streams": 6, "num_left": 100},
        100,
        [(256, "only an upper limit"), (506, "budget is left")],
    ),
    (
        puzzles.check_measures,
        MEASURES,
        (200, 1200, 330),
        [
            ((250, 1200, 330), "not at 0"),
            ((200, 1200, 264), "n - 1 gaps"),
            ((200, 1200, 304), "first token's wait"),
            ((200, 40, 330), "median"),
            ((1, 2, 3), "TTFT: arrival"),
        ],
    ),
    (
        puzzles.check_quantile,
        QUANTILE,
        "max",
        [("p99", "0.2 %"), ("p90", "0.2 %"), ("p75", "Answer with one")],
    ),
    (puzzles.check_quantile, {"num_gaps": 100, "num_stalls": 5}, "p99", [("max", "before")]),
]
PUZZLE_NAMES = [f"{check.__name__}-{i}" for i, (check, *_) in enumerate(PUZZLES)]


@pytest.mark.parametrize(("check", "given", "right", "wrong"), PUZZLES, ids=PUZZLE_NAMES)
def test_a_puzzle_knows_the_right_answer_and_the_mistakes(
    check: Callable[..., Verdict], given: dict[str, Any], right: Any, wrong: list[tuple[Any, str]]
) -> None:
    verdict = check(right, **given)
    assert verdict.right is True and verdict.text.startswith("Right")
    for answer, word in wrong:
        verdict = check(answer, **given)
        assert verdict.right is False
        assert word in verdict.text, f"{answer}: {verdict.text}"


@pytest.mark.parametrize(("check", "given", "right", "wrong"), PUZZLES, ids=PUZZLE_NAMES)
def test_no_answer_yet_is_no_mistake(
    check: Callable[..., Verdict], given: dict[str, Any], right: Any, wrong: Any
) -> None:
    parts = isinstance(right, (list, tuple))
    for answer in (None, ..., [..., *right[1:]] if parts else ...):
        verdict = check(answer, **given)
        assert verdict.right is None and verdict.text == OPEN


@pytest.mark.parametrize(("check", "given", "right", "wrong"), PUZZLES, ids=PUZZLE_NAMES)
def test_no_hint_gives_the_answer_away(
    check: Callable[..., Verdict], given: dict[str, Any], right: Any, wrong: list[tuple[Any, str]]
) -> None:
    if isinstance(right, str):
        return  # its hint names all that there is to choose from
    for answer in [answer for answer, _ in wrong] + ["nonsense", -1, [], True]:
        text = check(answer, **given).text
        assert str(right).strip("[]()") not in text.replace(repr(answer), "")


def paged(query: Any, k_cache: Any, v_cache: Any, table: Any, context_len: int, **how: Any) -> Any:
    """Attention through the table, right or with a mistake."""
    size = k_cache.shape[1]
    end = how.get("end", lambda n: n)(context_len)
    slots = [
        (table[t // size] if how.get("lookup", True) else t // size, t % size) for t in range(end)
    ]
    key, value = (torch.stack([cache[b, i] for b, i in slots]) for cache in (k_cache, v_cache))
    scores = key @ query * (how.get("scale") or query.shape[0] ** -0.5)
    weights = torch.softmax(scores, 0)
    return value.mean(0) if how.get("mean") else weights @ value


@pytest.mark.parametrize(
    ("how", "right", "word"),
    [
        ({}, True, "Right"),
        ({"end": lambda n: n + 1}, False, "never written"),
        ({"lookup": False}, False, "never written"),
        ({"end": lambda n: n // 4 * 4}, False, "last block"),
        ({"end": lambda n: n - 1}, False, "last token"),
        ({"scale": 1.0}, False, "not scaled"),
        ({"mean": True}, False, "plain mean"),
        ({"scale": 0.1}, False, "by hand"),
    ],
)
def test_attention_that_the_reader_writes(how: dict[str, Any], right: bool, word: str) -> None:
    verdict = puzzles.check_attend(lambda *args: paged(*args, **how))
    assert verdict.right is right and word in verdict.text


def test_a_function_that_is_not_written_yet_or_not_one() -> None:
    assert puzzles.check_attend(lambda *args: ...).right is None
    assert "ZeroDivisionError" in puzzles.check_attend(lambda *args: 1 / 0).text
    assert "[3]" in puzzles.check_attend(lambda *args: torch.zeros(3)).text.replace("(3,)", "[3]")
    assert "float" in puzzles.check_attend(lambda *args: 1.0).text


def test_a_verdict_is_text_and_html() -> None:
    verdict = Verdict(False, "first `a < b`, then b")
    assert repr(verdict) == "first `a < b`, then b"
    assert "first <code>a &lt; b</code>, then b" in verdict._repr_html_()


# --- pictures ---------------------------------------------------------------------------------


def record(index: int, slices: list[tuple[str, int, int]], **more: Any) -> StepRecord:
    fields = {"sampled": [name for name, _, _ in slices], "block_tables": {}, **more}
    return StepRecord(index=index, start=float(index), end=index + 0.5, slices=slices, **fields)


def trace() -> Trace:
    """A and B stream, the document comes in two chunks, B loses its blocks."""
    made = Trace(record_blocks=True)
    for step in (
        record(0, [("A", 0, 20)], block_tables={"A": [0, 1]}),
        record(1, [("A", 20, 1), ("B", 0, 5)], block_tables={"A": [0, 1], "B": [2]}),
        record(
            2,
            [("A", 21, 1), ("B", 5, 1), ("document", 0, 32)],
            sampled=["A", "B"],
            block_tables={"A": [0, 1], "B": [2], "document": [3, 4]},
        ),
        record(
            3,
            [("A", 22, 1), ("document", 32, 10)],
            preempted=["B"],
            block_tables={"A": [0, 1], "document": [3, 4, 2]},
        ),
        record(4, [("A", 23, 1)], block_tables={"A": [0, 1]}),
    ):
        made.add(step)
    return made


def texts(picture: draw.Picture) -> list[str]:
    """What is written on a picture."""
    root = ET.fromstring(picture.svg)
    return ["".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("}text")]


def test_a_pool_shows_who_holds_what() -> None:
    picture = draw.pool({"A": [0, 5, 3], "B": [0, 2], "document": [7]}, num_blocks=32)
    assert repr(picture) == "5 of 32 blocks held, 27 free, 1 shared"
    written = texts(picture)
    assert {"A1", "A2", "B1", "×2", "1", "16"} <= set(written)
    assert "A0" not in written and "B0" not in written
    with pytest.raises(ValueError, match="A holds block 32; the pool has 32"):
        draw.pool({"A": [32]}, num_blocks=32)


def test_a_block_table_shows_its_tokens() -> None:
    picture = draw.block_table("A", [4, 0], num_tokens=18)
    assert "18 tokens in 2 blocks, table [4, 0]" in repr(picture)
    assert {"0 .. 15", "16 .. 17"} <= set(texts(picture))
    with pytest.raises(ValueError, match="1 blocks of 16 do not hold 17"):
        draw.block_table("A", [4], num_tokens=17)


def test_chains_show_what_is_shared() -> None:
    picture = draw.chains({"A": [b"\x01" * 4, b"\x02" * 4], "B": [b"\x01" * 4, b"\x03" * 4]})
    assert repr(picture) == "1 of 3 different full blocks are in several prompts"
    assert texts(picture).count("01010101…") == 2


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((64, 20), "4 chunks, 4 blocks; 3 chunks beginning inside a block"),
        ((64, 16), "4 chunks, 4 blocks; 0 chunks beginning inside a block"),
        ((12, 100), "1 chunk, 1 block; 0 chunks beginning inside a block"),
    ],
)
def test_chunks_are_counted(args: tuple[int, int], text: str) -> None:
    assert repr(draw.chunks(*args)) == text


def test_chunks_behind_a_prefix() -> None:
    assert repr(draw.chunks(70, 20, start_pos=32)).startswith("2 chunks, 5 blocks; 1 chunk ")
    with pytest.raises(ValueError, match="no chunks of 20 from 70 to 70"):
        draw.chunks(70, 20, start_pos=70)


def test_steps_show_tokens_and_who_lost_blocks() -> None:
    picture = draw.steps(trace(), range(10))
    assert repr(picture) == "5 steps, 72 tokens computed, 1 preemption"
    written = texts(picture)
    assert {"20", "32", "document", "34"} <= set(written)
    assert picture.svg.count("l10 10m0 -10l-10 10") == 1
    assert repr(draw.steps(trace(), [0, 4])) == "2 steps, 21 tokens computed"
    assert "document" not in texts(draw.steps(trace(), [0, 4]))
    with pytest.raises(ValueError, match="the trace, which has 5"):
        draw.steps(trace(), [7])


def test_occupancy_counts_blocks_waste_and_preemptions() -> None:
    text = repr(draw.occupancy(trace(), num_blocks=8))
    # Slots 32 + 48 + 80 + 80 + 32, tokens 20 + 26 + 60 + 65 + 24.
    assert text == "at most 5 of 8 blocks held, 28.3 % of slots unused, 1 preemption"


def test_a_stall_is_measured_between_tokens() -> None:
    text = repr(draw.stall({"one": trace()}))
    assert text == "one: 2 steps with the document, longest gap 1.00 s"
    with pytest.raises(ValueError, match="one: the trace has no prefill of 'other'"):
        draw.stall({"one": trace()}, document="other")


def test_numbers_as_lines_bars_and_tables() -> None:
    picture = draw.lines([1, 2, 4], {"old": [3, 2, 1], "new": [1, 1, 1234]}, "x", "ms", log=True)
    assert repr(picture) == "ms, at 4: old 1, new 1,234"
    assert {"old", "new", "x", "ms"} <= set(texts(picture))
    assert repr(draw.lines([1, 2], {"one": [1, 2]}, "x", "y")) == "y, at 2: one 2"
    picture = draw.bars({"cold": 1234.5, "hot": 6.789}, "ms", title="time")
    assert repr(picture) == "cold 1,234 ms, hot 6.79 ms"
    assert "1,234 ms" in texts(picture)
    table = draw.Table(["name", "n"], [["a<b", 1500], ["c", "2.5"]])
    assert repr(table) == "name  n\na<b  1,500\nc  2.5"
    assert '<td style="text-align: right;">1,500</td>' in table._repr_html_()
    assert "a&lt;b" in table._repr_html_() and draw.Table(["x"], [])._repr_html_()


def test_a_picture_is_alone_on_its_page_and_the_same_each_time() -> None:
    """No style or name reaches beyond it, its colours are the page's, and nothing is by chance."""
    picture, again = (draw.pool({"A": [0, 1]}, num_blocks=16) for _ in range(2))
    assert picture.svg == again.svg
    assert "<style" not in picture.svg and "<metadata" not in picture.svg
    ids = re.findall(r' id="([^"]+)"', picture.svg)
    assert all(f"#{name}" in picture.svg for name in ids)
    assert "var(--fig-a, #3a6cb0)" in picture.svg
    assert f'aria-label="{picture.text}"' in picture.svg
    assert picture._repr_svg_() == picture.svg


def test_the_site_has_the_colours_of_the_pictures() -> None:
    light, _, dark = stylesheet().partition('[data-md-color-scheme="slate"]')
    for name, colours in COLOURS.items():
        for colour, mode in zip(colours, (light, dark), strict=True):
            assert f"--fig-{name}: {colour};" in mode
    names = set(
        re.findall(r"--fig-(\w+)", "".join(map(Path.read_text, ROOT.glob("docs/**/*.css"))))
    )
    assert names and names <= set(COLOURS), "a style asks for a colour that there is not"


def test_results_of_a_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = {
        "format": "mini-vllm-bench",
        "version": 1,
        "columns": {"gap": {"title": "longest gap", "unit": "ms"}},
        "rows": [
            {"table": "t", "name": "old", "params": {"n": 1}, "values": {"gap": {"median": 1234}}},
            {"table": "t", "name": "new", "params": {"n": 2}, "values": {"gap": None}},
        ],
    }
    monkeypatch.setattr("shared.notebook.RESULTS", tmp_path)
    assert committed("one") is None
    (tmp_path / "one.json").write_text(json.dumps(content))
    table = draw.results(committed("one") or {}, "t", ["gap"])
    assert repr(table).split("\n") == ["  n  longest gap (ms)", "old  1  1,234", "new  2  –"]
    with pytest.raises(ValueError, match="no table 'x', there are t"):
        draw.results(content, "x", [])


# --- the traffic ------------------------------------------------------------------------------


def test_play_leaves_the_steps_of_this_traffic_only() -> None:
    from shared import SamplingParams, load_stage
    from shared.measure.episode import Arrival
    from shared.models import load_model

    engine = load_stage(4).LLMEngine(load_model("tiny"), num_blocks=16, max_prefill_chunk_size=16)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    arrivals = [Arrival("A", "a", [5] * 20, params, 0), Arrival("B", "b", [6] * 40, params, 2)]
    for _ in range(2):
        engine.reset_prefix_cache()
        episode = play(engine, arrivals)
        assert episode.title == "stage 04"
        assert [len(output.token_ids) for output in episode.outputs.values()] == [4, 4]
        assert first_step(engine.trace, "A") == 0 and first_step(engine.trace, "B") == 3
        assert engine.trace.steps[3].block_tables is not None
        draw.steps(engine.trace, range(20))
        draw.occupancy(engine.trace, 16)
    with pytest.raises(ValueError, match="no step computes 'C'"):
        first_step(engine.trace, "C")


def test_a_slider_shows_what_it_stands_at(monkeypatch: pytest.MonkeyPatch) -> None:
    widgets = pytest.importorskip("ipywidgets")
    display = pytest.importorskip("IPython.display")
    shown: list[Any] = []
    made: list[Any] = []

    class Place:
        def update(self, what: Any) -> None:
            shown[-1] = what

    def record(what: Any, **_: Any) -> Place:
        shown.append(what)
        return Place()

    kind = widgets.SelectionSlider
    monkeypatch.setattr(display, "display", record)
    monkeypatch.setattr(widgets, "SelectionSlider", lambda **o: made.append(kind(**o)) or made[-1])
    slider("chunk size", [16, 32, 64], 32, lambda size: f"chunks of {size}")
    assert shown[0]["text/plain"] == "chunk size: 32 (a slider, where the notebook runs)"
    assert shown[0][WIDGET]["model_id"] == made[0].model_id
    assert shown[1:] == ["chunks of 32"]
    made[0].value = 64
    assert shown[1:] == ["chunks of 64"]
    with pytest.raises(ValueError, match="chunk size: 7 is not one of"):
        slider("chunk size", [16, 32, 64], 7, str)
    made[0].close()


def test_decode_steps_are_told_apart() -> None:
    made = Trace()
    for i, (slices, seconds) in enumerate(
        [
            ([("A", 0, 9)], 9),  # a prefill
            ([("A", 9, 1), ("B", 4, 1)], 1),
            ([("A", 10, 1), ("B", 5, 1)], 3),
            ([("A", 11, 1), ("B", 6, 1)], 2),
            ([("A", 12, 1), ("B", 7, 1), ("document", 8, 5)], 9),  # a chunk rides along
            ([("A", 13, 1), ("B", 8, 1), ("document", 13, 1)], 5),
            ([("A", 14, 1)], 9),  # too few
        ]
    ):
        made.add(StepRecord(index=i, start=10.0 * i, end=10.0 * i + seconds, slices=slices))
    assert decode_ms(made, "document", least=2) == (2000, 5000)
    with pytest.raises(ValueError, match="no step in which 2 sequences decode with 'C'"):
        decode_ms(made, "C", least=2)


def test_a_race_is_run_in_turn() -> None:
    order: list[tuple[str, int]] = []
    calls = {name: lambda i, n=name: order.append((n, i)) for name in ("one", "two")}
    times = race(calls, torch.device("cpu"), rounds=3)
    assert set(times) == {"one", "two"}
    assert order == [(name, i) for i in (0, 0, 1, 2) for name in ("one", "two")]
