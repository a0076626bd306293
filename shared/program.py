"""How every program of this project ends: with an exit code and at most one line, no traceback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

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
    try:
        code = program()
        sys.stdout.flush()  # if the reader has gone, it shows here and not after the last line
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EXPECTED as error:
        logging.getLogger(__name__).debug("failed", exc_info=True)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"error: {reason}", file=sys.stderr)
        return 2 if isinstance(error, usage_errors) else 1
