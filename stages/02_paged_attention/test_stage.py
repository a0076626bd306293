"""The contract, on this stage."""

from tests.contract import *
from tests.contract.backends import *
from tests.contract.whole_prompts import *
