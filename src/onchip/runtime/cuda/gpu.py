"""One GPU: memory from a pool, compiled functions, streams, events and captures.

Everything runs in the GPU's primary context, which torch, CuPy and JAX use too, so pointers and streams are
interchangeable. Streams are raw handles (int); the default is `Gpu.stream`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.runtime.cuda.checked_launches import CheckedCall, LaunchList, LaunchListBuilder, checks_launches
from onchip.runtime.cuda.devices import probe
from onchip.runtime.cuda.driver import OUT_OF_MEMORY, call, fail
from onchip.runtime.cuda.launches import Call, Function, Graph, GraphBuilder, Streams
from onchip.runtime.cuda.nvrtc import compile_program

# The pool caches up to 1/8 of the GPU's memory for later allocations. Synchronising a stream returns free memory beyond
# that to the driver, for other libraries of the process.
_CACHED_DIVISOR = 8

_gpus: dict[int, Gpu] = {}
_gpus_lock = threading.Lock()


class Buffer:
    """GPU memory, freed when the object is collected, in the order of the stream it was allocated on."""

    def __init__(self, gpu: Gpu, pointer: int, nbytes: int, stream: int | None) -> None:
        self.gpu, self.pointer, self.nbytes = gpu, pointer, nbytes
        self.stream = stream  # None: not from the pool; freeing it waits for all work

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():  # at exit the driver frees everything, and modules such as `sys` may be gone
            self.gpu.free(self.pointer, self.stream)


class BufferPart(Buffer):
    """A range of a buffer, which it keeps alive."""

    def __init__(self, whole: Buffer, offset: int, nbytes: int) -> None:
        super().__init__(whole.gpu, whole.pointer + offset, nbytes, whole.stream)
        self.whole, self.offset = whole, offset

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        return


class Event:
    """A CUDA event: a point in a stream's work."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.handle = call(gpu.driver.cuEventCreate, 0)

    def record(self, stream: int | None = None) -> None:
        call(self._gpu.driver.cuEventRecord, self.handle, self._gpu.stream if stream is None else stream)

    def block_stream(self, stream: int) -> None:
        """Make later work on this stream wait for the event; the host does not wait."""
        call(self._gpu.driver.cuStreamWaitEvent, stream, self.handle, 0)

    def wait(self) -> None:
        """Wait on the host until the work before the event is done."""
        call(self._gpu.driver.cuEventSynchronize, self.handle, doing="waiting for the GPU")

    @property
    def is_done(self) -> bool:
        return not self._gpu.driver.cuEventQuery(self.handle)[0]

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds on the GPU from an earlier event to this one; waits for this one."""
        self.wait()
        return float(call(self._gpu.driver.cuEventElapsedTime, earlier.handle, self.handle))

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "handle") and not is_ending():
            self._gpu.driver.cuEventDestroy(self.handle)


class SideStream:
    """A stream for launches that run concurrently with the caller's stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.handle = gpu, gpu.new_stream()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "handle") and not is_ending():
            self._gpu.driver.cuStreamDestroy(self.handle)  # pending work still completes


class Gpu:
    """One GPU in this process: `Gpu.get(0)`. `with gpu:` makes its CUDA context current in this thread."""

    def __init__(self, index: int, device: Device, driver: Any) -> None:
        """driver  the module cuda.bindings.driver"""
        self.index, self.device, self.driver = index, device, driver
        doing = f"starting cuda:{index}"
        self._context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index), doing=doing)
        self.enter()
        # cuda.bindings converts every argument of every launch; with prepared ctypes values it takes half the time.
        self.launch_kernel = self._address_of(b"cuLaunchKernelEx")
        self.launch_graph = self._address_of(b"cuGraphLaunch")
        self.add_kernel_node = self._address_of(b"cuGraphAddKernelNode")
        self.set_node_attribute = self._address_of(b"cuGraphKernelNodeSetAttribute")
        self.set_kernel_node = self._address_of(b"cuGraphExecKernelNodeSetParams")
        self.encode_tensor_map = self._address_of(b"cuTensorMapEncodeTiled")
        self.encode_window_map = self._address_of(b"cuTensorMapEncodeIm2col")
        self.streams = Streams()
        self.stream = self.new_stream()
        self._pool = self._make_pool()
        self._reserved: dict[int, int] = {}  # bytes by pointer, of `reserve`
        self._peak_reserved = 0
        self._functions: dict[Program, Function] = {}
        self._loading = threading.Lock()

    @staticmethod
    def get(index: int = 0) -> Gpu:
        """The GPU with this index; DeviceError if it does not exist."""
        with _gpus_lock:
            if index not in _gpus:
                devices, why = probe()
                if not 0 <= index < len(devices):
                    here = ", ".join(f"cuda:{i} {device.name}" for i, device in enumerate(devices))
                    hint = "device='cpu' or 'auto'"
                    raise DeviceError(f"there is no device cuda:{index}", got=why or here, hint=hint)
                from cuda.bindings import driver

                _gpus[index] = Gpu(index, devices[index], driver)
            return _gpus[index]

    def _address_of(self, name: bytes) -> Callable[..., int]:
        address = call(self.driver.cuGetProcAddress, name, 12000, 0)
        return ctypes.CFUNCTYPE(ctypes.c_int)(int(address))

    def enter(self) -> None:
        """Make the context current in this thread."""
        call(self.driver.cuCtxSetCurrent, self._context)

    def __enter__(self) -> None:
        call(self.driver.cuCtxPushCurrent, self._context)

    def __exit__(self, *_: object) -> None:
        self.driver.cuCtxPopCurrent()

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int | None = None, row_bytes: int = 0) -> Buffer:
        """Memory from the pool, for work on one stream; work on another stream must be ordered after it.

        row_bytes  bytes per row of the batch in total: an out-of-memory error then reports how many rows fit
        """
        stream = self.stream if stream is None else stream
        with self:
            result, pointer = self.driver.cuMemAllocFromPoolAsync(max(nbytes, 1), self._pool, stream)
            self._check_memory(int(result), nbytes, row_bytes)
        return Buffer(self, int(pointer), nbytes, stream)

    def reserve(self, nbytes: int, row_bytes: int = 0) -> Buffer:
        """Memory for work on any stream. Freeing it waits for all work on the GPU: use it for long-lived memory."""
        with self:
            result, pointer = self.driver.cuMemAlloc(max(nbytes, 1))
            self._check_memory(int(result), nbytes, row_bytes)
        self._reserved[int(pointer)] = nbytes
        self._peak_reserved = max(self._peak_reserved, self._reserved_bytes)
        return Buffer(self, int(pointer), nbytes, None)

    @property
    def _reserved_bytes(self) -> int:
        return sum(self._reserved.copy().values())  # a copy: other threads, and `__del__` in this one, may free some

    def reset_peak(self) -> None:
        """Measure peak_bytes from now on."""
        high = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        call(self.driver.cuMemPoolSetAttribute, self._pool, high, self.driver.cuuint64_t(0))  # means: what is in use
        self._peak_reserved = self._reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """The most memory that was allocated at a time: of the pool, plus of `reserve`, which mostly grows."""
        high = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
        return int(call(self.driver.cuMemPoolGetAttribute, self._pool, high)) + self._peak_reserved

    def upload(self, array: Array) -> Buffer:
        """A copy of the array on the GPU, for work on any stream; the array may be overwritten afterwards."""
        buffer = self.reserve(array.nbytes)
        with self:
            if array.nbytes:
                rows = array if array.flags.c_contiguous else array.copy()
                # Not cuMemcpyHtoD: it may return while the last part is in flight, and streams do not wait for it.
                copy = self.driver.cuMemcpyHtoDAsync
                call(copy, buffer.pointer, rows.ctypes.data, rows.nbytes, self.stream, doing="copying to the GPU")
                self.synchronise()
        return buffer

    def write(self, buffer: Buffer, array: Array, stream: int, offset: int = 0) -> None:
        """Copy a row-major array into a buffer at `offset` bytes, in stream order; it may be overwritten afterwards."""
        assert offset + array.nbytes <= buffer.nbytes, f"the buffer holds {buffer.nbytes} B, the array {array.nbytes}"
        assert array.flags.c_contiguous, "only a row-major array can be copied"
        if array.nbytes:  # pageable memory: the driver has made its own copy when this returns
            copy = self.driver.cuMemcpyHtoDAsync
            call(copy, buffer.pointer + offset, array.ctypes.data, array.nbytes, stream, doing="copying to the GPU")

    def download(self, buffer: Buffer, array: Array, stream: int | None = None) -> Array:
        """Copy a buffer into a row-major array, after the work on a stream, by default the GPU's own; waits for it."""
        assert array.nbytes <= buffer.nbytes, f"the buffer holds {buffer.nbytes} B, the array {array.nbytes}"
        assert array.flags.c_contiguous, "only a row-major array can be filled"
        stream = self.stream if stream is None else stream
        with self:
            if array.nbytes:
                copy = self.driver.cuMemcpyDtoHAsync
                call(copy, array.ctypes.data, buffer.pointer, array.nbytes, stream, doing="copying from the GPU")
            self.synchronise(stream)
        return array

    def index_of(self, pointer: int) -> int:
        """The index of the GPU that a pointer belongs to; -1 for other memory."""
        ordinal = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        code, index = self.driver.cuPointerGetAttribute(ordinal, pointer)
        return -1 if code else int(index)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory on the GPU, in stream order."""
        call(self.driver.cuMemcpyDtoDAsync, target, source, nbytes, stream, doing="copying on the GPU")

    def clear(self, pointer: int, nbytes: int, stream: int) -> None:
        """Set GPU memory to zero, in stream order."""
        call(self.driver.cuMemsetD8Async, pointer, 0, nbytes, stream, doing="clearing memory")

    def free(self, pointer: int, stream: int | None) -> None:
        """Free memory: to the pool in stream order, or, if not from the pool, after all work."""
        # Errors are ignored: after a failed kernel every call fails, and the first failure was reported.
        driver = self.driver
        if driver.cuCtxPushCurrent(self._context)[0]:
            return
        if stream is not None:
            driver.cuMemFreeAsync(pointer, stream)
        else:
            self._reserved.pop(pointer, None)
            with self.relaxed():
                driver.cuMemFree(pointer)
        driver.cuCtxPopCurrent()

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow this thread synchronising calls inside: they are otherwise illegal while any thread captures."""
        relaxed = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        code, before = self.driver.cuThreadExchangeStreamCaptureMode(relaxed)
        try:
            yield
        finally:
            if not code:
                self.driver.cuThreadExchangeStreamCaptureMode(before)

    def _make_pool(self) -> Any:
        driver = self.driver
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        pool = call(driver.cuMemPoolCreate, properties)
        cached_bytes = driver.cuuint64_t(self.device.memory_bytes // _CACHED_DIVISOR)
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call(driver.cuMemPoolSetAttribute, pool, threshold, cached_bytes)
        return pool

    def _check_memory(self, code: int, nbytes: int, row_bytes: int) -> None:
        if code == OUT_OF_MEMORY:
            raise self.out_of_memory(nbytes, row_bytes)
        if code:
            fail(code, f"allocating {nbytes:,} B")

    def out_of_memory(self, nbytes: int, row_bytes: int) -> DeviceError:
        code, free, total = self.driver.cuMemGetInfo()
        got = f"{nbytes:,} B requested, {free:,} of {total:,} B free" if not code else f"{nbytes:,} B requested"
        hint = "stop other programs on the GPU, or use another GPU: device='cuda:1'"
        if row_bytes and not code:
            hint = f"at most {free // row_bytes:,} rows at a time: each needs {row_bytes:,} B"
        return DeviceError(f"out of memory on {self.device.name}", got=got, hint=hint)

    # -- kernels -----------------------------------------------------------------------------------------------

    def load(self, program: Program, shared_bytes: int = 0, cluster: int = 1) -> Function:
        """The compiled function, loaded once, with limits for this much dynamic shared memory and this cluster size."""
        driver, doing = self.driver, f"loading {program.name_expression}"
        with self._loading, self:
            if program not in self._functions:
                binary = compile_program(program, self.device.arch)
                # The module stays loaded with the context: there are few, and a later engine may need it again.
                module = call(driver.cuModuleLoadData, binary.cubin, doing=doing)
                handle = call(driver.cuModuleGetFunction, module, binary.entry.encode(), doing=doing)
                found = Function(driver, program.name_expression, handle, binary)
                self._functions[program] = found
            function = self._functions[program]
            function.allow_shared(shared_bytes)
            function.allow_cluster(cluster)
        return function

    def launch(
        self, function: Function, config: LaunchConfig, arguments: Sequence[Any], stream: int | None = None
    ) -> None:
        """Launch a kernel on a stream. An int in `arguments` is a pointer, anything else a ctypes value."""
        self.prepare(function, config, arguments).launch(self.stream if stream is None else stream)

    def prepare(self, function: Function, config: LaunchConfig, arguments: Sequence[Any]) -> Call:
        """A launch with prepared arguments, which are ctypes values, TensorMapArguments, or ints for pointers."""
        return (CheckedCall if checks_launches() else Call)(self, function, config, arguments)

    def graph_builder(self) -> GraphBuilder:
        return (LaunchListBuilder if checks_launches() else GraphBuilder)(self)

    # -- streams -----------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A non-blocking stream; the caller destroys it, or it lives as long as the process."""
        return int(call(self.driver.cuStreamCreate, int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def synchronise(self, stream: int | None = None, kernel: str = "") -> None:
        """Return when all work on a stream is done. `kernel`: if it is the only one, its name for error messages."""
        (code,) = self.driver.cuStreamSynchronize(self.stream if stream is None else stream)
        if code:
            fail(int(code), "waiting for the GPU", kernel)

    def wait_for_all(self) -> None:
        """Return when the work on all streams is done."""
        with self, self.relaxed():
            call(self.driver.cuCtxSynchronize, doing="waiting for the GPU")

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        return bool(int(call(self.driver.cuStreamIsCapturing, stream)))

    def event(self) -> Event:
        with self:
            return Event(self)

    def capture(self, enqueue: Callable[[int], None], keeps: Buffer | None = None) -> Graph:
        """A graph of the work that `enqueue(stream)` puts on the stream.

        keeps  memory that the graph keeps alive
        """
        if checks_launches():
            return LaunchList(self, [enqueue], keeps)
        driver = self.driver
        with self, self.relaxed():
            stream = self.new_stream()
            call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                enqueue(stream)
            except BaseException:
                driver.cuStreamEndCapture(stream)  # discard the capture
                raise
            else:
                graph = call(driver.cuStreamEndCapture, stream, doing="capturing a graph")
            finally:
                driver.cuStreamDestroy(stream)
            return Graph(self, graph, keeps)
