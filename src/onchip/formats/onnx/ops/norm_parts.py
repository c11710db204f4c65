"""Norms that a file spells out as mean, difference, mean of squares, square root and quotient.

    d = x - ReduceMean(x);  y = d / Sqrt(ReduceMean(d ^ 2) + eps)      a LayerNorm; with x instead of d, an RMSNorm

d ^ 2 may be Pow(d, 2) or d * d, and the quotient a Mul by the reciprocal. The nodes are fused before any is read: one
layer makes one pass over memory instead of eight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.layers import LayerNorm, Permute, RMSNorm
from onchip.network.recipe import Array

NORM = "(norm)"  # the fused operator; its name is not valid in a file
_INPUTS = {"Add": 2, "Div": 2, "Mul": 2, "Pow": 2, "Reciprocal": 1, "Sqrt": 1, "Sub": 2}  # inputs per operator
_DEPTH = 6  # operators from x to the last: mean, difference, square, mean, sum, root
Makers = Mapping[str, Op]  # by output name
Constant = Callable[[str], Array | None]  # looks up a small constant by name; None: not one


@dataclass(frozen=True)
class _Mean:
    """ReduceMean(of) with keepdims=1."""

    of: str
    axes: tuple[int, ...]


def join_norms(ops: Sequence[Op], outputs: Sequence[str], constant: Constant) -> list[Op]:
    """Replace each norm by one operator; operators whose results are no longer used are removed."""
    makers = {op.outputs[0]: op for op in ops if len(op.inputs) == _INPUTS.get(op.kind, -1) or op.kind == "ReduceMean"}
    joined: list[Op] = []
    fused: set[str] = set()
    for op in ops:
        norm = _norm(op, makers, constant)
        joined.append(norm or op)
        if norm is not None:
            fused |= _between(op, makers, norm.inputs[0])
    readers = Counter(name for op in joined for name in op.inputs) + Counter(outputs)
    needed = []
    for op in reversed(joined):
        if op.outputs[0] in fused and not any(readers[name] for name in op.outputs):
            readers.subtract(op.inputs)
        else:
            needed.append(op)
    return needed[::-1]


def _between(last: Op, makers: Makers, x: str) -> set[str]:
    """Names of the intermediate values between x and the inputs of the last operator."""
    found: set[str] = set()
    ops = [last]
    for _ in range(_DEPTH):
        names = {name for op in ops for name in op.inputs if name != x and name in makers}
        found |= names
        ops = [makers[name] for name in names]
    return found


def _norm(op: Op, makers: Makers, constant: Constant) -> Op | None:
    """The norm that a Div or a Mul completes."""
    for numerator, root in _quotients(op, makers, constant):
        spread = makers.get(root)
        if spread is None or spread.kind != "Sqrt":
            continue
        for mean, eps in _with_constant(makers.get(spread.inputs[0]), "Add", constant):
            squares = _mean(makers.get(mean), constant)
            d = _root_of(makers.get(squares.of), constant) if squares is not None else None
            if squares is None or d is None or not _is_same(d, numerator, makers):
                continue
            x, centred = _source(numerator, squares.axes, makers, constant)
            attributes = {"axes": list(squares.axes), "epsilon": eps, "is_centred": int(centred)}
            return Op(NORM, op.name, (x,), op.outputs, attributes)
    return None


def _quotients(op: Op, makers: Makers, constant: Constant) -> Iterator[tuple[str, str]]:
    """(a, b) if the operator is a / b, or a times the reciprocal of b."""
    if len(op.inputs) != 2:
        return
    if op.kind == "Div":
        yield op.inputs[0], op.inputs[1]
    elif op.kind == "Mul":
        for a, inverse in (op.inputs, op.inputs[::-1]):
            maker = makers.get(inverse)
            if maker is not None and maker.kind == "Reciprocal":
                yield a, maker.inputs[0]
            elif maker is not None and maker.kind == "Div" and _number(maker.inputs[0], constant) == 1:
                yield a, maker.inputs[1]


def _with_constant(op: Op | None, kind: str, constant: Constant) -> Iterator[tuple[str, float]]:
    """(value, number) of an operator on a value and one constant."""
    if op is not None and op.kind == kind:
        for value, other in (op.inputs, op.inputs[::-1]):
            number = _number(other, constant)
            if number is not None:
                yield value, number


def _number(name: str, constant: Constant) -> float | None:
    array = constant(name)
    if array is None or array.size != 1 or array.dtype.kind not in "fV":
        return None
    return float(str(array.reshape(-1)[0]))  # as written: see Op.number


def _mean(op: Op | None, constant: Constant) -> _Mean | None:
    if op is None or op.kind != "ReduceMean" or not op.inputs or op.attributes.get("keepdims", 1) != 1:
        return None
    axes = op.attributes.get("axes")
    if axes is None and len(op.inputs) > 1:
        array = constant(op.inputs[1])
        axes = array.reshape(-1).tolist() if array is not None and array.dtype.kind == "i" else None
    if not isinstance(axes, list) or not axes or not all(type(axis) is int for axis in axes):
        return None
    return _Mean(op.inputs[0], tuple(sorted(axes)))


def _root_of(op: Op | None, constant: Constant) -> str | None:
    """d if the operator computes d ^ 2."""
    if op is not None and op.kind == "Pow":
        array = constant(op.inputs[1])
        is_two = array is not None and array.size == 1 and float(array.reshape(-1)[0]) == 2
        return op.inputs[0] if is_two else None
    is_square = op is not None and op.kind == "Mul" and op.inputs[0] == op.inputs[1]
    return op.inputs[0] if op is not None and is_square else None


def _is_same(a: str, b: str, makers: Makers) -> bool:
    """Whether two names have the same value: some files compute the same difference twice."""
    first, second = makers.get(a), makers.get(b)
    if a == b or first is None or second is None:
        return a == b
    return first.kind == second.kind == "Sub" and first.inputs == second.inputs


def _source(d: str, axes: tuple[int, ...], makers: Makers, constant: Constant) -> tuple[str, bool]:
    """x and True if d = x - ReduceMean(x) over these axes; else d itself and False."""
    op = makers.get(d)
    if op is not None and op.kind == "Sub":
        x, mean = op.inputs
        if _mean(makers.get(mean), constant) == _Mean(x, axes):
            return x, True
    return d, False


@reads(NORM)
def read_norm(graph: GraphReader, op: Op) -> None:
    """Axes that are not the last ones are permuted to the end and back."""
    x = graph.value(op)
    rank = len(graph.types[x].shape)
    axes = sorted({graph.axis(op, x, axis) for axis in op.sizes("axes", [])})
    kind = LayerNorm if op.attribute("is_centred", 1) else RMSNorm
    layer = kind(-len(axes), op.number("epsilon", 0.0))
    order = (*(axis for axis in range(rank) if axis not in axes), *axes)
    if order == tuple(range(rank)):
        graph.add(op, layer, (x,))
    else:
        normed = graph.add_step(op, layer, (graph.add_step(op, Permute(order), (x,)),))
        graph.add(op, Permute(tuple(order.index(axis) for axis in range(rank))), (normed,))
