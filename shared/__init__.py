"""What no stage is about: models, sampling, text, command line, traces, benchmarks."""

from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .stages import load_stage

__all__ = ["RequestOutput", "SamplingParams", "load_stage"]
