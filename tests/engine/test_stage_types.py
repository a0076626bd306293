"""What an editor knows of a stage: `shared/stages.pyi` says what the stages' code says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from mypy import api

from shared import load_stage

ROOT = Path(__file__).resolve().parents[2]


def method(engine_class: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(f for f in engine_class.body if isinstance(f, ast.FunctionDef) and f.name == name)


def attributes(text: str | None, heading: str) -> dict[str, str]:
    """The entries under a heading of a docstring, by name."""
    _, _, section = inspect.cleandoc(text or "").partition(f"{heading}:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_stub_has_the_options_of_the_stage(number: int) -> None:
    """Names, order, types, defaults and docs of the constructor; the parameters of add_request."""
    tree = ast.parse((ROOT / "shared/stages.pyi").read_text(encoding="utf-8"))
    found = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == f"Engine{number}"
    )
    stage = load_stage(number)

    init = method(found, "__init__")
    options = [
        (arg.arg, ast.unparse(arg.annotation), ast.literal_eval(default))
        for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    ]
    fields = dataclasses.fields(stage.EngineConfig)
    given = [("device", "Any", "auto"), ("dtype", "Any", "auto")]
    assert options == given + [(f.name, f.type, f.default) for f in fields]

    docs = attributes(ast.get_docstring(init, clean=False), "Args")
    assert {f.name: docs[f.name] for f in fields} == attributes(
        stage.EngineConfig.__doc__, "Attributes"
    )

    parameters = inspect.signature(stage.LLMEngine.add_request).parameters
    assert [arg.arg for arg in method(found, "add_request").args.args] == list(parameters)
    public = {n for n, f in vars(stage.LLMEngine).items() if inspect.isfunction(f) and n[0] != "_"}
    stubbed = {f.name for f in found.body if isinstance(f, ast.FunctionDef)}
    assert public - stubbed <= {"stats"}  # typed in the base


def test_a_type_checker_knows_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports a misspelt method and option, and knows what a stream gives."""
    script = tmp_path / "script.py"
    script.write_text(
        "from shared import load_stage\n"
        "engine = load_stage(4).LLMEngine(model='tiny', max_prefill_chunk_size=256)\n"
        "engine.generat()\n"
        "reveal_type(engine.stream('hi'))\n"
        "load_stage(1).LLMEngine(enable_prefix_caching=True)\n"
    )
    monkeypatch.chdir(ROOT)
    said, errors, _ = api.run(
        ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports", str(script)]
    )
    assert not errors, errors
    lines = re.findall(r"script\.py:(\d): (.*)", said)
    assert [int(number) for number, _ in lines] == [3, 4, 5, 5], said
    assert '"Engine4" has no attribute "generat"' in lines[0][1]
    assert "Iterator[shared.engine.outputs.RequestOutput]" in lines[1][1]
    assert 'Unexpected keyword argument "enable_prefix_caching" for "Engine1"' in lines[2][1]
