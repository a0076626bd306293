"""Every bad input is refused at once, in one clear line, and nothing is left half-done.

`pytest tests/engine/test_bad_input.py --list-refusals` lists each bad input with its answer.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoTokenizer

from shared import SamplingParams, load_stage
from shared.bench import __main__ as bench_program
from shared.bench import compare, soak
from shared.demo import __main__ as demo_program
from shared.engine import files
from shared.engine.prompts import chat_prompt
from shared.engine.trace import StepRecord, Trace
from shared.measure.results import load as load_results
from shared.models import load_model, smollm2
from shared.models.tiny import build_tiny_model, tiny_tokenizer
from shared.notebook import example
from shared.programs.cli import main as stage_program
from shared.programs.program import finish
from shared.record import __main__ as trace_program
from tools.check import propagate as propagate_program
from tools.setup import start as start_program

ROOT = Path(__file__).resolve().parents[2]
STAGES = [load_stage(number) for number in (1, 2, 3, 4)]
LAST = STAGES[-1]
HUGE = 10**400  # an int that no float can hold
HALF = "\ud800"  # half of a surrogate pair, which has no UTF-8
P = SamplingParams(max_tokens=2)


def short(value: Any) -> str:
    text = value.__name__ if hasattr(value, "__name__") else ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@pytest.fixture(autouse=True)
def listed(request: pytest.FixtureRequest) -> None:
    """Begin this test's entry for --list-refusals; `refused` goes on."""
    title = request.function.__name__.removeprefix("test_").replace("_", " ")
    given = request.node.callspec.params.items() if hasattr(request.node, "callspec") else ()
    words = [f"{name}={short(value)}" for name, value in given if name not in ("code", "says")]
    print(": ".join(filter(None, [title, ", ".join(words)])))


def refused(
    call: Callable[[], Any],
    says: str,
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError),  # that mean "called wrongly"
) -> None:
    """Assert that it raises one of these errors, in one line."""
    with pytest.raises(kinds) as error:
        call()
    message = str(error.value)
    print("    " + message.replace("\0", "\\0"))
    assert says in message and "\n" not in message, message


# --- an engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, 5, (), ("tiny",), b"tiny"])
def test_what_is_no_model(model: Any) -> None:
    refused(lambda: LAST.LLMEngine(model), "a name, a path or a (model, tokenizer) pair")
    refused(lambda: load_model(model), "a name, a path or a (model, tokenizer) pair")


def test_a_pair_without_a_model() -> None:
    refused(lambda: LAST.LLMEngine((None, None)), "got model None")


@pytest.mark.parametrize("device", [None, True, "", "gpu", "meta", "mps"])
def test_what_is_no_device_for_an_engine(device: Any) -> None:
    refused(lambda: load_model("tiny", device), f"device {device!r}")


@pytest.mark.parametrize(
    "value", ["4", True, 0, -1, 2.5, math.nan, math.inf, 2**31, HUGE, []], ids=short
)
@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_num_batched_tokens"])
def test_numbers_that_are_no_counts(tiny: Any, name: str, value: Any) -> None:
    says = f"{name} must be an integer from 1 to 2147483647, got {value!r}"
    for stage in STAGES[:3] if value is None else STAGES[3:]:  # in stage 04 one may be None
        options = {"num_blocks": 8, name: value}
        refused(functools.partial(stage.LLMEngine, tiny, **options), says)


@pytest.mark.parametrize("value", ["4", True, 0, -1.0, math.nan, math.inf, HUGE], ids=short)
@pytest.mark.parametrize("name", ["memory_utilization", "max_decode_share", "target_step_ms"])
def test_numbers_that_are_no_measures(tiny: Any, name: str, value: Any) -> None:
    says = f"{name} must be a finite number above 0, got {value!r}"
    refused(lambda: LAST.LLMEngine(tiny, **{"num_blocks": 8, name: value}), says)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{"num_blocks": 2**31 - 1}, {"block_size": 2**31 - 1}])
def test_a_pool_larger_than_the_machine(tiny: Any, stage: ModuleType, options: Any) -> None:
    options = {"num_blocks": 10**6, "block_size": 10**6, **options}
    refused(lambda: stage.LLMEngine(tiny, **options), " bytes; cpu has ")


# --- requests ---------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny: Any) -> Any:
    return LAST.LLMEngine(tiny, num_blocks=16, block_size=4)


@pytest.mark.parametrize("prompt", [None, 5, b"text", {3, 4}, range(3), torch.tensor([3]), HALF])
def test_prompts_that_are_none(engine: Any, prompt: Any) -> None:
    for call in (engine.add_request, engine.stream, engine.generate):
        refused(lambda call=call: call(prompt, P), "prompt")
    refused(lambda: engine.generate([[3], prompt], P, use_tqdm=False), "prompt")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("prompt", [[3] * 10**6, "word " * 10**5])
def test_gigantic_prompts(engine: Any, prompt: Any) -> None:
    refused(lambda: engine.add_request(prompt, P), "prompt tokens and 2 to generate do not fit")


@pytest.mark.parametrize("salt", [None, 5, b"salt", [], HALF])
@pytest.mark.parametrize("stage", STAGES[2:])
def test_a_salt_without_a_hash(tiny: Any, stage: ModuleType, salt: Any) -> None:
    """Found by the scheduler, it would stop the engine for everybody, for ever."""
    engine = stage.LLMEngine(tiny, num_blocks=16, block_size=4)
    refused(lambda: engine.add_request([3] * 9, P, request_id="a", cache_salt=salt), "cache_salt")
    assert not engine.has_unfinished_requests()
    engine.add_request([3] * 9, P, request_id="a")
    assert engine.step()[0].request_id == "a"


@pytest.mark.parametrize("request_id", [5, b"a", [], HALF])
def test_ids_that_are_no_names(engine: Any, request_id: Any) -> None:
    refused(lambda: engine.add_request([3], P, request_id), "request_id")


@pytest.mark.parametrize("given", [[P], [P] * 3, (P,), "P", 5, [5, 5], {}])
def test_parameters_that_do_not_fit_the_prompts(engine: Any, given: Any) -> None:
    refused(lambda: engine.generate([[3], [4]], given, use_tqdm=False), "sampling_params")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("value", [HUGE, math.nan, -math.inf, True, "1", None], ids=short)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_parameters_that_are_no_numbers(name: str, value: Any) -> None:
    refused(lambda: SamplingParams(**{name: value}), name)


@pytest.mark.parametrize("penalty", [0, -1, 1e-320, 9e-7, 1.1e6, 1e308])
def test_a_penalty_that_overflows(penalty: float) -> None:
    refused(lambda: SamplingParams(repetition_penalty=penalty), f"got {float(penalty)}")


def test_a_request_that_may_get_no_token_at_all(engine: Any) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=1, stop_token_ids=range(512))
    refused(lambda: engine.add_request([3], params), "min_tokens leaves no token")
    engine.add_request([3], SamplingParams(max_tokens=4, stop_token_ids=range(512)))
    assert engine.step()[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 1e-320},
        {"min_p": 1e-320},
        {"temperature": 1e308, "min_tokens": 2},
        {"temperature": 1e-5},
        {"top_k": 10**30, "logprobs": 10**30},
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6, "temperature": 0},
        {"stop_token_ids": [511], "min_tokens": 3, "seed": 2**64 - 1},
    ],
    ids=str,
)
def test_what_is_extreme_but_allowed_harms_nobody(engine: Any, extreme: dict[str, Any]) -> None:
    """A step fails for all of its requests, so nothing that passes the door may make it fail."""
    for params in ({}, extreme):
        engine.add_request([5] * 7, SamplingParams(max_tokens=4, ignore_eos=True, **params))
    reasons = []
    while engine.has_unfinished_requests():
        reasons += [output.finish_reason for output in engine.step() if output.finished]
    assert reasons == ["length", "length"]


@pytest.mark.parametrize("number", [0, 5, "4", None, 4.0, True, []])
def test_stages_that_there_are_not(number: Any) -> None:
    refused(lambda: load_stage(number), f"there is no stage {number!r}")


# --- models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def cut(name: str, size: int) -> Callable[[Path], Any]:
    def cut(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    cut.__name__ = f"{name}[:{size}]"
    return cut


def remove(name: str) -> Callable[[Path], Any]:
    def remove(folder: Path) -> None:
        (folder / name).unlink()

    remove.__name__ = f"no {name}"
    return remove


def configure(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    change.__name__ = str(changes)
    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut("model.safetensors", 0), "header"),
        (cut("model.safetensors", 5000), "header"),
        (cut("model.safetensors", -1), "header"),
        (cut("config.json", 40), "config"),
        (cut("tokenizer.json", 40), "line "),
        (remove("config.json"), "no config.json in this folder"),
        (remove("model.safetensors"), "model.safetensors"),
        (configure(hidden_size=128), "mismatched"),
        (configure(num_attention_heads=0), "zero"),
        # transformers would fill them with random numbers.
        (configure(num_hidden_layers=3), "9 weights are not in its files: model.layers.2."),
    ],
)
def test_a_damaged_model(
    saved: Path, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder)
    refused(lambda: load_model(folder, "cpu"), "cannot load model")
    refused(lambda: load_model(str(folder), "cpu"), says)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 999, b"<html>" * 99])
def test_a_gguf_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    refused(lambda: load_model(tmp_path / "model.gguf", "cpu"), "cannot load model")


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 300, "a\0b", "nope:llama"])
def test_names_that_no_model_has(name: str) -> None:
    refused(lambda: load_model(name, "cpu"), "cannot load model")


@pytest.mark.parametrize(
    ("answer", "is_offline"),
    [(ConnectionError("no route"), True), (TimeoutError("10 s"), True), (ValueError("404"), False)],
)
def test_the_hub_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, is_offline: bool
) -> None:
    """Where it cannot be reached its client would ask for a minute; then only the cache is read."""
    asked = []

    def ask(url: str, timeout: float) -> None:
        asked.append((url, timeout))
        raise answer

    def load(name: str, **options: Any) -> None:
        assert options["local_files_only"] == is_offline
        assert options["trust_remote_code"] is False
        raise OSError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    refused(lambda: load_model("nobody/nothing", "cpu"), "not in the cache")
    [(url, timeout)] = asked
    assert "nobody/nothing" in url and timeout <= 10


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the default model would be kept, which is a single word here."""
    source = tmp_path / smollm2.GGUF_NAME
    source.write_bytes(b"")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: source)
    monkeypatch.setattr(smollm2, "_sha256", lambda path: smollm2.GGUF_SHA256)
    monkeypatch.setattr(
        smollm2, "convert", lambda source, target: (target / "model").write_text("new")
    )
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["OSError", "SafetensorError"])
def test_a_disk_that_is_full_while_a_model_is_converted(
    monkeypatch: pytest.MonkeyPatch, cache: Path, kind: str
) -> None:
    from safetensors import SafetensorError

    def fill(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        if kind == "SafetensorError":
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", fill)
    refused(smollm2.smollm2_folder, "No space left on device", (RuntimeError,))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/x", "/proc/x", "/" + "x" * 300])
def test_a_cache_where_no_folder_can_be(
    monkeypatch: pytest.MonkeyPatch, cache: Path, place: str
) -> None:
    monkeypatch.setenv("MINI_VLLM_CACHE", place)
    refused(smollm2.smollm2_folder, "; set MINI_VLLM_CACHE to a folder", (RuntimeError,))


@pytest.mark.parametrize("manifest", ["", "[]", "5", '{"model": null}', '{"other": 3}'])
def test_what_a_killed_conversion_left_is_made_anew(cache: Path, manifest: str) -> None:
    folder = smollm2.smollm2_folder()
    (folder / "model").write_text("half")
    (folder / smollm2.MANIFEST).write_text(manifest)
    (cache / f"{folder.name}.tmp-killed").mkdir()
    assert smollm2.smollm2_folder() == folder and (folder / "model").read_text() == "new"
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


# --- files ------------------------------------------------------------------------------------


def test_a_disk_that_is_full_keeps_the_file_that_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "trace.json"
    Trace().save(path)
    before = path.read_bytes()
    trace = Trace()
    trace.add(StepRecord(0, 0.0, 1.0, [("a", 0, 1)]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        refused(lambda: trace.save(path), "No space left", (OSError,))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    trace.save(path)
    assert path.read_bytes() != before and list(tmp_path.iterdir()) == [path]


def test_where_no_file_can_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "where"):
        refused(lambda path=path: Trace().save(path), path.name, (OSError,))
    files.save(os.devnull, "a device stays a device")
    assert not Path(os.devnull).is_file()


LOADERS = {
    "mini-vllm-trace": Trace.load,
    "mini-vllm-replay": trace_program.load,
    "mini-vllm-bench": load_results,
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot read"),
        (b"\xff\xfe", "cannot read"),
        (b'{"format": "mini-v', "cannot read"),
        (b"[]", "is not a mini-vllm-"),
        (b'{"format": "NAME", "version": 99}', "has version 99, expected 1"),
        (b'{"format": "NAME", "version": "1"}', "has version '1', expected 1"),
        (b'{"format": "NAME", "version": 1, "steps": [NaN]}', "NaN is not a number"),
        (b"[" * 100_000, "cannot read"),
    ],
)
def test_files_that_are_something_else(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content.replace(b"NAME", name.encode()))
    refused(lambda: LOADERS[name](path), says)
    refused(lambda: LOADERS[name](tmp_path / "nowhere"), "cannot read")


@pytest.mark.parametrize(
    "steps",
    [
        *(None, 5, [5], [{"x": 1}], [{"slices": [], "nonsense": 1}]),
        *([{"slices": [["a", 1]]}], [{"slices": [["a", 0, "x"]]}]),
    ],
)
@pytest.mark.parametrize("name", ["mini-vllm-trace", "mini-vllm-replay"])
def test_a_trace_whose_steps_are_none(tmp_path: Path, name: str, steps: Any) -> None:
    content = {"format": name, "version": 1, "steps": steps}
    (tmp_path / "trace.json").write_text(json.dumps(content))
    refused(lambda: LOADERS[name](tmp_path / "trace.json"), "has a step that is none")


@pytest.mark.parametrize("change", [{"rows": 5}, {"rows": [{}]}, {"machine": None}, {"columns": 5}])
def test_a_result_that_lacks_something(
    tmp_path: Path, capsys: pytest.CaptureFixture, change: dict[str, Any]
) -> None:
    content = json.loads((ROOT / "docs" / "assets" / "bench" / "stall.json").read_text()) | change
    content.pop("machine" if content["machine"] is None else "date")
    path = tmp_path / "stall.json"
    path.write_text(json.dumps(content))
    assert bench_program.main(["compare", str(path), str(path)]) == 2
    said = capsys.readouterr().err
    print(f"    {said.strip()}")
    assert said.count("\n") == 1 and "is not as a benchmark writes it" in said


@pytest.mark.parametrize("most", ["5", 0, -1, 1.5, True, math.nan, []])
def test_a_trace_of_no_steps(most: Any) -> None:
    refused(lambda: Trace(max_steps=most), f"got {most!r}")


def test_a_step_that_has_no_time() -> None:
    refused(lambda: Trace().add(StepRecord(0, math.nan, math.nan, [])), "nan")


# --- notebooks --------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [None, 5, {}, [5], [{}], [{"role": "user"}]])
def test_what_is_no_conversation(tiny: Any, messages: Any) -> None:
    refused(lambda: chat_prompt(tiny.tokenizer, messages), "messages are text or a list")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "content of a message is text or a list of parts, got None"),
        (5, "content of a message is text or a list of parts, got 5"),
        ([], "content of a message is text or a list of parts, got []"),
        (["hi"], "a part of a message's content has a type, got 'hi'"),
        ([{"text": "hi"}], "a part of a message's content has a type"),
        ([{"type": "text"}], "the text of a message's part must be a string, got None"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "got a part 'image_url'"),
        ([{"type": "text", "text": HALF}], "not valid Unicode"),
        ("a" * 5000 + HALF, "character 5000 of 5001"),
    ],
)
def test_contents_that_are_no_text(tiny: Any, content: Any, says: str) -> None:
    refused(lambda: chat_prompt(tiny.tokenizer, [{"role": "user", "content": content}]), says)


def test_roles_that_are_none_and_messages_without_a_template(tiny: Any) -> None:
    messages = [{"role": None, "content": "hi"}]
    refused(lambda: chat_prompt(tiny.tokenizer, messages), "the role of a message must be a string")
    refused(lambda: chat_prompt(None, [{"role": "user", "content": "hi"}]), "no chat template")
    refused(lambda: chat_prompt(tiny.tokenizer, "x" * 10**5 + HALF), "character 100000 of 100001")
    refused(lambda: chat_prompt(tiny.tokenizer, [{"x": "y" * 10**5}]), "...")


def test_text_parts_are_joined(tiny: Any) -> None:
    """A list of parts used to go into the prompt as Python writes it."""
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    got = chat_prompt(tiny.tokenizer, [{"role": "user", "content": parts}])
    assert got == chat_prompt(tiny.tokenizer, "hi\nthere")


@pytest.mark.parametrize("tokenizer", [None, 5, "tiny", []])
def test_an_example_without_a_tokenizer(tokenizer: Any) -> None:
    refused(lambda: example(tokenizer), f"needs a tokenizer, got {tokenizer!r}")


@pytest.mark.parametrize("number", [None, 0, -5, 2.5, True, "9", math.nan])
def test_an_example_of_no_length(tiny: Any, number: Any) -> None:
    refused(lambda: example(tiny.tokenizer, document_tokens=number), "document_tokens must be")
    if number is not None:
        refused(lambda: example(tiny.tokenizer, max_tokens=number), "max_tokens must be")


# --- programs ---------------------------------------------------------------------------------


def stage(argv: list[str]) -> int:
    return stage_program(LAST.LLMEngine, ["--model", "tiny", "--num-blocks", "64", *argv])


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "stage": stage,
    "bench": bench_program.main,
    "demo": demo_program.main,
    "trace": trace_program.main,
    "start": start_program.main,
    "propagate": propagate_program.main,
}


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("stage x --temperature nan", 2, "temperature must be finite"),
        ("stage x --top-p inf", 2, "top_p must be finite"),
        ("stage x --max-tokens 1e3", 2, "1e3"),
        ("stage x --seed 99999999999999999999", 2, "seed must be 18446744073709551615 or less"),
        ("stage x --num-blocks 99999999999", 2, "num_blocks must be an integer from 1 to"),
        ("stage x --num-blocks 2147483647", 1, "bytes; cpu has"),
        ("stage x --target-step-ms 1e999", 2, "target_step_ms must be a finite number"),
        ("stage x --trace no/such/folder/t.json", 2, "--trace no/such/folder/t.json: its folder"),
        ("stage x --attention-backend numb", 1, "there are auto, triton, numba, gather"),
        ("stage x --device mps", 1, "no engine for device 'mps'"),
        ("stage x --model tiny:what", 1, "no tiny model of architecture 'what'"),
        ("stage x --max-tokens 99999999999999999999", 1, "max_model_len is 1024"),
        (f"stage {HALF} --raw", 1, "not valid Unicode"),
        (f"stage {HALF}", 1, "not valid Unicode"),
        ("stage x --max-tokens 2 --trace /dev/full", 1, "No space left on device"),
        ("stage x --max-tokens 2 --trace /", 1, "Is a directory"),
        ("bench stall --model tiny:what", 2, "no tiny model of architecture 'what'"),
        ("bench stall --model tiny --out /dev/null", 1, "/dev/null"),
        ("bench stall --model tiny --text /nowhere", 2, "cannot read the text /nowhere"),
        ("bench goodput --rates nan", 2, "must be from 0.001 to 10000, got 'nan'"),
        ("bench goodput --rates 5 1 --model tiny", 2, "rates must grow"),
        ("bench simulate --shape ../x", 2, "no shape '../x'"),
        ("bench compare /nowhere /nowhere", 2, "cannot read /nowhere"),
        ("bench plots --out /nowhere", 1, ""),
        ("bench soak --requests 0", 2, "whole number from 1 to"),
        ("bench soak --model tiny:what", 2, "no tiny model of architecture 'what'"),
        ("demo --chunk nan", 2, "whole number from 16 to 8192, got 'nan'"),
        ("demo --max-tokens 999999999", 2, "got '999999999'"),
        ("demo --model tiny --max-tokens 5000", 2, "context of 1024 tokens allows 16 to"),
        ("demo --model tiny --out /dev/null", 1, "/dev/null"),
        ("demo --model tiny:what", 1, "no tiny model of architecture 'what'"),
        ("trace", 2, "command"),
        ("trace record nothing", 2, "there is no recording 'nothing'"),
        ("trace record --out /dev/null", 1, "/dev/null"),
        ("trace record --model tiny:what --out OUT", 1, "no tiny model of architecture 'what'"),
        ("start", 2, "usage: make start"),
        ("start 9 OUT/x", 2, "STAGE must be one of 01, 02, 03, 04, got '9'"),
        ("start 04 OUT", 2, "is there already"),
        ("start 04 /dev/null/x", 1, "Not a directory"),
        ("start 04 OUT/" + "x" * 300, 1, "File name too long"),
        ("propagate", 2, "there is no stage ''; there are 01, 02, 03, 04"),
        ("propagate ²", 2, "there is no stage '²'"),
        ("propagate 01 02", 2, "there is no stage '01 02'"),
    ],
)
def test_a_program_called_wrongly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    line: str,
    code: int,
    says: str,
) -> None:
    """One line, and the exit code: 2 for usage, 1 for failure."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(tmp_path)
    name, *argv = [word.replace("OUT", str(out)) for word in line.split(" ")]
    try:
        got = PROGRAMS[name](argv)
    except SystemExit as end:
        got = end.code
    said = capsys.readouterr().err
    assert got == code, said
    assert "Traceback" not in said
    lines = [one for one in said.splitlines() if "error: " in one or one.startswith("usage: make")]
    print(f"    exit {code}: {''.join(lines)}")
    assert len(lines) == (1 if says else 0) and says in "".join(lines), said
    assert list(out.iterdir()) == []


def interrupt(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "function", "line"),
    [
        (soak, "load_model", "bench soak"),
        (compare, "load", "bench compare a b"),
        (trace_program, "record_all", "trace record"),
        (demo_program, "run", "demo"),
    ],
)
def test_ctrl_c_ends_every_program_alike(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    module: ModuleType,
    function: str,
    line: str,
) -> None:
    monkeypatch.setattr(module, function, interrupt)

    name, *argv = line.split()
    assert PROGRAMS[name](argv) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_streams_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a terminal without columns, on which nothing would be seen."""
    monkeypatch.setenv("COLUMNS", "0")
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert finish(lambda: len(sys.stdin.read()) + sys.stdout.isatty()) == 0
    assert "COLUMNS" not in os.environ


def test_a_machine_without_git(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert propagate_program.main(["01"]) == 1
    assert "No such file or directory: 'git'" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "/nowhere", "README.md", "stages", "x" * 300, "a\0b"])
def test_an_engine_to_test_that_is_none(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, folder: str
) -> None:
    monkeypatch.setattr(request.config.option, "engine", folder)
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    refused(
        lambda: conftest.pytest_configure(request.config),
        f"--engine {folder!r}: there is no __init__.py",
        (pytest.UsageError,),
    )


def test_an_engine_in_another_checkout(request: pytest.FixtureRequest) -> None:
    """Then pytest loads the conftest.py of that one, too, with the same options."""
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    conftest.pytest_addoption(request.config._parser)


def test_ctrl_c_while_a_folder_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start_program, "take_out", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_program.start(start_program.ROOT, "01", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_before_the_first_line() -> None:
    command = [sys.executable, "-m", "shared.bench"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout and program.stderr
        program.stdout.close()
        assert program.wait() == 1
        assert program.stderr.read() == b""


# --- what need not be installed ---------------------------------------------------------------

WITHOUT = """
import dataclasses, importlib, pkgutil, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ("numba", "triton") else PathFinder.find_spec(
            name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import torch, shared
from shared import load_stage
from shared.engine.backends import load_kernels
from shared.models import inspect_model, load_model

for module in pkgutil.walk_packages(shared.__path__, "shared."):
    importlib.import_module(module.name)
tiny = load_model("tiny", "cpu")
shape = inspect_model(tiny.model)
for number in (1, 2, 3, 4):
    engine = load_stage(number).LLMEngine(tiny, num_blocks=8)
    assert engine.generate([[3, 4]], use_tqdm=False, sampling_params=shared.SamplingParams(
        max_tokens=2, ignore_eos=True))[0].finish_reason == "length"
for name, device in (("numba", "cpu"), ("triton", "cuda")):
    try:
        there = dataclasses.replace(shape, device=torch.device(device))
        load_kernels("stages.02_paged_attention", name, there)
    except ValueError as error:
        print(error)
"""


def test_without_numba_and_triton() -> None:
    """All modules are imported, all stages run, and the backends say what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"attention_backend '{name}' cannot run here: {name} is not installed; "
        f"run: pip install {name}"
        for name in ("numba", "triton")
    ]
