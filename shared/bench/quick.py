"""The quick set: ladder, stall and chunk sizes in small, then the pictures (`make bench`)."""

from __future__ import annotations

import argparse

from rich.console import Console

from .options import Parser


def add_options(parser: Parser) -> None:
    """Its own options."""
    parser.add_argument("--model", default="smollm2", help="as for the stages")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", default="build/bench", metavar="DIR", help="where results go")


def main(args: argparse.Namespace, console: Console) -> int:
    """Run each in this process, so that the model is loaded once. Stops at the first failure."""
    from .__main__ import main as run

    common = ["--quick", "--model", args.model, "--device", args.device, "--out", args.out]
    for name, *own in (["ladder"], ["stall"], ["sweeps", "--of", "chunk"]):
        code = run([name, *common, *own])
        if code:
            return code
    return run(["plots", "--out", args.out])
