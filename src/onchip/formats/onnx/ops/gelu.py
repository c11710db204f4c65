"""GELU: an operator since opset 20; in older files it is a pattern of nodes.

exact  x * 0.5 * (1 + Erf(x / sqrt(2))), with the factors in any order
tanh   0.5 * (x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * (x * (x * x))))))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, cast

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import GELU, Add, Erf, Layer, Mul, Tanh
from onchip.network.reading import show

_TANH_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715
_ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2}  # tolerance of constants; 1e-6 for wider types


@reads("Gelu")
def read_gelu(graph: GraphReader, op: Op) -> None:
    mode = op.attribute("approximate", b"none")
    if mode not in (b"none", b"tanh"):
        raise FormatError(f"{op}: bad attribute 'approximate'", got=show(mode), expected="none or tanh")
    graph.add(op, GELU(cast(Literal["none", "tanh"], mode.decode())), (graph.value(op),))


# Pattern matching on layers added so far.


def exact_gelu(graph: GraphReader, pair: tuple[str, str], scale: float) -> str | None:
    """The x for which scale times the product of the two values is the exact GELU."""
    for first, second in (pair, pair[::-1]):
        for x, factor in _unscaled(graph, first):
            for bell, other in _unscaled(graph, second):
                erf = graph.nodes.get(_scaled_by(graph, bell, Add, 1))
                if erf is None or not isinstance(erf.layer, Erf) or not _near(graph, x, scale * factor * other, 0.5):
                    continue
                if _scaled_by(graph, erf.inputs[0], Mul, math.sqrt(0.5)) == x:
                    return x
    return None


def _unscaled(graph: GraphReader, value: str) -> Iterator[tuple[str, float]]:
    """The value times 1, and its factors if it is another value times a constant."""
    yield value, 1.0
    inner = scaled(graph, value, Mul)
    if inner is not None:
        yield inner


def tanh_gelu(graph: GraphReader, value: str, half: float) -> str | None:
    """The x for which value * half is the tanh approximation of GELU."""
    if not _near(graph, value, half, 0.5):
        return None
    for x, outer in pairs(graph, value, Mul):
        tanh = graph.nodes.get(_scaled_by(graph, outer, Add, 1))
        if tanh is None or not isinstance(tanh.layer, Tanh):
            continue
        for also_x, cubic in pairs(graph, _scaled_by(graph, tanh.inputs[0], Mul, _TANH_SCALE), Add):
            for again_x, square in pairs(graph, _scaled_by(graph, cubic, Mul, _CUBIC), Mul):
                if also_x == again_x == x and (x, x) in pairs(graph, square, Mul):
                    return x
    return None


def scaled(graph: GraphReader, value: str, kind: type[Layer]) -> tuple[str, float] | None:
    """(x, c) if the value is x + c or x * c with a scalar c."""
    node = graph.nodes.get(value)
    if node is None or not isinstance(node.layer, kind) or len(node.inputs) != 1:
        return None
    constant = graph.weights[node.weights["constant"]]
    return (node.inputs[0], float(constant.reshape(-1)[0])) if constant.size == 1 else None


def _scaled_by(graph: GraphReader, value: str, kind: type[Layer], number: float) -> str:
    inner = scaled(graph, value, kind)
    return inner[0] if inner is not None and _near(graph, inner[0], inner[1], number) else ""


def pairs(graph: GraphReader, value: str, kind: type[Layer]) -> Iterator[tuple[str, str]]:
    """The two operands of the value's sum or product, in both orders."""
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
    doubled = graph.emit_step("Mul", node, [x, graph.emit_step("Add", node, [bell, one])])
    graph.emit("Mul", node, [doubled, half])
