"""`python -m shared.bench NAME [options]`: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from shared.programs.program import Parser, finish, log_to_stderr

from . import options
from .results import Report
from .session import Session

# In the order in which they are listed. A benchmark is a module with `add_options(parser)` and
# `run(session)`; a tool has `main(args, console)` instead of `run`.
NAMES = (
    *("quick", "ladder", "throughput", "attention", "prefix", "stall", "sweeps", "bookkeeping"),
    *("goodput", "waiting", "serve", "simulate", "soak", "plots", "compare"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says.

    Returns:
        The exit code: 0; 1 if rows that must agree do not, or something failed; 2 if the command
        line is wrong; 130 after Ctrl-C, with what was measured until then printed and written.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in NAMES}
    parser = Parser(prog="python -m shared.bench", description="Measure what each stage buys.")
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in modules.items():
        command = commands.add_parser(name, help=first_line(module), description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        if hasattr(module, "run"):
            options.add_common(command)
        module.add_options(command)
    args = parser.parse_args(argv)

    def program() -> int:
        console = Console(width=None if sys.stdout.isatty() else 150)
        if args.name is None:
            for name, module in modules.items():
                console.print(f"  {name:12} {first_line(module)}", highlight=False, markup=False)
            console.print("\nOptions: python -m shared.bench NAME --help", highlight=False)
            return 0
        quiet_libraries()
        module = modules[args.name]
        if hasattr(module, "main"):
            return module.main(args, console)
        return measure(module, args, console, options.clean_command(argv))

    return finish(program, usage_errors=ValueError)


def measure(module: ModuleType, args: argparse.Namespace, console: Console, command: str) -> int:
    """Run a benchmark; print and write what it measured, however it ends."""
    Path(args.out).mkdir(parents=True, exist_ok=True)  # fails now if it must, not after minutes
    report = Report(args.name, command, args.seed, {"quick": args.quick})
    code = 130
    try:
        module.run(Session(args, report))
        report.complete = True
        code = 1 if report.failures else 0
    except KeyboardInterrupt:
        print("\nstopped: what follows was measured until then", file=sys.stderr)
    finally:
        if report.rows():
            if hasattr(module, "conclude"):
                module.conclude(report)
            report.print(console)
            path = report.save(args.out)
            console.print(f"written: {path}", highlight=False, markup=False)
    return code


def first_line(module: ModuleType) -> str:
    """What a module says of itself, in short."""
    return (module.__doc__ or "").strip().splitlines()[0].rstrip(".")


def quiet_libraries() -> None:
    """Warnings go to stderr; what transformers says about every `generate()` goes nowhere."""
    import transformers

    log_to_stderr(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
