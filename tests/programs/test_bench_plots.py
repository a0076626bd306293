"""Pictures: each from a small result made by hand, and what happens without one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.text
import pytest
from matplotlib.figure import Figure
from PIL import Image

from shared.bench import __main__ as program
from shared.bench import plots
from shared.draw import picture
from shared.draw.palette import LIGHT, THEMES
from shared.measure.metrics import MEASURES
from tools.site.bench import FOLDER


def value(*rounds: float) -> dict[str, Any]:
    middle = sorted(rounds)[len(rounds) // 2]
    return {"median": middle, "min": min(rounds), "max": max(rounds), "rounds": list(rounds)}


def result(benchmark: str, **parts: Any) -> dict[str, Any]:
    measures = {key: vars(measure) for key, measure in MEASURES.items()}
    return {
        "format": "mini-vllm-bench",
        "version": 1,
        "benchmark": benchmark,
        "complete": True,
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "abc1234567",
        "command": f"python -m shared.bench {benchmark} --seed 3",
        "settings": {"chunk_size": 48},
        "machine": {"cpu": "A Good CPU", "cores": 8, "gpu": None},
        "versions": {"torch": "9.9"},
        "model": {"name": "smollm2", "dtype": "float32"},
        "columns": measures,
        "rows": [],
        "failures": [],
        "series": {},
        **parts,
    }


def step(start: float, end: float, *slices: tuple[str, int, int], long_blocks: int = 0) -> Any:
    """The streams hold one block each, the long prompt `long_blocks` of 12."""
    held = {"stream-0": 1, "stream-1": 1} | ({"long": long_blocks} if long_blocks else {})
    sampled = [name for name, first, n in slices if name != "long" or first + n >= 96]
    free = 12 - sum(held.values())
    return {
        "start": start,
        "end": end,
        **{"slices": slices, "sampled": sampled, "free_blocks": free, "blocks": held},
    }


def run(steps: list[Any]) -> dict[str, Any]:
    """Raw data in the form of `stall.series`."""
    requests: dict[str, Any] = {
        name: {
            "arrival": 0.0 if name == "long" else -0.2,
            "prompt_tokens": 96 if name == "long" else 4,
            "token_times": [s["end"] for s in steps if name in s["sampled"]],
        }
        for name in ("stream-0", "stream-1", "long")
    }
    return {"requests": requests, "steps": steps}


def decode(position: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    return ("stream-0", position, 1), ("stream-1", position, 1)


BEFORE = [step(-0.2, -0.1, *decode(4)), step(-0.1, 0.0, *decode(5))]
WHOLE = [
    step(0.0, 2.0, ("long", 0, 96), long_blocks=6),
    step(2.0, 2.1, *decode(6), ("long", 96, 1), long_blocks=7),
    step(2.1, 2.2, *decode(7)),
]
CHUNKED = [
    step(0.0, 1.0, *decode(6), ("long", 0, 48), long_blocks=3),
    step(1.0, 2.1, *decode(7), ("long", 48, 48), long_blocks=6),
    step(2.1, 2.2, *decode(8)),
]
RESERVED = [{**s, "blocks": s["blocks"] | {"long": 6}} for s in CHUNKED[:2]] + CHUNKED[2:]

LADDER = result(
    "ladder",
    rows=[
        {
            "table": "ladder",
            "name": name,
            "params": {},
            "values": {
                **{"output_tok_s": value(speed, speed * 1.1), "ttft_p50": value(900 / speed)},
                **{"itl_p50": value(30.0), "stall": value(9000 / speed)},
            },
        }
        for name, speed in (("naive, no KV cache", 2.0), ("stage 01", 30.0), ("stage 04", 60.0))
    ],
)
STALL = result(
    "stall",
    series={
        "stage 03": run(BEFORE + WHOLE),
        "stage 04": run(BEFORE + CHUNKED),
        "stage 04, reserved": run(BEFORE + RESERVED),
    },
)
SWEEPS = result(
    "sweeps",
    rows=[
        {
            "table": "chunk size",
            "name": "stage 04",
            "params": {"chunk": chunk},
            "values": {"gap_max": value(chunk, 2 * chunk), "long_ttft": value(5000 - chunk)},
        }
        for chunk in (1024, 64, 256)
    ],
)
GOODPUT = result(
    "goodput",
    settings={"limits": {"ttft_ms": 1234.5, "itl_ms": 200.0}},
    rows=[
        {
            "table": "goodput",
            "name": f"stage 0{stage}",
            "params": {"rate": rate},
            "values": {"in_time": value(100 - 10 * rate), "goodput": value(rate * 0.8, rate)},
        }
        for rate in (2.0, 0.5)
        for stage in (3, 4)
    ],
)
SIMULATE = result(
    "simulate",
    settings={
        **{"gpu": "H100 SXM", "shape": "llama-3.1-8b"},
        "(e) limits": {"ttft_ms": 1234.5, "itl_ms": 200.0},
    },
    rows=[row | {"table": "(e) goodput"} for row in GOODPUT["rows"]],
)
RESULTS = {
    **{"ladder": LADDER, "stall": STALL, "sweeps": SWEEPS},
    **{"goodput": GOODPUT, "simulate": SIMULATE},
}
NAMES = [picture.name for picture in plots.PICTURES]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts results into a folder."""

    def put(**results: Any) -> Path:
        for name, content in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return put


def draw(folder: Path) -> int:
    return program.main(["plots", "--out", str(folder)])


def painted(name: str, content: Any = None) -> Figure:
    """The figure of a picture, before it is a file."""
    one = next(one for one in plots.PICTURES if one.name == name)
    figure = Figure(figsize=(picture.WIDTH, one.height), layout="constrained")
    one.paint(figure, LIGHT, content or RESULTS[one.benchmark])
    return figure


def test_every_picture_in_both_variants(write: Write, capsys: pytest.CaptureFixture) -> None:
    folder = write(**RESULTS)
    assert draw(folder) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == "" and "skipped" not in captured.out
    for one in plots.PICTURES:
        corners = []
        for theme in THEMES:
            path = folder / f"{one.name}-{theme['name']}.png"
            assert f"written: {path}" in captured.out
            image = Image.open(path)
            size = [round(inches * picture.DPI) for inches in (picture.WIDTH, one.height)]
            assert image.size == pytest.approx(size, abs=1)
            corners.append(f"#{bytes(image.convert('RGB').getpixel((0, 0))).hex()}")
            place = ["A Good CPU", "8 cores", "smollm2"]
            if one.benchmark == "simulate":
                place = ["simulated: llama-3.1-8b on H100 SXM"]
            for part in (*place, "2030-01-02", "abc1234567", "--seed"):
                assert part in image.text["Description"].replace("\N{NO-BREAK SPACE}", " ")
        assert corners == [theme["background"] for theme in THEMES]


@pytest.mark.parametrize("name", NAMES)
def test_axes_have_units(name: str) -> None:
    figure = painted(name)
    labels = {figure.get_supylabel(), *(a.get_xlabel() for a in figure.axes)}
    labels |= {axes.get_ylabel() for axes in figure.axes}
    assert len(labels - {""}) >= 2
    assert not [label for label in labels if label and "(" not in label and ", log" not in label]


def test_no_letters_are_cut_off(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    folder = write(**RESULTS)
    outside = []
    whole = picture.Image.frombuffer

    def look(mode: str, size: tuple[int, int], *rest: Any) -> Any:
        # Labels of ticks beyond an axis' ends are there, too, but are not drawn.
        both = [axis for axes in figures[-1].axes for axis in (axes.xaxis, axes.yaxis)]
        ticks = {text for axis in both for text in axis.findobj(matplotlib.text.Text)}
        labels = {axis.label for axis in both}
        for text in set(figures[-1].findobj(matplotlib.text.Text)) - ticks | labels:
            box = text.get_window_extent()
            if text.get_text() and (min(box.min) < -1 or any(box.max - size > 1)):
                outside.append((text.get_text(), box, size))
        return whole(mode, size, *rest)

    figures: list[Figure] = []

    class Remembered(Figure):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            figures.append(self)

    monkeypatch.setattr(picture, "Figure", Remembered)
    monkeypatch.setattr(picture.Image, "frombuffer", look)
    assert draw(folder) == 0
    assert len(figures) == 2 * len(NAMES) and not outside


# --- what they show ---------------------------------------------------------------------------


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_gaps_and_steps_name_the_longest() -> None:
    both = texts(painted("gaps"))
    assert "longest gap 2.10 s" in both and "longest gap 1.10 s" in both
    assert "chunks of 48 tokens" in both
    both = texts(painted("steps"))
    assert "longest step 2.00 s" in both and "longest step 1.10 s" in both


def test_tokens_of_a_step_are_told_apart() -> None:
    requests = STALL["series"]["stage 03"]["requests"]
    assert [plots.tokens_of(s, requests) for s in WHOLE] == [(0, 96), (3, 0), (2, 0)]
    assert [plots.tokens_of(s, requests) for s in CHUNKED] == [(2, 48), (2, 48), (2, 0)]


def test_bars_stand_on_each_other() -> None:
    bars = painted("steps").axes[1].patches
    x = {round(bar.get_x() + bar.get_width() / 2): bar for bar in bars if bar.get_height() > 40}
    assert sorted(x) == [0, 1]
    assert {(bar.get_y(), bar.get_height()) for bar in x.values()} == {(2, 48)}


def test_the_tail_of_the_cdf() -> None:
    lines = {line.get_label(): line for line in painted("itl-cdf").axes[0].lines}
    gaps, longer = lines["stage 03"].get_data()
    assert gaps == pytest.approx([100, 100, 100, 100, 2100, 2100])
    assert longer == pytest.approx([11 / 12, 9 / 12, 7 / 12, 5 / 12, 3 / 12, 1 / 12])


def test_the_pool_is_filled_by_chunk_or_at_once() -> None:
    for axes, first in zip(painted("pool").axes, (3, 6), strict=True):
        long = axes.collections[2].get_paths()[0].vertices
        top = max(y for x, y in long if 0 <= x < 1.0)
        assert top == 2 + first
        assert axes.lines[0].get_ydata()[0] == 12


def test_chunk_sizes_are_in_order() -> None:
    gap, ttft = painted("chunk-sizes").axes[0].lines
    assert list(gap.get_xdata()) == [64, 256, 1024] == list(ttft.get_xdata())
    assert list(gap.get_ydata()) == [128, 512, 2048]


@pytest.mark.parametrize("name", ["goodput", "goodput-simulated"])
def test_goodput_says_its_limits(name: str) -> None:
    figure = painted(name)
    assert "TTFT ≤ 1,234 ms, every gap ≤ 200 ms" in texts(figure)
    for axes, low, high in zip(figure.axes, (95, 0.5), (80, 2.0), strict=True):
        assert [list(line.get_xdata()) for line in axes.lines[:2]] == [[0.5, 2.0]] * 2
        assert list(axes.lines[1].get_ydata()) == [low, high]


def test_a_gpu_comes_before_the_cpu_and_an_interrupted_run_says_so() -> None:
    content = copy.deepcopy(STALL) | {"complete": False, "commit": None, "model": {}}
    content["machine"]["gpu"] = "A GPU"
    said = plots.caption(content)
    assert said.startswith("A\N{NO-BREAK SPACE}GPU · torch") and said.endswith("INTERRUPTED")
    assert "commit" in said and "None" not in said


# --- without results --------------------------------------------------------------------------


def test_a_missing_file_is_skipped_with_its_command(
    write: Write, capsys: pytest.CaptureFixture
) -> None:
    folder = write(ladder=LADDER)
    assert draw(folder) == 0
    out = capsys.readouterr().out
    skipped = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == len(NAMES) - 1
    sweeps = folder / "sweeps.json"
    expected = f"skipped: chunk-sizes: no {sweeps}; make it with python -m shared.bench sweeps"
    assert expected in skipped
    assert sorted(p.name for p in folder.glob("*.png")) == ["ladder-dark.png", "ladder-light.png"]


def test_an_empty_folder_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert draw(tmp_path) == 1
    assert capsys.readouterr().out.count("skipped: ") == len(NAMES)


def test_a_run_without_one_stage_is_no_error(write: Write, capsys: pytest.CaptureFixture) -> None:
    series = {name: run for name, run in STALL["series"].items() if name != "stage 03"}
    folder = write(stall=STALL | {"series": series}, simulate=SIMULATE | {"rows": []})
    assert draw(folder) == 0
    out = capsys.readouterr().out
    how = "make it with python -m shared.bench"
    assert f"skipped: gaps: {folder}/stall.json has no raw data of stage 03; {how} stall" in out
    assert f"{folder}/simulate.json has no table '(e) goodput'; {how} simulate" in out
    assert sorted(path.name for path in folder.glob("*-dark.png")) == [
        *("itl-cdf-dark.png", "pool-dark.png")
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot read"),
        ([1], "is not a mini-vllm-bench file"),
        (STALL | {"version": 9}, "has version 9, expected 1"),
        (STALL | {"series": {"stage 03": {}, "stage 04": {}}}, "cannot draw gaps: no 'requests'"),
    ],
)
def test_a_bad_file_gives_one_line_and_does_not_stop_the_others(
    content: Any, says: str, write: Write, capsys: pytest.CaptureFixture
) -> None:
    folder = write(ladder=LADDER)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "stall.json").write_text(text)
    assert draw(folder) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert says in captured.err and "stall.json" in captured.err
    assert (folder / "ladder-dark.png").exists()


# --- the committed ones -----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.png")), ids=lambda path: path.name)
def test_committed_pictures_are_of_the_committed_results(path: Path) -> None:
    name = path.stem.rpartition("-")[0]
    one = next(one for one in plots.PICTURES if one.name == name)
    content = json.loads((FOLDER / f"{one.benchmark}.json").read_text(encoding="utf-8"))
    assert Image.open(path).text["Description"] == plots.caption(content)
    assert path.stat().st_size < 80_000, "the repository keeps it"
