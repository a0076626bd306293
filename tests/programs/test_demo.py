"""The demo: the running example, what is said while it runs, and what is said of it afterwards."""

from __future__ import annotations

import importlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from shared import load_stage
from shared.demo.__main__ import main, make_engine
from shared.demo.view import LiveView, results
from shared.engine.outputs import RequestMetrics, RequestOutput
from shared.measure import example
from shared.measure.episode import (
    DOCUMENT,
    Arrival,
    Episode,
    build_arrivals,
    document_text,
    first_difference,
    seconds,
    serve,
)
from shared.models import load_model
from shared.stages import STAGES

# Small enough for seconds: a document of 300 tokens in chunks of 32 beside chats of 40 tokens.
SMALL = ["--model", "tiny", "--device", "cpu", "--document-tokens", "300", "--chunk", "32"]
SMALL += ["--max-tokens", "40"]


@pytest.fixture(autouse=True)
def one_load_for_all(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in STAGES:  # one that is imported later would keep the replacement for ever
        load_stage(number)
    monkeypatch.setattr("shared.models.load_model", lambda name, **options: tiny)


@pytest.fixture
def arrivals(tiny: Any) -> list[Arrival]:
    return build_arrivals(tiny.tokenizer, document_tokens=300, max_tokens=40)


# ----------------------------------------------------------------------------------- the whole demo


def test_plain_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrivals: list[Arrival]
) -> None:
    assert main([*SMALL, "--plain", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\r" not in said

    # 1. Both stages tell the same events of each request, and stage 04 those of its chunks, too.
    _, stage_03, stage_04 = re.split(r"^Stage 0[34], .*$", said, flags=re.MULTILINE)
    for part in (stage_03, stage_04):
        events = re.findall(r"^ +[\d.]+ s  (\w+) +(arrives|first token|ends)", part, re.MULTILINE)
        for name in ("A", "B", "C", "D", DOCUMENT):
            assert [event for who, event in events if who == name] == [
                "arrives",
                "first token",
                "ends",
            ]
        assert [who for who, event in events if event == "arrives"] == [*"ABCD", DOCUMENT]
        # What the warm-up computed is forgotten: A is cold. The others find the common prompt.
        cached = [int(n) for n in re.findall(r", (\d+) prompt tokens were cached", part)]
        hit = found(arrivals)
        assert cached[0] == 0 and min(cached[1:4]) >= hit and cached[4] == hit >= 32
    total = re.search(r"(\d+) of (\d+) prompt tokens are in the cache", stage_03)
    assert total and total[1] == total[2]  # at once
    counts = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens are in the cache", stage_04)]
    assert counts == [*range(hit + 32, int(total[2]), 32), int(total[2])] and len(counts) > 5

    # 2. The table has a number for everything, and the picture is there.
    for row in ("longest gap", "median gap before", "p99 gap", "first token", "total time"):
        assert re.search(rf"{row}.*  [\d.]+ m?s  +[\d.]+ m?s  +[\d.e+]+ x", stage_04), row
    assert "The texts of all five requests are the same in both stages." in stage_04
    path = Path(re.search(r"^picture: (.*)$", stage_04, re.MULTILINE)[1])
    assert path.parent == tmp_path.resolve()
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_stages_and_a_single_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--stages", "1", "2", "4"]) == 0
    said = capsys.readouterr().out  # not a terminal, so plain
    assert "\x1b" not in said
    assert re.search(r"stage 01 +stage 02 +stage 04 +01 / 04", said)
    assert "are the same in all 3 stages" in said

    assert main([*SMALL, "--out", str(tmp_path), "--stages", "3"]) == 0
    said = capsys.readouterr().out
    assert "the same" not in said and " x\n" not in said


def test_texts_that_differ_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{load_stage(4).__name__}.engine")

    class Wrong(module.Sampler):
        def sample(self, logits: Any, requests: list[Any]) -> list[Any]:
            tokens = super().sample(logits, requests)
            for i, request in enumerate(requests):
                if request.request_id == "C" and len(request.token_ids) == 7:
                    tokens[i] = tokens[i]._replace(token_id=tokens[i].token_id ^ 1)
            return tokens

    monkeypatch.setattr(module, "Sampler", Wrong)
    assert main([*SMALL, "--plain", "--out", str(tmp_path)]) == 1
    said, error = capsys.readouterr()
    assert "The texts DIFFER: stage 04 differs" in said and "the same" not in said
    assert "error: the texts differ: stage 04 differs from stage 03 at token 7 of C: " in error


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_dtypes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In bfloat16 two logits are often as close as rounding: a tie is no error, and it is told."""
    monkeypatch.setattr("shared.models.load_model", load_model)
    module = importlib.import_module(f"{load_stage(4).__name__}.engine")

    class Rounded(module.Sampler):
        def sample(self, logits: Any, requests: list[Any]) -> list[Any]:
            tokens = super().sample(logits, requests)
            for i, request in enumerate(requests):
                if dtype == "bfloat16" and request.request_id == "C":
                    tokens[i] = tokens[i]._replace(token_id=int(logits[i].topk(2).indices[1]))
            return tokens

    monkeypatch.setattr(module, "Sampler", Rounded)
    monkeypatch.setattr("shared.measure.agreement.NEAR_TIE", {"float32": 0.0, "bfloat16": 99.0})
    assert main([*SMALL, "--plain", "--out", str(tmp_path), "--dtype", dtype]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Greedy, {'float32' if dtype == 'auto' else dtype}, CPU threads" in said
    assert ("both stages until rounding decides a tie: stage 04 differs" in said) == (
        dtype == "bfloat16"
    )


def test_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def interrupted(engine: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 30:
            raise KeyboardInterrupt
        advance(engine)

    engine_class = load_stage(3).LLMEngine
    advance = engine_class._advance
    monkeypatch.setattr(engine_class, "_advance", interrupted)
    assert main([*SMALL, "--plain", "--out", str(tmp_path)]) == 130
    said, error = capsys.readouterr()
    assert "A         arrives" in said and "ends" not in said
    assert error == "\ninterrupted\n"


def test_a_failed_request_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"{load_stage(3).__name__}.model_runner")
    run = module.ModelRunner.run

    def failing(self: Any, batch: Any) -> Any:
        if any(s.sequence.request_id == DOCUMENT for s in batch.slices):
            raise RuntimeError("no luck")
        return run(self, batch)

    monkeypatch.setattr(module.ModelRunner, "run", failing)
    assert main([*SMALL, "--plain", "--out", str(tmp_path)]) == 1
    assert "error: stage 03: the request 'document' failed" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- its options


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stages", "5"], "argument --stages: invalid choice: 5 (choose from"),
        (["--stages", "x"], "argument --stages: invalid int value: 'x'"),
        (["--chunk", "15"], "--chunk: must be a whole number from 16 to 8192, got '15'"),
        (["--chunk", "x"], "--chunk: must be a whole number from 16 to 8192, got 'x'"),
        (["--chunk", "8193"], "--chunk: must be a whole number from 16 to 8192, got '8193'"),
        (["--document-tokens", "199"], "must be a whole number from 200 to 100000, got '199'"),
        (["--max-tokens", "0"], "--max-tokens: must be a whole number from 16 to 10000"),
        (["--document-tokens", "5000"], "context of 1024 tokens allows 200 to 9"),
        (["--max-tokens", "1000"], "context of 1024 tokens allows 16 to 8"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_options_out_of_range(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*SMALL, "--plain", "--out", str(tmp_path), *options])
    except SystemExit as by_argparse:
        code = by_argparse.code
    assert code == 2
    said, error = capsys.readouterr()
    assert message in error and "arrives" not in said


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*SMALL, "--plain", "--out", str(tmp_path / "file" / "out")]) == 1
    said, error = capsys.readouterr()
    assert error.startswith("error: ") and "file" in error and said == ""


# -------------------------------------------------------------------------------------- its traffic


def test_all_prompts_begin_alike(arrivals: list[Arrival]) -> None:
    *chats, document = arrivals
    assert [arrival.name for arrival in arrivals] == [*"ABCD", DOCUMENT]
    prompts = {tuple(chat.prompt_token_ids) for chat in chats}
    assert len(prompts) == 4 and len({prompt[:32] for prompt in prompts}) == 1
    assert document.prompt_token_ids[:16] == chats[0].prompt_token_ids[:16]


@pytest.mark.parametrize("num_tokens", [250, 300, 777])
def test_the_document_s_prompt_has_as_many_tokens_as_asked(tiny: Any, num_tokens: int) -> None:
    document = build_arrivals(tiny.tokenizer, num_tokens, 40)[-1]
    assert len(document.prompt_token_ids) == num_tokens
    text = tiny.tokenizer.decode(document.prompt_token_ids)
    beginning = document_text(20).strip()[:20]
    assert example.TASK.strip() in text and beginning in text
    asked = tiny.tokenizer.decode(build_arrivals(tiny.tokenizer, 300, 40)[0].prompt_token_ids)
    assert text[-8:] == asked[-8:]  # the turn ends as every turn does


def test_a_document_without_room_for_its_question_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="20 tokens are not enough"):
        build_arrivals(tiny.tokenizer, 20, 40)


@pytest.mark.model
def test_the_running_example_has_the_numbers_that_the_course_tells(smollm2: Any) -> None:
    *chats, document = build_arrivals(smollm2[1], example.DOCUMENT_TOKENS, 40)
    lengths = {chat.name: len(chat.prompt_token_ids) for chat in chats}
    assert lengths == example.CHATS
    assert len(document.prompt_token_ids) == example.DOCUMENT_TOKENS
    prompts = [arrival.prompt_token_ids for arrival in (*chats, document)]
    common = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len({*tokens}) > 1)
    assert common == example.SYSTEM_TOKENS


def test_a_tokenizer_without_chat_template(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    arrivals = build_arrivals(tiny.tokenizer, 300, 40)
    assert "foxes" in tiny.tokenizer.decode(arrivals[0].prompt_token_ids)


@pytest.mark.parametrize("number", [3, 4])
def test_requests_come_at_the_same_tokens_in_every_stage(
    number: int, tiny: Any, arrivals: list[Arrival]
) -> None:
    engine = make_engine(number, tiny, arrivals, 32)
    counts: dict[str, int] = {}
    seen = []

    def arrived(arrival: Arrival) -> None:
        seen.append((arrival.name, list(counts.values())[-1:]))

    def stepped(outputs: list[RequestOutput]) -> None:
        counts.update({output.request_id: len(output.token_ids) for output in outputs})

    episode = serve(engine, arrivals, "x", "X", arrived, stepped)
    assert seen == [
        ("A", []),
        ("B", [2]),
        ("C", [2]),
        ("D", [2]),
        (DOCUMENT, [example.BEFORE_DOCUMENT]),
    ]
    chats = [episode.outputs[name] for name in "ABCD"]
    assert [len(output.token_ids) for output in chats] == [40] * 4
    # The common prompt is found by all but the first.
    cached = [output.metrics.num_cached_tokens for output in episode.outputs.values()]
    assert cached[0] == 0 and min(cached[1:]) >= 32 and max(cached) < 200
    # All chats were streaming when the document came, and when its first token did.
    arrival, first_token = episode.prefill
    for output in chats:
        times = output.metrics.token_times
        assert times[0] < arrival and first_token < times[-1]
    assert engine.stats()["preemptions"] == 0


# ----------------------------------------------------------------------------------------- its view


def found(arrivals: list[Arrival]) -> int:
    """Tokens of the document's prompt that the cache has: whole blocks of the common beginning."""
    pairs = zip(arrivals[0].prompt_token_ids, arrivals[-1].prompt_token_ids, strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b) // 16 * 16


def small_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)


def screen(view: LiveView) -> list[str]:
    """The lines that the view draws now, with nothing but the text."""
    console = Console(file=io.StringIO(), width=80, height=24, color_system=None)
    console.print(view.render())
    return console.file.getvalue().rstrip("\n").split("\n")


def test_the_screen_shows_what_the_engine_says(tiny: Any, arrivals: list[Arrival]) -> None:
    engine = make_engine(4, tiny, arrivals, 32)
    view = LiveView(small_console(), engine, "Stage 04, chunked: x", arrivals, {"stage 03": 21.4})
    screens = []
    with view:

        def stepped(outputs: list[RequestOutput]) -> None:
            view.stepped(outputs)
            screens.append(screen(view))

        serve(engine, arrivals, "x", "X", view.arrived, stepped)
    screens.append(screen(view))

    assert all(len(lines) == 22 for lines in screens)
    assert max(cell_len(line) for lines in screens for line in lines) <= 80
    assert screens[0][0].startswith("Stage 04, chunked  ")
    total = len(arrivals[-1].prompt_token_ids)

    def states(lines: list[str]) -> list[list[str]]:
        return [re.split(r"  +", line.strip()) for line in lines[16:21]]

    document = [states(lines)[-1] for lines in screens]
    assert document[0] == [DOCUMENT, "not here yet", f"- / {total}", "0 / 48", "-", "-"]
    chunks = [row for row in document if row[1] == "prefilling"]
    hit = found(arrivals)
    counts = [f"{n} / {total}" for n in range(hit + 32, total, 32)]
    assert [row[2] for row in chunks] == counts and len(counts) > 5
    assert [row[4] for row in chunks] == [
        str((hit + 32 * (i + 1)) // 16) for i in range(len(counts))
    ]
    assert all(row[5].startswith("waits ") for row in chunks)
    assert any(f"{hit + 64} of {total} tokens" in line for lines in screens for line in lines)
    assert [row[1] for row in states(screens[-1])] == ["finished"] * 5
    assert [row[3] for row in states(screens[-1])[:4]] == ["40 / 40"] * 4
    assert re.search(r"gap of the chats so far: [\d.]+ m?s   stage 03: 21.4 s", screens[-1][21])

    written = view.console.file.getvalue()
    assert "\x1b[?25l" in written and written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_the_gap_grows_while_a_step_takes_its_time(arrivals: list[Arrival]) -> None:
    class Engine:
        def progress(self, name: str) -> None:
            raise KeyError(name)  # as when it ends between two looks of the other thread

    view = LiveView(small_console(), Engine(), "x", arrivals, {})
    view.arrived(arrivals[0])
    times = [time.perf_counter() - 3.2, time.perf_counter() - 3.0]
    metrics = RequestMetrics(arrival_time=times[0], token_times=times)
    text = "one\x1b[2Jtwo\n\nthree"
    view.stepped([RequestOutput("A", [1], [2, 3], text, "", False, None, metrics)])
    lines = screen(view)
    assert "waits for 3." in lines[5] and "waits" not in lines[5][40:]
    assert "one[2Jtwo three" in lines[2] and "\x1b" not in "".join(lines)
    assert re.search(r"longest gap of the chats so far: 3\.\d+ s", lines[21])


def test_an_interrupted_screen_gives_the_cursor_back(arrivals: list[Arrival]) -> None:
    class Engine:
        def progress(self, name: str) -> None:
            return None

    view = LiveView(small_console(), Engine(), "x", arrivals, {})
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert view.console.file.getvalue().endswith("\x1b[?25h")


# ---------------------------------------------------------------------------------- what it reports


def episode_of(label: str, chat_times: list[float], first_token: float) -> Episode:
    """Chats whose tokens come at the same times; the document arrives at 10 s."""

    def output(name: str, arrival: float, times: list[float]) -> RequestOutput:
        metrics = RequestMetrics(arrival_time=100 + arrival, token_times=[100 + t for t in times])
        tokens = list(range(len(times)))
        return RequestOutput(name, [1, 2, 3, 4], tokens, "", "", True, "length", metrics)

    outputs = {name: output(name, 0.0, chat_times) for name in "ABCD"}
    outputs[DOCUMENT] = output(DOCUMENT, 10.0, [first_token, first_token + 1])
    for name in "BCD":
        outputs[name].metrics.num_cached_tokens = 2
    return Episode(label, label.title(), outputs, 100.0, 100 + max(*chat_times, first_token + 1))


def test_the_table_has_the_measures_of_both_and_their_ratio() -> None:
    before = [8.0, 9.0, 9.5, 10.0]
    one = episode_of("stage 03", [*before, 30.5, 31.0, 40.0], first_token=30.0)
    other = episode_of("stage 04", [*before, 12.0, 14.0, 17.0, 30.0], first_token=16.0)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(results([one, other], "caption"))
    table = console.file.getvalue()
    rows = [re.split(r"  +", line.strip()) for line in table.splitlines() if "  " in line]
    assert rows == [
        ["stage 03", "stage 04", "03 / 04"],
        ["longest gap", "20.5 s", "13.0 s", "1.58 x"],
        ["median gap before the document", "500 ms", "500 ms", "1 x"],
        ["median gap while it is in prefill", "20.5 s", "2.00 s", "10.2 x"],
        ["p99 gap while it is in prefill", "20.5 s", "3.00 s", "6.83 x"],
        ["document's time to first token", "20.0 s", "6.00 s", "3.33 x"],
        ["total time", "40.0 s", "30.0 s", "1.33 x"],
        ["chats' prompts found in the cache", "38 %", "38 %"],
    ]


def test_where_texts_differ() -> None:
    one = episode_of("stage 03", [1.0, 2.0, 3.0], first_token=30.0)
    other = episode_of("stage 04", [1.0, 2.5, 9.0], first_token=16.0)
    assert first_difference([one]) is None
    assert first_difference([one, one, other]) is None  # times may differ, tokens may not
    other.outputs["B"].token_ids[1] = 7
    where = "B: stage 03 and stage 04 differ after 1 equal tokens"
    assert first_difference([one, one, other]) == where
    other.outputs["B"].token_ids[:] = [0, 1]
    assert first_difference([one, other]) == "B: stage 03 and stage 04 differ after 2 equal tokens"


def test_the_longest_gap_is_of_the_chats_alone() -> None:
    episode = episode_of("stage 03", [1.0, 2.0, 4.0], first_token=30.0)
    episode.outputs[DOCUMENT].metrics.token_times[1] += 100
    assert episode.longest_gap.seconds == 2.0
    assert len(episode.gaps) == 8


@pytest.mark.parametrize(
    "value, text",
    [(None, "-"), (0.0619, "61.9 ms"), (0.9999, "1.00 s"), (1.618, "1.62 s"), (21.44, "21.4 s")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text
