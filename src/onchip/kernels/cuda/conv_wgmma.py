"""conv_wgmma on a GPU: the host's side of conv_wgmma.cu. Convolutions of whole boxes of channels, channels last."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.conv import Geometry, geometry_of
from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.product import activation_words
from onchip.kernels.cuda.product_wgmma import ARCHITECTURES, BOX_ROWS, LINE, PART, WgmmaProduct, multiplied_weight
from onchip.kernels.cuda.program import (
    NUMBERS,
    Argument,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Memory,
    Output,
    Program,
    Steps,
    Struct,
    UInt32,
    Weight,
    WindowMap,
)
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels
from onchip.spec.layers import Convolution, Elementwise
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Recipe, as_is, op_name, recipe_op
from onchip.spec.types import DTYPE_BYTES

SOURCE = Path(__file__).with_suffix(".cu")
MOST_CORNER, MOST_REACH, MOST_STRIDE = 127, 255, 8  # as the accelerator counts
LEAST_CHANNELS = 16  # of x and of y: with fewer, most of a box or a tile would be empty


@dataclass(frozen=True)
class ConvWgmmaLowering:
    """A convolution and its activation as one launch."""

    geometry: Geometry
    precision: str
    dtypes: tuple[str, str]
    activation: Elementwise | None
    has_bias: bool
    units: int

    @property
    def depth(self) -> int:
        """Numbers of k in a box."""
        return LINE // DTYPE_BYTES[PRECISIONS[self.precision].dtype]

    @property
    def blocks(self) -> int:
        """Boxes of channels, of each tap."""
        return math.ceil(self.geometry.C / self.depth)

    def product(self, B: int) -> WgmmaProduct:
        """A row for each place of y."""
        g = self.geometry
        K = math.prod(g.taps) * self.blocks * self.depth
        return WgmmaProduct(B * math.prod(g.sides_out), g.N, K, self.precision, self.dtypes, self.activation)

    def why_not(self) -> str:
        g = self.geometry
        product = self.product(1)
        if g.is_transposed or g.groups > 1:
            return "convolves all channels, not those of groups; no transposed convolutions"
        if not product.is_direct and self.dtypes[0] != "float32":
            return f"multiplies {PRECISIONS[self.precision].dtype} or float32, not {self.dtypes[0]}"
        if g.C * DTYPE_BYTES[self.dtypes[0]] % BOX_ROWS:
            return f"moves channels of multiples of {BOX_ROWS} B, and {g.C} of {self.dtypes[0]} are none"
        if max(g.stride) > MOST_STRIDE or max(*g.before, *map(abs, self._behind)) > MOST_CORNER or g.far > MOST_REACH:
            return f"strides up to {MOST_STRIDE}, pads up to {MOST_CORNER}, windows that reach up to {MOST_REACH}"
        return ""

    @property
    def _behind(self) -> tuple[int, int]:
        """How far past the end of x a window's first tap comes, down and to the right."""
        g = self.geometry
        sides = zip(g.sides_out, g.stride, g.before, g.sides_in, strict=True)
        down, right = ((out - 1) * stride - before - (side - 1) for out, stride, before, side in sides)
        return down, right

    def at(self, B: int) -> Steps:
        if B == 0:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        return Steps((self.launch(B, Input(0), Weight("weight"), bias, Output(0)),))

    def launch(self, B: int, x: Memory, w: Memory, bias: Argument, y: Argument) -> KernelLaunch:
        g, product = self.geometry, self.product(B)
        tiling, (H, W) = product.tiling(self.units), g.sides_in
        pixels = WindowMap(
            x, self.dtypes[0], (g.C, W, H, B), LINE // DTYPE_BYTES[self.dtypes[0]], tiling.box_rows,
            _turned(g.before), _turned(self._behind), _turned(g.stride), LINE,
        )  # fmt: skip
        places, columns = math.prod(g.sides_out), g.sides_out[1]
        windows = struct.pack("<4I6i", self.blocks, g.taps[1], places, columns, *g.stride, *g.before, *g.dilation)
        arguments = (
            pixels, product.weight_map(w, tiling.tile), bias, y, Int64(product.M), Int64(product.N),
            UInt32(math.prod(g.taps) * self.blocks), UInt32(tiling.box_rows), Struct((), windows),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        program = Program(SOURCE, f"conv_wgmma<{tiling.template}>")
        return KernelLaunch(program, tiling.config, arguments, tiling.budget)


def _turned(pair: tuple[int, int]) -> tuple[int, int]:
    """(H, W) as (W, H)."""
    return pair[1], pair[0]


class ConvWgmma:
    name = "conv_wgmma"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    @property
    def makes(self) -> Mapping[str, float]:
        """By recipes.cu: a pass over memory."""
        return {op_name(spread_taps): 1.0}

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A convolution inside a network, where values may lie with channels last, with its activation."""
        node = net.nodes[start]
        if not isinstance(node.layer, Convolution) or job.is_training or device.arch not in ARCHITECTURES:
            return
        x, y = (net.types[value] for value in (node.inputs[0], node.name))
        dtypes = {x.dtype, y.dtype, *(net.weight_type(name).dtype for name in node.weights.values())}
        if not dtypes <= NUMBERS.keys() or not (has_channels(x) and has_channels(y)) or node.inputs[0] in net.inputs:
            return
        geometry = geometry_of(net, node)
        if geometry.N < LEAST_CHANNELS or geometry.C < LEAST_CHANNELS:
            return
        nodes = with_activation(net, start, ACTIVATIONS)
        if not net.readers(nodes[-1].name):  # the network's own ends lie in rows
            nodes = (node,)
        last = nodes[-1]
        if not net.readers(last.name):
            return
        activation = last.layer if isinstance(last.layer, Elementwise) else None
        has_bias = "bias" in node.weights
        ends = (x.dtype, net.types[last.name].dtype)
        lowering = ConvWgmmaLowering(geometry, job.precision, ends, activation, has_bias, device.units)
        if why := lowering.why_not():
            yield Refusal(self.name, node.name, why)
        else:
            yield _claim(net, nodes, lowering, job)


def _claim(net: Network, nodes: tuple[Node, ...], lowering: ConvWgmmaLowering, job: Job) -> Claim:
    first, last, g = nodes[0], nodes[-1], lowering.geometry
    recipes, parts = _recipes(net, first, lowering), PRECISIONS[job.precision].parts
    x, y = net.types[first.inputs[0]], net.types[last.name]
    taps = "x".join(map(str, net.weights[first.weights["weight"]].shape[2:]))
    kinds = (f"{g.C},{g.N},{taps}", *([lowering.activation.kind] if lowering.activation else ()))
    order = f"taps, then channels in steps of {PRECISIONS[job.precision].step} by wgmma"
    return Claim(
        kernel=ConvWgmma.name,
        label=f"{ConvWgmma.name}<{','.join(kinds)}>",
        nodes=tuple(node.name for node in nodes),
        price=Price(
            sum(map(net.row_flop, nodes)) * (3 if parts > 1 else 1),  # three products of tf32 for one of fp32
            x.row_bytes + y.row_bytes,
            sum(made.nbytes for made in recipes.values()),
            precision="tf32" if parts > 1 else "",
            # Channels are filled up to whole boxes.
            rate=lowering.product(max(1, job.batch)).rate(lowering.units) * g.C / (lowering.blocks * lowering.depth),
        ),
        why="tensor cores, a tile of places a block",
        recipes=recipes,
        order=order + (f", parts of {PART}" if parts > 1 else ""),
        reads={first.inputs[0]: Use(CHANNELS_LAST, is_read_often=True)},
        gives={last.name: CHANNELS_LAST},
        facts=lowering,
    )


def _recipes(net: Network, node: Node, lowering: ConvWgmmaLowering) -> dict[str, Recipe]:
    g, channels = lowering.geometry, lowering.blocks * lowering.depth
    name = node.weights["weight"]
    shape = (g.N, math.prod(g.taps) * channels)
    spread = Recipe.of(spread_taps, (name,), shape, net.weight_type(name).dtype, channels=channels)
    recipes = {"weight": multiplied_weight(spread, shape, lowering.precision)}
    if lowering.has_bias:
        recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (g.N,))
    return recipes


@recipe_op
def spread_taps(weight: Array, channels: int) -> Array:
    """(N, C, taps...) as (N, taps * channels), zeros behind each tap's C channels."""
    N, C = weight.shape[:2]
    turned = np.moveaxis(weight.reshape(N, C, -1), 1, 2)
    spread = np.zeros((N, turned.shape[1], channels), weight.dtype)
    spread[..., :C] = turned
    return spread.reshape(N, -1)


def _instance(name: str, precision: str, dtype: str) -> Instance:
    both = Geometry(False, 64, 64, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))

    def launch(device: Device) -> KernelLaunch:
        lowering = ConvWgmmaLowering(both, precision, (dtype, dtype), None, True, device.units)
        return lowering.launch(1024, Input(0), Input(0), Int64(0), Int64(0))

    return Instance(name, launch)


INSTANCES = (
    _instance("64 channels fp16", "fp16", "float16"),
    _instance("64 channels bf16, in float32", "bf16", "float32"),
    _instance("64 channels fp32", "fp32", "float32"),
    _instance("64 channels tf32", "tf32", "float32"),
)
