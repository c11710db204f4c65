"""dx of LinearResize: host side of gradient/resize_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gradient.batch_sum import accumulated
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.selection import ResizeParts, axis_taps, resize_parts
from onchip.network.graph import Network
from onchip.network.layers import InputGrad, LinearResize
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import ROWS

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256


class Axes(CStruct):
    source, c_name = SOURCE, "Axes"
    _fields_ = (("n1", Divider), ("n2", Divider), ("n3", Divider), ("run", Divider))


@dataclass(frozen=True, eq=False)
class Entries:
    """Which positions of y read each position of x, along the three axes: see gradient/resize_grad.cu."""

    sizes: tuple[int, ...]  # of x
    starts: Array
    offsets: Array
    weights: Array

    @staticmethod
    def of(layer: LinearResize, row_shape: tuple[int, ...]) -> Entries:
        parts, axes = _parts(layer, row_shape), axis_taps(layer, row_shape, ROWS)
        sizes, starts, offsets, weights = list[int](), list[Array](), list[Array](), list[Array]()
        inside, count = parts.x_row, 0  # elements of x inside a position of the previous axis; entries of those before
        for axis, (taps, stride) in enumerate(axes):
            sizes.append(inside // stride if stride else 1)
            inside = stride or inside
            position, is_one = np.arange(len(taps.low)), taps.low == taps.high
            read = np.concatenate([taps.low, taps.high[~is_one]])
            by = np.concatenate([position, position[~is_one]])
            shares = np.concatenate([np.where(is_one, 1, 1 - taps.share), taps.share[~is_one]])
            order = np.lexsort((by, read))
            starts.append(count + np.searchsorted(read[order], np.arange(sizes[-1] + 1)))
            offsets.append(by[order] * math.prod(parts.sizes[axis + 1 :]) * parts.run)
            weights.append(shares[order])
            count += len(order)
        return Entries(tuple(sizes), *(np.concatenate(each) for each in (starts, offsets, weights)))


def _parts(layer: LinearResize, row_shape: tuple[int, ...]) -> ResizeParts:
    parts = resize_parts(layer, TensorType(("B", *row_shape)), ROWS)
    assert parts is not None  # LinearResize refuses more axes
    return parts


def _entries(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...]
) -> Entries:
    return Entries.of(LinearResize(sizes, scales, coordinates), row_shape)  # type: ignore[arg-type]


@recipe_op
def resize_starts(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...]
) -> Array:
    return _entries(sizes, scales, coordinates, row_shape).starts.astype(np.int32)


@recipe_op
def resize_offsets(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...]
) -> Array:
    return _entries(sizes, scales, coordinates, row_shape).offsets.astype(np.int32)


@recipe_op
def resize_weights(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...]
) -> Array:
    return _entries(sizes, scales, coordinates, row_shape).weights


@dataclass(frozen=True)
class ResizeGradLowering:
    """resize_grad(dy, starts, offsets, weights, dx, count, y_row, axes)"""

    dtype: str
    outer: int  # per row of the batch
    sizes: tuple[int, ...]  # of x along the three axes
    run: int
    y_row: int
    dy: int  # the index of the input

    def at(self, B: int) -> Steps:
        count = B * self.outer * math.prod(self.sizes) * self.run
        if not count:
            return Steps(())
        n1, n2, n3 = map(divider, self.sizes)
        arguments = (
            Input(self.dy), Weight("starts"), Weight("offsets"), Weight("weights"), Output(0), Int64(count),
            Int64(self.y_row), Axes.of(n1=n1, n2=n2, n3=n3, run=divider(self.run)),
        )  # fmt: skip
        program = Program(SOURCE, f"resize_grad<{FLOATS[self.dtype]}, {index_of(count)}>")
        return Steps((KernelLaunch(program, grid_1d(-(-count // THREADS), THREADS), arguments, Budget(64)),))


class ResizeGradKernel(OneDtypeKernel):
    name = "resize_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, LinearResize)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x, dy = node.layer.attributes()["of"], net.types[node.name], net.types[node.inputs[-1]]
        if max(x.row_size, dy.row_size) >= MAX_ELEMENTS:
            yield Refusal(
                self.name, node.name, f"supports rows of fewer than {MAX_ELEMENTS:,} elements, not {x} and {dy}"
            )
            return
        entries, parts = Entries.of(layer, x.row_shape), _parts(layer, x.row_shape)
        options = {**layer.attributes(), "row_shape": x.row_shape}
        recipes = {
            "starts": Recipe.of(resize_starts, (), entries.starts.shape, "int32", **options),
            "offsets": Recipe.of(resize_offsets, (), entries.offsets.shape, "int32", **options),
            "weights": Recipe.of(resize_weights, (), entries.weights.shape, accumulated(x.dtype), **options),
        }
        index = list(dict.fromkeys(node.inputs)).index(node.inputs[-1])
        lowering = ResizeGradLowering(x.dtype, parts.outer, entries.sizes, parts.run, dy.row_size // parts.outer, index)
        yield self.claim(
            net, node, lowering, label=f"{self.name}<linear>", order="in order, axis by axis", recipes=recipes,
            cost=Cost(net.row_flop(node), x.row_bytes + dy.row_bytes, recipe_bytes(recipes), precision="fp32"),
        )  # fmt: skip


def _instance(dtype: str, run: int) -> Instance:
    return instance(f"{dtype}, runs of {run}", ResizeGradLowering(dtype, 8, (1, 16, 16), run, 1024 * run, 1), B=64)


INSTANCES = tuple(_instance(dtype, 1) for dtype in FLOATS)
