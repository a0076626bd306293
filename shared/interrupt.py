"""What Ctrl-C does while a program is still importing, before `programs.program.finish` runs."""

from __future__ import annotations

import sys
from types import TracebackType


def interrupted_import(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A `sys.excepthook` for the seconds before `finish`: Ctrl-C ends a program in the same way."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)
