"""How every program here ends: with an exit code and one line at most, without a traceback."""

from __future__ import annotations

import argparse
import difflib
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

EXPECTED = (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def finish(
    program: Callable[[], int], usage_errors: type[Exception] | tuple[type[Exception], ...] = ()
) -> int:
    """Run a program to its end.

    Args:
        usage_errors: what it raises if it was called wrongly.

    Returns:
        What it returns; 1 if it failed, 2 if it was called wrongly, 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what it cannot show
    _open_streams()
    try:
        code = program()
        sys.stdout.flush()  # if the reader has gone, it shows here and not after the last line
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader is gone, so no message would arrive
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EXPECTED as error:
        logging.getLogger(__name__).debug("failed", exc_info=True)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"error: {reason}", file=sys.stderr)
        return 2 if isinstance(error, usage_errors) else 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short: one line of usage, what is wrong, and the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with code 2."""
        words = re.findall(r"unrecognized arguments: (--?[\w-]+)", message)
        near = [
            other for word in words for other in difflib.get_close_matches(word, self._flags(), n=1)
        ]
        hint = f" (did you mean {near[0]}?)" if near else ""
        print(f"usage: {self.prog} ...; --help lists the options", file=sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def _flags(self) -> list[str]:
        """All options, those of the commands included."""
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                commands: dict[str, Any] = action.choices
                flags += [flag for command in commands.values() for flag in command._flags()]
        return flags


def _open_streams() -> None:
    """Replace standard streams that the caller closed (`>&-`), and ignore `COLUMNS=0`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if os.environ.get("COLUMNS") == "0":  # rich would print nothing at all
        del os.environ["COLUMNS"]


def log_to_stderr(level: int) -> None:
    """Show log records from `level` on, one line each, on standard error."""
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(
        console=Console(stderr=True), show_time=False, show_path=False, show_level=False
    )
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
