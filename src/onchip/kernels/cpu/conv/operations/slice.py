"""Slices of conv_fused: views of some channels and pixels, without a copy. Operations that need a zero border or whole
pixels copy their input (conv/operations/combine.py).
"""

from __future__ import annotations

import math

from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import Slice


def lower_slice(to: Lowering, node: Node) -> None:
    assert isinstance(node.layer, Slice)
    layer, name = node.layer, node.inputs[0]
    if name == to.source and 2 * math.prod(layer.sizes) < to.net.types[name].row_size:
        raise UnsupportedError("a Slice of less than half of the network input")
    x = to.image(name)
    sizes = image_sizes(to.net.types[node.name].row_shape)
    starts = layer.starts if len(layer.starts) == 3 else (layer.starts[0], 0, *layer.starts[1:], 0)[:3]
    steps = layer.steps if len(layer.steps) == 3 else (layer.steps[0], 1, *layer.steps[1:], 1)[:3]
    channel, y_step, x_step = (step if size > 1 else 1 for step, size in zip(steps, sizes, strict=True))
    if channel != 1 or y_step < 1 or x_step < 1:
        raise UnsupportedError("a Slice with a channel step or a negative step")
    start = x.start[0] + x.step[0] * starts[1], x.start[1] + x.step[1] * starts[2]
    step = x.step[0] * y_step, x.step[1] * x_step
    to.values[node.name] = Value(View(x.store, sizes, start, step, x.channel + starts[0]), None)
