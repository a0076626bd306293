"""What no stage is about: models, sampling, text, command line, traces, benchmarks."""

import sys

from .outputs import RequestOutput
from .program import interrupted_import
from .sampling_params import SamplingParams
from .stages import load_stage

__all__ = ["RequestOutput", "SamplingParams", "load_stage"]

if sys.argv[:1] == ["-m"]:  # which it is while `python -m` imports one of our programs
    sys.excepthook = interrupted_import
