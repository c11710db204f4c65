"""Host side of conv/pixel.cu: 1x1 convolution of few channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.fast_divide import divider, index_of
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    NUMBERS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.conv.direct import Geometry, conv_recipes, geometry_of
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Elementwise
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS = 256
SLICES = {4: 4, 16: 2}  # channels of y per thread -> pixels per thread
MOST_WEIGHTS = 8192  # floats in shared memory
MOST_PIXELS = 1 << 31  # per image
# Share of the device's fp32 rate for full slices: 32 -> 32 and 64 -> 64 channels reached 0.27 to 0.45 of an H200. A
# thread computes all channels of its pixels, so one image takes as long as one block: 3.5 us for 8 -> 16 channels, 5
# for 32 -> 32, 13 for 64 -> 64, 23 for 64 -> 128, minus 2 for the launch.
RATE, HEAD_US, WEIGHT_US = 0.3, 0.9, 0.0025


@dataclass(frozen=True)
class PixelLowering:
    """conv_pixel(x, w, bias, y, count, apart, C, N, slices, places, is_last, activation's three words)"""

    C: int
    N: int
    places: int  # pixels per image
    dtype: str
    is_last: bool  # whether y is NHWC
    has_bias: bool
    activation: Elementwise | None = None

    @property
    def slice(self) -> int:
        return min(SLICES) if min(SLICES) >= self.N else max(SLICES)

    @property
    def filled(self) -> int:
        """N padded to whole slices."""
        return round_up(self.N, self.slice)

    def at(self, B: int) -> Steps:
        count, pixels, slices = B * self.places, SLICES[self.slice], self.filled // self.slice
        if not count:
            return Steps(())
        apart = math.ceil(count / pixels)
        number = NUMBERS[self.dtype]
        index = index_of(max(count, round_up(apart * slices, THREADS)))
        program = Program(SOURCE, f"conv_pixel<{number}, {number}, {index}, {self.slice}, {pixels}>")
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        arguments = (
            Input(0), Weight("weight"), bias, Output(0), Int64(count), Int64(apart), UInt32(self.C), UInt32(self.N),
            divider(slices), divider(self.places), UInt32(self.is_last),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        config = LaunchConfig((-(-apart * slices // THREADS), 1, 1), (THREADS, 1, 1), 4 * self.C * self.filled)
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=128)),))


class ConvPixel:
    name = "conv_pixel"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Convolution) or job.is_training or device.arch not in ARCHITECTURES:
            return
        x, geometry = net.types[node.inputs[0]], geometry_of(net, node)
        if _takes(net, node, geometry):
            yield from _claims(net, with_activation(net, start, ACTIVATIONS), geometry, x.dtype)


def _takes(net: Network, node: Node, g: Geometry) -> bool:
    """Whether this is a plain 1x1 convolution with 16 B aligned NHWC pixels."""
    value = node.inputs[0]
    x = net.types[value]
    if x.dtype not in NUMBERS or net.types[node.name].dtype != x.dtype or not has_channels(x) or value in net.inputs:
        return False
    is_plain = g.groups == math.prod((*g.taps, *g.stride)) == 1 and g.sides_in == g.sides_out and max(g.before) == 0
    is_small = g.C * round_up(g.N, max(SLICES)) <= MOST_WEIGHTS and math.prod(g.sides_in) < MOST_PIXELS
    return is_plain and is_small and g.C * DTYPE_BYTES[x.dtype] % 16 == 0


def _claims(net: Network, nodes: tuple[Node, ...], g: Geometry, dtype: str) -> Iterator[Claim]:
    """One claim with y in NCHW, one in NHWC."""
    first, last = nodes[0], nodes[-1]
    value, made = first.inputs[0], last.name
    activation = last.layer if isinstance(last.layer, Elementwise) else None
    recipes = conv_recipes(net, first, "float32")
    labels = (str(g.C), str(g.N), *([activation.kind] if activation else ()))
    for is_last in (False, True) if net.readers(made) and has_channels(net.types[made]) else (False,):
        lowering = PixelLowering(g.C, g.N, math.prod(g.sides_in), dtype, is_last, "bias" in recipes, activation)
        # FFMA whatever the job's precision: the result is only more exact.
        price = Price(
            sum(map(net.row_flop, nodes)), net.types[value].row_bytes + net.types[made].row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()), 1, "fp32", RATE * g.N / lowering.filled,
            least_us=HEAD_US + WEIGHT_US * g.C * lowering.filled,
        )  # fmt: skip
        yield Claim(
            ConvPixel.name, f"{ConvPixel.name}<{','.join(labels)}>", tuple(node.name for node in nodes), price,
            "one tap of few channels: a thread makes pixels", recipes, 4 * g.C * lowering.filled,
            order="channels in order", facts=lowering, reads={value: Use(CHANNELS_LAST)},
            gives={made: CHANNELS_LAST} if is_last else {},
        )  # fmt: skip


def _instance(dtype: str, C: int, N: int, is_last: bool) -> Instance:
    lowering = PixelLowering(C, N, 1024, dtype, is_last, True)
    return Instance(f"{C} -> {N} of {dtype}", lambda device: lowering.at(64).launches[0])


INSTANCES = (
    _instance("float16", 8, 16, True), _instance("float32", 8, 16, True), _instance("bfloat16", 16, 2, False),
    _instance("float32", 16, 2, False),
)  # fmt: skip
