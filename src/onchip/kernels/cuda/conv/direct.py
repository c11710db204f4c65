"""Host side of conv/direct.cu: convolution and transposed convolution of any shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.costs import H200, ConvDirectCosts, costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Elementwise, Layer, Linear, TransposedConvolution
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.recipe import Recipe, as_is, transposed
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
TRANSPOSED, X_NHWC, Y_NHWC = 1, 2, 4  # flags of conv/direct.cu
MAX_OFFSET = 1 << 30  # limit of an offset in an image, padding included
Pair = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """Tile of a block."""

    positions: int
    channels: int
    per_thread: Pair  # positions and channels per thread

    @property
    def threads(self) -> int:
        return self.positions // self.per_thread[0] * (self.channels // self.per_thread[1])

    def share(self, costs: ConvDirectCosts) -> float:
        """Estimated share of the device's fp32 rate when full."""
        return costs.tile_shares[self.positions, self.channels]

    def work(self, costs: ConvDirectCosts) -> float:
        """Relative time of a block."""
        return self.positions * self.channels / self.share(costs)

    def share_for(self, N: int, costs: ConvDirectCosts) -> float:
        """Share with many positions: channels past N are padding."""
        return self.share(costs) * N / (math.ceil(N / self.channels) * self.channels)


# For many channels; for few positions and channels; for few channels. NARROW: 4 channels x 4 positions per thread.
# DIRECT: one output per thread, two loads per fma.
TILES = (Tile(128, 64, (8, 4)), Tile(64, 32, (4, 4)), Tile(128, 16, (4, 4)))
DEPTH = 16  # k per slice
NARROW = Tile(1024, 4, (4, 4))
DIRECT = Tile(256, 1, (1, 1))
DOUBLE_TILES = (TILES[1], DIRECT)  # the others exceed registers or shared memory in float64
FEW_CHANNELS = 16
PART = 128  # K elements per partial sum
DOUBLE_RATE = 0.5  # of the fp32 rate on GPUs with full fp64 units; far less elsewhere


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
    def tap_step(self) -> Pair:
        """Distance between the taps of one phase."""
        if not self.is_transposed:
            return (1, 1)
        first, second = (s // math.gcd(s, d) for s, d in zip(self.stride, self.dilation, strict=True))
        return first, second

    @property
    def depth(self) -> int:
        """K; for a transposed convolution, that of the phase with the most taps."""
        return self.C * math.prod(math.ceil(taps / step) for taps, step in zip(self.taps, self.tap_step, strict=True))

    @property
    def reach(self) -> int:
        """Upper bound of any offset in an image, padding included."""
        return self.groups * max(self.C, self.N) * self.pixel_reach

    @property
    def pixel_reach(self) -> int:
        """The same in pixels."""
        reach = 1
        sides = zip(self.sides_in, self.sides_out, strict=True)
        window = zip(self.stride, self.dilation, self.before, self.taps, strict=True)
        for side, (stride, dilation, before, taps) in zip(map(max, sides), window, strict=True):
            reach *= side + stride * (1 + dilation) + before + dilation * taps
        return reach

    def blocks(self, B: int, tile: Tile) -> int:
        if tile is DIRECT:
            return math.ceil(B * self.groups * self.N * math.prod(self.sides_out) / tile.positions)
        H, W = (math.ceil(n / s) for n, s in zip(self.sides_out, self.phases, strict=True))
        tiles = math.ceil(B * H * W / tile.positions) * math.ceil(self.N / tile.channels)
        return tiles * math.prod(self.phases) * self.groups


@dataclass(frozen=True)
class ConvDirectLowering:
    geometry: Geometry
    dtypes: tuple[str, str]
    nhwc: tuple[bool, bool]  # whether x, and y, is NHWC
    has_bias: bool
    units: int
    activation: Elementwise | None = None
    costs: ConvDirectCosts = field(default=H200.conv_direct, kw_only=True, repr=False)

    @property
    def tiles(self) -> list[Tile]:
        """Tiles that apply. NARROW needs NCHW x: adjacent threads read adjacent positions of a channel."""
        is_narrow = NARROW.channels >= self.geometry.N and not self.nhwc[0]
        tiles = DOUBLE_TILES if "float64" in self.dtypes else (*TILES, NARROW, DIRECT)
        return [tile for tile in tiles if is_narrow or tile is not NARROW]

    @property
    def is_direct(self) -> bool:
        """Whether one output per thread is best for large batches."""
        return self._best_full_tile is DIRECT

    @property
    def _best_full_tile(self) -> Tile:
        return max(self.tiles, key=lambda tile: tile.share_for(self.geometry.N, self.costs))

    def rate(self, B: int) -> float:
        """Estimated share of the device's fp32 rate for B rows."""
        C, N, K, tile, costs = self.geometry.C, self.geometry.N, self.geometry.depth, self._best_full_tile, self.costs
        rate = costs.depthwise_share if tile is DIRECT and C < FEW_CHANNELS else tile.share_for(N, costs)
        rate *= K / (round_up(K, DEPTH) + costs.overhead_elements) if tile in TILES else 1.0
        rate *= C / (C + NARROW.channels) if tile is NARROW else 1.0  # index arithmetic costs as much as 4 channels
        rate *= DOUBLE_RATE if "float64" in self.dtypes else 1.0
        return rate * min(1.0, self.geometry.blocks(max(1, B), tile) / self.units)  # idle SMs

    def min_us(self, B: int) -> float:
        """Serial time of one output, whatever B."""
        g, costs = self.geometry, self.costs
        taps = math.prod(g.taps) / math.prod(g.phases)  # per output
        return taps * (costs.k_us * g.C + (costs.tap_us if self.tile(max(1, B)) is DIRECT else 0.0))

    def tile(self, B: int) -> Tile:
        """The tile with the least waves of blocks times work per block. All compute the same bits."""

        def time(tile: Tile) -> float:
            return math.ceil(self.geometry.blocks(B, tile) / self.units) * tile.work(self.costs)

        return min(self.tiles, key=time)

    def at(self, B: int) -> Steps:
        return Steps((self.launch(B, self.tile(B)),) if B else ())

    def launch(self, B: int, tile: Tile) -> KernelLaunch:
        """conv_tile, conv_narrow or conv_direct (x, w, bias, y, B, C, N, groups, in, out, taps, stride, before,
        dilation, tap_step, flags, activation)"""
        g = self.geometry
        types = ", ".join(FLOATS[dtype] for dtype in self.dtypes)
        if tile is DIRECT:
            name, registers = f"conv_direct<{types}>", 80
        elif tile is NARROW:
            name, registers = f"conv_narrow<{types}>", 128
        else:
            sizes = (tile.positions, tile.channels, *tile.per_thread)
            name, registers = f"conv_tile<{types}, {', '.join(map(str, sizes))}>", 128
        # The newest GPUs spill a few registers, in float64 some more.
        budget = Budget(registers, spill_bytes=96 if "float64" in self.dtypes else 16)
        flags = TRANSPOSED * g.is_transposed | X_NHWC * self.nhwc[0] | Y_NHWC * self.nhwc[1]
        pairs = (g.sides_in, g.sides_out, g.taps, g.stride, g.before, g.dilation, g.tap_step)
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), Weight("bias") if self.has_bias else NOTHING, Output(0), Int64(B),
            *map(UInt32, (g.C, g.N, g.groups)), *(Int64(first | second << 32) for first, second in pairs),
            UInt32(flags), *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        config = LaunchConfig((g.blocks(B, tile), 1, 1), (tile.threads, 1, 1), 0)
        return KernelLaunch(Program(SOURCE, name), config, arguments, budget)


class ConvDirectKernel(CudaKernel):
    name = "conv_direct"
    layers = (Convolution, TransposedConvolution, Linear)

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        return not isinstance(node.layer, Linear) or net.types[node.name].dtype == "float64"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        x, y = net.types[node.inputs[0]], net.types[node.name]
        g = _linear_geometry(net, node) if isinstance(node.layer, Linear) else geometry_of(net, node)
        if g.reach >= MAX_OFFSET:
            why = f"supports images of up to {MAX_OFFSET:,} elements, padding included, not {x}"
            yield Refusal(self.name, node.name, why)
            return
        if isinstance(node.layer, Linear):
            yield self._linear_claim(net, node, g, device)
            return
        nodes = (node,) if "float64" in (x.dtype, y.dtype) else with_activation(net, start, ACTIVATIONS)
        last = nodes[-1]
        activation = last.layer if isinstance(last.layer, Elementwise) else None
        recipes = conv_recipes(net, node, "float64" if x.dtype == "float64" else "float32")
        taps = "x".join(map(str, net.weights[node.weights["weight"]].shape[2:]))
        fused = f",{activation.kind}" if activation is not None else ""
        for nhwc in _layouts(net, node, last):
            dtypes, has_bias, costs = (x.dtype, y.dtype), "bias" in recipes, costs_of(device).conv_direct
            lowering = ConvDirectLowering(g, dtypes, nhwc, has_bias, device.units, activation, costs=costs)
            if lowering.is_direct and nhwc[0] != nhwc[1]:
                continue  # uncoalesced: adjacent threads write adjacent y, so x must have the same layout
            # FFMA whatever the job's precision: the result is only more exact.
            cost = Cost(
                sum(map(net.row_flop, nodes)), x.row_bytes + y.row_bytes, recipe_bytes(recipes),
                precision="fp32", rate=lowering.rate(job.batch), min_us=lowering.min_us(job.batch),
            )  # fmt: skip
            yield self.claim(
                net, node, lowering, label=f"{self.name}<{g.groups * g.C},{g.groups * g.N},{taps}{fused}>",
                nodes=tuple(each.name for each in nodes), cost=cost, recipes=recipes,
                why="one output per thread: few channels per group" if lowering.is_direct else "single layer",
                order=f"taps, then channels, partial sums of {PART}",
                reads={node.inputs[0]: Use(CHANNELS_LAST if nhwc[0] else ROWS, is_read_often=True)},
                writes={last.name: CHANNELS_LAST} if nhwc[1] else {},
            )  # fmt: skip

    def _linear_claim(self, net: Network, node: Node, g: Geometry, device: Device) -> Claim:
        x, y, name = net.types[node.inputs[0]], net.types[node.name], node.weights["weight"]
        weight = Recipe.of(transposed, (name,), (g.C, g.N), "float64", axes=(1, 0))
        recipes = {"weight": weight, **bias_recipe(net, node, "float64")}
        costs, dtypes = costs_of(device).conv_direct, (x.dtype, y.dtype)
        rate = DOUBLE_RATE * max(tile.share_for(g.N, costs) for tile in DOUBLE_TILES)
        return self.claim(
            net, node, ConvDirectLowering(g, dtypes, (True, True), "bias" in recipes, device.units, costs=costs),
            label=f"{self.name}<{g.C},{g.N}>", why="float64 on CUDA cores", recipes=recipes,
            cost=Cost(
                net.row_flop(node), x.row_bytes + y.row_bytes, recipe_bytes(recipes),
                precision="fp32", rate=rate,
            ),
            order=f"k in order, partial sums of {PART}", reads={node.inputs[0]: Use(is_read_often=True)},
        )  # fmt: skip


def _linear_geometry(net: Network, node: Node) -> Geometry:
    """A Linear as a 1x1 convolution in NHWC."""
    N, K = net.weights[node.weights["weight"]].shape
    sides = (1, net.types[node.inputs[0]].row_size // K)
    return Geometry(False, K, N, 1, sides, sides, (1, 1), (1, 1), (0, 0), (1, 1))


def by_axis(**pairs: Pair) -> dict[str, int]:
    """Fields of a struct: stride=(h, w) becomes stride_h and stride_w."""
    return {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}


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
    return recipes | bias_recipe(net, node, dtype)


def bias_recipe(net: Network, node: Node, dtype: str = "float32") -> dict[str, Recipe]:
    """The bias, if there is one."""
    if (name := node.weights.get("bias")) is None:
        return {}
    return {"bias": Recipe.of(as_is, (name,), net.weights[name].shape, dtype)}


def _layouts(net: Network, first: Node, last: Node) -> list[tuple[bool, bool]]:
    """Layouts of (x, y), True for NHWC. The network's inputs and outputs are NCHW."""
    x, y = first.inputs[0], last.name
    ins = (False, True) if x not in net.inputs and has_channels(net.types[x]) else (False,)
    outs = (False, True) if net.readers(y) and has_channels(net.types[y]) else (False,)
    return [(x_nhwc, y_nhwc) for x_nhwc in ins for y_nhwc in outs]


def _instance(name: str, tile: Tile, dtypes: tuple[str, str] = ("float32", "float32")) -> Instance:
    same = Geometry(False, 64, 64, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))
    return Instance(
        name, lambda device: ConvDirectLowering(same, dtypes, (False, False), True, device.units).launch(256, tile)
    )


INSTANCES = (
    _instance("many channels", TILES[0]),
    _instance("small", TILES[1]),
    _instance("few channels", TILES[2]),
    _instance("very few channels", NARROW),
    _instance("one output per thread", DIRECT),
    _instance("many channels, fp16 to bf16", TILES[0], ("float16", "bfloat16")),
    _instance("small, bf16 to fp16", TILES[1], ("bfloat16", "float16")),
    _instance("few channels, fp16", TILES[2], ("float16", "float16")),
    _instance("one output per thread, bf16", DIRECT, ("bfloat16", "bfloat16")),
    _instance("small, fp64", TILES[1], ("float64", "float64")),
    _instance("very few channels, fp16", NARROW, ("float16", "float16")),
    _instance("one output per thread, fp64", DIRECT, ("float64", "float64")),
)
