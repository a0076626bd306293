"""The command line of every stage, mostly called as a function; as a program where it matters."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shared import SamplingParams, load_stage
from shared.engine.prompts import chat_prompt
from shared.programs.cli import attribute_docs, build_parser, main
from shared.programs.live import LiveAnswers

STAGE = load_stage(1)
PROGRAM = [sys.executable, "-m", STAGE.__name__, "--model", "tiny"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # the tiny model is slower on more


@pytest.fixture
def call() -> Callable[..., int]:
    """Run the command line on the tiny model, with a pool that is quickly made."""

    def run(*args: str, engine_class: Any = STAGE.LLMEngine) -> int:
        return main(engine_class, ["--model", "tiny", "--num-blocks", "64", *args])

    return run


@pytest.fixture
def answer(tiny: Any) -> Callable[..., str]:
    """What the tiny model says to a prompt."""

    def ask(prompt: str, raw: bool = False, **params: Any) -> str:
        engine = STAGE.LLMEngine(model=tiny, num_blocks=64)
        params = {"temperature": 0, "max_tokens": 8, **params}
        prompt = prompt if raw else chat_prompt(tiny[1], prompt)
        [output] = engine.generate([prompt], SamplingParams(**params), use_tqdm=False)
        return output.text

    return ask


# ---------------------------------------------------------------- answers


def test_one_prompt(call: Callable, answer: Callable, capsys: Any) -> None:
    assert call("hello", "--max-tokens", "8") == 0
    assert capsys.readouterr().out == answer("hello") + "\n"


def test_without_the_chat_template(call: Callable, answer: Callable, capsys: Any) -> None:
    assert call("hello", "--raw", "--max-tokens", "8") == 0
    assert capsys.readouterr().out == answer("hello", raw=True) + "\n" != answer("hello") + "\n"


def test_a_prompt_from_stdin(
    call: Callable, answer: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert call("-", "--max-tokens", "8") == 0
    assert capsys.readouterr().out == answer("two\nlines\n") + "\n"


def test_several_prompts(call: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer once, under its prompt's first line. A blank prompt is one, too."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\nmore"))
    assert call("first", "-", " ", "last\nmore", "--max-tokens", "3") == 0
    out = capsys.readouterr().out
    for title in ("first", "from stdin", "last"):
        assert out.count(title) == 1, out
    assert "more" not in out
    assert out.count("length") == 4, "an answer is missing, or was printed twice"


def test_sampling_options(call: Callable, answer: Callable, capsys: Any) -> None:
    args = "--temperature 3 --top-p 0.9 --seed 7 --max-tokens 8".split()
    assert call("hello", *args) == 0
    sampled = answer("hello", temperature=3.0, top_p=0.9, seed=7)
    assert capsys.readouterr().out == sampled + "\n" != answer("hello") + "\n"


def test_stop_strings(call: Callable, answer: Callable, capsys: Any) -> None:
    text = answer("hello", max_tokens=30)
    stops = [text[10:12], text[6:8]]
    assert call("hello", "--max-tokens", "30", "--stop", stops[0], "--stop", stops[1]) == 0
    shown = capsys.readouterr().out[:-1]
    assert shown == min((text.partition(stop)[0] for stop in stops), key=len) != text


def test_stop_tokens(call: Callable, capsys: Any, tiny: Any) -> None:
    engine = STAGE.LLMEngine(model=tiny, num_blocks=64)
    prompt = chat_prompt(tiny[1], "hello")
    params = SamplingParams(temperature=0, max_tokens=30)
    [output] = engine.generate([prompt], params, use_tqdm=False)
    first, second = output.token_ids[7], output.token_ids[12]
    assert call("hello", "--stop-token-id", str(first), "--stop-token-id", str(second)) == 0
    end = min(output.token_ids.index(first), output.token_ids.index(second))
    assert capsys.readouterr().out == tiny[1].decode(output.token_ids[:end]) + "\n"


def test_a_stop_string_that_is_a_special_token(
    call: Callable, capsys: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`<|im_start|>` (1) is left out of the text, so it can only be found by its id."""
    sampler = sys.modules[STAGE.LLMEngine.__module__].Sampler
    sample = sampler.sample

    def fourth(self: Any, logits: Any, requests: list[Any]) -> list[Any]:
        tokens = sample(self, logits, requests)
        if len(requests[0].token_ids) == 3:
            tokens[0] = tokens[0]._replace(token_id=1)
        return tokens

    monkeypatch.setattr(sampler, "sample", fourth)
    caplog.set_level(logging.INFO, logger="shared.engine.prompts")
    for stop, count in (("<|im_start|>", 4), ("x<|im_start|>", 9)):
        assert call("hello", "--stop", stop, "--stats", "--max-tokens", "9") == 0
        err = capsys.readouterr().err
        assert re.search(rf"generated +{count}\b", err), err
        [said] = [one.message for one in caplog.records if stop in one.message]
        assert ("is the special token 1, which ends" if count == 4 else "never in the text") in said


def test_stats_and_trace(call: Callable, tmp_path: Any, capsys: Any) -> None:
    file = tmp_path / "trace.json"
    assert call("hello", "--max-tokens", "5", "--stats", "--trace", str(file)) == 0
    captured = capsys.readouterr()
    stats = dict(re.findall(r"(\w+)  +(\S+)$", captured.err, re.MULTILINE))
    assert (stats["steps"], stats["generated"], stats["num_blocks"]) == ("5", "5", "64")
    assert str(file) in captured.err and str(file) not in captured.out
    assert len([e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]) == 10


def test_engine_options_reach_the_engine(call: Callable) -> None:
    engines = []

    class Engine(STAGE.LLMEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            engines.append(self)

    Engine.__module__ = STAGE.LLMEngine.__module__
    options = {
        "block_size": 4,
        "num_blocks": 50,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 100,
        "max_model_len": 90,
    }
    args = [arg for name, n in options.items() for arg in ("--" + name.replace("_", "-"), str(n))]
    assert call("hello", "--max-tokens", "2", *args, engine_class=Engine) == 0
    [engine] = engines
    assert {name: getattr(engine.config, name) for name in options} == options


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "PROMPT"),
        (["hello", "--nonsense"], "--nonsense"),
        (["hello", "--max-token", "3", "--temprature", "1"], "(did you mean --temperature?)"),
        (["-", "hello", "-"], "can be given once only"),
        (["hello", "--stop-token-id", "<|im_end|>"], "invalid int value"),
        (["hello", "--max-tokens", "many"], "many"),
        (["hello", "--max-tokens", "0"], "max_tokens"),
        (["hello", "--temperature", "-1"], "-1"),
        (["hello", "--top-p", "2"], "top_p"),
        (["hello", "--seed", "-1"], "seed"),
        (["hello", "--stop", ""], "stop"),
        (["hello", "--block-size", "0"], "block_size"),
        (["hello", "--max-num-seqs", "-3"], "max_num_seqs"),
    ],
)
def test_a_wrong_command_line(call: Callable, capsys: Any, args: list[str], message: str) -> None:
    """Exit code 2, before a model is loaded."""
    with pytest.raises(SystemExit) as error:
        call(*args)
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert captured.out == "" and len(captured.err.splitlines()) == 2, captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["", "--raw"], "empty"),
        (["hello", "--max-model-len", "8"], "8"),
        (["hello", "--max-model-len", "9999"], "9999"),
        (["hello " * 200, "--max-num-batched-tokens", "100"], "100"),
        (["hello", "--num-blocks", "1"], "16"),
        (["hello", "--dtype", "float63"], "float63"),
        (["hello", "--device", "abacus"], "abacus"),
        (["hello", "--model", "./no/such/folder"], "no/such/folder"),
        (["hello", "--max-tokens", "1", "--trace", "/"], "Is a directory"),
        (["hello", "--max-tokens", "1", "--trace", "/dev/full"], "No space left on device"),
    ],
)
def test_what_cannot_be_done(call: Callable, capsys: Any, args: list[str], message: str) -> None:
    """Exit code 1 and one line that says why, before anything is answered."""
    assert call(*args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("error: ")], err


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (
            b"fine until here \xff" + b"x" * 9999,
            "is not utf-8: byte 0xff at 16: invalid start byte",
        ),
        (b"", "standard input is empty or closed"),
    ],
)
def test_a_standard_input_without_a_prompt(
    call: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch, stdin: bytes, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert call("-") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and len(err) < 200


def test_a_standard_input_that_is_closed(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert call("-") == 1


def test_an_invalid_byte_in_a_long_prompt(call: Callable, capsys: Any) -> None:
    """As Python hands over an argument that is not UTF-8."""
    assert call("x" * 5000 + "\udcff") == 1
    err = capsys.readouterr().err
    assert "character 5000 of 5001 is '\\udcff'" in err and len(err) < 200


def test_a_trace_is_tried_out_before_the_answers_and_leaves_nothing(tmp_path: Path) -> None:
    from shared.engine import files

    kept = tmp_path / "kept.json"
    kept.write_text("old")
    files.try_out(kept)
    files.try_out(tmp_path / "new.json")
    files.try_out(os.devnull)
    assert kept.read_text() == "old" and list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "failed: "),
        ("{{ messages[0]['content'] + 1 }}", "failed: "),
        ("{{ messages.nothing.at.all }}", "failed: "),
    ],
)
def test_a_chat_template_that_fails(
    call: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    from shared.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    monkeypatch.setattr("shared.models.tiny.CHAT_TEMPLATE", template)
    assert call("hello") == 1
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line and "Traceback" not in err and out == ""


class Broken(STAGE.LLMEngine):
    """Its model raises `error` in the third step."""

    error: BaseException = RuntimeError("a kernel failed")

    def step(self) -> list:
        if len(self.trace.steps) == 2:

            def fail(*args: Any) -> None:
                raise self.error

            self.model_runner.model.register_forward_pre_hook(fail)
        return super().step()


Broken.__module__ = STAGE.LLMEngine.__module__


@pytest.mark.parametrize("prompts", [["hello"], ["hello", "again"]])
def test_a_request_that_ends_with_an_error(call: Callable, prompts: list[str]) -> None:
    assert call(*prompts, engine_class=Broken) == 1


@pytest.mark.parametrize("prompts", [["hello"], ["hello", "again"]])
def test_ctrl_c(
    call: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    monkeypatch.setattr(Broken, "error", KeyboardInterrupt())
    assert call(*prompts, engine_class=Broken) == 130
    assert "interrupted" in capsys.readouterr().err


def test_ctrl_c_while_waiting_for_stdin(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=read))
    assert call("-") == 130


def test_a_wrong_option_is_told_before_stdin_is_read(
    call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        call("-", "--max-tokens", "0")


# ---------------------------------------------------------------- as a program


SLOWLY = """
import runpy, signal, time
from shared.engine.base import EngineBase

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in jobs of a script
step = EngineBase.step
EngineBase.step = lambda self: (time.sleep(0.1), step(self))[1]
runpy.run_module({name!r}, run_name="__main__")
"""


def interrupted(act: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    """Exit code and stderr of a program on which `act` is done after its first letter.

    Its steps are slowed down: it would take a minute and a half to end by itself.
    """
    program = [sys.executable, "-c", SLOWLY.format(name=STAGE.__name__), *PROGRAM[3:]]
    with start("hello", "--max-tokens", "900", "--num-blocks", "64", program=program) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        act(process)
        return process.wait(timeout=60), process.stderr.read()


def test_a_reader_that_goes_away() -> None:
    """`... | head -c 1` ends the program without a word."""
    code, said = interrupted(lambda program: program.stdout.close())
    assert code == 1 and said.startswith("KV cache: ") and said.count("\n") == 1, said


def test_ctrl_c_for_the_program() -> None:
    code, said = interrupted(lambda program: program.send_signal(signal.SIGINT))
    assert code == 130 and said.rstrip().endswith("\ninterrupted") and "Trace" not in said, said


@pytest.mark.parametrize(
    ("program", "imports"),
    [("stages.01_block_manager", "tqdm"), ("shared.bench", "rich"), ("shared.demo", "rich")],
)
def test_ctrl_c_while_a_program_is_imported(program: str, imports: str, tmp_path: Path) -> None:
    (tmp_path / f"{imports}.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", program, "x"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_the_program_reads_a_pipe() -> None:
    """A pipe in, a pipe out: nothing but the answers comes out, each in its frame."""
    done = subprocess.run(
        [*PROGRAM, "-", "and this?", "--max-tokens", "4"],
        env=ENV,
        input="What is it?\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "What is it?" in done.stdout and "and this?" in done.stdout
    assert "\x1b" not in done.stdout, "colours and cursor movements in a pipe"
    assert "KV cache" in done.stderr, "how large the pool is and why should be said"


def start(*args: str, program: list[str] = PROGRAM) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([*program, *args], stdout=pipe, stderr=pipe, text=True, env=ENV)


# ---------------------------------------------------------------- the parts


def test_every_option_of_a_stage_is_on_the_command_line() -> None:
    @dataclass
    class EngineConfig:
        """Options.

        Attributes:
            chunk: how much at once, which takes
                two lines to say; None is all.
            size: of the pool; None sizes it.
            share: a part, as in 50 % of it.
            caching: find it again.
            backend: by name.
        """

        chunk: int | None = None
        size: int | None = None
        share: float = 0.5
        caching: bool = True
        backend: str = "auto"

    parser = build_parser(with_hints(EngineConfig), "program")
    text = " ".join(parser.format_help().split())
    for words in (
        "--chunk CHUNK how much at once, which takes two lines to say; by default all.",
        "--size SIZE of the pool; by default the engine sizes it.",
        "--max-tokens MAX_TOKENS most tokens of an answer (default 256)",
        "--seed SEED makes sampling repeatable",
        "--top-p TOP_P sample from the likeliest tokens",
        "--share SHARE a part, as in 50 % of it. (default 0.5)",
        "--caching, --no-caching find it again. (default True)",
        "--backend BACKEND by name. (default auto)",
    ):
        assert words in text, text
    args = parser.parse_args("x --chunk 3 --share 0.25 --no-caching --backend fast".split())
    assert (args.chunk, args.share, args.caching, args.backend) == (3, 0.25, False, "fast")
    args = parser.parse_args(["x"])
    assert args.chunk is args.share is args.caching is args.backend is None


def with_hints(config_class: Any) -> Any:
    """`get_type_hints` looks a class's annotations up in its module."""
    module = ModuleType("a_stage")
    config_class.__module__ = module.__name__
    sys.modules[module.__name__] = module
    return config_class


def test_the_stage_s_own_options_are_documented() -> None:
    texts = attribute_docs(STAGE.EngineConfig)
    assert set(STAGE.EngineConfig.__dataclass_fields__) <= set(texts)
    assert attribute_docs(object) == {}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_side_by_side(is_terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=60, height=30)
    with LiveAnswers(["one", "two"], console) as answers:
        answers.update(0, "Hel")
        assert ("Hel" in file.getvalue()) == is_terminal
        answers.update(1, "[bold]42[/bold]", "stop")
        answers.update(0, "Hello", "length")
    text = file.getvalue()
    for words in ("one", "two", "Hello", "[bold]42[/bold]", "stop", "length"):
        assert words in text, f"{words!r} is missing in {text}"
    if not is_terminal:
        assert text.count("Hello") == 1 and "\x1b" not in text


def test_answers_end_when_something_fails() -> None:
    """The terminal is given back, whatever happened."""
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError), LiveAnswers(["one"], console) as answers:
        answers.update(0, "Hel")
        raise RuntimeError
    assert console._live_stack == []
