"""Runs of the faces generator from z on the host to images on the host; a rung decides on the order of their steps.

The kernels of a batch are one graph. z is 1/123 of the bytes and stays in pageable memory, as in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onchip.ladders.faces_steps import Method, Sizes
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.driver import call
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.pinned import PinnedBuffer


class HostRun:
    """A run over all faces, a batch at a time. The host's clock times it."""

    def __init__(
        self, gpu: Gpu, net: Network, method: Method, z: Array, run_batches: Callable[[HostRun], None]
    ) -> None:  # fmt: skip
        """z            (B, latent) float32
        run_batches  does all steps of all `batches`
        """
        sizes, B = Sizes.of(net), len(z)
        self.batches = [slice(first, min(first + method.batch, B)) for first in range(0, B, method.batch)]
        self._gpu, self._z, self._run_batches = gpu, z, run_batches
        self._images = np.zeros((B, *sizes.image), np.float32)  # written, so that no page fault is timed
        largest = min(method.batch, B)
        self._x = gpu.reserve(largest * z[0].nbytes)
        self._y = gpu.reserve(largest * self._images[0].nbytes)
        self._pinned = PinnedBuffer(gpu, self._y.nbytes)
        self._is_received = gpu.event()
        weights = {name: gpu.upload(w) for name, w in method.weights(net).items()}
        faces = {_faces(batch) for batch in self.batches}
        self._bound = {count: BoundSteps(gpu, method.steps(sizes, count), weights) for count in faces}
        self._scratch = gpu.reserve(max(bound.scratch_bytes for bound in self._bound.values()))
        self._graphs = {count: self._capture(bound) for count, bound in self._bound.items()}

    def _capture(self, bound: BoundSteps) -> Graph:
        pointers = [self._x.pointer], [self._y.pointer], self._scratch.pointer
        return self._gpu.capture(lambda stream: bound.enqueue(*pointers, stream))

    @property
    def facts(self) -> Mapping[str, int | str]:
        return {"launches": sum(len(self._bound[_faces(batch)].calls) for batch in self.batches)}

    def __call__(self) -> Array:
        """The images of all faces; the next call overwrites them."""
        with self._gpu:
            self._run_batches(self)
        return self._images

    # -- the steps of a batch ----------------------------------------------------------------------------------

    def send(self, batch: slice) -> None:
        """Enqueue the copy of z and the kernels."""
        self._gpu.write(self._x, self._z[batch], self._gpu.stream)
        self._graphs[_faces(batch)].launch()

    def download(self, batch: slice) -> None:
        """Copy the images to where they belong, in pageable memory; returns when they are there."""
        self._gpu.download(self._y, self._images[batch])

    def receive(self, batch: slice) -> None:
        """Enqueue the copy of the images to pinned memory."""
        copy = self._pinned.pointer, self._y.pointer, self._images[batch].nbytes
        call(self._gpu.driver.cuMemcpyDtoHAsync, *copy, self._gpu.stream, doing="copying from the GPU")
        self._is_received.record()

    def copy_out(self, batch: slice) -> None:
        """Wait for the last `receive`; copy the images, on the host, from pinned memory to where they belong."""
        self._is_received.wait()
        images = self._images[batch].reshape(-1).view(np.uint8)
        np.copyto(images, self._pinned.bytes[: images.nbytes])


def _faces(batch: slice) -> int:
    return int(batch.stop - batch.start)
