"""The contract, on this stage; the random schedules also share prefixes under salts."""

from typing import Any

import pytest

from tests.contract import *
from tests.contract.backends import *
from tests.contract.whole_prompts import *


@pytest.fixture
def oracle_options() -> dict[str, list[Any]]:
    return {"enable_prefix_caching": [True, True, True, False]}


@pytest.fixture
def oracle_request_options() -> dict[str, list[Any]]:
    return {"cache_salt": ["", "", "", "a", "b"]}
