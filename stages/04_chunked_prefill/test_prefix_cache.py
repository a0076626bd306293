"""The prefix cache once more: this stage's scheduler calls the block manager of stage 03."""

from tests.contract.prefix_cache import *  # noqa: F403
