"""The gradients of recurrent layers.

What the states add to the gates is a gemm over all steps, as the states are known. A RecurrentGrad goes back through
the steps; the gradients of the recurrent weights are then those of Linears over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onchip.network.graph import Node
from onchip.network.layers import (
    GRU,
    Add,
    Concat,
    Gather,
    Linear,
    Mul,
    Pad,
    Recurrent,
    RecurrentGrad,
    Reshape,
    Sigmoid,
    Slice,
    WeightGrad,
)
from onchip.network.recipe import Recipe, block_of
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, rule_of


@rule_of(Recurrent)
def recurrent(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    layer, y = node.layer, node.name
    assert isinstance(layer, Recurrent)
    if layer.output != "sequence":
        y = build.add(f"{node.name}.states", replace(layer, output="sequence"), node.inputs, node.weights)
    directions = [_Direction.of(build, node, y, d) for d in range(layer.directions)]
    sums, before = [each.sums for each in directions], [each.before for each in directions]
    read = (node.inputs[0], dy, *sums, *before, *node.inputs[2:])

    def gradient(index: int) -> str:
        return build.add(f"{node.inputs[index]}.grad", RecurrentGrad(layer, index), read, node.weights)

    d_inputs: list[str | None] = [gradient(i) if i and wants else None for i, wants in enumerate(wanted.inputs)]
    if not (wanted.inputs[0] or wanted.roles):
        return tuple(d_inputs), {}
    gates, d_weights = gradient(0), dict[str, str]()
    if wanted.inputs[0]:
        d_inputs[0] = _of_inputs(build, node, gates)
    parts = [_columns(build, gates, d, len(directions)) for d in range(len(directions))]
    if "recurrence" in wanted.roles:
        name = node.weights["recurrence"]
        found = [each.of_weight(build, part) for each, part in zip(directions, parts, strict=True)]
        d_weights["recurrence"] = _stacked(build, f"{name}.grad", found, build.weights[name].shape)
    if "bias" in wanted.roles:
        name, axes = node.weights["bias"], range(1, len(build.types[gates].shape) - 1)
        found = [batch_sum(build, f"{name}.grad", _columns(build, part, 2, 4), axes) for part in parts]
        d_weights["bias"] = _stacked(build, f"{name}.grad", found, build.weights[name].shape)
    return tuple(d_inputs), d_weights


@dataclass(frozen=True)
class _Direction:
    """A direction of a recurrent layer.

    before  (B, ..., S, H): the state before each step
    sums    (B, ..., S, G * H): what it adds to the gates
    blocks  the recurrent weights in blocks of rows, with the value that each is multiplied by
    """

    before: str
    sums: str
    blocks: tuple[tuple[str, str], ...]

    @staticmethod
    def of(build: StepBuilder, node: Node, y: str, d: int) -> _Direction:
        layer, name = node.layer, node.weights["recurrence"]
        _, width, H = build.weights[name].shape
        before = _before(build, node, y, d)

        def block(first: int, rows: int) -> str:
            dtype, at = build.weight_type(name).dtype, (d * width + first) * H
            recipe = Recipe.of(block_of, (name,), (rows, H), dtype, first=at, sizes=(rows, H))
            return build.add_weight(f"{name}.{d}", recipe)

        def product(value: str, weight: str) -> str:
            return build.add(f"{node.name}.sums", Linear(), (value,), {"weight": weight})

        if not isinstance(layer, GRU) or layer.reset_after:
            whole = block(0, width)
            return _Direction(before, product(before, whole), ((whole, before),))
        zr, n, x = block(0, 2 * H), block(2 * H, H), node.inputs[0]
        zr_sums = product(before, zr)
        r_inputs = _columns(build, x, 3 * d + 1, 3 * layer.directions), _columns(build, zr_sums, 1, 2)
        r = build.add(f"{node.name}.r", Sigmoid(), (build.add(f"{node.name}.r", Add(), r_inputs),))
        reset = build.add(f"{node.name}.reset", Mul(), (r, before))
        sums = build.add(f"{node.name}.sums", Concat(-1), (zr_sums, product(reset, n)))
        return _Direction(before, sums, ((zr, before), (n, reset)))

    def of_weight(self, build: StepBuilder, gates: str) -> str:
        """The gradient (1, G * H, H) of the recurrent weights."""
        found, begin = list[str](), 0
        for weight, value in self.blocks:
            rows = build.weights[weight].shape[0]
            part = _slice(build, gates, -1, begin, rows)
            layer, roles = WeightGrad(Linear(), "weight"), {"weight": weight}
            found.append(build.add(f"{weight}.grad", layer, (value, part), roles))
            begin += rows
        return found[0] if len(found) == 1 else build.add(f"{self.blocks[0][0]}.grad", Concat(1), found)


def is_reverse(layer: Recurrent, d: int) -> bool:
    """Whether a direction goes from the last step to the first."""
    return layer.direction == "reverse" or d == 1


def _before(build: StepBuilder, node: Node, y: str, d: int) -> str:
    """The state before each step of a direction (B, ..., S, H): the initial one, or 0, then those of y."""
    assert isinstance(node.layer, Recurrent)
    reverse, (*leading, S, width) = is_reverse(node.layer, d), build.types[y].row_shape
    H, name, none = width // node.layer.directions, f"{node.name}.before", [0] * len(leading)
    if len(node.inputs) == 1:
        first, last = (-1, 1) if reverse else (1, -1)
        return build.add(name, Pad((*none, first, -d * H, *none, last, (d + 1) * H - width)), (y,))
    initial = _slice(build, node.inputs[1], -2, d, 1)
    if S == 1:
        return initial
    rest = Slice((*none, int(reverse), d * H), (*leading, S - 1, H), (1,) * (len(leading) + 2))
    states = build.add(name, rest, (y,)), initial
    return build.add(name, Concat(-2), states if reverse else states[::-1])


def _of_inputs(build: StepBuilder, node: Node, gates: str) -> str:
    """The gradient of x, without that of what h adds to the gate n."""
    x, kind = node.inputs[0], build.types[node.inputs[0]]
    if build.types[gates].row_shape == kind.row_shape:
        return gates
    assert isinstance(node.layer, Recurrent)
    *leading, width = kind.row_shape
    D = node.layer.directions
    blocks = build.add(f"{x}.grad", Reshape((*leading, D, 4, width // (3 * D))), (gates,))
    blocks = build.add(f"{x}.grad", Gather(-2, (0, 1, 3)), (blocks,))
    return build.add(f"{x}.grad", Reshape(kind.row_shape), (blocks,))


def _columns(build: StepBuilder, value: str, index: int, count: int) -> str:
    """Part `index` of `count` equal parts of the last axis."""
    size = build.types[value].row_shape[-1] // count
    return _slice(build, value, -1, index * size, size)


def _slice(build: StepBuilder, value: str, axis: int, begin: int, size: int) -> str:
    sizes = list(build.types[value].row_shape)
    if sizes[axis] == size:
        return value
    starts = [0] * len(sizes)
    starts[axis], sizes[axis] = begin, size
    return build.add(f"{value}.part", Slice(tuple(starts), tuple(sizes), (1,) * len(sizes)), (value,))


def _stacked(build: StepBuilder, name: str, values: Sequence[str], shape: Sequence[int]) -> str:
    """Values of one row, one after the other, as one of this shape."""
    flat = [build.add(f"{name}.part", Reshape((math.prod(shape) // len(values),)), (value,)) for value in values]
    whole = flat[0] if len(flat) == 1 else build.add(f"{name}.part", Concat(1), flat)
    return build.add(name, Reshape(tuple(shape)), (whole,))
