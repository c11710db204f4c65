"""Host side of conv/direct.cu: convolution and transposed convolution of any shape."""

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
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
TRANSPOSED, X_LAST, Y_LAST = 1, 2, 4  # flags of conv/direct.cu
MOST = 1 << 30  # limit of an offset in an image, padding included
Pair = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """Tile of a block, and its estimated share of the device's fp32 rate when full."""

    places: int
    channels: int
    cut: Pair  # positions and channels per thread
    rate: float

    @property
    def threads(self) -> int:
        return self.places // self.cut[0] * (self.channels // self.cut[1])

    @property
    def work(self) -> float:
        """Relative time of a block."""
        return self.places * self.channels / self.rate

    def rate_for(self, N: int) -> float:
        """Rate with many positions: channels past N are padding."""
        return self.rate * N / (math.ceil(N / self.channels) * self.channels)


# For many channels; for few positions and channels; for few channels. NARROW: 4 channels x 4 positions per thread.
# DIRECT: one output per thread, two loads per fma. With HEAD, estimates for K of 8 to 40 are within a fifth of an H200:
# 8 -> 16 channels, 1x1: 594 us (fp16) and 523; 3 -> 16, 3 x 3: 1,259; 1 -> 64, 10 x 4: 145.
TILES = (Tile(128, 64, (8, 4), 0.57), Tile(64, 32, (4, 4), 0.45), Tile(128, 16, (4, 4), 0.4))
DEPTH = 16  # k per slice
HEAD = 18  # fixed cost of a tile, in units of k
NARROW = Tile(1024, 4, (4, 4), 0.2)
DIRECT = Tile(256, 1, (1, 1), 0.07)
DOUBLE_TILES = (TILES[1], DIRECT)  # the others exceed registers or shared memory in float64
FEW_CHANNELS = 16
PART = 128  # K elements per partial sum
DOUBLE_RATE = 0.5  # of the fp32 rate on GPUs with full fp64 units; far less elsewhere
# A block's k loop is serial: 17 us for K = 256 and 203 us for K = 3,200, with one image. DIRECT also computes each
# tap's position: 10 us for 25 taps of one channel.
TERM_US, TAP_US = 0.06, 0.25
DEPTHWISE_RATE = 0.0085  # of DIRECT for few channels: index arithmetic dominates


@dataclass(frozen=True)
class Geometry:
    """A 2D convolution; 1D is an image of one row. Pairs are (H, W)."""

    is_transposed: bool
    C: int  # channels of x per group
    N: int  # channels of y per group
    groups: int
    sides_in: Pair
    sides_out: Pair
    taps: Pair
    stride: Pair
    before: Pair  # padding
    dilation: Pair

    @property
    def phases(self) -> Pair:
        """Outputs with the same position modulo these share their taps."""
        return self.stride if self.is_transposed else (1, 1)

    @property
    def every(self) -> Pair:
        """Distance between the taps of one phase."""
        if not self.is_transposed:
            return (1, 1)
        first, second = (s // math.gcd(s, d) for s, d in zip(self.stride, self.dilation, strict=True))
        return first, second

    @property
    def terms(self) -> int:
        """K; for a transposed convolution, that of the phase with the most taps."""
        return self.C * math.prod(math.ceil(taps / every) for taps, every in zip(self.taps, self.every, strict=True))

    @property
    def reach(self) -> int:
        """Upper bound of any offset in an image, padding included."""
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
        """Distance from a window's first tap to its last, along the longer axis."""
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
    lasts: tuple[bool, bool]  # whether x, and y, is NHWC
    has_bias: bool
    units: int
    activation: Elementwise | None = None

    @property
    def tiles(self) -> list[Tile]:
        """Tiles that apply. NARROW needs NCHW x: adjacent threads read adjacent positions of a channel."""
        is_narrow = NARROW.channels >= self.geometry.N and not self.lasts[0]
        tiles = DOUBLE_TILES if "float64" in self.dtypes else (*TILES, NARROW, DIRECT)
        return [tile for tile in tiles if is_narrow or tile is not NARROW]

    @property
    def is_direct(self) -> bool:
        """Whether one output per thread is best for large batches."""
        return max(self.tiles, key=lambda tile: tile.rate_for(self.geometry.N)) is DIRECT

    def rate(self, B: int) -> float:
        """Estimated share of the device's fp32 rate for B rows."""
        C, N, K = self.geometry.C, self.geometry.N, self.geometry.terms
        tile = max(self.tiles, key=lambda tile: tile.rate_for(N))
        rate = DEPTHWISE_RATE if tile is DIRECT and C < FEW_CHANNELS else tile.rate_for(N)
        rate *= K / (round_up(K, DEPTH) + HEAD) if tile in TILES else 1.0
        rate *= C / (C + NARROW.channels) if tile is NARROW else 1.0  # index arithmetic costs as much as 4 channels
        rate *= DOUBLE_RATE if "float64" in self.dtypes else 1.0
        return rate * min(1.0, self.geometry.blocks(max(1, B), tile) / self.units)  # idle SMs

    def min_us(self, B: int) -> float:
        """Serial time of one output, whatever B."""
        g, tile = self.geometry, self.tile(max(1, B))
        taps = math.prod(g.taps) / math.prod(g.phases)  # per output
        return taps * (TERM_US * g.C + (TAP_US if tile is DIRECT else 0.0))

    def tile(self, B: int) -> Tile:
        """The fastest tile: waves of blocks, times the work of a block. All compute the same bits."""
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
        # The newest GPUs spill a few registers, in float64 some more.
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


class ConvDirect:
    name = "conv_direct"
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
                continue  # uncoalesced: adjacent threads write adjacent y, so x must have the same layout
            # FFMA whatever the job's precision: the result is only more exact.
            cost = Cost(
                sum(map(net.row_flop, nodes)),
                x.row_bytes + y.row_bytes,
                weight_bytes,
                1,
                "fp32",
                lowering.rate(job.batch),
                min_us=lowering.min_us(job.batch),
            )
            yield Claim(
                self.name, label, tuple(each.name for each in nodes), cost,
                "a thread an output: few channels a group" if lowering.is_direct else "one layer by itself",
                recipes, order=f"taps, then channels, parts of {PART}", facts=lowering,
                reads={node.inputs[0]: Use(CHANNELS_LAST if lasts[0] else ROWS, is_read_often=True)},
                writes={last.name: CHANNELS_LAST} if lasts[1] else {},
            )  # fmt: skip


def _pair(sizes: tuple[int, ...], first: int = 1) -> Pair:
    """(H, W); `first` stands for a missing H."""
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
    """The weight as (taps..., channels of x, channels of y), and the bias."""
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
    """Layouts of (x, y), True for NHWC. The network's own inputs and outputs are NCHW."""
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
