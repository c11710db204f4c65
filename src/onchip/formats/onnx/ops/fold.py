"""Operators on constants, evaluated while reading: transposed weights and shape arithmetic.

Exporters write `x.view(x.size(0), -1)` as Shape, Gather, Unsqueeze, Concat and Reshape. A shape is an object array of
sizes with one BATCH and goes through the same functions. What NumPy rejects, the reader rejects.
"""

from __future__ import annotations

import math

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, folds, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.select import shape_part, slice_operands
from onchip.formats.onnx.tensors import dtype_of
from onchip.network.reading import MAX_RANK, show
from onchip.network.recipe import Array
from onchip.network.types import BATCH, numpy_dtype

# These only rearrange elements: a weight keeps its name.
KEEP_ELEMENTS = ("Reshape", "Squeeze", "Transpose", "Unsqueeze")


@reads("Shape")
def read_shape(graph: GraphReader, op: Op) -> None:
    """The shape of a value: BATCH, then sizes."""
    shape = graph.constant_or_shape(op, 0).shape if graph.is_constant(op, 0) else graph.shape(graph.value(op))
    graph.add_constant(op, np.array(shape_part(op, shape), object))


_COMPARISONS = {
    "Less": np.less, "Greater": np.greater, "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal, "And": np.logical_and, "Or": np.logical_or, "Max": np.maximum,
    "Min": np.minimum,
}  # fmt: skip


@folds(*_COMPARISONS)
def fold_comparison(graph: GraphReader, op: Op) -> Array:
    found = graph.constant(op, 0)
    for index in range(1, len(op.inputs)):
        other = graph.constant(op, index)
        if found.dtype != other.dtype:
            raise FormatError(
                f"{op} mixes dtypes", got=f"{found.dtype.name} and {other.dtype.name}", expected="one dtype"
            )
        graph.spend(op, math.prod(np.broadcast_shapes(found.shape, other.shape)))
        found = np.asarray(_COMPARISONS[op.kind](found, other))
    return found


@folds("Not")
def fold_not(graph: GraphReader, op: Op) -> Array:
    graph.spend(op, graph.constant(op, 0).size)
    return np.logical_not(graph.constant(op, 0))


@folds("Clip")
def fold_clip(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    if graph.opset < 11:
        low, high = np.array(op.number("min", -math.inf)), np.array(op.number("max", math.inf))
    else:
        low, high = (graph.constant(op, index) if graph.has(op, index) else array for index in (1, 2))
    return np.asarray(np.minimum(np.maximum(array, low), high), array.dtype)


@folds("Add", "Sub", "Mul", "Div", "Mod", "Pow")
def fold_arithmetic(graph: GraphReader, op: Op) -> Array:
    a, b = graph.constant(op, 0), graph.constant(op, 1)
    if op.kind == "Pow":
        graph.spend(op, math.prod(np.broadcast_shapes(a.shape, b.shape)))
        return np.asarray(np.power(a, b), a.dtype)
    if a.dtype != b.dtype:
        raise FormatError(f"{op} mixes dtypes", got=f"{a.dtype.name} and {b.dtype.name}", expected="one dtype")
    graph.spend(op, math.prod(np.broadcast_shapes(a.shape, b.shape)))
    if op.kind == "Add":
        return a + b
    if op.kind == "Sub":
        return a - b
    if op.kind == "Mul":
        return a * b
    if a.dtype.kind in "iu" and not b.all():
        raise FormatError(f"{op} divides by zero", got=f"{show(b.tolist())}", expected="ints other than 0")
    if op.kind == "Mod":
        return np.asarray(np.fmod(a, b) if op.attribute("fmod", 0) else np.mod(a, b))
    if a.dtype.kind in "iu":
        return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))  # rounds towards zero
    return a / b


@folds("Cast")
def fold_cast(graph: GraphReader, op: Op) -> Array:
    array, dtype = graph.constant_or_shape(op, 0), dtype_of(op.attribute("to", 0), str(op))
    if array.dtype == object and dtype in ("int64", "int32"):
        return array
    graph.spend(op, array.size)
    return graph.constant(op, 0).astype(numpy_dtype(dtype))


@folds("ConstantOfShape")
def fold_constant_of_shape(graph: GraphReader, op: Op) -> Array:
    # The same for every row: size 1, which broadcasts over the batch.
    shape = [1 if d == BATCH else int(d) for d in graph.constant_or_shape(op, 0).ravel()]
    if min(shape, default=0) < 0 or len(shape) > MAX_RANK:
        raise FormatError(f"{op}: bad shape", got=show(shape), expected="sizes")
    graph.spend(op, math.prod(shape))
    value = graph.tensor(op, "value") if "value" in op.attributes else np.zeros(1, np.float32)
    return np.full(shape, value.reshape(()))


@folds("Range")
def fold_range(graph: GraphReader, op: Op) -> Array:
    start, stop, step = (graph.constant(op, index).item() for index in range(3))
    graph.spend(op, max(0, math.ceil((stop - start) / step)))
    return np.asarray(np.arange(start, stop, step), graph.constant(op, 0).dtype)


@folds("Concat")
def fold_concat(graph: GraphReader, op: Op) -> Array:
    arrays = [graph.constant_or_shape(op, index) for index in range(len(op.inputs))]
    graph.spend(op, sum(array.size for array in arrays))
    return np.concatenate(arrays, op.attribute("axis", 0))


@folds("Gather")
def fold_gather(graph: GraphReader, op: Op) -> Array:
    array, indices, axis = graph.constant_or_shape(op, 0), graph.constant(op, 1), op.attribute("axis", 0)
    graph.spend(op, array.size // max(array.shape[axis], 1) * indices.size)
    return np.asarray(np.take(array, indices, axis), array.dtype)


@folds("Slice")
def fold_slice(graph: GraphReader, op: Op) -> Array:
    array = graph.constant_or_shape(op, 0)
    starts, ends, axes, steps = slice_operands(graph, op)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        # With a negative step, an end before the first element is a large negative number in ONNX and None in Python.
        stop = None if step < 0 and end < -array.shape[axis] else end
        array = np.moveaxis(np.moveaxis(array, axis, 0)[start:stop:step], 0, axis)
    return array


@folds("Equal")
def fold_equal(graph: GraphReader, op: Op) -> Array:
    """Also of shapes: the batch equals only itself."""
    a, b = graph.constant_or_shape(op, 0), graph.constant_or_shape(op, 1)
    graph.spend(op, math.prod(np.broadcast_shapes(a.shape, b.shape)))
    return np.asarray(a == b, bool)


@folds("Where")
def fold_where(graph: GraphReader, op: Op) -> Array:
    """Also of shapes."""
    condition, a, b = (graph.constant_or_shape(op, index) for index in range(3))
    if a.dtype != b.dtype and object not in (a.dtype, b.dtype):
        raise FormatError(f"{op} mixes dtypes", got=f"{a.dtype.name} and {b.dtype.name}", expected="one dtype")
    graph.spend(op, math.prod(np.broadcast_shapes(condition.shape, a.shape, b.shape)))
    return np.where(condition.astype(bool), a, b)


@folds("Expand")
def fold_expand(graph: GraphReader, op: Op) -> Array:
    """A constant expanded to every row of the batch keeps size 1 on the batch axis."""
    array, shape = graph.constant(op, 0), graph.constant_or_shape(op, 1).tolist()
    if BATCH in shape and (at := shape.index(BATCH) - len(shape) + array.ndim) >= 0:
        array = graph.once(array, at)
    aligned = (1,) * (len(shape) - array.ndim) + array.shape
    if shape.count(BATCH) > 1 or (BATCH in shape and aligned[shape.index(BATCH) - len(shape)] != 1):
        got = f"{array.shape} to {show(shape)}"
        raise FormatError(f"{op} would depend on the batch", got=got, expected="the batch once, on an axis of size 1")
    sizes = np.broadcast_shapes(array.shape, tuple(1 if size == BATCH else int(size) for size in shape))
    graph.spend(op, math.prod(sizes))
    return np.broadcast_to(array, sizes)


@folds("Squeeze")
def fold_squeeze(graph: GraphReader, op: Op) -> Array:
    axes = graph.axes(op, since=13)
    return np.squeeze(graph.constant_or_shape(op, 0), None if axes is None else tuple(axes))


@folds("Unsqueeze")
def fold_unsqueeze(graph: GraphReader, op: Op) -> Array:
    array, axes = graph.constant_or_shape(op, 0), graph.new_axes(op)
    if array.ndim + len(axes) > MAX_RANK:
        raise FormatError(f"{op}: too many axes", got=str(array.ndim + len(axes)), expected=f"at most {MAX_RANK}")
    return np.expand_dims(array, tuple(axes))


@folds("Reshape")
def fold_reshape(graph: GraphReader, op: Op) -> Array:
    array, wanted = graph.constant_or_shape(op, 0), graph.constant_or_shape(op, 1).ravel().tolist()
    if wanted[:1] == [BATCH] and array.shape[:1] == (1,):  # the same for every row: stored once
        shape = [1, *(int(d) for d in wanted[1:])]
    else:
        shape = graph.ints(op, 1)
    if not array.flags.c_contiguous:  # else it is a view
        graph.spend(op, array.size)
    if not op.attribute("allowzero", 0):
        shape = [array.shape[axis] if d == 0 else d for axis, d in enumerate(shape)]
    return array.reshape(shape)


@folds("Transpose")
def fold_transpose(graph: GraphReader, op: Op) -> Array:
    array = graph.constant_or_shape(op, 0)
    return array.transpose(op.attribute("perm", list(range(array.ndim))[::-1]))
