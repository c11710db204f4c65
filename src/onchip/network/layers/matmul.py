"""MatMul: gemms of two values that both depend on the input, as in attention."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, need_float
from onchip.network.layers.combine import operands, unbroadcast
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class MatMul(Layer):
    """a (B, ..., M, K) times b (B, ..., K, N) -> (B, ..., M, N): a gemm batched over the leading axes.

    Two values of equal rank; or one value and either b, the weight `constant`, or a, the weight `first`, which have
    no batch and may lack leading axes. Leading axes broadcast as in NumPy.
    """

    arity: ClassVar[int | None] = None
    optional: ClassVar[tuple[str, ...]] = ("constant", "first")
    needs_y: ClassVar[bool] = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        a, b = self.operands(inputs, weights)
        need_float(inputs[0])
        dtypes = {t.dtype for t in (*inputs, *weights.values())}
        if len(dtypes) > 1:
            raise ShapeError("operands have different dtypes", got=", ".join(sorted(dtypes)), expected="one")
        got = " and ".join(str(list(shape)) for shape in (a, b))
        rank = len(inputs[0].row_shape)
        if rank < 2 or {len(t.row_shape) for t in inputs} != {rank} or min(len(a), len(b)) < 2:
            raise ShapeError("needs matrices", got=got, expected="rows (..., M, K) and (..., K, N) of equal rank")
        if a[-1] != b[-2] or a[-1] == 0 or max(len(a), len(b)) > rank:
            raise ShapeError("matrices do not fit", got=got, expected="rows (..., M, K) and (..., K, N)")
        leading = []
        for m, n in zip(*((1,) * (rank - len(shape)) + shape[:-2] for shape in (a, b)), strict=False):
            if m != n and 1 not in (m, n):
                raise ShapeError("leading axes do not broadcast", got=got, expected="equal leading sizes, or 1")
            leading.append(n if m == 1 else m)
        return TensorType((inputs[0].shape[0], *leading[: rank - 2], a[-2], b[-1]), inputs[0].dtype)

    def operands(self, inputs: Types, weights: WeightTypes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a row of a and of b; ShapeError if there are not two operands."""
        shapes = [t.row_shape for t in inputs]
        shapes += [tuple(int(d) for d in t.shape) for t in weights.values()]
        if len(shapes) != 2:
            raise ShapeError("needs two operands", got=str(len(shapes)), expected="two values, or one and a constant")
        a, b = shapes[::-1] if "first" in weights else shapes
        return a, b

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        K = self.operands(inputs, weights)[0][-1]
        return 2 * K * self.infer(inputs, weights).row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        a, b = operands(xs, w)
        y: Array = a @ b
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        a, b = operands(xs, w)
        da = unbroadcast(dy @ np.swapaxes(b, -1, -2), a.shape)
        db = unbroadcast(np.swapaxes(a, -1, -2) @ dy, b.shape)
        if "first" in w:
            return (db,), {"first": da}
        return ((da,), {"constant": db}) if w else ((da, db), {})
