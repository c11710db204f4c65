"""A GPU to measure on: device-resident rows, CUDA events, captured graphs.

With torch, arrays are its tensors and all work goes to its current stream. Without it there are no peers, and arrays
are onchip's.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.runtime.cuda.checked_launches import checks_launches
from onchip.runtime.cuda.gpu import Buffer, Event, Gpu
from onchip.runtime.cuda.pinned import PinnedBuffer

Work = Callable[[], Any]  # enqueues work and returns the array that it writes
COPY_BYTES = 4 << 30  # at most a quarter of the GPU's memory
GEMM_SIZE = 8192  # M, N and K of the measured gemm


class Recorded:
    """A CUDA graph and the work it was captured from; the graph reads the work's weights, so both must stay alive."""

    def __init__(self, replay: Callable[[], object], work: Work, y: Any) -> None:
        self._replay, self._work, self._y = replay, work, y

    def __call__(self) -> Any:
        self._replay()
        return self._y


def repeat(call: Work, calls: int) -> Any:
    for _ in range(calls - 1):
        call()
    return call()


class Stage(Protocol):
    @property
    def stream(self) -> int:
        """The handle of the stream that work goes to."""

    def put(self, x: Array, dtype: str) -> Any:
        """Upload x, rounded to dtype."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised array on the GPU."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array in pinned host memory that lives as long as the stage."""

    def poison(self, y: Any) -> None:
        """Fill y with NaNs, ints with -1, if it is writable: marks the elements that no kernel writes."""

    def copy(self, x: Any, y: Any) -> Any:
        """Copy x to y with a device-to-device memcpy; return y."""

    def fetch(self, y: Any, rows: Array | None = None) -> Array:
        """Wait, then download y or these rows: floats as float32 or unchanged, ints unchanged."""

    def is_finite(self, y: Any) -> bool:
        """Whether y has no NaN and no infinity."""

    def record(self, work: Work, times: int) -> Work:
        """A CUDA graph of `times` repetitions of the work. Calling it launches it; it keeps the work alive."""

    def ms(self, work: Work) -> float:
        """GPU time of the work, queued after other work: excludes the launch latency."""

    def trim(self) -> None:
        """Free cached memory if the device is more than half full."""

    def synchronise(self) -> None:
        """Wait for the stream."""


def make_stage(index: int) -> Stage:
    return TorchStage(index) if has_torch() else OnchipStage(index)


def has_torch() -> bool:
    """Whether torch is installed with CUDA."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


class TorchStage:
    def __init__(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)
        self.torch, self.device, self._stream = torch, torch.device("cuda", index), torch.cuda.current_stream()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._is_half_full():
            gc.collect()  # reference cycles of the previous job; slow, so once per job
            self.trim()

    @property
    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def put(self, x: Array, dtype: str) -> Any:
        return self.torch.from_numpy(x).to(self.device).to(getattr(self.torch, dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Array:
        array: Array = self.torch.empty(shape, dtype=getattr(self.torch, dtype), pin_memory=True).numpy()
        return array

    def poison(self, y: Any) -> None:
        if isinstance(y, self.torch.Tensor):  # JAX arrays are immutable, and new in every call
            y.fill_(float("nan") if y.is_floating_point() else -1)

    def copy(self, x: Any, y: Any) -> Any:
        return y.copy_(x)

    def fetch(self, y: Any, rows: Array | None = None) -> Array:
        tensor = self.torch.from_dlpack(y)
        if rows is not None:
            tensor = tensor[self.torch.from_numpy(rows).to(tensor.device)]
        array: Array = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
        return array

    def is_finite(self, y: Any) -> bool:
        return bool(self.torch.isfinite(self.torch.from_dlpack(y)).all())

    def record(self, work: Work, times: int) -> Work:
        if checks_launches():  # those of a torch graph cannot be
            return functools.partial(repeat, work, times)
        torch = self.torch
        side = torch.cuda.Stream()  # torch requires a warm-up on a side stream before capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.synchronize()
        self.trim()  # cuDNN's autotuning leaves cached workspaces, which torch cannot free during a capture
        graph, y = torch.cuda.CUDAGraph(), None
        # Not `with torch.cuda.graph`: it collects garbage first, which takes longer than everything else here.
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(times):
                    y = work()
            finally:
                graph.capture_end()

        return Recorded(graph.replay, work, y)

    def ms(self, work: Work) -> float:
        work()  # keeps the GPU busy when the clock starts, so the first launch's latency is not measured
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def trim(self) -> None:
        if self._is_half_full():  # torch caches the memory of freed graphs and tensors
            self.torch.cuda.empty_cache()

    def _is_half_full(self) -> bool:
        free, total = self.torch.cuda.mem_get_info(self.device)
        return bool(free < total / 2)

    def memory_bytes(self) -> int:
        """Memory allocated by torch's tensors."""
        return int(self.torch.cuda.memory_allocated())

    def synchronise(self) -> None:
        self._stream.synchronize()


class Rows:
    """A GPU array with __cuda_array_interface__."""

    def __init__(self, stage: OnchipStage, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.buffer, self.shape, self.dtype = buffer, shape, dtype
        self._stage = stage

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.buffer.pointer, False), "version": 3,
                "strides": None, "stream": self._stage.stream}  # fmt: skip


class OnchipStage:
    def __init__(self, index: int) -> None:
        self.gpu = Gpu.get(index)
        self.gpu.enter()
        self.stream = self.gpu.stream  # the current one; during capture, the stream being captured
        self._start, self._end = self.gpu.event(), self.gpu.event()
        self._pinned: list[PinnedBuffer] = []

    def put(self, x: Array, dtype: str) -> Rows:
        rounded = x.astype(numpy_dtype(dtype))
        return Rows(self, self.gpu.upload(rounded), x.shape, rounded.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Rows:
        numpy_type = numpy_dtype(dtype)
        return Rows(self, self.gpu.allocate(int(np.prod(shape)) * numpy_type.itemsize), shape, numpy_type)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Array:
        numpy_type = numpy_dtype(dtype)
        self._pinned.append(PinnedBuffer(self.gpu, int(np.prod(shape)) * numpy_type.itemsize))
        return self._pinned[-1].bytes.view(numpy_type).reshape(shape)

    def poison(self, y: Rows) -> None:
        self.gpu.driver.cuMemsetD8Async(y.buffer.pointer, 0xFF, y.buffer.nbytes, self.gpu.stream)

    def copy(self, x: Rows, y: Rows) -> Rows:
        self.gpu.driver.cuMemcpyDtoDAsync(y.buffer.pointer, x.buffer.pointer, x.buffer.nbytes, self.stream)
        return y

    def fetch(self, y: Rows, rows: Array | None = None) -> Array:
        array = self.gpu.download(y.buffer, np.empty(y.shape, y.dtype))
        return array if rows is None else array[rows]

    def is_finite(self, y: Rows) -> bool:
        return bool(np.isfinite(self.fetch(y).astype(np.float32)).all())

    def record(self, work: Work, times: int) -> Work:
        y = work()
        self.synchronise()

        def enqueue(stream: int) -> None:
            self.stream = stream
            for _ in range(times):
                work()

        try:
            graph = self.gpu.capture(enqueue)
        finally:
            self.stream = self.gpu.stream

        return Recorded(graph.launch, work, y)

    def ms(self, work: Work) -> float:
        return elapsed_ms(work, self._start, self._end)

    def trim(self) -> None:
        """Nothing is cached: buffers are freed with their arrays."""

    def synchronise(self) -> None:
        self.gpu.synchronise()


def elapsed_ms(work: Work, start: Event, end: Event) -> float:
    """As TorchStage.ms, on onchip's stream."""
    work()
    start.record()
    work()
    end.record()
    return end.ms_since(start)


# -- measured rates --------------------------------------------------------------------------------------


def measure_ceilings(index: int) -> dict[str, float]:
    """Measured rates: bytes/s that a copy reads and writes and, with torch, flop/s of an fp16 gemm."""
    gpu = Gpu.get(index)
    gpu.enter()
    nbytes = min(COPY_BYTES, gpu.device.memory_bytes // 16 * 4)
    driver, (source, target) = gpu.driver, (gpu.allocate(nbytes) for _ in range(2))
    driver.cuMemsetD32Async(source.pointer, 0x9E3779B9, nbytes // 4, gpu.stream)

    def copy() -> None:
        driver.cuMemcpyDtoDAsync(target.pointer, source.pointer, nbytes, gpu.stream)

    events = gpu.event(), gpu.event()
    copy_ms = statistics.median(elapsed_ms(copy, *events) for _ in range(9))
    ceilings = {"copy_bytes_per_s": 2 * nbytes / copy_ms * 1e3}
    if has_torch():
        stage = TorchStage(index)
        a, b = (stage.torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=stage.torch.half, device=stage.device) for _ in range(2))
        out = stage.torch.empty_like(a)
        gemm_ms = statistics.median(stage.ms(lambda: stage.torch.mm(a, b, out=out)) for _ in range(15))
        ceilings["fp16_product_flops"] = 2 * GEMM_SIZE**3 / gemm_ms * 1e3
    return ceilings
