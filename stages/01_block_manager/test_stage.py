"""Stage 01 keeps the contract of all stages."""

from tests.contract import *  # noqa: F403
