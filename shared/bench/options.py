"""Options of the benchmarks: what they may be, said when they are not."""

from __future__ import annotations

import argparse
from typing import Any

from shared.programs.options import whole

Parser = argparse.ArgumentParser


def add_common(parser: Parser) -> None:
    """What every benchmark understands."""
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes")
    parser.add_argument("--model", default="smollm2", help="as for the stages")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--out", default="build/bench", metavar="DIR", help="where the JSON goes")
    parser.add_argument("--seed", type=whole(0, 2**31), default=0)
    parser.add_argument("--text", metavar="FILE", help="take prompts from this text")
    parser.add_argument(
        "--rounds", type=whole(1, 100), help="measure each row so often; medians are shown"
    )


def add_stages(parser: Parser, default: list[int]) -> None:
    """Which stages; `default` if none are named."""
    parser.add_argument(
        *("--stages", "-s"),
        type=int,
        nargs="+",
        choices=(1, 2, 3, 4),
        default=default,
        help=f"default: {' '.join(map(str, default))}",
    )


def sizes(args: argparse.Namespace, full: dict[str, Any], quick: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a run: the full ones, or with --quick what differs then."""
    return {**full, **quick} if args.quick else full


def clean_command(argv: list[str]) -> str:
    """The command as typed, without folders: results name no path of a machine."""
    words = ["python", "-m", "shared.bench"]
    skip = False
    for word in argv:
        if skip or word.startswith("--out="):
            skip = False
        elif word == "--out":
            skip = True
        else:
            option, equals, value = word.rpartition("=")
            words.append(option + equals + base_name(value))
    return " ".join(words)


def base_name(name: str) -> str:
    """The last part of a path; a name on the Hugging Face hub (`owner/model`) stays as it is."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2] if is_path else name
