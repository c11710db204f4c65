"""The gradients of reductions along axes, and of prefix sums."""

from __future__ import annotations

import dataclasses
import math

from onchip.network.graph import Node
from onchip.network.layers import (
    CumSum,
    Div,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    InputGrad,
    Mul,
    Permute,
    Reshape,
    Tile,
)
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, input_grad, rule_of


@rule_of(GlobalSum, GlobalMean)
def total(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,) = node.inputs
    sizes, kept = build.types[x].row_shape, _kept(build, node)
    repeats = tuple(n if one == 1 else 1 for n, one in zip(sizes, kept, strict=True))
    if isinstance(node.layer, GlobalMean):
        share = build.number(1 / math.prod(repeats), build.types[x].dtype)
        dy = build.add(f"{x}.grad.share", Mul(), (dy,), {"constant": share})
    return (build.add(f"{x}.grad", Tile(repeats), (_keeping_axes(build, node, dy),)),), {}


@rule_of(GlobalNorm)
def norm(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """x dy / y."""
    (x,) = node.inputs
    factor = _keeping_axes(build, node, build.add(f"{x}.grad.factor", Div(), (dy, node.name)))
    return (build.add(f"{x}.grad", Mul(), (x, factor)),), {}


@rule_of(GlobalMax, GlobalMin)
def extreme(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """Of a row with the reduced axes last, where others are between them."""
    (x,), kept = node.inputs, _kept(build, node)
    layer, sizes = node.layer, build.types[x].row_shape
    assert isinstance(layer, GlobalMax | GlobalMin)
    reduced = sorted(axis % (len(sizes) + 1) for axis in layer.axes)
    if reduced[-1] - reduced[0] < len(reduced):
        return (input_grad(build, node, dy, 0),), {}
    order = (*(axis for axis in range(len(sizes) + 1) if axis not in reduced), *reduced)
    outer = tuple(kept[axis - 1] for axis in order if axis and axis not in reduced)
    moved = build.add(f"{x}.moved", Permute(order), (x,))
    dy = build.add(f"{dy}.moved", Reshape(outer), (dy,))
    last = dataclasses.replace(layer, axes=tuple(range(1 + len(outer), len(order))), keep=False)
    dx = build.add(f"{x}.grad.moved", InputGrad(last, 0), (moved, dy))
    back = tuple(order.index(axis) for axis in range(len(order)))
    return (build.add(f"{x}.grad", Permute(back), (dx,)),), {}


@rule_of(CumSum)
def cumulated(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), layer = node.inputs, node.layer
    assert isinstance(layer, CumSum)
    return (build.add(f"{x}.grad", dataclasses.replace(layer, reverse=not layer.reverse), (dy,)),), {}


def _kept(build: StepBuilder, node: Node) -> tuple[int, ...]:
    """The shape of a row of x with size 1 on the reduced axes."""
    sizes = build.types[node.inputs[0]].row_shape
    axes = {axis % (len(sizes) + 1) - 1 for axis in node.layer.attributes()["axes"]}
    return tuple(1 if axis in axes else n for axis, n in enumerate(sizes))


def _keeping_axes(build: StepBuilder, node: Node, value: str) -> str:
    """A value of the node's output type with size 1 on the reduced axes."""
    kept = _kept(build, node)
    if build.types[value].row_shape == kept:
        return value
    return build.add(f"{value}.axes", Reshape(kept), (value,))
