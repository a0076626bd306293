"""A CUDA device that is not there, for the tests of what runs on one.

Its tensors say `cuda:0` and hold their values on the CPU. It keeps the rules of a real one, so that
it can disagree with the code under test: what mixes host and device is refused, what waits for the
device is counted, and what a graph cannot record is refused while one is recorded. It knows nothing
of time, streams that overlap, or rounding on a GPU.

    with cuda_device() as device:
        model = load_model("tiny", device="cuda")
        ...
        assert len(device.waits) == 1

- `guard`: the little that a CPU build of torch lacks, in C++;
- `tensors`: the tensors, and the rules for every operator;
- `runtime`: what `torch.cuda` answers, memory and graphs;
- `launches`: Triton's kernels, replaced behind their own argument checks.
"""

from .runtime import cuda_device
from .tensors import CudaTensor, Device

__all__ = ["CudaTensor", "Device", "cuda_device"]
