"""Shapes and dtypes of the values of a network."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onchip.errors import ShapeError

if TYPE_CHECKING:
    import numpy as np

BATCH = "B"  # the one symbolic dimension: rows of a batch, known only at run time
Dim = int | str

# Name -> bytes per element. The names are NumPy's, with ml_dtypes' for those that NumPy lacks.
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name in DTYPE_BYTES."""
    import numpy as np

    if name in _ML_DTYPES:
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return narrow
    return np.dtype(name)


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a value; only the first dimension may be symbolic.

    ("B", ...): a row per row of the batch. (1, ...): one row, whatever the batch, as of a gradient of a weight. Weights
    have any shape.
    """

    shape: tuple[Dim, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.dtype not in DTYPE_BYTES:
            raise ShapeError("unknown dtype", got=repr(self.dtype), expected=", ".join(DTYPE_BYTES))
        for axis, dim in enumerate(self.shape):
            if dim == BATCH and axis == 0:
                continue
            if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
                raise ShapeError("bad dimension in a shape", got=str(self), expected=f"({BATCH!r}, sizes...)")

    @property
    def is_batched(self) -> bool:
        return bool(self.shape) and self.shape[0] == BATCH

    def rows(self, B: int) -> int:
        """The rows of a value where the batch has B."""
        return B if self.is_batched else 1

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row: all axes after the first."""
        return tuple(int(d) for d in self.shape[1:])

    @property
    def row_size(self) -> int:
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        return self.row_size * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"
