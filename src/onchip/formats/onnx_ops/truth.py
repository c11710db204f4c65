"""Comparisons of ints with a number, up to the Cast that makes factors of them: masks of ids that are padding.

Networks have no truth values: what is compared becomes 0.0 or 1.0 at once, exactly, by a difference that is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads
from onchip.formats.onnx_ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx_ops.lengths import MIRRORED, begins_mask, turns_mask
from onchip.formats.onnx_tensors import ELEMENT_DTYPES
from onchip.spec.layers import Add, Cast, Clip, Mul
from onchip.spec.reading import show

# x > k is that of x - k; of the others, what is added to it first, and whether all is turned round.
_ORDERS = {"Greater": (0, False), "GreaterOrEqual": (1, False), "LessOrEqual": (0, True), "Less": (1, True)}
_SEEN = ("Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose")


@dataclass(frozen=True)
class Truth(Unfinished):
    """x is 1.0 where it is true and 0.0 where it is not, or the other way round."""

    is_turned: bool = False
    expected: ClassVar[str] = "a Cast to a float, as of a mask that is multiplied with"


@reads("Equal", *_ORDERS)
def read_comparison(graph: GraphReader, op: Op) -> None:
    if begins_mask(graph, op):
        return
    is_mirrored = graph.is_constant(op, 0)
    x, number = graph.value(op, int(is_mirrored)), graph.constant(op, int(not is_mirrored))
    kind = MIRRORED.get(op.kind, op.kind) if is_mirrored else op.kind
    if graph.types[x].dtype not in ("int32", "int64") or number.size != 1:
        got = f"{graph.types[x]} and {number.dtype.name} {number.shape}"
        raise FormatError(
            f"{op}: only ints can be compared, and only with one number", got=got, expected="ids and an id"
        )
    more, is_turned = _ORDERS.get(kind, (0, False))
    offset = more - number.reshape(()).astype(np.int64)
    if offset:
        constant = {"constant": graph.weight(f"{op.outputs[0]}_offset", offset.astype(graph.types[x].dtype))}
        x = graph.add_step(op, Add(), (x,), constant)
    difference = graph.add_step(op, Cast("float32"), (x,))
    if kind == "Equal":
        sign = graph.add_step(op, Clip(-1.0, 1.0), (difference,))
        graph.begin(op, Truth(graph.add_step(op, Mul(), (sign, sign)), is_turned=True))
    else:
        graph.begin(op, Truth(graph.add_step(op, Clip(0.0, 1.0), (difference,)), is_turned))


@reads("Not")
def read_not(graph: GraphReader, op: Op) -> None:
    if turns_mask(graph, op):
        return
    given = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if not isinstance(given, Truth):
        raise FormatError(f"{op} needs a comparison before it", got=show(op.inputs), expected="Equal, Greater, Less")
    graph.begin(op, Truth(given.x, not given.is_turned))


def reads_truth(graph: GraphReader, op: Op) -> bool:
    """Whether the node sees a truth value in another way, or makes numbers of it; if so, it is done."""
    given = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if not isinstance(given, Truth) or op.kind not in (*_SEEN, "Cast"):
        return False
    if op.kind != "Cast":
        name = graph.part(op, op.kind, [graph.part_value(op, given.x), *op.inputs[1:]], **op.attributes)
        graph.begin(op, Truth(graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), given.is_turned))
    elif ELEMENT_DTYPES.get(op.attribute("to", 0)) == "bool":
        graph.begin(op, given)
    else:
        x = _not(graph, op, given.x) if given.is_turned else given.x
        name = graph.part(op, "Cast", [graph.part_value(op, x)], **op.attributes)
        graph.hand_out(op, 0, graph.value(Op(op.kind, op.name, (name,), op.outputs, {})))
    return True


def _not(graph: GraphReader, op: Op, x: str) -> str:
    """1 - x"""
    turned = graph.add_step(op, Mul(), (x,), {"constant": graph.weight("minus_one", np.array(-1, np.float32))})
    return graph.add_step(op, Add(), (turned,), {"constant": graph.weight("plus_one", np.array(1, np.float32))})
