"""A stand-in for the GPU under benchmarks: NumPy arrays, everything done at once."""

import numpy as np

from onchip.network.types import numpy_dtype


class NumpyStage:
    """A subclass has a clock: `ms`."""

    def __init__(self, index=0):
        self.waits = 0

    def put(self, x, dtype):
        return x.astype(numpy_dtype(dtype))

    def empty(self, shape, dtype):
        return np.zeros(shape, numpy_dtype(dtype))

    def pinned(self, shape, dtype):
        return self.empty(shape, dtype)

    def poison(self, y):
        y.fill(np.nan if y.dtype.kind != "i" else -1)

    def fetch(self, y, rows=None):
        return y if rows is None else y[rows]

    def is_finite(self, y):
        return bool(np.isfinite(y.astype(np.float32)).all())

    def record(self, work, times):
        def replay():
            for _ in range(times):
                y = work()
            return y

        replay.times = times
        return replay

    def trim(self):
        pass

    def synchronise(self):
        self.waits += 1
