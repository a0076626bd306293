"""The contract, on this stage; the random schedules also choose how prompts are cut."""

from typing import Any

import pytest

from tests.contract import *
from tests.contract.backends import *


@pytest.fixture
def oracle_options() -> dict[str, list[Any]]:
    return {
        "enable_prefix_caching": [True, True, True, False],
        "max_prefill_chunk_size": [1, 2, 3, 4, 5, 7, 32],
        "max_decode_share": [None, None, 0.5],
        "reserve_full_prompt": [False, False, True],
    }


@pytest.fixture
def oracle_request_options() -> dict[str, list[Any]]:
    return {"cache_salt": ["", "", "", "a", "b"]}
