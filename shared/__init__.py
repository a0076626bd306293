"""What all stages use: models, sampling, text, command line, traces, benchmarks."""

import sys

from . import waiting as _waiting  # noqa: F401  # isort: skip  # before torch is imported

from .engine.outputs import RequestOutput
from .engine.sampling_params import SamplingParams
from .interrupt import interrupted_import
from .stages import load_stage

__all__ = ["RequestOutput", "SamplingParams", "load_stage"]

if sys.argv[:1] == ["-m"]:  # which it is while `python -m` imports one of our programs
    sys.excepthook = interrupted_import
