"""Arrays on the GPU: torch, CuPy, JAX, or any with `__cuda_array_interface__` or `__dlpack__`.

Nothing here imports these libraries: a caller with a torch tensor has loaded torch. An adapter describes an array and
its owner's stream (`stream`, `describe`) and allocates new ones (`empty`).
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import importlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from onchip.errors import DeviceError, InputError
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype
from onchip.runtime.arrays import dlpack
from onchip.runtime.arrays.overlap import is_apart
from onchip.runtime.cuda.gpu import Buffer, Event, Gpu
from onchip.runtime.io.host_rows import HostRowsError

LEGACY_STREAM = 1  # CUDA's legacy default stream, which synchronises with all blocking streams


@dataclass(frozen=True, eq=False)
class ArrayView:
    """An array as the driver sees it."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str  # a name in DTYPE_BYTES, or the library's own name
    is_row_major: bool
    device_index: int
    is_writable: bool = True
    owner: object = None  # keeps the memory alive, if the array alone does not

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 0)

    def overlaps(self, other: ArrayView) -> bool:
        return not is_apart(self.pointer, self.nbytes, other.pointer, other.nbytes)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Scratch:
    pointer: int
    owner: object  # keeps the memory alive


class ArrayAdapter(abc.ABC):
    """The arrays of one library."""

    name = ""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @abc.abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether x is an array of this kind."""

    @abc.abstractmethod
    def stream(self, x: Any) -> int:
        """The stream for work on x: the caller's, if the library exposes it."""

    @abc.abstractmethod
    def describe(self, x: Any, stream: int) -> ArrayView:
        """The memory of x; work enqueued on the stream from now on runs after the work that computes x."""

    def empty(self, row_type: TensorType, B: int, stream: int) -> Any:
        """An array for B rows of results."""
        return DeviceArray(self._gpu, row_type, B, stream)

    def scratch(self, nbytes: int, stream: int) -> Scratch | None:
        """Memory for work on the stream; it may be released once the work is enqueued. None for 0 bytes."""
        if not nbytes:
            return None
        buffer = self._gpu.allocate(nbytes, stream)
        return Scratch(buffer.pointer, buffer)

    def export(self, y: Any) -> Any:
        """What the caller receives for an array from `empty`, once the work that fills it is enqueued."""
        return y

    def launched(self, owners: list[object], is_out_given: bool) -> None:
        """Called when the work is on the stream. Nothing to do if the array's owner uses the same stream."""
        return


def kind_of(x: Any, gpu: Gpu) -> ArrayAdapter | None:
    """The adapter for an array; None if it is not a GPU array."""
    root, torch = type(x).__module__.partition(".")[0], sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return Torch(gpu)
    if root == "cupy" and hasattr(x, "__cuda_array_interface__"):
        return Cupy(gpu)
    if root in ("jax", "jaxlib") and hasattr(x, "__dlpack__"):
        return Jax(gpu)
    if isinstance(x, DeviceArray) or hasattr(x, "__cuda_array_interface__"):
        return CudaArrays(gpu, type(x))
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray | np.generic):
        return DlpackArrays(gpu, type(x))
    return None


# -- libraries that expose their stream ------------------------------------------------------------------------


class Torch(ArrayAdapter):
    name = "a torch tensor"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.torch: Any = sys.modules["torch"]
        c_api, cuda = self.torch._C, self.torch.cuda
        raw = getattr(c_api, "_cuda_getCurrentRawStream", None)  # a tenth of the cost of a Stream object
        self.raw_stream: Callable[[int], int] = raw or (lambda i: int(cuda.current_stream(i).cuda_stream))
        is_capturing = getattr(c_api, "_cuda_isCurrentStreamCapturing", None) or cuda.is_current_stream_capturing
        current = getattr(c_api, "_cuda_getDevice", None) or cuda.current_device
        # Whether the current stream cannot launch a graph: it is being captured, or belongs to another GPU. The driver
        # refuses to launch a kernel on another GPU's stream, but would launch a graph there.
        self.refuses_graphs: Callable[[], bool] = is_capturing
        if cuda.device_count() > 1:
            self.refuses_graphs = lambda: current() != gpu.index or is_capturing()

    def owns(self, x: Any) -> bool:
        return isinstance(x, self.torch.Tensor)

    def describe(self, x: Any, stream: int) -> ArrayView:
        self._check_device(x)
        dtype = str(x.dtype).removeprefix("torch.")
        return ArrayView(x.data_ptr(), tuple(x.shape), dtype, x.is_contiguous(), x.get_device())

    def stream(self, x: Any) -> int:
        self._check_device(x)  # a torch that sees no GPU has no stream either
        return self.raw_stream(self._gpu.index)

    def _check_device(self, x: Any) -> None:
        if not x.is_cuda:
            kind = HostRowsError if x.device.type == "cpu" else InputError
            raise _wrong_device(self.name, str(x.device), self._gpu, "x.cuda()", kind)

    def scratch(self, nbytes: int, stream: int) -> Scratch | None:
        # torch's own allocator tracks the memory that a captured graph uses.
        if not nbytes:
            return None
        tensor = self.torch.empty(nbytes, dtype=self.torch.uint8, device=f"cuda:{self._gpu.index}")
        return Scratch(tensor.data_ptr(), tensor)

    def empty(self, row_type: TensorType, B: int, stream: int) -> Any:
        dtype = getattr(self.torch, row_type.dtype)
        return self.torch.empty((B, *row_type.row_shape), dtype=dtype, device=f"cuda:{self._gpu.index}")


class Cupy(ArrayAdapter):
    name = "a CuPy array"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.cupy: Any = sys.modules["cupy"]

    def owns(self, x: Any) -> bool:
        return isinstance(x, self.cupy.ndarray)

    def describe(self, x: Any, stream: int) -> ArrayView:
        return ArrayView(x.data.ptr, tuple(x.shape), x.dtype.name, x.flags.c_contiguous, x.device.id)

    def stream(self, x: Any) -> int:
        return int(self.cupy.cuda.get_current_stream(self._gpu.index).ptr)

    def empty(self, row_type: TensorType, B: int, stream: int) -> Any:
        with self.cupy.cuda.Device(self._gpu.index):
            return self.cupy.empty((B, *row_type.row_shape), numpy_dtype(row_type.dtype))


class CudaArrays(ArrayAdapter):
    """Anything with `__cuda_array_interface__`. Results are DeviceArrays."""

    def __init__(self, gpu: Gpu, of: type) -> None:
        super().__init__(gpu)
        self._type = of
        self.name = f"a {of.__name__}"

    def owns(self, x: Any) -> bool:
        return isinstance(x, (self._type, DeviceArray))

    def describe(self, x: Any, stream: int) -> ArrayView:
        facts = x.__cuda_array_interface__
        dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
        name = "bfloat16" if facts["typestr"] == "<V2" and str(getattr(x, "dtype", "")) == "bfloat16" else dtype.name
        strides = facts.get("strides")
        row_major = strides is None or _is_row_major(shape, [s // dtype.itemsize for s in strides])
        pointer, read_only = facts["data"]
        # The interface does not include the device; the pointer identifies it.
        index = self._gpu.index_of(pointer) if pointer else self._gpu.index
        return ArrayView(pointer or 0, shape, name, row_major, index, not read_only)

    def stream(self, x: Any) -> int:
        return int(x.__cuda_array_interface__.get("stream") or LEGACY_STREAM)


# -- libraries that do not expose their stream ----------------------------------------------------------------


class DlpackArrays(ArrayAdapter):
    """Anything with `__dlpack__`. Results are DeviceArrays.

    The work runs on the GPU's own stream, which waits for the array's owner, as DLPack specifies. The owner only waits
    for arrays that it imports through DLPack, so a call with `out` synchronises here.
    """

    # Shared by all adapters: the work may outlive its adapter.
    _in_use: ClassVar[deque[tuple[Event, list[object]]]] = deque()
    _using: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, gpu: Gpu, of: type) -> None:
        super().__init__(gpu)
        self._type = of
        self.name = f"a {of.__name__}"
        # Handlers run in reverse order. The array's library is loaded by now, so this one runs before its handlers.
        atexit.unregister(DlpackArrays.release_all)
        atexit.register(DlpackArrays.release_all)

    def owns(self, x: Any) -> bool:
        return isinstance(x, (self._type, DeviceArray))

    def describe(self, x: Any, stream: int) -> ArrayView:
        kind, index = x.__dlpack_device__()
        if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            raise _wrong_device(self.name, f"device type {int(kind)} of DLPack", self._gpu, "a GPU array, or NumPy")
        capsule = x.__dlpack__(stream=stream)
        found = dlpack.describe(capsule)
        row_major = found.strides is None or _is_row_major(found.shape, found.strides)
        return ArrayView(found.pointer, found.shape, found.dtype, row_major, index, not found.is_read_only, capsule)

    def stream(self, x: Any) -> int:
        return self._gpu.stream

    def launched(self, owners: list[object], is_out_given: bool) -> None:
        if is_out_given:
            self._gpu.synchronise()
            return
        # The owner may reuse the memory as soon as the reference is dropped: keep it until the kernel is done.
        event = self._gpu.event()
        event.record()
        done = []  # dropped outside the lock: the owner's destructor may run any code
        with self._using:
            while self._in_use and self._in_use[0][0].is_done:
                done.append(self._in_use.popleft())
            self._in_use.append((event, owners))

    @staticmethod
    def release_all() -> None:
        """Wait for all work and release its arrays."""
        with DlpackArrays._using:
            done = list(DlpackArrays._in_use)
            DlpackArrays._in_use.clear()
        for event, _ in done:
            with contextlib.suppress(DeviceError):  # the caller already got this error
                event.wait()


class Jax(DlpackArrays):
    """JAX arrays are immutable, so there is no `out`. Results are JAX arrays."""

    def __init__(self, gpu: Gpu) -> None:
        self.jax: Any = sys.modules["jax"]
        super().__init__(gpu, self.jax.Array)
        self.name = "a JAX array"

    def describe(self, x: Any, stream: int) -> ArrayView:
        return replace(super().describe(x, stream), is_writable=isinstance(x, DeviceArray))

    def export(self, y: Any) -> Any:
        return importlib.import_module("jax.dlpack").from_dlpack(y)  # `import jax` alone may not load it


class DeviceArray:
    """A result on the GPU, for any library that accepts `__dlpack__` or `__cuda_array_interface__`."""

    def __init__(self, gpu: Gpu, row_type: TensorType, B: int, stream: int) -> None:
        self.shape, self.dtype = (B, *row_type.row_shape), row_type.dtype
        self.stream = stream  # the stream that computes its values
        self._gpu = gpu
        with gpu:
            if gpu.is_capturing(stream):
                what = "cannot allocate a result during graph capture"
                raise InputError(what, expected="a preallocated array", hint="engine(x, out=y)")
        # Not from the pool: the readers and their streams are unknown, so freeing it must wait for the whole GPU.
        self._buffer: Buffer = gpu.reserve(row_type.row_bytes * B, row_type.row_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": numpy_dtype(self.dtype).str, "data": (self._buffer.pointer, False),
            "strides": None, "version": 3, "stream": self.stream,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._gpu.index

    def __dlpack__(
        self, *, stream: int | None = None, max_version: object = None, dl_device: object = None, copy: object = None
    ) -> Any:
        """A capsule; `stream`, by default CUDA's legacy one, waits for the values. -1: no synchronisation."""
        if stream != -1:
            with self._gpu:
                event = self._gpu.event()
                event.record(self.stream)
                event.block_stream(LEGACY_STREAM if stream is None else stream)
        return dlpack.export(self._buffer.pointer, self.shape, self.dtype, self._gpu.index, self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        self._gpu.synchronise(self.stream)
        return self._gpu.download(self._buffer, out)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)}, cuda:{self._gpu.index})"


def _is_row_major(shape: tuple[int, ...], strides: Any) -> bool:
    """Whether the elements are contiguous, last axis fastest; strides in elements."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _wrong_device(name: str, device: str, gpu: Gpu, hint: str, kind: type[InputError] = InputError) -> InputError:
    expected = f"an array on cuda:{gpu.index}, where the engine is"
    return kind(f"{name} is not on the GPU", got=device, expected=expected, hint=hint)
