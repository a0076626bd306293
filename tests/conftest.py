"""What the tests measured, told once more at the end of the run."""

from __future__ import annotations

import pytest

DECODE_STALL = "{:>5}  {:>4}  {:>6}  {:>5}  {:>6}  {:>15}  {:>6}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what `test_decode_stall.py` recorded with `record_property`, passed or failed.

    "seen": tokens of the document that an earlier request had; "cached": how many of them the
    stage found again.
    """
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    rows = [
        value
        for report in reports
        for name, value in report.user_properties
        if name == "decode_stall" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("decode stall: most tokens computed between two of a chat")
        header = ("stage", "seen", "cached", "chunk", "budget", "prompt + others", "tokens")
        for row in [header, *rows]:
            terminalreporter.line(DECODE_STALL.format(*row))
