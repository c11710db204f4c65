"""dx of selections and linear resizes: host side of gradient/select_grad.cu."""

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
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.selection import GradientSums, gradient_sums
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, InputGrad, LinearResize, Selection
from onchip.network.recipe import Array, Attribute, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256


def _sums(kind: str, given: tuple[tuple[str, Attribute], ...], row_shape: tuple[int, ...], layout: str) -> GradientSums:
    layer = LAYERS[kind](**dict(given))
    assert isinstance(layer, Selection | LinearResize)
    return gradient_sums(layer, row_shape, layout)


@recipe_op
def sum_offsets(kind: str, given: tuple[tuple[str, Attribute], ...], row_shape: tuple[int, ...], layout: str) -> Array:
    """The starts of the terms of each index, then the offsets of the terms."""
    sums = _sums(kind, given, row_shape, layout)
    return np.concatenate((sums.starts, sums.offsets)).astype(np.int32)


@recipe_op
def sum_factors(kind: str, given: tuple[tuple[str, Attribute], ...], row_shape: tuple[int, ...], layout: str) -> Array:
    return _sums(kind, given, row_shape, layout).factors


class Axes(CStruct):
    source, c_name = SOURCE, "Axes"
    _fields_ = (("n1", Divider), ("n2", Divider), ("n3", Divider), ("run", Divider))


@dataclass(frozen=True)
class SelectGradLowering:
    """select_grad(dy, starts, factors, dx, count, dy_row, axes)"""

    dtype: str
    outer: int
    dy_row: int
    sizes: tuple[int, int, int]
    run: int

    @property
    def vector(self) -> int:
        """Contiguous elements per thread, up to 16 bytes."""
        return math.gcd(self.run, 16 // DTYPE_BYTES[self.dtype])

    def at(self, B: int) -> Steps:
        run = self.run // self.vector
        count = B * self.outer * math.prod(self.sizes) * run
        if not count:
            return Steps(())
        n1, n2, n3 = map(divider, self.sizes)
        program = Program(SOURCE, f"select_grad<{FLOATS[self.dtype]}, {index_of(count)}, {self.vector}>")
        arguments = (
            Input(1), Weight("starts"), Weight("factors"), Output(0), Int64(count), Int64(self.dy_row),
            Axes.of(n1=n1, n2=n2, n3=n3, run=divider(run)),
        )  # fmt: skip
        budget = Budget(registers=80, spill_bytes=16)
        return Steps((KernelLaunch(program, grid_1d(-(-count // THREADS)), arguments, budget),))


class SelectGradKernel(CudaKernel):
    name = "select_grad"
    layers = (InputGrad,)
    order = "axis by axis, the terms of each in order"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, Selection | LinearResize)

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<{node.layer.attributes()['of'].kind}>"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        x, dy, of = net.types[node.inputs[0]], net.types[node.inputs[-1]], node.layer.attributes()["of"]
        if max(x.row_size, dy.row_size) >= MAX_ELEMENTS:
            why = f"supports rows of fewer than {MAX_ELEMENTS:,} elements, not {x} and {dy}"
            yield Refusal(self.name, node.name, why)
            return
        may_be_nhwc = has_channels(x) and has_channels(dy) and bool(net.readers(node.name))
        given, acc_dtype = tuple(sorted(of.attributes().items())), "float64" if x.dtype == "float64" else "float32"
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc else (ROWS,):
            options = {"kind": of.kind, "given": given, "row_shape": x.row_shape, "layout": layout}
            sums = gradient_sums(of, x.row_shape, layout)
            terms = len(sums.offsets)
            recipes = {
                "starts": Recipe.of(sum_offsets, (), (len(sums.starts) + terms,), "int32", **options),
                "factors": Recipe.of(sum_factors, (), (terms,), acc_dtype, **options),
            }
            cost = Cost(net.row_flop(node), dy.row_bytes + x.row_bytes, recipe_bytes(recipes), precision="fp32")
            lowering = SelectGradLowering(x.dtype, sums.outer, sums.dy_row, sums.sizes, sums.run)
            yield self.claim(net, node, lowering, layout, cost=cost, recipes=recipes)


def _instance(dtype: str, run: int, B: int = 1000) -> Instance:
    name = f"{dtype}, runs of {run}" + (", very many" if B > 1000 else "")
    return instance(name, SelectGradLowering(dtype, 8, 4096 * run, (1, 32, 32), run), B)


INSTANCES = tuple(
    _instance(*options)
    for options in (
        ("float32", 1), ("float32", 4), ("float16", 1), ("bfloat16", 8), ("float64", 2), ("float64", 1),
        ("float32", 1, 1 << 18),
    )
)  # fmt: skip
