"""Runs of the faces generator from z on the host to images on the host: pageable, pinned, and copies behind kernels.

The kernels of a batch are one graph. z is 1/123 of the bytes and stays in pageable memory, as in the report.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import numpy as np

from onchip.ladders.faces_steps import Method, Sizes
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.pinned import PinnedBuffer


class HostRun(abc.ABC):
    """A run over all faces, a batch at a time. It has no clock of its own: the host's clock times it."""

    def __init__(self, gpu: Gpu, net: Network, method: Method, z: Array) -> None:
        """z: (B, latent) float32"""
        sizes, B = Sizes.of(net), len(z)
        self._gpu, self._z = gpu, z
        self._batches = [slice(first, min(first + method.batch, B)) for first in range(0, B, method.batch)]
        self._images = np.zeros((B, *sizes.image), np.float32)  # written, so that no page fault is timed
        largest = min(method.batch, B)
        self._x = gpu.reserve(largest * z[0].nbytes)
        self._y = gpu.reserve(largest * self._images[0].nbytes)
        weights = {name: gpu.upload(w) for name, w in method.weights(net).items()}
        faces = {batch.stop - batch.start for batch in self._batches}
        self._bound = {count: BoundSteps(gpu, method.steps(sizes, count), weights) for count in faces}
        self._scratch = gpu.reserve(max(bound.scratch_bytes for bound in self._bound.values()))
        self._graphs = {count: self._capture(bound) for count, bound in self._bound.items()}

    def _capture(self, bound: BoundSteps) -> Graph:
        pointers = [self._x.pointer], [self._y.pointer], self._scratch.pointer
        return self._gpu.capture(lambda stream: bound.enqueue(*pointers, stream))

    @property
    def facts(self) -> Mapping[str, int | str]:
        return {"launches": sum(len(self._bound[batch.stop - batch.start].calls) for batch in self._batches)}

    def __call__(self) -> Array:
        """The images of all faces; the next call overwrites them."""
        with self._gpu:
            self._run()
        return self._images

    @abc.abstractmethod
    def _run(self) -> None: ...

    def _send(self, batch: slice) -> None:
        """Enqueue the copy of z and the kernels."""
        self._gpu.write(self._x, self._z[batch], self._gpu.stream)
        self._graphs[batch.stop - batch.start].launch()


class PageableRun(HostRun):
    """The driver copies a batch's images through pinned memory of its own, while the host waits."""

    def _run(self) -> None:
        for batch in self._batches:
            self._send(batch)
            self._gpu.download(self._y, self._images[batch])


class PinnedRun(HostRun):
    """A batch's images go to pinned memory; from there the host copies them to where they belong."""

    def __init__(self, gpu: Gpu, net: Network, method: Method, z: Array) -> None:
        super().__init__(gpu, net, method, z)
        self._pinned = PinnedBuffer(gpu, self._y.nbytes)
        self._is_copied = gpu.event()  # from the GPU to pinned memory

    def _run(self) -> None:
        for batch in self._batches:
            self._send(batch)
            self._receive(batch)
            self._copy_out(batch)

    def _receive(self, batch: slice) -> None:
        """Enqueue the copy to pinned memory."""
        copy = self._pinned.pointer, self._y.pointer, self._images[batch].nbytes
        call(self._gpu.driver.cuMemcpyDtoHAsync, *copy, self._gpu.stream, doing="copying from the GPU")
        self._is_copied.record()

    def _copy_out(self, batch: slice) -> None:
        self._is_copied.wait()
        images = self._images[batch].reshape(-1).view(np.uint8)
        np.copyto(images, self._pinned.bytes[: images.nbytes])


class OverlappedRun(PinnedRun):
    """The host copies a batch's images while the GPU computes the next batch."""

    def _run(self) -> None:
        for previous, batch in zip([None, *self._batches], self._batches, strict=False):
            self._send(batch)
            if previous is not None:
                self._copy_out(previous)
            self._receive(batch)  # after the host has emptied the pinned memory
        self._copy_out(self._batches[-1])
