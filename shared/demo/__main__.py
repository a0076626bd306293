"""The decode stall, and how it goes: the same traffic through stage 03 and stage 04.

Four chats are streaming when a document of about 3,000 tokens arrives. `python -m shared.demo`
serves that with one stage after the other on one model, live in the terminal, and ends with a
table and a picture. `--plain`, or output that goes to no terminal, prints a line per event.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shared.programs.options import whole
from shared.programs.program import Parser, finish
from shared.stages import STAGES, load_stage

if TYPE_CHECKING:
    from shared.measure.episode import Arrival, Episode
    from shared.models import LoadedModel

BLOCK_SIZE = 16
MIN_DOCUMENT = 200


class OutOfRange(ValueError):
    """An option that does not fit the loaded model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit code: 0; 1 if something failed or the stages' texts differ; 2 if the command line
        is wrong; 130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    return finish(lambda: run(args), usage_errors=OutOfRange)


def build_parser() -> Parser:
    """The demo's options."""
    parser = Parser(
        prog="python -m shared.demo",
        description="Four chats are streaming when a long document arrives: watch them wait, "
        "stage by stage.",
    )
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=list(STAGES),
        default=[3, 4],
        help="which, one after the other (default 3 4)",
    )
    parser.add_argument("--model", default="smollm2", help="a name, a hub name or a folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16 or float16 (default auto: float32 on a CPU)",
    )
    parser.add_argument(
        "--chunk",
        type=whole(16, 8192),
        default=256,
        help="most prompt tokens in a step of stage 04 (default 256)",
    )
    parser.add_argument(
        "--document-tokens",
        type=whole(MIN_DOCUMENT, 100_000),
        help="prompt tokens of the document (default 3000, or what the model has room for)",
    )
    parser.add_argument(
        "--max-tokens", type=whole(16, 10_000), default=112, help="of each chat (default 112)"
    )
    parser.add_argument("--plain", action="store_true", help="a line per event, for logs")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder of the picture (build/demo)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve the example with each stage, show it, and compare; returns the exit code.

    Raises:
        OutOfRange: the model has no room for the lengths that were asked for.
    """
    plain = args.plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    console = Console(color_system=None, force_terminal=False) if plain else Console()
    args.out.mkdir(parents=True, exist_ok=True)  # fails now if it must, not after minutes

    # 1. One model and one traffic for all stages. Imported late: wrong options are told at once.
    print(f"loading {args.model} ...", flush=True)
    from transformers.utils.logging import disable_progress_bar

    from shared.draw.gaps import plot_gaps
    from shared.measure.episode import serve, warm_up
    from shared.models import load_model

    from .view import LiveView, PlainView, results

    disable_progress_bar()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    arrivals = prepare(loaded, args)

    # 2. The stages, one after the other.
    episodes: list[Episode] = []
    for number in args.stages:
        label = f"stage {number:02d}"
        print(f"warming up {label} ...", flush=True)
        engine = make_engine(number, loaded, arrivals, args.chunk)
        warm_up(engine, arrivals, args.chunk)
        title = (load_stage(number).__doc__ or label).splitlines()[0]
        before = {e.label: e.longest_gap.seconds for e in episodes}
        view = (PlainView if plain else LiveView)(console, engine, title, arrivals, before)
        with view:
            episodes.append(
                serve(engine, arrivals, label, title.split(":")[0], view.arrived, view.stepped)
            )
        del engine, view  # the KV cache goes before the next one comes

    # 3. What came of it.
    differences, ties = compare(episodes, loaded.model)
    console.print(results(episodes, caption(episodes, differences, ties, loaded.model)))
    path = (args.out / "decode-stall.png").resolve()
    plot_gaps(episodes, path)
    print(f"picture: {path}")
    if differences:
        print(f"error: the texts differ: {differences[0]}", file=sys.stderr)
    return int(bool(differences))


def prepare(loaded: LoadedModel, args: argparse.Namespace) -> list[Arrival]:
    """The requests, cut to lengths that fit into the model's context.

    Raises:
        OutOfRange: it has no room for what was asked.
    """
    from shared.measure.episode import SUMMARY_TOKENS, build_arrivals
    from shared.models import inspect_model

    model, tokenizer = loaded
    context = inspect_model(model).max_model_len
    room = context - SUMMARY_TOKENS
    document_tokens = min(3000, room) if args.document_tokens is None else args.document_tokens
    if not MIN_DOCUMENT <= document_tokens <= room:
        raise OutOfRange(
            f"argument --document-tokens: this model's context of {context} tokens allows "
            f"{MIN_DOCUMENT} to {room}, got {document_tokens}"
        )
    before_document = args.max_tokens // 4
    arrivals = build_arrivals(tokenizer, document_tokens, args.max_tokens, before_document)
    room = context - max(len(a.prompt_token_ids) for a in arrivals if not a.is_document)
    if args.max_tokens > room:
        raise OutOfRange(
            f"argument --max-tokens: this model's context of {context} tokens allows "
            f"16 to {room}, got {args.max_tokens}"
        )
    return arrivals


def make_engine(number: int, loaded: LoadedModel, arrivals: Sequence[Arrival], chunk: int) -> Any:
    """An engine with blocks for everything, so that nothing is preempted."""
    lengths = [len(a.prompt_token_ids) + a.max_tokens for a in arrivals]
    options = {
        "block_size": BLOCK_SIZE,
        "num_blocks": sum(-(-length // BLOCK_SIZE) for length in lengths),
        "max_num_batched_tokens": max(8192, *lengths),
    }
    if number == 4:
        options["max_prefill_chunk_size"] = chunk
    return load_stage(number).LLMEngine(loaded, **options)


def compare(episodes: Sequence[Episode], model: Any) -> tuple[list[str], list[str]]:
    """Where the stages' texts differ, and where they do so at a tie, which rounding explains.

    In 16 bits two logits are often that close, and then the shape of the batch decides.
    """
    from shared.measure.agreement import NEAR_TIE, Agreement
    from shared.measure.baselines import logit_gap

    tolerance = NEAR_TIE[str(model.dtype).removeprefix("torch.")]
    agreement = Agreement(functools.partial(logit_gap, model), tolerance)
    differences: list[str] = []
    ties: list[str] = []
    for episode in episodes:
        new_differences, new_ties = agreement.check(episode.label, list(episode.outputs.values()))
        differences += new_differences
        ties += new_ties
    return differences, ties


def caption(
    episodes: Sequence[Episode], differences: Sequence[str], ties: Sequence[str], model: Any
) -> str:
    """The line under the table: whether the texts were the same, the dtype and the machine."""
    import torch

    said = []
    stages = "both stages" if len(episodes) == 2 else f"all {len(episodes)} stages"
    if differences:
        said.append(f"The texts DIFFER: {differences[0]}.")
    elif ties:
        said.append(f"The texts are the same in {stages} until rounding decides a tie: {ties[0]}.")
    elif len(episodes) > 1:
        said.append(f"The texts of all five requests are the same in {stages}.")
    if model.device.type == "cuda":
        machine = torch.cuda.get_device_name(model.device)
    else:
        machine = f"CPU threads: {torch.get_num_threads()}"
    dtype = str(model.dtype).removeprefix("torch.")
    said.append(f"Greedy, {dtype}, {machine}, torch {torch.__version__}.")
    return " ".join(said)


if __name__ == "__main__":
    sys.exit(main())
