"""Tensors that hold their values on the CPU and say `cuda:0`, and the rules for every operator."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda:0")
ROOT = f"{Path(__file__).parent.parent.parent}/"
OURS = (f"{ROOT}stages/", f"{ROOT}shared/")
NOT_ASKED = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
aten = torch.ops.aten


class Allocation:
    """Bytes on the device, given back when no tensor is left that lies in them."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        device.allocated += num_bytes
        device.peak = max(device.peak, device.allocated)
        if device.allocated > device.total_memory - device.taken:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {num_bytes} bytes")

    def __del__(self) -> None:
        self.device.allocated -= self.num_bytes


class CudaTensor(Tensor):
    """`values`, a CPU tensor, as a tensor on the device. Views share their values' memory."""

    values: Tensor
    allocation: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, allocation: Allocation) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
        )
        made.values, made.allocation = values, allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of the device is used outside `cuda_device()`")

    def tolist(self) -> Any:
        """torch refuses it to subclasses; for any other tensor it copies to the host first."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.values!r})"


# Operators whose result, or its shape, is known to the host only after the device has come to it.
WAITING = {
    aten._local_scalar_dense.default: "a value is read (item, bool, int)",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "torch.equal",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.bincount.default: "bincount",
}
# Run as one operator, though torch has them as compositions: they ask for kernels of the device.
WHOLE = {aten.scaled_dot_product_attention.default, aten._grouped_mm.default}
# What a GPU does and the CPU does not: counting whole numbers.
INSTEAD = {
    aten.histc.default: lambda x, *args: torch.histc(x.float(), *args).to(x.dtype),
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# These take a number of the host, as operators that work element by element do.
TAKING_NUMBERS = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}


@functools.cache
def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return func not in WHOLE and has_kernel(func.name(), "CompositeImplicitAutograd")


class Device(TorchDispatchMode):
    """All that happens on the device, while it is entered.

    Args:
        capability: compute capability, (9, 0) for sm_90.
        total_memory: bytes of the card; `taken` of them are in use by others.

    Attributes:
        waits: what made the host wait for the device, and where: "nonzero at file.py:3 in f".
        launches: the names of the kernels launched.
        specialisations: what Triton would have compiled, and the launch that asked for it first.
        allocated, peak: bytes in tensors now, and at most.
        recording: the operations of the graph being recorded, if one is.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        total_memory: int = 2**33,
        num_processors: int = 132,
    ) -> None:
        super().__init__()
        self.capability, self.num_processors = capability, num_processors
        self.total_memory, self.taken = total_memory, 0
        self.allocated = self.peak = 0
        self.waits: list[str] = []
        self.launches: list[str] = []
        self.specialisations: dict[Any, str] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.replays = 0
        self._allocations: weakref.WeakValueDictionary[int, Allocation] = (
            weakref.WeakValueDictionary()
        )
        self._pinned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.generators: set[int] = set()  # addresses of the device's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and guarding against it takes time

    # --- rules -------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """Count that the host waits here; refuse it while a graph is recorded."""
        if self.recording is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )
        self.waits.append(f"{what} at {_place()}")

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._pinned.get(tensor.untyped_storage().data_ptr()) is not None

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        """Refuse tensors of the host among those of the device; numbers (0-dim) may be mixed in."""
        for tensor in tensors:
            if not isinstance(tensor, CudaTensor):
                is_number = tensor.dim() == 0 and (
                    torch.Tag.pointwise in func.tags or func in TAKING_NUMBERS
                )
                if not is_number:
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two "
                        f"devices, cuda:0 and cpu! ({func}, a CPU tensor {tuple(tensor.shape)})"
                    )

    def _check_indices(self, func: Any, source: Tensor, indices: list[Any]) -> list[Any]:
        """Indices on the device; those of the host are copied there, which waits."""
        found = []
        for index in indices:
            if index is not None:
                if isinstance(index, CudaTensor) and not isinstance(source, CudaTensor):
                    raise RuntimeError(
                        "indices should be either on cpu or on the same device as the indexed "
                        "tensor (cpu)"
                    )
                if not isinstance(index, CudaTensor):
                    self.wait("an index is copied from pageable memory")
                    index = self.wrap(index.clone())
                if index.dtype in (torch.bool, torch.uint8):
                    self.wait("a boolean index")
            found.append(index)
        return found

    # --- operators ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        on_device = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        made_on = kwargs.get("device")
        made_on_device = made_on is not None and torch.device(made_on).type == "cuda"
        if not on_device and not made_on_device:
            return self._on_host(func, args, kwargs)
        if tensors and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)

        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in self.generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if generator is not None and self.recording is not None:
            raise RuntimeError("a generator that the graph does not know, while it is recorded")
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func in INDEXING:
            args = (args[0], self._check_indices(func, args[0], args[1]), *args[2:])
            values = [args[2]] if len(args) > 2 else []
            if any(not isinstance(v, CudaTensor) and v.dim() for v in values):
                self._check_devices(func, values)
        else:
            self._check_devices(func, tensors)
        if func in WAITING:
            self.wait(WAITING[func])
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without its output_size")
        if made_on is not None:
            if not made_on_device:
                raise NotImplementedError(f"{func} from the device to {made_on}")
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        return self.do(INSTEAD.get(func, func), args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Only pinned memory concerns the device: which tensors lie in it."""
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func in (aten._pin_memory.default, aten.pin_memory.default):
            return self.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _to_copy(self, source: Tensor, *, device: Any = None, **options: Any) -> Tensor:
        """To another dtype, or between host and device."""
        non_blocking = options.pop("non_blocking", False)
        options.pop("pin_memory", None)
        target = source.device if device is None else torch.device(device)
        if isinstance(source, CudaTensor):
            if target.type == "cpu":
                if source.numel():
                    self.wait("a copy to the host")
                with _disable_current_modes():
                    return aten._to_copy.default(source.values, **options)
        else:
            self._upload(source, non_blocking)
        return self.do(aten._to_copy.default, (source,), options)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(target, CudaTensor):
            if not (non_blocking and self.is_pinned(target)):
                self.wait("a copy to the host")
            self.do(aten.copy_.default, (target, source), {})
            return target
        if not isinstance(source, CudaTensor):
            self._upload(source, non_blocking)
        return self.do(aten.copy_.default, (target, source), {})

    def _upload(self, source: Tensor, non_blocking: bool) -> None:
        if not self.is_pinned(source):
            self.wait("a copy from pageable memory")
        elif not non_blocking:
            self.wait("a copy from pinned memory that is waited for")

    def do(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func` on the values; record it, if a graph is being recorded."""
        holders = {id(t.values): t for t in _tensors((*args, *kwargs.values())) if _is_ours(t)}
        args, kwargs = _map(args), {name: _map(value) for name, value in kwargs.items()}
        if self.recording is not None:  # a number is passed by value: a replay has the old one
            args = tuple(
                a.clone() if isinstance(a, Tensor) and a.dim() == 0 and id(a) not in holders else a
                for a in args
            )
        made = func(*args, **kwargs)  # no mode sees it: torch leaves this one within its handler
        if self.recording is not None:
            self._record(func, args, kwargs, made)
        return self._wrap_all(made, holders)

    def do_launch(self, compute: Callable[[], None]) -> None:
        """Run a kernel of Triton's, which writes where its pointers lead."""
        with _disable_current_modes():
            compute()
        if self.recording is not None:
            self.recording.append(compute)

    def _record(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        given = {t.untyped_storage().data_ptr() for t in _tensors((*args, *kwargs.values()))}
        outputs = list(_tensors((made,)))
        fresh = [t.untyped_storage().data_ptr() not in given for t in outputs]
        schema = getattr(func, "_schema", None)
        if outputs and not any(fresh) and not (schema and schema.is_mutable):
            return  # a view; what it looks at will be there
        assert self.recording is not None

        def again() -> None:
            results = _tensors((func(*args, **kwargs),))
            for output, result, is_fresh in zip(outputs, results, fresh, strict=True):
                if is_fresh:
                    output.copy_(result)

        self.recording.append(again)

    def wrap(self, values: Tensor, holders: dict[int, CudaTensor] | None = None) -> Tensor:
        holder = (holders or {}).get(id(values))
        if holder is not None:  # changed in place
            assert holder.shape == values.shape, "an operator that changes a shape in place"
            return holder
        memory = values.untyped_storage()
        allocation = self._allocations.get(memory.data_ptr())
        if allocation is None:
            allocation = Allocation(self, memory.nbytes())
            if memory.data_ptr():
                self._allocations[memory.data_ptr()] = allocation
        if values.is_inference() == torch.is_inference_mode_enabled():
            return CudaTensor(values, allocation)
        with torch.inference_mode(values.is_inference()):  # a view of what was made outside
            return CudaTensor(values, allocation)

    def _wrap_all(self, made: Any, holders: dict[int, CudaTensor]) -> Any:
        if isinstance(made, Tensor):
            return self.wrap(made, holders)
        if isinstance(made, (tuple, list)):
            return type(made)(self._wrap_all(item, holders) for item in made)
        return made


def _is_ours(value: Any) -> bool:
    return isinstance(value, CudaTensor)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in arguments, and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _map(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.values
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item) for item in value)
    return value


def _place() -> str:
    """The line of this repository that is at work, tests apart; else the innermost one."""
    frame: Any = sys._getframe(1)
    other = ""
    while frame is not None:
        name = frame.f_code.co_filename
        where = f"{frame.f_lineno} in {frame.f_code.co_name}"
        if name.startswith(OURS):
            return f"{name.removeprefix(ROOT)}:{where}"
        if not other and not name.startswith(NOT_ASKED):
            other = f"{name.rpartition('/')[2]}:{where}"
        frame = frame.f_back
    return other
