"""The contract, on this stage."""

from tests.contract import *
