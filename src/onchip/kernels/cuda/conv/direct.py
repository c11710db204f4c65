"""Host side of conv/direct.cu: convolutions and transposed ones of any shape, by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    FLOATS,
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
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Elementwise, Layer, TransposedConvolution
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.recipe import Recipe, as_is, transposed
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
TRANSPOSED, X_LAST, Y_LAST = 1, 2, 4  # flags of conv/direct.cu
MOST = 1 << 30  # of an offset in an image, with the reach of a window
Pair = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """What a block makes of y, and the share of the device's fp32 rate that we expect of it where it is full."""

    places: int
    channels: int
    cut: Pair  # the places and channels of a thread
    rate: float

    @property
    def threads(self) -> int:
        return self.places // self.cut[0] * (self.channels // self.cut[1])

    @property
    def work(self) -> float:
        """Of a block, as it takes time."""
        return self.places * self.channels / self.rate

    def rate_for(self, N: int) -> float:
        """With many places: channels past N are multiplied for nothing."""
        return self.rate * N / (math.ceil(N / self.channels) * self.channels)


# For many channels; for few of everything; for few channels. For very few of y: four at four places a thread. And a
# thread an output, which reads two numbers a product. With HEAD they are within a fifth of what sums of 8 to 40 terms
# took on an H200: 8 -> 16 channels of one tap 594 us (fp16) and 523, 3 -> 16 of 3 x 3 1,259, 1 -> 64 of 10 x 4 145.
TILES = (Tile(128, 64, (8, 4), 0.57), Tile(64, 32, (4, 4), 0.45), Tile(128, 16, (4, 4), 0.4))
DEPTH = 16  # of a slice along k
HEAD = 18  # what a tile takes besides its products, as if k were longer by so many terms
NARROW = Tile(1024, 4, (4, 4), 0.2)
DIRECT = Tile(256, 1, (1, 1), 0.07)
DOUBLE_TILES = (TILES[1], DIRECT)  # of float64 the others take more registers or shared memory than there are
FEW_CHANNELS = 16
PART = 128  # terms of a sum; longer ones are sums of sums
DOUBLE_RATE = 0.5  # of the fp32 rate, where a chip has the units; elsewhere it is far less
# Of a block, whose terms come one after the other: 17 us for 256 of them and 203 for 3,200, with one image. Where a
# thread makes an output, it finds the place of each tap: 10 us for the 25 of one channel.
TERM_US, TAP_US = 0.06, 0.25
DEPTHWISE_RATE = 0.0085  # of DIRECT where a sum has few terms: finding its places takes most of the time


@dataclass(frozen=True)
class Geometry:
    """A convolution over two axes; one axis is an image of one row. Pairs are of the two axes."""

    is_transposed: bool
    C: int  # channels of x in a group
    N: int  # and of y
    groups: int
    sides_in: Pair
    sides_out: Pair
    taps: Pair
    stride: Pair
    before: Pair  # pads
    dilation: Pair

    @property
    def phases(self) -> Pair:
        """Outputs whose places leave the same rest by these have the same taps."""
        return self.stride if self.is_transposed else (1, 1)

    @property
    def every(self) -> Pair:
        """Which taps those are: every so many."""
        if not self.is_transposed:
            return (1, 1)
        first, second = (s // math.gcd(s, d) for s, d in zip(self.stride, self.dilation, strict=True))
        return first, second

    @property
    def terms(self) -> int:
        """Of a sum: of a transposed convolution the longest, of the phase that has the most taps."""
        return self.C * math.prod(math.ceil(taps / every) for taps, every in zip(self.taps, self.every, strict=True))

    @property
    def reach(self) -> int:
        """More than any offset in an image, a window that hangs over its sides included."""
        return self.groups * max(self.C, self.N) * self.pixel_reach

    @property
    def pixel_reach(self) -> int:
        """The same in pixels."""
        reach = 1
        sides = zip(self.sides_in, self.sides_out, strict=True)
        frame = zip(self.stride, self.dilation, self.before, self.taps, strict=True)
        for side, (stride, dilation, before, taps) in zip(map(max, sides), frame, strict=True):
            reach *= side + stride * (1 + dilation) + before + dilation * taps
        return reach

    @property
    def far(self) -> int:
        """From a window's first tap to its last, along the longer axis."""
        return max((taps - 1) * dilation for taps, dilation in zip(self.taps, self.dilation, strict=True))

    def blocks(self, B: int, tile: Tile) -> int:
        if tile is DIRECT:
            return math.ceil(B * self.groups * self.N * math.prod(self.sides_out) / tile.places)
        H, W = (math.ceil(n / s) for n, s in zip(self.sides_out, self.phases, strict=True))
        tiles = math.ceil(B * H * W / tile.places) * math.ceil(self.N / tile.channels)
        return tiles * math.prod(self.phases) * self.groups


@dataclass(frozen=True)
class ConvLowering:
    geometry: Geometry
    dtypes: tuple[str, str]
    lasts: tuple[bool, bool]  # whether x, and y, lies with channels last
    has_bias: bool
    units: int
    activation: Elementwise | None = None

    @property
    def tiles(self) -> list[Tile]:
        """Those that suit. A narrow one reads x channel by channel, neighbouring places at once."""
        is_narrow = NARROW.channels >= self.geometry.N and not self.lasts[0]
        tiles = DOUBLE_TILES if "float64" in self.dtypes else (*TILES, NARROW, DIRECT)
        return [tile for tile in tiles if is_narrow or tile is not NARROW]

    @property
    def is_direct(self) -> bool:
        """Whether a thread an output is best for many rows."""
        return max(self.tiles, key=lambda tile: tile.rate_for(self.geometry.N)) is DIRECT

    def rate(self, B: int) -> float:
        """The share of the device's fp32 rate that we expect with so many rows."""
        C, N, K = self.geometry.C, self.geometry.N, self.geometry.terms
        tile = max(self.tiles, key=lambda tile: tile.rate_for(N))
        rate = DEPTHWISE_RATE if tile is DIRECT and C < FEW_CHANNELS else tile.rate_for(N)
        rate *= K / (round_up(K, DEPTH) + HEAD) if tile in TILES else 1.0
        rate *= C / (C + NARROW.channels) if tile is NARROW else 1.0  # to find a tap takes as long as some channels
        rate *= DOUBLE_RATE if "float64" in self.dtypes else 1.0
        return rate * min(1.0, self.geometry.blocks(max(1, B), tile) / self.units)  # multiprocessors without a block

    def least_us(self, B: int) -> float:
        """Of a sum, however few rows there are."""
        g, tile = self.geometry, self.tile(max(1, B))
        taps = math.prod(g.taps) / math.prod(g.phases)  # of a place
        return taps * (TERM_US * g.C + (TAP_US if tile is DIRECT else 0.0))

    def tile(self, B: int) -> Tile:
        """The one that should be done first: rounds of blocks, times what a block has to do. All make the same bits."""
        return min(self.tiles, key=lambda tile: math.ceil(self.geometry.blocks(B, tile) / self.units) * tile.work)

    def at(self, B: int) -> Steps:
        if B == 0:
            return Steps(())
        return Steps((self.launch(B, self.tile(B)),))

    def launch(self, B: int, tile: Tile) -> KernelLaunch:
        """conv_tile, conv_narrow or conv_direct (x, w, bias, y, B, C, N, groups, seven pairs, flags, activation)"""
        g = self.geometry
        numbers = ", ".join(FLOATS[dtype] for dtype in self.dtypes)
        if tile is DIRECT:
            name, registers = f"conv_direct<{numbers}>", 80
        elif tile is NARROW:
            name, registers = f"conv_narrow<{numbers}>", 128
        else:
            sizes = (tile.places, tile.channels, *tile.cut)
            name, registers = f"conv_tile<{numbers}, {', '.join(map(str, sizes))}>", 128
        # The newest chips set a few registers aside, in float64 some more.
        budget = Budget(registers, spill_bytes=96 if "float64" in self.dtypes else 16)
        flags = TRANSPOSED * g.is_transposed | X_LAST * self.lasts[0] | Y_LAST * self.lasts[1]
        pairs = (g.sides_in, g.sides_out, g.taps, g.stride, g.before, g.dilation, g.every)
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), Weight("bias") if self.has_bias else Int64(0), Output(0), Int64(B),
            *map(UInt32, (g.C, g.N, g.groups)), *(Int64(first | second << 32) for first, second in pairs),
            UInt32(flags), *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        config = LaunchConfig((g.blocks(B, tile), 1, 1), (tile.threads, 1, 1), 0)
        return KernelLaunch(Program(SOURCE, name), config, arguments, budget)


class ConvAlone:
    name = "conv"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Convolution | TransposedConvolution) or job.is_training:
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        found = geometry_of(net, node)
        if device.arch not in ARCHITECTURES or x.dtype not in FLOATS:
            why = f"convolves {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x.dtype} on {device.arch}")
            return
        if found.reach >= MOST:
            yield Refusal(
                self.name, node.name, f"{x}: images of up to {MOST:,} numbers, windows that hang over included"
            )
            return
        nodes = (node,) if "float64" in (x.dtype, y.dtype) else with_activation(net, start, ACTIVATIONS)
        last = nodes[-1]
        activation = last.layer if isinstance(last.layer, Elementwise) else None
        recipes = conv_recipes(net, node, "float64" if x.dtype == "float64" else "float32")
        weight_bytes = sum(recipe.nbytes for recipe in recipes.values())
        taps = "x".join(map(str, found.taps if node.layer.rank == 2 else found.taps[1:]))
        active = f",{activation.kind}" if activation is not None else ""
        label = f"{self.name}<{found.groups * found.C},{found.groups * found.N},{taps}{active}>"
        for lasts in _layouts(net, node, last):
            lowering = ConvLowering(found, (x.dtype, y.dtype), lasts, "bias" in recipes, device.units, activation)
            if lowering.is_direct and lasts[0] != lasts[1]:
                continue  # neighbouring threads make neighbours of y: they read neighbours of x where that lies alike
            # The flop are those of the ordinary cores, whatever the job computes in: it only becomes more exact.
            price = Price(
                sum(map(net.row_flop, nodes)),
                x.row_bytes + y.row_bytes,
                weight_bytes,
                1,
                "fp32",
                lowering.rate(job.batch),
                least_us=lowering.least_us(job.batch),
            )
            yield Claim(
                self.name, label, tuple(each.name for each in nodes), price,
                "a thread an output: few channels a group" if lowering.is_direct else "one layer by itself",
                recipes, order=f"taps, then channels, parts of {PART}", facts=lowering,
                reads={node.inputs[0]: Use(CHANNELS_LAST if lasts[0] else ROWS, is_read_often=True)},
                gives={last.name: CHANNELS_LAST} if lasts[1] else {},
            )  # fmt: skip


def _pair(sizes: tuple[int, ...], first: int = 1) -> Pair:
    """Of both axes; `first` of an axis that is not there."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (first, sizes[0])


def geometry_of(net: Network, node: Node) -> Geometry:
    x, y = net.types[node.inputs[0]], net.types[node.name]
    layer: Layer = node.layer
    groups, rank = conv_groups(layer), len(x.shape) - 2
    stride, pads, dilation = geometry(layer)
    return Geometry(
        isinstance(layer, TransposedConvolution), x.row_shape[0] // groups, y.row_shape[0] // groups, groups,
        _pair(x.row_shape[1:]), _pair(y.row_shape[1:]), _pair(net.weights[node.weights["weight"]].shape[2:]),
        _pair(stride), _pair(pads[:rank], 0), _pair(dilation),
    )  # fmt: skip


def conv_recipes(net: Network, node: Node, dtype: str) -> dict[str, Recipe]:
    """The weight with its taps in front and the channels of y last."""
    name = node.weights["weight"]
    shape = net.weights[name].shape
    channels = (0, 1) if isinstance(node.layer, TransposedConvolution) else (1, 0)
    axes = (*range(2, len(shape)), *channels)
    recipes = {"weight": Recipe.of(transposed, (name,), [shape[axis] for axis in axes], dtype, axes=axes)}
    if "bias" in node.weights:
        bias = node.weights["bias"]
        recipes["bias"] = Recipe.of(as_is, (bias,), net.weights[bias].shape, dtype)
    return recipes


def _layouts(net: Network, first: Node, last: Node) -> list[tuple[bool, bool]]:
    """The ways in which x and y may lie, True for channels last: not at the network's own ends, which lie in rows."""
    x, y = first.inputs[0], last.name
    ins = (False, True) if x not in net.inputs and has_channels(net.types[x]) else (False,)
    outs = (False, True) if net.readers(y) and has_channels(net.types[y]) else (False,)
    return [(last_in, last_out) for last_in in ins for last_out in outs]


def _instance(name: str, tile: Tile, dtypes: tuple[str, str] = ("float32", "float32")) -> Instance:
    both = Geometry(False, 64, 64, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))
    return Instance(
        name, lambda device: ConvLowering(both, dtypes, (False, False), True, device.units).launch(256, tile)
    )


INSTANCES = (
    _instance("many channels", TILES[0]),
    _instance("few of everything", TILES[1]),
    _instance("few channels", TILES[2]),
    _instance("very few channels", NARROW),
    _instance("a thread an output", DIRECT),
    _instance("many channels, fp16 to bf16", TILES[0], ("float16", "bfloat16")),
    _instance("few of everything, bf16 to fp16", TILES[1], ("bfloat16", "float16")),
    _instance("few channels, fp16", TILES[2], ("float16", "float16")),
    _instance("a thread an output, bf16", DIRECT, ("bfloat16", "bfloat16")),
    _instance("few of everything, fp64", TILES[1], ("float64", "float64")),
    _instance("very few channels, fp16", NARROW, ("float16", "float16")),
    _instance("a thread an output, fp64", DIRECT, ("float64", "float64")),
)
