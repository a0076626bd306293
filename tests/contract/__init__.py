"""What every stage keeps: `from tests.contract import *` in a stage's test file runs all of it."""

from .memory import *  # noqa: F403
