"""Slice, Split, Gather by constant indices, Pad, Tile and Expand."""

from __future__ import annotations

import itertools

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter, OpsetError
from onchip.network.graph import Node
from onchip.network.layers import Add, Concat, Gather, Mask, Pad, Slice, Tile
from onchip.network.layers.select import PadMode
from onchip.network.reading import show
from onchip.network.types import BATCH, Dim, numpy_dtype

_MODES: dict[bytes, PadMode] = {b"constant": "constant", b"reflect": "reflect", b"edge": "edge", b"wrap": "wrap"}
FAR = 10**9  # larger than any batch: such an end means the end of the batch


def row_axis_of(graph: GraphReader, op: Op, x: str, axis: int) -> int:
    """The file's axis counted within a row; FormatError for the batch."""
    found = graph.axis(op, x, axis) - 1
    if found < 0:
        raise FormatError(f"{op} would mix the rows of the batch", got=f"axis {axis}", expected="an axis after axis 0")
    return found


@reads("Slice")
def read_slice(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    starts, ends, axes, steps = slice_operands(graph, op)
    row = list(graph.types[x].row_shape)
    ranges = [range(n) for n in row]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        begins, ends_after = start == 0 or start <= -FAR, end >= (graph.batch or FAR)
        if graph.axis(op, x, axis) == 0 and begins and ends_after and step == 1:
            continue  # all rows of the batch
        at = row_axis_of(graph, op, x, axis)
        if step == 0 or ranges[at] != range(row[at]):
            raise FormatError(f"{op}: bad slice", got=show((starts, ends, axes, steps)), expected="a step, axes once")
        ranges[at] = range(row[at])[slice(start, end, step)]
    if ranges == [range(n) for n in row]:
        graph.pass_on(op)
    else:
        add_ranges(graph, op, x, ranges)


def slice_operands(graph: GraphReader, op: Op) -> tuple[list[int], list[int], list[int], list[int]]:
    """starts, ends, axes, steps: attributes before opset 10."""
    if graph.opset < 10:
        starts, ends = op.attribute("starts", [0]), op.attribute("ends", [0])
        axes, steps = op.attribute("axes", list(range(len(starts)))), [1] * len(starts)
    else:
        starts, ends = graph.ints(op, 1), graph.ints(op, 2)
        axes = graph.ints(op, 3) if graph.has(op, 3) else list(range(len(starts)))
        steps = graph.ints(op, 4) if graph.has(op, 4) else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise FormatError(f"{op}: bad slice", got=show((starts, ends, axes, steps)), expected="one of each per axis")
    return starts, ends, axes, steps


def shape_part(op: Op, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The sizes that a Shape returns: all, or a range from opset 15 on."""
    return shape[op.attribute("start", 0) : op.attribute("end", 0) if "end" in op.attributes else None]


def add_ranges(graph: GraphReader, op: Op, x: str, ranges: list[range], output: int = 0) -> None:
    """A Slice with one range per axis of a row."""
    starts = tuple(r.start if len(r) else 0 for r in ranges)
    layer = Slice(starts, tuple(map(len, ranges)), tuple(r.step for r in ranges))
    graph.add(op, layer, (x,), output=output)


@reads("Split")
def read_split(graph: GraphReader, op: Op) -> None:
    """A Slice per output; a constant is split while reading."""
    if graph.is_constant(op, 0):
        array, axis = graph.constant(op, 0), op.attribute("axis", 0)
        graph.spend(op, array.size)
        for name, indices in zip(op.outputs, split_ranges(graph, op, array.shape[axis]), strict=True):
            part = Op(op.kind, op.name, op.inputs, (name,), op.attributes)
            graph.add_constant(part, np.take(array, indices, axis))
        return
    x = graph.value(op)
    at = row_axis_of(graph, op, x, op.attribute("axis", 0))
    for output, indices in enumerate(split_ranges(graph, op, graph.types[x].row_shape[at])):
        ranges = [range(d) for d in graph.types[x].row_shape]
        ranges[at] = indices
        if op.outputs[output]:
            add_ranges(graph, op, x, ranges, output)


def split_ranges(graph: GraphReader, op: Op, n: int) -> list[range]:
    """The range of n indices for each output."""
    count = len(op.outputs)
    if graph.opset >= 13 and graph.has(op, 1):
        sizes = graph.ints(op, 1, most=len(op.outputs))
    elif "split" in op.attributes:
        sizes = op.sizes("split", [], count)
    else:  # equal, the last one may be smaller
        each = -(-n // count)
        sizes = [max(0, min(each, n - i * each)) for i in range(count)]
    if len(sizes) != count or sum(sizes) != n or min(sizes) < 0:
        raise FormatError(f"{op}: bad sizes", got=show(sizes), expected=f"{count} sizes of total {n}")
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def gather_constant(graph: GraphReader, op: Op) -> None:
    """x[:, indices]: a Slice if they are evenly spaced, else a Gather; then a reshape to the indices' shape."""
    x, indices = graph.value(op), graph.constant(op, 1)
    at = row_axis_of(graph, op, x, op.attribute("axis", 0))
    row = graph.types[x].row_shape
    n = row[at]
    if indices.dtype not in (np.int64, np.int32) or indices.size == 0 or not np.all((-n <= indices) & (indices < n)):
        raise FormatError(
            f"{op}: bad indices", got=show(indices.ravel()[:8].tolist()), expected=f"ints from {-n} to {n - 1}"
        )
    flat = (indices.reshape(-1) % n).tolist()
    step = flat[1] - flat[0] if len(flat) > 1 else 1
    layer: Slice | Gather
    if step and flat == list(range(flat[0], flat[0] + step * len(flat), step)):
        ones, zeros = [1] * len(row), [0] * len(row)
        zeros[at], ones[at] = flat[0], step
        layer = Slice(tuple(zeros), (*row[:at], len(flat), *row[at + 1 :]), tuple(ones))
    else:
        layer = Gather(at + 1, tuple(flat))
    if indices.ndim == 1:
        graph.add(op, layer, (x,))
    else:
        shape = graph.shape(x)
        axis = at + 1 - graph.one_row
        gathered = graph.add_step(op, layer, (x,))
        graph.add(op, graph.reshape(op, [*shape[:axis], *indices.shape, *shape[axis + 1 :]]), (gathered,))


@reads("Pad")
def read_pad(graph: GraphReader, op: Op) -> None:
    """A Pad, which a following Conv or AveragePool may absorb (windows.py)."""
    x, word = graph.value(op), op.attribute("mode", b"constant") or b"constant"
    rank = len(graph.shape(x))
    if word not in _MODES:
        raise FormatError(f"{op}: bad attribute 'mode'", got=show(word), expected=b", ".join(_MODES).decode())
    if graph.opset < 11:
        pads, value, axes = op.sizes("pads", []), op.number("value", 0.0), list(range(rank))
    else:
        pads = graph.ints(op, 1)
        value = float(graph.weight_constant(op, 2, x).reshape(())) if graph.has(op, 2) else 0.0
        axes = graph.ints(op, 3) if graph.has(op, 3) else list(range(rank))
    found = [graph.axis(op, x, axis) for axis in axes]
    if len(pads) != 2 * len(axes) or len(set(found)) < len(found):
        raise FormatError(f"{op}: bad pads", got=show(pads), expected="two ints per axis")
    before, after = [0] * len(graph.types[x].shape), [0] * len(graph.types[x].shape)
    for index, axis in enumerate(found):
        before[axis], after[axis] = pads[index], pads[len(axes) + index]
    if before[0] or after[0]:
        raise FormatError(f"{op} would add rows to the batch", got=show(pads), expected="no pads along axis 0")
    if not any(before + after):
        graph.pass_on(op)
        return
    mode = _MODES[word]
    graph.add(op, Pad((*before[1:], *after[1:]), mode, value if mode == "constant" else 0.0), (x,))


@reads("Tile")
def read_tile(graph: GraphReader, op: Op) -> None:
    x, repeats = graph.value(op), graph.ints(op, 1)
    if len(repeats) != len(graph.shape(x)) or min(repeats, default=0) < 0:
        raise FormatError(f"{op}: bad repeats", got=show(repeats), expected=f"one for each axis of {graph.types[x]}")
    if not graph.one_row:
        if repeats[0] != 1:
            raise FormatError(f"{op} would repeat the batch", got=show(repeats), expected="1 along axis 0")
        repeats = repeats[1:]
    add_tile(graph, op, x, repeats)


@reads("Expand")
def read_expand(graph: GraphReader, op: Op) -> None:
    """Sizes of 1 are broadcast; 1 in the new shape keeps a size."""
    x, wanted = graph.value(op), graph.constant_or_shape(op, 1).tolist()
    shape = graph.shape(x)
    if not graph.one_row and (
        len(wanted) > len(shape) or (len(wanted) == len(shape) and wanted[0] not in (1, BATCH, graph.batch))
    ):
        raise FormatError(f"{op} would repeat the batch", got=show(wanted), expected="the batch first, unchanged")
    rank = max(len(shape), len(wanted))
    wanted = [1] * (rank - len(wanted)) + wanted
    if rank > len(shape):
        shape = (*[1] * (rank - len(shape)), *shape)
        x = graph.add_step(op, graph.reshape(op, shape), (x,))
    pairs = list(zip(shape, wanted, strict=True))[0 if graph.one_row else 1 :]
    if any(size not in (1, n) and n != 1 for n, size in pairs) or BATCH in [size for _, size in pairs]:
        raise FormatError(
            f"{op}: shapes do not fit", got=f"{show(list(shape))} to {show(wanted)}", expected="1 or equal sizes"
        )
    add_tile(graph, op, x, [size if n == 1 else 1 for n, size in pairs])


def add_tile(graph: GraphReader, op: Op, x: str, repeats: list[int]) -> None:
    if x == graph.value(op) and set(repeats) <= {1}:
        graph.pass_on(op)
    else:
        graph.add(op, Tile(tuple(repeats)), (x,))


def concat_constants(graph: GraphReader, op: Op, axis: int) -> None:
    """Concatenate values and constants, such as a token before a sequence: zero pads for the constants, then an Add."""
    padded: list[str] = []
    parts, zeros = [], 0  # all operands, values as zeros; zeros before the first value
    for index in range(len(op.inputs)):
        if not graph.is_constant(op, index):
            padded.append(graph.value(op, index))
            parts.append(np.zeros(graph.types[padded[-1]].row_shape, numpy_dtype(graph.types[padded[-1]].dtype)))
            continue
        array = graph.constant(op, index)
        array = array if graph.one_row else graph.once(array)
        if axis == 0 or (not graph.one_row and array.shape[:1] != (1,)) or array.dtype == bool:
            got, expected = f"{array.dtype.name} {array.shape}, axis {axis}", "numbers, the same for every row"
            raise FormatError(f"{op}: bad constant", got=got, expected=expected)
        parts.append(array if graph.one_row else array[0])
        size = parts[-1].shape[axis - 1]
        if padded:
            padded[-1] = _pad_axis(graph, op, padded[-1], axis, 0, size)
        else:
            zeros += size
    graph.spend(op, sum(part.size for part in parts))
    constant = np.concatenate(parts, axis - 1).astype(parts[0].dtype)
    padded[0] = _pad_axis(graph, op, padded[0], axis, zeros, 0)
    y = padded[0] if len(padded) == 1 else graph.add_step(op, Concat(axis), tuple(padded))
    graph.add(op, Add(), (y,), {"constant": graph.weight(f"{op.outputs[0]}_constant", constant)})


def _pad_axis(graph: GraphReader, op: Op, x: str, axis: int, before: int, after: int) -> str:
    if not before + after:
        return x
    pads = [0] * 2 * len(graph.types[x].row_shape)
    pads[axis - 1], pads[len(pads) // 2 + axis - 1] = before, after
    return graph.add_step(op, Pad(tuple(pads)), (x,))


@reads("Trilu")
def read_triangle(graph: GraphReader, op: Op) -> None:
    """The part on one side of a diagonal; zeros elsewhere."""
    x, first = graph.value(op), int(graph.constant(op, 1).reshape(())) if graph.has(op, 1) else 0
    row = graph.types[x].row_shape
    if len(row) < 2 - graph.one_row:
        raise FormatError(f"{op} needs matrices", got=str(graph.types[x]), expected="two axes after the batch")
    ones = np.ones(row[-2:], numpy_dtype(graph.types[x].dtype))
    mask = np.triu(ones, first) if op.attribute("upper", 1) else np.tril(ones, first)
    graph.add(op, Mask(), (x,), {"mask": graph.weight(f"{op.outputs[0]}_side", mask)})


# -- writing --------------------------------------------------------------------------------------------------------


@writes(Slice)
def write_slice(graph: GraphWriter, node: Node) -> None:
    attributes, row = node.layer.attributes(), graph.net.input_types(node)[0].row_shape
    columns = []
    for axis, (n, start, size, step) in enumerate(
        zip(row, attributes["starts"], attributes["sizes"], attributes["steps"], strict=True), start=1
    ):
        if (start, size, step) != (0, n, 1):
            stop = start + size * step
            columns.append((start, stop if stop >= 0 else -n - 1, axis, step))
    columns = columns or [(0, row[0], 1, 1)] if row else columns
    names = ("starts", "ends", "axes", "steps")
    operands = [
        graph.constant(f"{node.name}_{name}", np.array(values, np.int64))
        for name, values in zip(names, zip(*columns, strict=True), strict=True)
    ]
    graph.emit("Slice", node, [graph.value(node), *operands])


@writes(Gather)
def write_gather(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    indices = graph.constant(f"{node.name}_indices", np.array(attributes["indices"], np.int64))
    graph.emit("Gather", node, [graph.value(node), indices], axis=attributes["axis"])


@writes(Pad)
def write_pad(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    if attributes["mode"] == "wrap" and graph.opset < 19:
        raise OpsetError("wrap pads need opset 19")
    rank = len(attributes["pads"]) // 2
    pads = [0, *attributes["pads"][:rank], 0, *attributes["pads"][rank:]]
    operands = [graph.value(node), graph.constant(f"{node.name}_pads", np.array(pads, np.int64))]
    if attributes["mode"] == "constant":
        value = np.array(attributes["value"]).astype(numpy_dtype(graph.dtype(node)))
        operands.append(graph.constant(f"{node.name}_value", value))
    graph.emit("Pad", node, operands, mode=attributes["mode"])


@writes(Tile)
def write_tile(graph: GraphWriter, node: Node) -> None:
    repeats = graph.constant(f"{node.name}_repeats", np.array([1, *node.layer.attributes()["repeats"]], np.int64))
    graph.emit("Tile", node, [graph.value(node), repeats])
