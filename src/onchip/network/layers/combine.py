"""Layers of several inputs: elementwise, concatenated, and the phases of a strided output."""

from __future__ import annotations

import abc
import itertools
import math
import operator
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.divisors import check_divisors
from onchip.network.layers.base import (
    Arrays,
    Expression,
    Gradients,
    Layer,
    Types,
    Weights,
    WeightTypes,
    as_sizes,
    need_float,
    row_axis,
)
from onchip.network.recipe import Array
from onchip.network.types import Dim, TensorType


class Broadcast(Layer, abstract=True):
    """Elementwise over all inputs, and over a weight (a row's shape, no batch) if there is one: `constant`.

    Broadcasts as NumPy does: sizes of 1 expand, and missing leading axes of the constant are 1. All inputs must have
    the same number of axes. `cuda` and `cpu` are its expressions of two operands, a and b, as those of an Elementwise.
    """

    cuda: ClassVar[Expression] = ""
    cpu: ClassVar[Expression] = ""
    arity: ClassVar[int | None] = None
    optional: ClassVar[tuple[str, ...]] = ("constant",)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) + len(weights) < 2:
            raise ShapeError("needs two operands", got="one", expected="two values, or a value and a constant")
        shapes = [operand.row_shape for operand in inputs]
        if len({len(shape) for shape in shapes}) > 1:
            got = ", ".join(str(operand) for operand in inputs)
            raise ShapeError("operands have different ranks", got=got, expected="equal ranks")
        if weights:
            (operand,) = weights.values()
            constant = tuple(int(d) for d in operand.shape)
            shapes.append((1,) * (len(shapes[0]) - len(constant)) + constant)
        dtypes = {operand.dtype for operand in (*inputs, *weights.values())}
        if len(dtypes) > 1:
            raise ShapeError("operands have different dtypes", got=", ".join(sorted(dtypes)), expected="one")
        if "bool" in dtypes:
            raise ShapeError("unsupported dtype", got="bool", expected="a float or int dtype")
        sizes: list[Dim] = []
        if len({len(shape) for shape in shapes}) == 1:
            for column in zip(*shapes, strict=True):
                distinct = {d for d in column if d != 1}
                if len(distinct) > 1:
                    break
                sizes.append(distinct.pop() if distinct else 1)
        if len(sizes) < len(shapes[0]) or len(shapes[-1]) > len(shapes[0]):
            got = " and ".join(str(list(shape)) for shape in shapes)
            raise ShapeError("operands do not fit", got=got, expected="rows of equal sizes, or 1")
        return TensorType((inputs[0].shape[0], *sizes), inputs[0].dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return (len(inputs) + len(weights) - 1) * self.infer(inputs, weights).row_size


class Add(Broadcast):
    """x1 + x2 + ... + constant."""

    cuda = "sum_of(a, b)"
    cpu = "a + b"

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return reduce(operator.add, (*xs, *w.values()))

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return tuple(unbroadcast(dy, x.shape) for x in xs), {role: unbroadcast(dy, v.shape) for role, v in w.items()}


class Mul(Broadcast):
    """x1 * x2 * ... * constant."""

    cuda = "product_of(a, b)"
    cpu = "a * b"

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return reduce(operator.mul, (*xs, *w.values()))

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        factors = (*xs, *w.values())
        gradients = []
        for i, factor in enumerate(factors):
            others = reduce(operator.mul, (*factors[:i], *factors[i + 1 :]))
            gradients.append(unbroadcast(dy * others, factor.shape))
        return tuple(gradients[: len(xs)]), dict(zip(w, gradients[len(xs) :], strict=True))


class _Extreme(Broadcast, abstract=True):
    def forward(self, xs: Arrays, w: Weights) -> Array:
        return reduce(np.maximum if isinstance(self, Max) else np.minimum, (*xs, *w.values()))  # they propagate NaN

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """The gradient goes to the first operand that equals the result."""
        gradients, assigned = [], np.zeros(y.shape, bool)
        for operand in (*xs, *w.values()):
            is_first = (operand == y) & ~assigned
            gradients.append(unbroadcast(dy * is_first, operand.shape))
            assigned |= is_first
        return tuple(gradients[: len(xs)]), dict(zip(w, gradients[len(xs) :], strict=True))


class Max(_Extreme):
    """The largest of x1, x2, ..., constant; NaN if any is NaN."""

    cuda = "b > a || b != b ? b : a"
    cpu = "b if b > a or b != b else a"


class Min(_Extreme):
    """The smallest of x1, x2, ..., constant; NaN if any is NaN."""

    cuda = "b < a || b != b ? b : a"
    cpu = "b if b < a or b != b else a"


class Ordered(Broadcast, abstract=True):
    """Two ordered operands, a and b: two values; or one value and either b, the weight `constant`, or a, the weight
    `first`. A subclass has a `function` of both, and its `derivatives`.
    """

    optional: ClassVar[tuple[str, ...]] = ("constant", "first")
    takes_ints: ClassVar[bool] = False
    flop_each: ClassVar[int] = 1

    @abc.abstractmethod
    def function(self, a: Array, b: Array) -> Array:
        """y of a and b."""

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[Array | int, Array | int]:
        """dy / da and dy / db; zeros for a step function."""
        return 0, 0

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) + len(weights) != 2:
            got = f"{len(inputs)} values and {len(weights)} constants"
            raise ShapeError("needs two operands", got=got, expected="two values, or a value and a constant")
        if not self.takes_ints:
            need_float(inputs[0])
        return super().infer(inputs, weights)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.flop_each * self.infer(inputs, weights).row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return self.function(*operands(xs, w))

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        a, b = operands(xs, w)
        da, db = (unbroadcast(dy * s, v.shape) for v, s in zip((a, b), self.derivatives(a, b, y), strict=True))
        if "first" in w:
            return (db,), {"first": da}
        return ((da,), dict.fromkeys(w, db)) if w else ((da, db), {})


class Sub(Ordered):
    """a - b."""

    takes_ints: ClassVar[bool] = True
    cuda = "difference_of(a, b)"
    cpu = "a - b"

    def function(self, a: Array, b: Array) -> Array:
        return np.asarray(a - b)

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[int, int]:
        return 1, -1


class Mask(Ordered):
    """a where b is not 0, else 0, even if a is NaN.

    a is a value or the weight `first`, b a value or the weight `mask`.
    """

    takes_ints: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("first", "mask")
    constants: ClassVar[tuple[str, ...]] = ("mask",)
    cuda = "b != 0 ? a : 0"
    cpu = "0 if b == 0 else a"

    def function(self, a: Array, b: Array) -> Array:
        return np.where(b != 0, a, a.dtype.type(0))

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[Array, int]:
        return b != 0, 0

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """A mask that is a weight is a constant."""
        dxs, dw = super().backward(xs, w, y, dy)
        return dxs, {role: gradient for role, gradient in dw.items() if role != "mask"}


class Div(Ordered):
    """a / b; for ints truncated, and an error if b is 0."""

    takes_ints: ClassVar[bool] = True
    flop_each: ClassVar[int] = 8
    cuda = "quotient_of(a, b)"
    cpu = "quotient(a, b)"

    def function(self, a: Array, b: Array) -> Array:
        if a.dtype.kind == "f":
            return np.asarray(a / b)
        _check_divisors(a, b, "Div")
        low = a // b  # NumPy rounds down; Div rounds toward 0
        return np.asarray(low + ((low * b != a) & ((a < 0) != (b < 0))))

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[Array, Array]:
        return 1 / b, -y / b


@dataclass(frozen=True, eq=False, repr=False)
class Mod(Ordered):
    """The exact remainder of a / b: with the sign of b, or with that of a if `truncated`, which is C's fmod.

    For ints it is an error if b is 0.
    """

    truncated: bool = False
    takes_ints: ClassVar[bool] = True
    flop_each: ClassVar[int] = 8
    backward = Layer.backward  # none
    cuda: ClassVar[Expression] = {"": "remainder_of(a, b)", "truncated": "fmod_of(a, b)"}
    cpu: ClassVar[Expression] = {"": "remainder(a, b)", "truncated": "truncated_remainder(a, b)"}

    @property
    def variant(self) -> str:
        return "truncated" if self.truncated else ""

    def function(self, a: Array, b: Array) -> Array:
        _check_divisors(a, b, "Mod")
        return np.asarray(np.fmod(a, b) if self.truncated else np.mod(a, b))


class Pow(Ordered):
    """a to the power of b; NaN if a < 0 and b is not an integer."""

    flop_each: ClassVar[int] = 60
    cuda = "power_of(a, b)"
    cpu = "powers"

    def function(self, a: Array, b: Array) -> Array:
        """NumPy computes b = 1/2 as a square root, which is NaN for -infinity instead of infinity."""
        return np.where(np.isneginf(a) & (b == 0.5), np.inf, np.power(a, b)).astype(a.dtype)

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[Array, Array]:
        return b * np.power(a, b - 1), y * np.log(np.where(a > 0, a, 1))


class PReLU(Ordered):
    """a where a >= 0, else a * b: a LeakyReLU with a slope per channel, or per element."""

    flop_each: ClassVar[int] = 2
    cuda = "a >= 0 ? a : a * b"
    cpu = "a * b if a < 0 else a"

    def function(self, a: Array, b: Array) -> Array:
        return np.where(a >= 0, a, a * b)

    def derivatives(self, a: Array, b: Array, y: Array) -> tuple[Array, Array]:
        return np.where(a >= 0, 1, b), np.where(a >= 0, 0, a)


class Comparison(Ordered, abstract=True):
    """1 where it is true, else 0, in the dtype of a and b. False if either is NaN."""

    takes_ints: ClassVar[bool] = True


class Greater(Comparison):
    """1 where a > b, else 0."""

    cuda = "a > b ? 1 : 0"
    cpu = "1 if a > b else 0"

    def function(self, a: Array, b: Array) -> Array:
        return np.asarray(a > b, a.dtype)


class GreaterOrEqual(Comparison):
    """1 where a >= b, else 0."""

    cuda = "a >= b ? 1 : 0"
    cpu = "1 if a >= b else 0"

    def function(self, a: Array, b: Array) -> Array:
        return np.asarray(a >= b, a.dtype)


class Equal(Comparison):
    """1 where a == b, else 0."""

    cuda = "a == b ? 1 : 0"
    cpu = "1 if a == b else 0"

    def function(self, a: Array, b: Array) -> Array:
        return np.asarray(a == b, a.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Concat(Layer):
    """Concatenation along an axis."""

    axis: int = 1
    arity: ClassVar[int | None] = None

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        first, axis = inputs[0], row_axis(self.axis, inputs[0])
        for other in inputs[1:]:
            resized = TensorType((*other.shape[:axis], first.shape[axis], *other.shape[axis + 1 :]), other.dtype)
            if len(other.shape) != len(first.shape) or resized != first:
                raise ShapeError("operands do not fit", got=str(other), expected=f"{first} except axis {axis}")
        total = sum(int(operand.shape[axis]) for operand in inputs)
        return TensorType((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return np.concatenate(xs, axis=self.axis)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        ends = np.cumsum([x.shape[self.axis] for x in xs])
        return tuple(np.split(dy, ends[:-1], axis=self.axis)), {}


@dataclass(frozen=True, eq=False, repr=False)
class Interleave(Layer):
    """Interleaves the phases of an output; a rewrite puts it after the phases of a transposed convolution.

    Input p (counted over the strides, the last axis fastest) fills y[..., p0::stride0, p1::stride1].
    """

    stride: tuple[int, ...] = (2, 2)
    arity: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        as_sizes(self, stride=1)

    def phases(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(s) for s in self.stride)))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) != math.prod(self.stride):
            raise ShapeError("wrong number of phases", got=str(len(inputs)), expected=str(math.prod(self.stride)))
        x = inputs[0]
        if len(x.shape) != 2 + len(self.stride):
            raise ShapeError("bad input shape", got=str(x), expected=f"(B, C and {len(self.stride)} more axes)")
        sizes = [0] * len(self.stride)
        for phase, part in zip(self.phases(), inputs, strict=True):
            for axis, (p, s) in enumerate(zip(phase, self.stride, strict=True)):
                if len(part.shape) == len(x.shape):
                    sizes[axis] = max(sizes[axis], (int(part.shape[2 + axis]) - 1) * s + p + 1)
        for phase, part in zip(self.phases(), inputs, strict=True):
            expected = (*x.shape[:2], *(len(range(p, n, s)) for p, n, s in zip(phase, sizes, self.stride, strict=True)))
            if part.shape != expected or part.dtype != x.dtype:
                raise ShapeError("phases do not fit", got=str(part), expected=str(TensorType(expected, x.dtype)))
        return TensorType((*x.shape[:2], *sizes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        sizes = [
            max((x.shape[2 + a] - 1) * stride + phase[a] + 1 for phase, x in zip(self.phases(), xs, strict=True))
            for a, stride in enumerate(self.stride)
        ]
        y = np.empty((*xs[0].shape[:2], *sizes), xs[0].dtype)
        for slices, x in zip(_phase_slices(self), xs, strict=True):
            y[slices] = x
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return tuple(dy[slices] for slices in _phase_slices(self)), {}


def operands(xs: Arrays, w: Weights) -> Arrays:
    """a and b of an Ordered layer."""
    first, second = ([w[role]] if role in w else [] for role in ("first", "mask" if "mask" in w else "constant"))
    return (*first, *xs, *second)


def _check_divisors(a: Array, b: Array, name: str) -> None:
    """InputError if ints are divided by 0: NumPy would return 0."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    if a.dtype.kind != "f" and 0 not in shape:
        check_divisors(np.broadcast_to(b, shape), name)


def _phase_slices(layer: Interleave) -> list[tuple[slice, ...]]:
    whole = (slice(None), slice(None))
    return [
        (*whole, *(slice(p, None, s) for p, s in zip(phase, layer.stride, strict=True))) for phase in layer.phases()
    ]


def unbroadcast(dy: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of an operand of this shape: summed over the axes along which it was broadcast."""
    missing = dy.ndim - len(shape)
    expanded = tuple(a for a, d in enumerate(dy.shape) if a < missing or (shape[a - missing] == 1 and d != 1))
    dx: Array = dy.sum(axis=expanded).reshape(shape)
    return dx
