"""The command line of every stage: prompts in, streamed text out.

Takes the engine class; its options come from the stage's own `EngineConfig`, so that a stage
which adds an option has it on the command line, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from shared.engine import files
from shared.engine.prompts import chat_prompt
from shared.engine.sampling_params import SamplingParams

from .live import LiveAnswers
from .program import Parser, finish, log_to_stderr


def main(engine_class: Any, argv: Sequence[str] | None = None) -> int:
    """Run one engine on the prompts of the command line.

    Returns:
        The exit code: 0, 1 if something failed, 2 if the command line is wrong, 130 after Ctrl-C.
    """
    config_class = sys.modules[engine_class.__module__].EngineConfig
    parser = build_parser(config_class, f"python -m {engine_class.__module__.rpartition('.')[0]}")
    args = parser.parse_args(argv)
    options = engine_options(args, config_class)
    try:
        params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            max_tokens=args.max_tokens,
            stop=args.stop,
            stop_token_ids=args.stop_token_id,
        )
        config_class(**options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if args.prompts.count("-") > 1:
        parser.error("- reads one prompt from standard input and can be given once only")
    if args.trace and not Path(args.trace).resolve().parent.is_dir():
        parser.error(f"--trace {args.trace}: its folder does not exist")

    def program() -> int:
        log_to_stderr(logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        logging.getLogger("shared.engine.base").setLevel(logging.WARNING)  # not amid the answers
        if args.trace:
            files.try_out(args.trace)
        args.prompts = [read_stdin() if p == "-" else p for p in args.prompts]
        engine = engine_class(args.model, device=args.device, dtype=args.dtype, **options)
        return run(engine, args, params)

    return finish(program)


def read_stdin() -> str:
    """All of standard input, as text.

    Raises ValueError if there is none, or if it is not text.
    """
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} at {error.start}: {error.reason}"
        raise ValueError(f"standard input is not {error.encoding}: {wrong}") from error
    if not text:
        raise ValueError("standard input is empty or closed, and - reads the prompt from there")
    return text


def run(engine: Any, args: argparse.Namespace, params: SamplingParams) -> int:
    """Stream the answers to all prompts at once, then write what was asked for."""
    prompts = args.prompts
    if not args.raw:
        prompts = [chat_prompt(engine.tokenizer, prompt) for prompt in prompts]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    failed = False
    if len(ids) == 1:
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.new_text, end="", flush=True)
                failed |= output.finish_reason == "error"
        print(flush=True)
    else:
        titles = [prompt.strip().partition("\n")[0] for prompt in args.prompts]
        with LiveAnswers(titles) as answers:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    index = ids.index(output.request_id)
                    answers.update(index, output.text, output.finish_reason)
                    failed |= output.finish_reason == "error"
    if args.stats:
        for name, value in engine.stats().items():
            print(f"{name:>16}  {value}", file=sys.stderr)
    if args.trace is not None:
        engine.trace.save_chrome(args.trace)
        print(f"trace: {args.trace} (open it at ui.perfetto.dev)", file=sys.stderr)
    return int(failed)


def build_parser(config_class: Any, prog: str) -> Parser:
    """The options that all stages share, and one for each field of `config_class`."""
    parser = Parser(prog=prog, description="Answer prompts, streamed.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text; - reads it from stdin")
    parser.add_argument("--model", default="smollm2", help="a name, a hub name or a folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that together have this share (default 1: from all)",
    )
    parser.add_argument("--seed", type=int, help="makes sampling repeatable (default: random)")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="most tokens of an answer (default 256)"
    )
    parser.add_argument("--stop", action="append", help="end before this text; may be repeated")
    parser.add_argument(
        "--stop-token-id",
        type=int,
        action="append",
        metavar="ID",
        help="end at this token, beside the model's own end; may be repeated",
    )
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace")
    parser.add_argument("--stats", action="store_true", help="print the engine's counts at the end")
    add_engine_options(parser, config_class)
    return parser


def add_engine_options(parser: argparse.ArgumentParser, config_class: Any) -> None:
    """An option for each field of a stage's `EngineConfig`."""
    group = parser.add_argument_group("engine")
    hints, texts = get_type_hints(config_class), attribute_docs(config_class)
    for field in dataclasses.fields(config_class):
        flag = "--" + field.name.replace("_", "-")
        text = texts.get(field.name, "")
        if field.default is None:  # the command line has no way to say None
            text = text.replace("; None is ", "; by default ")
            text = text.replace("; None ", "; by default the engine ")
        else:
            text += f" (default {field.default})"
        text = text.replace("%", "%%")
        if hints[field.name] is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=None, help=text)
        else:
            kind = next((t for t in (int, float) if str(t.__name__) in str(hints[field.name])), str)
            group.add_argument(flag, type=kind, help=text)


def engine_options(args: argparse.Namespace, config_class: Any) -> dict[str, Any]:
    """Those that the command line has and `config_class` knows."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def attribute_docs(cls: Any) -> dict[str, str]:
    """The texts under `Attributes:` in a class's docstring, by name."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
