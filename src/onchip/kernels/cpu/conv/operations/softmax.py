"""Normalise, an operation of conv_fused: softmax or log-softmax of a vector."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.conv.lowering import Lowering, Value
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, runs
from onchip.kernels.cpu.conv.operations.combine import Copy
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.kernels.cpu.microkernels.activation import NORMALISERS, normalise
from onchip.network.graph import Node


@dataclass(frozen=True, eq=False, kw_only=True)
class Normalise(Activated):
    """Softmax or log-softmax of a vector, in place on y."""

    order = "softmax in order"
    how: int  # a value of NORMALISERS


def lower_softmax(to: Lowering, node: Node) -> None:
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2 or value.view.sizes[1:] != (1, 1):
        raise UnsupportedError("a softmax over an image")
    to.make(node, Copy, x=value.view)
    y = to.values[node.name].view
    to.emit(Normalise(y=y, how=NORMALISERS[node.layer.kind]))
    to.values[node.name] = Value(y, None)


_normalise = fields_of(Normalise)


@runs(Normalise)
def softmax(row: int, call: int) -> None:
    op, args = _normalise(row, call), call_at(call)
    if args.part == 0:
        normalise(args.base + op.y.offset * 4, args.images, op.y.C, op.y.image, op.how)
