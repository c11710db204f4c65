"""conv_last on a GPU: the host's side of conv_last.cu. Convolutions to few channels of y, at the tensor cores."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.conv import Geometry, geometry_of
from onchip.kernels.cuda.conv_mma import (
    COLUMNS,
    ISSUED_A_PRODUCT,
    PART,
    THREADS,
    activation_of,
    are_numbers,
    convolution_of,
    even_share,
    find_nodes,
    fragment_shape,
    in_fragments,
    label_of,
    multiplied_fragments,
    price_of,
)
from onchip.kernels.cuda.divide import divider
from onchip.kernels.cuda.mlp_packing import PRECISIONS, round_up
from onchip.kernels.cuda.product import activation_words
from onchip.kernels.cuda.program import (
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
    Struct,
    UInt32,
    Weight,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels
from onchip.spec.layers import Convolution, Elementwise, TransposedConvolution
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Recipe, as_is, recipe_op
from onchip.spec.types import DTYPE_BYTES

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
MADE = NUMBERS | {"uint8": "unsigned char"}
MOST_CHANNELS = 16  # of y: more of them fill tiles by themselves
LEAST_CHANNELS = 16  # of x: fewer leave a step empty
GROUPS = (2, 4, 6)  # tiles of 8 columns that a warp makes at a time
READ_BYTES = 16  # of channels, by a lane
BLOCK_BYTES = 1 << 10  # of shared memory, which a block takes for itself
LINES = (128, 64, 32, 16, 8, 4, 2, 1)  # places of a line of a tile
# Instructions, counted in what the compiler makes, not measured. Of a warp for 16 pixels: by itself, for each step, for
# each tile of 8 columns, and for each step of such a tile; of 32 lanes for a place of y each: by itself, for each
# number, for each tap, and for each tap of a number.
PIXELS_ISSUED, STEP_ISSUED, COLUMNS_ISSUED, PRODUCT_ISSUED = 50, 8, 8, 1.5
PLACE_ISSUED, NUMBER_ISSUED, TAP_ISSUED, TERM_ISSUED = 60, 15, 8, 2.5
Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvLastLowering:
    """A convolution with its activation, and pixels made of it, as one launch."""

    geometry: Geometry
    precision: str
    dtypes: tuple[str, str]
    activation: Elementwise | None
    has_bias: bool
    units: int
    fast_bytes: int

    @property
    def wide(self) -> int:
        """Channels that four lanes read at once."""
        return 4 * READ_BYTES // DTYPE_BYTES[self.dtypes[0]]

    @property
    def blocks(self) -> int:
        return math.ceil(self.geometry.C / self.wide)

    @property
    def columns(self) -> int:
        return math.prod(self.geometry.taps) * self.geometry.N

    @property
    def group(self) -> int:
        """Of GROUPS, the one that makes the fewest columns for nothing, the larger of two such."""
        tiles = math.ceil(self.columns / COLUMNS)
        return min(GROUPS, key=lambda group: (round_up(tiles, group), -group))

    @property
    def all_columns(self) -> int:
        """Filled up to whole groups."""
        return round_up(self.columns, COLUMNS * self.group)

    @property
    def weight_bytes(self) -> int:
        precision = PRECISIONS[self.precision]
        return precision.parts * self.blocks * self.wide * self.all_columns * 4 // precision.per_word

    def pixels(self, tile: Pair) -> int:
        """Of x, under a tile of y, at most."""
        g = self.geometry
        counts = []
        for count, side, taps, stride, dilation in zip(tile, g.sides_in, g.taps, g.stride, g.dilation, strict=True):
            far = (taps - 1) * dilation
            reach = (count - 1 + far) // stride + 1 if g.is_transposed else (count - 1) * stride + far + 1
            counts.append(min(side, reach))
        return math.prod(counts)

    def pitch(self, tile: Pair) -> int:
        """Pixels of a column of products: whole jobs of a warp, and 4 more than a multiple of 32 for the banks."""
        return round_up(self.pixels(tile), 32) + 4

    def shared_bytes(self, tile: Pair) -> int:
        return self.weight_bytes + 4 * self.columns * self.pitch(tile) + 8 * sum(tile)

    def fits(self, tile: Pair, blocks: int) -> bool:
        """Whether so many blocks of a multiprocessor may make such tiles."""
        return blocks * (self.shared_bytes(tile) + BLOCK_BYTES) <= self.fast_bytes

    def tile(self, B: int) -> Pair | None:
        """Lines, and places of a line, as many as leave room for several blocks, else for one; None: no place does.

        Fewer where there would be fewer tiles than multiprocessors. All make the same bits.
        """
        H, W = self.geometry.sides_out
        columns = [even_share(W, most) for most in LINES]
        for blocks in range(self.most_blocks, 0, -1):
            for line in columns:
                for parts in range(1, H + 1) if self.fits((1, line), blocks) else ():
                    tile = math.ceil(H / parts), line
                    if self.fits(tile, blocks):
                        while self.count(B, tile) < self.units and tile[0] > max(4, self.geometry.stride[0]):
                            tile = math.ceil(tile[0] / 2), line
                        return tile
        return None

    @property
    def most_blocks(self) -> int:
        """Of a multiprocessor, as registers allow."""
        return 3 if self.group == 2 and PRECISIONS[self.precision].parts == 1 else 2

    def count(self, B: int, tile: Pair) -> int:
        H, W = self.geometry.sides_out
        return B * math.ceil(H / tile[0]) * math.ceil(W / tile[1])

    def why_not(self) -> str:
        g = self.geometry
        if g.is_transposed and max(g.dilation) > 1:
            return "makes transposed convolutions without dilation"
        if g.C * DTYPE_BYTES[self.dtypes[0]] % READ_BYTES:
            return f"reads channels of multiples of {READ_BYTES} B, and {g.C} of {self.dtypes[0]} are none"
        if g.reach >= 1 << 30:
            return "convolves images of less than 2^30 numbers, windows that hang over included"
        if self.tile(1) is None:
            wanted = self.shared_bytes((1, 1)) + BLOCK_BYTES
            return f"weights and products take {wanted:,} B of shared memory, more than {self.fast_bytes:,}"
        return ""

    def rate(self, B: int) -> float:
        """Of the steady rate: products, among all that is issued for them and to add them up."""
        g, tile, precision = self.geometry, self.tile(B), PRECISIONS[self.precision]
        assert tile is not None
        products = 3 if precision.parts > 1 else 1
        steps, tiles_n = self.blocks * self.wide // precision.step, self.all_columns // COLUMNS
        of_pixels = tiles_n // self.group * (PIXELS_ISSUED + steps * STEP_ISSUED)
        job = of_pixels + tiles_n * (COLUMNS_ISSUED + products * steps * PRODUCT_ISSUED)
        taps = math.prod(g.taps) / (math.prod(g.stride) if g.is_transposed else 1)
        place = PLACE_ISSUED + g.N * NUMBER_ISSUED + taps * (math.ceil(g.N / 4) * TAP_ISSUED + g.N * TERM_ISSUED)
        tiles = self.count(B, tile)
        issued = tiles * (math.ceil(self.pixels(tile) / 16) * job + math.ceil(math.prod(tile) / 32) * place)
        pixels = g.sides_in if g.is_transposed else g.sides_out
        wanted = products * B * math.prod(pixels) * g.C * self.columns / (16 * COLUMNS * precision.step)
        return min(1.0, ISSUED_A_PRODUCT * wanted / issued) * min(1.0, tiles / self.units)

    def at(self, B: int) -> Steps:
        if B == 0:
            return Steps(())
        return Steps((self.launch(B),))

    def launch(self, B: int) -> KernelLaunch:
        """conv_last(x, w, bias, y, B, Layer, activation's three words)"""
        g, tile, precision = self.geometry, self.tile(B), PRECISIONS[self.precision]
        assert tile is not None
        sizes = struct.pack(
            "<6i", g.C, g.N, self.blocks, self.all_columns // (COLUMNS * self.group), self.pitch(tile), g.is_transposed
        )
        axes = zip(g.sides_in, g.sides_out, g.taps, g.stride, g.before, g.dilation, tile, strict=True)
        for axis in axes:
            out, count = axis[1], axis[6]
            sizes += struct.pack("<7i", *axis)
            sizes += b"".join(divider(n).data for n in (count, math.ceil(out / count), axis[3], axis[5]))
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), Weight("bias") if self.has_bias else Int64(0), Output(0), Int64(B),
            Struct((), sizes), *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        blocks = self.units * max(1, min(self.most_blocks, self.fast_bytes // (self.shared_bytes(tile) + BLOCK_BYTES)))
        config = LaunchConfig((min(blocks, self.count(B, tile)), 1, 1), (THREADS, 1, 1), self.shared_bytes(tile))
        numbers = (precision.name, NUMBERS[self.dtypes[0]], MADE[self.dtypes[1]], str(self.group))
        # Where sums take most registers, some of a tile's numbers wait aside while a warp multiplies.
        budget = Budget(65536 // (self.most_blocks * THREADS) // 8 * 8, spill_bytes=96)
        return KernelLaunch(Program(SOURCE, f"conv_last<{', '.join(numbers)}>"), config, arguments, budget)


class ConvLast:
    name = "conv_last"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A convolution inside a network to few channels, with its activation, Casts around it and ToPixels behind."""
        nodes = find_nodes(net, start, (Convolution, TransposedConvolution))
        if not nodes or job.is_training or device.arch not in ARCHITECTURES:
            return
        node, value = convolution_of(nodes), nodes[0].inputs[0]
        geometry = geometry_of(net, node)
        if geometry.groups > 1 or geometry.N > MOST_CHANNELS or geometry.C < LEAST_CHANNELS:
            return
        if not are_numbers(net, nodes) or value in net.inputs or not has_channels(net.types[value]):
            return
        lowering = ConvLastLowering(
            geometry, job.precision, (net.types[value].dtype, net.types[nodes[-1].name].dtype), activation_of(nodes),
            "bias" in node.weights, device.units, device.fast_bytes,
        )  # fmt: skip
        if why := lowering.why_not():
            yield Refusal(self.name, node.name, why)
        else:
            yield _claim(net, nodes, lowering, job)


def _claim(net: Network, nodes: tuple[Node, ...], lowering: ConvLastLowering, job: Job) -> Claim:
    recipes, precision = _recipes(net, convolution_of(nodes), lowering), PRECISIONS[job.precision]
    tile = lowering.tile(job.batch)
    assert tile is not None
    order = f"channels in steps of {precision.step} by mma.sync" + (f", parts of {PART}" if precision.parts > 1 else "")
    return Claim(
        ConvLast.name, label_of(ConvLast.name, net, nodes), tuple(node.name for node in nodes),
        price_of(net, nodes, sum(made.nbytes for made in recipes.values()), job.precision, lowering.rate(job.batch)),
        "tensor cores, a product for each tap: few channels", recipes, fast_bytes=lowering.shared_bytes(tile),
        order=f"{order}, then taps", facts=lowering,
        reads={nodes[0].inputs[0]: Use(CHANNELS_LAST, is_read_often=True)},
    )  # fmt: skip


def _recipes(net: Network, node: Node, lowering: ConvLastLowering) -> dict[str, Recipe]:
    name, per_word = node.weights["weight"], PRECISIONS[lowering.precision].per_word
    arranged = Recipe.of(
        tap_fragments, (name,), fragment_shape(lowering.blocks * lowering.wide, lowering.all_columns, per_word),
        net.weight_type(name).dtype, per_word=per_word, wide=lowering.wide, columns=lowering.all_columns,
        channel_axis=0 if lowering.geometry.is_transposed else 1,
    )  # fmt: skip
    recipes = {"weight": multiplied_fragments(arranged, lowering.precision)}
    if lowering.has_bias:
        recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (lowering.geometry.N,))
    return recipes


@recipe_op
def tap_fragments(weight: Array, per_word: int, wide: int, columns: int, channel_axis: int) -> Array:
    """(N, C, taps...), or (C, N, taps...), in fragments: columns over taps and N, k over channels as lanes read them.

    Four lanes read `wide` channels at once, each a quarter; of these, each step has two words of every lane.
    """
    turned = np.moveaxis(weight, channel_axis, 0)  # (C, N, taps...)
    C, N = turned.shape[:2]
    full = np.zeros((round_up(C, wide), columns), weight.dtype)
    full[:C, : N * math.prod(turned.shape[2:])] = np.moveaxis(turned, 1, -1).reshape(C, -1)
    lanes = full.reshape(-1, 4, wide // (8 * per_word), 2, per_word, columns)  # block, q, step, word, number
    return in_fragments(lanes.transpose(0, 2, 3, 1, 4, 5).reshape(-1, columns), per_word)


def _instance(name: str, precision: str, dtypes: tuple[str, str], taps: int = 3, N: int = 3) -> Instance:
    stride, out = (1, 32) if taps == 3 else (2, 64)
    both = Geometry(
        stride > 1, 64, N, 1, (32, 32), (out, out), (taps, taps), (stride, stride), (1, 1), (1, 1)
    )  # fmt: skip
    return Instance(
        name,
        lambda device: ConvLastLowering(
            both, precision, dtypes, None, True, device.units, device.fast_bytes
        ).launch(1024),
    )  # fmt: skip


INSTANCES = (
    _instance("64 channels fp16, 4x4 by steps of 2", "fp16", ("float16", "float16"), 4),
    _instance("64 channels fp16, 4x4 by steps of 2, to pixels", "fp16", ("float16", "uint8"), 4),
    _instance("64 channels fp32, 4x4 by steps of 2", "fp32", ("float32", "float32"), 4),
    _instance("64 channels fp32, 3x3", "fp32", ("float32", "float32")),
    _instance("64 channels tf32, 3x3", "tf32", ("float32", "float32")),
    _instance("64 channels bf16, in float32, 4x4", "bf16", ("float32", "bfloat16"), 4),
    _instance("64 channels fp16 to 1, 3x3", "fp16", ("float16", "float16"), N=1),
    _instance("64 channels tf32 to 1, 3x3", "tf32", ("float32", "float32"), N=1),
    _instance("64 channels fp32, in float16, 4x4", "fp32", ("float16", "float32"), 4),
)
