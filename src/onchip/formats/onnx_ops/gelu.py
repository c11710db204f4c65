"""GELU: opset 20 has an operator for it; before, it is a handful of nodes, as everybody writes them.

exact  x * 0.5 * (1 + Erf(x / sqrt(2))), in any order of the factors
tanh   0.5 * (x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * (x * (x * x))))))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.spec.layers import GELU, Add, Layer, Mul, Tanh
from onchip.spec.network import Node
from onchip.spec.reading import show

_TANH_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715
_ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2}  # how far a constant may be off; wider types hold it to 1e-6


@reads("Gelu")
def read_gelu(graph: GraphReader, op: Op) -> None:
    word = op.attribute("approximate", b"none")
    if word not in (b"none", b"tanh"):
        raise FormatError(f"{op}: bad attribute 'approximate'", got=show(word), expected="none or tanh")
    graph.add(op, GELU(cast(Literal["none", "tanh"], word.decode())), (graph.value(op),))


# -- exact: from Erf on, the parts are gathered until they are all there -----------------------------------------


@dataclass(frozen=True)
class ErfPart(Unfinished):
    """scale * (Erf(x / sqrt(2)) [+ 1]) [* x]."""

    has_one: bool = False
    has_x: bool = False
    scale: float = 1.0
    expected: ClassVar[str] = "the rest of a GELU: x * 0.5 * (1 + Erf(x / sqrt(2)))"


@reads("Erf")
def read_erf(graph: GraphReader, op: Op) -> None:
    inner = scaled(graph, graph.value(op), Mul)
    if inner is None or not _near(graph, inner[0], inner[1], math.sqrt(0.5)):
        raise FormatError(f"{op} stands alone", got=show(op.inputs[0]), expected="Erf(x / sqrt(2)), inside of a GELU")
    graph.begin(op, ErfPart(inner[0]))


def completes_gelu(graph: GraphReader, op: Op) -> bool:
    """Whether an Add or Mul belongs to a GELU that an Erf began; if so, it is done."""
    sides = [i for i, name in enumerate(op.inputs) if isinstance(graph.unfinished.get(name), ErfPart)]
    if len(op.inputs) != 2 or len(sides) != 1:
        return False
    part, other = cast(ErfPart, graph.unfinished[op.inputs[sides[0]]]), 1 - sides[0]
    factor, has_x = _factor(graph, op, other, part.x)
    if factor is None:
        return False
    if op.kind == "Mul":
        if has_x and part.has_x:
            return False
        part = dataclasses.replace(part, has_x=part.has_x or has_x, scale=part.scale * factor)
    elif has_x or part != ErfPart(part.x) or not _near(graph, part.x, factor, 1):
        return False
    else:
        part = dataclasses.replace(part, has_one=True)
    if part.has_one and part.has_x and _near(graph, part.x, part.scale, 0.5):
        graph.add(op, GELU(), (part.x,))
    else:
        graph.begin(op, part)
    return True


def _factor(graph: GraphReader, op: Op, index: int, x: str) -> tuple[float | None, bool]:
    """The operand as a number, or as a number times x: (number, whether x is in it)."""
    if graph.is_constant(op, index):
        array = graph.constant(op, index)
        return (float(array.reshape(-1)[0]), False) if array.size == 1 else (None, False)
    value = graph.value(op, index)
    if value == x:
        return 1.0, True
    inner = scaled(graph, value, Mul)
    return (inner[1], True) if inner is not None and inner[0] == x else (None, False)


# -- tanh: layers that are there already are recognised ----------------------------------------------------------


def tanh_gelu(graph: GraphReader, value: str, half: float) -> str | None:
    """The x of which value * half is the tanh approximation of GELU."""
    if not _near(graph, value, half, 0.5):
        return None
    for x, outer in _pairs(graph, value, Mul):
        tanh = graph.nodes.get(_scaled_by(graph, outer, Add, 1))
        if tanh is None or not isinstance(tanh.layer, Tanh):
            continue
        for also_x, cubic in _pairs(graph, _scaled_by(graph, tanh.inputs[0], Mul, _TANH_SCALE), Add):
            for again_x, square in _pairs(graph, _scaled_by(graph, cubic, Mul, _CUBIC), Mul):
                if also_x == again_x == x and (x, x) in _pairs(graph, square, Mul):
                    return x
    return None


def scaled(graph: GraphReader, value: str, kind: type[Layer]) -> tuple[str, float] | None:
    """(x, c) where the value is x + c or x * c, c one number."""
    node = graph.nodes.get(value)
    if node is None or not isinstance(node.layer, kind) or len(node.inputs) != 1:
        return None
    constant = graph.weights[node.weights["constant"]]
    return (node.inputs[0], float(constant.reshape(-1)[0])) if constant.size == 1 else None


def _scaled_by(graph: GraphReader, value: str, kind: type[Layer], number: float) -> str:
    inner = scaled(graph, value, kind)
    return inner[0] if inner is not None and _near(graph, inner[0], inner[1], number) else ""


def _pairs(graph: GraphReader, value: str, kind: type[Layer]) -> Iterator[tuple[str, str]]:
    """The two values that the value is the sum or product of, both ways round."""
    node = graph.nodes.get(value)
    if node is not None and isinstance(node.layer, kind) and len(node.inputs) == 2 and not node.weights:
        yield node.inputs[0], node.inputs[1]
        yield node.inputs[1], node.inputs[0]


def _near(graph: GraphReader, x: str, number: float, wanted: float) -> bool:
    return abs(number - wanted) <= _ROUNDING.get(graph.types[x].dtype, 1e-6) * wanted


@writes(GELU)
def write_gelu(graph: GraphWriter, node: Node) -> None:
    x, half, one = graph.value(node), graph.number(node, "half", 0.5), graph.number(node, "one", 1)
    if node.layer.attributes()["approximate"] == "none":
        bell = graph.emit_step("Erf", node, [graph.emit_step("Div", node, [x, graph.number(node, "root", 2**0.5)])])
    else:
        cube = graph.emit_step("Mul", node, [x, graph.emit_step("Mul", node, [x, x])])
        cubic = graph.emit_step("Mul", node, [cube, graph.number(node, "cubic", _CUBIC)])
        inner = graph.emit_step("Add", node, [x, cubic])
        scaled_up = graph.emit_step("Mul", node, [inner, graph.number(node, "scale", _TANH_SCALE)])
        bell = graph.emit_step("Tanh", node, [scaled_up])
    product = graph.emit_step("Mul", node, [x, graph.emit_step("Add", node, [bell, one])])
    graph.emit("Mul", node, [product, half])
