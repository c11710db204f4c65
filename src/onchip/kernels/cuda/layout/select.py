"""Slice, Gather, Pad, Tile and NearestResize: host side of layout/select.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Struct, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.permute import WORDS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.selection import may_be_nhwc, tables_for
from onchip.network.graph import Network
from onchip.network.layers import LAYERS, Selection
from onchip.network.recipe import Array, Attribute, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES, numpy_dtype
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, PER_THREAD, BLOCKS_PER_SM, WAVES = 256, 4, 8, 8


@recipe_op
def offsets_of(
    kind: str, given: tuple[tuple[str, Attribute], ...], row_shape: tuple[int, ...], layout: str, word: int
) -> Array:
    """The layer's three offset tables, concatenated, in words of `word` elements."""
    layer = LAYERS[kind](**dict(given))
    assert isinstance(layer, Selection)
    offsets = np.concatenate(tables_for(layer, row_shape, layout).offsets)
    return np.where(offsets < 0, -1, offsets // word).astype(np.int32)


class Axes(CStruct):
    source, c_name = SOURCE, "Axes"
    _fields_ = (("n1", Divider), ("n2", Divider), ("n3", Divider), ("run", Divider))


@dataclass(frozen=True)
class SelectLowering:
    """select(x, offsets, y, count, x_row, axes, fill); sizes in words"""

    outer: int
    x_row: int
    sizes: tuple[int, int, int]
    run: int
    word_bytes: int
    fill: bytes  # 16
    units: int

    def at(self, B: int) -> Steps:
        count = B * self.outer * math.prod(self.sizes) * self.run
        if not count:
            return Steps(())
        program = Program(SOURCE, f"select<{WORDS[self.word_bytes]}, {index_of(count)}>")
        n1, n2, n3 = map(divider, self.sizes)
        axes = Axes.of(n1=n1, n2=n2, n3=n3, run=divider(self.run))
        arguments = (
            Input(0), Weight("places"), Output(0), Int64(count), Int64(self.x_row), axes, Struct(self.fill),
        )  # fmt: skip
        blocks = min(-(-count // (THREADS * PER_THREAD)), self.units * BLOCKS_PER_SM * WAVES)
        return Steps((KernelLaunch(program, grid_1d(blocks), arguments, Budget(registers=64, spill_bytes=16)),))


class SelectKernel(CudaKernel):
    name = "select"
    layers = (Selection,)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x, y = node.layer, net.types[node.inputs[0]], net.types[node.name]
        assert isinstance(layer, Selection)
        if x.row_size >= MAX_ELEMENTS:
            yield Refusal(self.name, node.name, f"supports rows of fewer than {MAX_ELEMENTS:,} elements, not {x}")
            return
        item_bytes, given = DTYPE_BYTES[x.dtype], tuple(sorted(layer.attributes().items()))
        fill = np.full(16 // item_bytes, layer.fill).astype(numpy_dtype(x.dtype)).tobytes()
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            tables = tables_for(layer, x.row_shape, layout)
            word_bytes = math.gcd(16, tables.run * item_bytes)
            word = word_bytes // item_bytes
            n1, n2, n3 = map(len, tables.offsets)
            recipe = Recipe.of(
                offsets_of, (), (n1 + n2 + n3,), "int32", kind=layer.kind, given=given, row_shape=x.row_shape,
                layout=layout, word=word,
            )  # fmt: skip
            lowering = SelectLowering(
                tables.outer, tables.x_row // word, (n1, n2, n3), tables.run // word, word_bytes, fill, device.units
            )
            cost = Cost(0, min(x.row_bytes, y.row_bytes) + y.row_bytes, recipe.nbytes)
            yield self.claim(net, node, lowering, layout, cost=cost, recipes={"places": recipe})


def _instance(name: str, word_bytes: int, count: int = 1 << 20) -> Instance:
    return instance(name, SelectLowering(8, 512, (1, 16, 16), 2, word_bytes, bytes(16), 132), B=count // 4096)


INSTANCES = (
    _instance("floats", 4), _instance("bytes", 1), _instance("halves", 2), _instance("doubles", 8),
    _instance("16 bytes", 16), _instance("very many", 16, 1 << 32),
)  # fmt: skip
