"""A driver in Python that writes down what a scan puts on a stream, and an array on its GPU."""

from __future__ import annotations

import numpy as np

from fake_cuda import FakeDriver

STREAM = 1234
PARAMETERS = {
    "clear_states": ("states", "count"),
    "scan_tiles": ("x", "y", "states", "before", "after", "N", "tiles"),
    "scan_warps": ("x", "y", "N"),
    "scan_rows": ("x", "y", "rows", "N"),
    "scan_columns": ("x", "y", "outer", "N", "inner"),
    "permute_few": ("x", "y", "groups", "across"),
    "permute_tiles": ("x", "y", "tiles", "Na", "Nb", *(f"more{i}" for i in range(8))),
}


def name_of(kernel):
    return kernel.partition("<")[0]


def arguments(launched):
    """By name."""
    found = dict(zip(PARAMETERS[name_of(launched.kernel)], launched.words, strict=True))
    if "tiles" in found:
        found["tiles"] &= 0xFFFFFFFF  # the kernel takes 4 bytes
    return found


class Recorder(FakeDriver):
    """Writes down everything that is put on a stream: (what, stream)."""

    def __init__(self):
        super().__init__(lambda kernel: len(PARAMETERS[name_of(kernel)]))
        self.log = []
        self.requested_bytes = []
        self.elsewhere = set()  # memory of another GPU
        self.compute = lambda given: None  # stands for scan_tiles
        self.run = self._run

    def _run(self, launched):
        self.log.append((name_of(launched.kernel), launched.stream))
        if launched.kernel.startswith("scan_tiles"):
            self.compute(arguments(launched))

    def cuMemAllocFromPoolAsync(self, nbytes, pool, stream):  # noqa: N802 - the driver's name
        self.log.append(("allocate", stream))
        self.requested_bytes.append(nbytes)
        return super().cuMemAllocFromPoolAsync(nbytes, pool, stream)

    def cuMemFreeAsync(self, pointer, stream):  # noqa: N802
        self.log.append(("free", stream))
        return super().cuMemFreeAsync(pointer, stream)

    def cuStreamWaitEvent(self, stream, event, flags):  # noqa: N802
        self.log.append((f"hold {event}", stream))
        return (0,)

    def cuEventRecord(self, event, stream):  # noqa: N802
        self.log.append((f"record {event}", stream))
        return (0,)

    def cuPointerGetAttribute(self, attribute, pointer):  # noqa: N802
        return (0, 1) if pointer in self.elsewhere else super().cuPointerGetAttribute(attribute, pointer)


class Array:
    """An array on the fake GPU, as a library shows it."""

    def __init__(self, values, **facts):
        self.values, self.facts = values, facts

    @property
    def pointer(self):
        return self.values.ctypes.data

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "data": (self.pointer, False),
            "strides": None, "version": 3, "stream": STREAM, **self.facts,
        }  # fmt: skip


def zeros(*shape, dtype=np.float32, **facts):
    return Array(np.zeros(shape, dtype), **facts)
