"""How a GPU rung of the backprop ladder runs: its memory, its uploads, its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from onchip.kernels.cuda.common.program import KernelLaunch, Steps
from onchip.ladders.backprop import EPOCHS
from onchip.ladders.device import DeviceRun
from onchip.ladders.training import TrainingRows, layer_arrays, layer_widths, network_of
from onchip.measure.truth import flat_run
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Buffer, BufferPart, Gpu, SideStream
from onchip.runtime.cuda.pinned import PinnedBuffer

_ALIGN = 512  # bytes: a texture object needs it
_FIRST_EPOCHS = 3  # measured; their median is shown


class Memory:
    """Everything a rung reads and writes, by name; w, v, x and y are contiguous, so that one copy can upload them.

    w, v            weights and velocities of all layers; w0, b0, w1, ... are parts of w
    x<p>, y<p>      patterns and targets of part p
    h<p>.<i>        outputs of hidden layer i; dz<p>.<i>: gradients of layer i's sums
    g               (parts, len(w)) gradients: g<p>.w0, g<p>.b0, ...; g<p> all of a part's
    error           (B, D_out); error<p> of a part
    """

    def __init__(self, gpu: Gpu, net: Network, rows: TrainingRows, sizes: Sequence[int]) -> None:
        """sizes  patterns of each part"""
        self.initial = layer_arrays(net)
        w = np.concatenate([array.ravel() for array in self.initial.values()])
        self.host: dict[str, Array] = {"w": w, "v": np.zeros_like(w), "x": rows.x, "y": rows.y}
        self.count = len(w)
        self.widths = layer_widths(net)
        ends = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in self.host.values())])
        self.offsets = dict(zip(self.host, map(int, ends), strict=False))
        self.whole = gpu.reserve(int(ends[-1]))
        self.buffers: dict[str, Buffer] = {
            name: BufferPart(self.whole, self.offsets[name], array.nbytes) for name, array in self.host.items()
        }
        self.buffers["g"] = gpu.reserve(4 * len(sizes) * self.count)
        self.buffers["error"] = gpu.reserve(4 * len(rows) * self.widths[-1])
        self._add_layers("w", "")
        starts = np.cumsum([0, *sizes])
        self.rows = [slice(int(first), int(end)) for first, end in pairwise(starts)]
        for p, (size, part) in enumerate(zip(sizes, self.rows, strict=True)):
            for name, columns in (("x", self.widths[0]), ("y", self.widths[-1]), ("error", self.widths[-1])):
                self._add_part(f"{name}{p}", name, part.start * columns, size * columns)
            self._add_part(f"g{p}", "g", p * self.count, self.count)
            self._add_layers(f"g{p}", f"g{p}.")
            for i, width in enumerate(self.widths[1:]):
                self.buffers[f"h{p}.{i}"] = gpu.reserve(4 * size * width)
                self.buffers[f"dz{p}.{i}"] = gpu.reserve(4 * size * width)

    def _add_layers(self, of: str, prefix: str) -> None:
        first = 0
        for name, array in self.initial.items():
            self._add_part(prefix + name, of, first, array.size)
            first += array.size

    def _add_part(self, name: str, of: str, first: int, count: int) -> None:
        self.buffers[name] = BufferPart(self.buffers[of], 4 * first, 4 * count)


class BackpropRun(DeviceRun):
    """EPOCHS epochs from the network's weights. Calling it uploads everything, trains, and returns losses and weights
    (flat_run). A sample is the time of one later epoch; the fact "first epoch ms" includes the upload.
    """

    def __init__(
        self, gpu: Gpu, net: Network, memory: Memory, parts: Sequence[Sequence[KernelLaunch]],
        tail: Sequence[KernelLaunch],
    ) -> None:  # fmt: skip
        """parts  the launches of each part; tail: those after all parts"""
        self._net, self._memory = net, memory
        launches = (*(launch for part in parts for launch in part), *tail)
        super().__init__(gpu, Steps(launches), memory.whole, {}, (1,), "float64", memory.buffers)
        self._write("w", "v", "x", "y")  # a timed run may not have been called before

    def __call__(self) -> Array:
        losses = []
        self._first_epoch(self._gpu.stream)
        for epoch in range(EPOCHS):
            if epoch > 0:
                self._enqueue(self._gpu.stream)
            losses.append(float(self._gpu.download(self._y, np.empty(self._shape, self._dtype))[0]))
        arrays = {name: np.empty_like(array) for name, array in self._memory.initial.items()}
        for name, array in arrays.items():
            self._gpu.download(self._memory.buffers[name], array)
        return flat_run(losses, network_of(self._net, arrays))

    @property
    def facts(self) -> dict[str, int | str]:
        samples = []
        for _ in range(_FIRST_EPOCHS):
            self._start.record()
            self._first_epoch(self._gpu.stream)
            self._end.record()
            samples.append(self._end.ms_since(self._start))
        return {**super().facts, "first epoch ms": f"{np.median(samples):.4g}"}

    def _restore(self) -> None:
        self._write("w", "v")

    def _write(self, *names: str) -> None:
        with self._gpu:
            for name in names:
                array = np.ascontiguousarray(self._memory.host[name], np.float32)
                self._gpu.write(self._memory.whole, array, self._gpu.stream, self._memory.offsets[name])
            self._gpu.synchronise()

    def _first_epoch(self, stream: int) -> None:
        self._upload(stream)
        self._enqueue(stream)

    def _upload(self, stream: int) -> None:
        """A copy per row of every matrix: what an array of pointers to rows needs."""
        for name, array in self._memory.host.items():
            matrices = self._memory.initial.values() if name == "w" else [array]
            at = self._memory.offsets[name]
            for row in (row for matrix in matrices for row in np.atleast_2d(matrix)):
                self._gpu.write(self._memory.whole, row, stream, at)
                at += row.nbytes


class FlatRun(BackpropRun):
    """The same with all matrices in one array on the host: one copy."""

    def __init__(
        self, gpu: Gpu, net: Network, memory: Memory, parts: Sequence[Sequence[KernelLaunch]],
        tail: Sequence[KernelLaunch],
    ) -> None:  # fmt: skip
        super().__init__(gpu, net, memory, parts, tail)
        self._host = self._allocate_host(memory.whole.nbytes)
        for name, array in memory.host.items():
            at = memory.offsets[name]
            self._host[at : at + array.nbytes] = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)

    def _allocate_host(self, nbytes: int) -> Array:
        return np.zeros(nbytes, np.uint8)

    def _upload(self, stream: int) -> None:
        self._gpu.write(self._memory.whole, self._host, stream)


class StreamsRun(FlatRun):
    """A stream per part. In the first epoch each copies its own patterns, from pinned memory: the copy of one part
    overlaps with the kernels of the others. The weights are copied before."""

    def __init__(
        self, gpu: Gpu, net: Network, memory: Memory, parts: Sequence[Sequence[KernelLaunch]],
        tail: Sequence[KernelLaunch],
    ) -> None:  # fmt: skip
        super().__init__(gpu, net, memory, parts, tail)
        self._streams = [SideStream(gpu) for _ in parts]
        self._parts = [BoundSteps(gpu, Steps(tuple(part)), state=memory.buffers) for part in parts]
        self._tail = BoundSteps(gpu, Steps(tuple(tail)), state=memory.buffers)
        self._begun, self._done = gpu.event(), [gpu.event() for _ in parts]

    def _allocate_host(self, nbytes: int) -> Array:
        self._pinned = PinnedBuffer(self._gpu, nbytes)
        return self._pinned.bytes

    def _first_epoch(self, stream: int) -> None:
        self._copy(stream, "w", slice(None))
        self._copy(stream, "v", slice(None))
        self._run(stream, self._copy_patterns)

    def _enqueue(self, stream: int, calls: int = 1) -> None:
        for _ in range(calls):
            self._run(stream, lambda part, side: None)

    def _run(self, stream: int, prepare: Callable[[int, int], None]) -> None:
        """An epoch; prepare(part, stream) goes before the kernels of a part."""
        self._begun.record(stream)
        for part, (side, bound, done) in enumerate(zip(self._streams, self._parts, self._done, strict=True)):
            self._begun.block_stream(side.handle)
            prepare(part, side.handle)
            bound.enqueue((), (), 0, side.handle)
            done.record(side.handle)
            done.block_stream(stream)
        self._tail.enqueue((), [self._y.pointer], 0, stream)

    def _copy_patterns(self, part: int, stream: int) -> None:
        for name in ("x", "y"):
            self._copy(stream, name, self._memory.rows[part])

    def _copy(self, stream: int, name: str, rows: slice) -> None:
        array = self._memory.host[name][rows]
        at = self._memory.offsets[name] + (rows.start or 0) * self._memory.host[name][:1].nbytes
        copy = self._gpu.driver.cuMemcpyHtoDAsync
        call(copy, self._memory.whole.pointer + at, self._pinned.pointer + at, array.nbytes, stream,
             doing="copying patterns to the GPU")  # fmt: skip
