"""GEMM on CUDA cores: the host side of gemm/simt.cu. A Linear of any shape, without a compilation of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from onchip.kernels.chain import Chain, Dense, end_dtypes, find_chain, forward_cost
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.precision import PRECISIONS, narrowed
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
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
from onchip.kernels.cuda.conv.direct import DOUBLE_RATE, DOUBLE_TILES, MOST, ConvLowering, Geometry
from onchip.kernels.cuda.embedding.token_slices import narrow_tables, split_tables, token_slices, token_taps
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Elementwise, Linear
from onchip.network.recipe import Array, Recipe, as_is, op_name, recipe_op, transposed
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.rewrites.embedding import token_tables
from onchip.plan.rewrites.linear import merged_weight

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
PART = 128  # elements of k per partial sum
FEW = 32  # rows or columns up to which narrow tiles are considered


@dataclass(frozen=True)
class Tile:
    """The tile of y that a block computes, and the expected share of the device's peak rate for a full tile."""

    BM: int
    BN: int
    cut: tuple[int, int]  # rows and columns per thread
    rate: float

    @property
    def work(self) -> float:
        """Relative cost of a block."""
        return self.BM * self.BN / self.rate

    def suits(self, M: int, N: int) -> bool:
        """A narrow tile reads more per multiply-add: only where a square one would be mostly empty."""
        return self.BM == self.BN or (M if self.BM < self.BN else N) <= FEW

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.BM) * math.ceil(N / self.BN)


# First: large GEMMs; third: few rows; fourth: few columns.
FMA_TILES = (
    Tile(128, 128, (8, 8), 0.75), Tile(64, 64, (4, 4), 0.5), Tile(16, 64, (4, 4), 0.17), Tile(256, 16, (4, 4), 0.35),
)  # fmt: skip
EXACT = ("fp32", "tf32")  # precisions that true fp32 on CUDA cores satisfies


@recipe_op
def narrow_weight(weight: Array) -> Array:
    """The weight in float16; InputError where a value overflows."""
    return narrowed(weight, "float16")


# Recipes that recipes.py computes with these GEMMs and copies: shares of the device's fp32 rate. float64 sums run at
# half of it where the GPU has that many fp64 units. Tables use gemm_sm90 on sm_90a: its tensor cores have 12 times
# the fp32 rate in 16 bits and 2.3 times with 3xTF32; some of that is lost.
MAKES = MappingProxyType({
    op_name(token_tables): 0.75, op_name(merged_weight): 0.2, op_name(as_is): 1.0, op_name(transposed): 1.0,
    op_name(narrow_tables): 10.0, op_name(split_tables): 2.0, op_name(token_taps): 1.0, op_name(token_slices): 1.0,
    op_name(narrow_weight): 1.0,
})  # fmt: skip


@dataclass(frozen=True)
class Product:
    """y (M, N) = activation(x (M, K) w^T + bias), w (N, K)."""

    M: int
    N: int
    K: int
    precision: str  # "fp32", or "fp64": float32 operands with float64 accumulators
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None

    def tile(self, units: int) -> Tile:
        """The tile with the least estimated cost: waves of blocks times the cost of a block."""
        if self.precision == "fp64":
            return FMA_TILES[1]  # 8 x 8 float64 accumulators do not fit in registers
        tiles = [tile for tile in FMA_TILES if tile.suits(self.M, self.N)]
        return min(tiles, key=lambda tile: math.ceil(tile.count(self.M, self.N) / units) * tile.work)

    def rate(self, units: int) -> float:
        """Estimated share of the peak rate: counts tile overhang and idle SMs in the last wave."""
        tile = self.tile(units)
        return self.M * self.N / (math.ceil(tile.count(self.M, self.N) / units) * units * tile.work)

    def launch(self, units: int, x: Argument, w: Argument, bias: Argument, y: Argument) -> KernelLaunch:
        """bias  (N) float32, or Int64(0): none"""
        tile = self.tile(units)
        TM, TN = tile.cut
        threads = tile.BM // TM * (tile.BN // TN)
        given, made = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        head = f"{'double' if self.precision == 'fp64' else 'float'}, {given}, {made}"
        is_long = "true" if self.K > PART else "false"
        program = Program(SOURCE, f"gemm_simt<{head}, {tile.BM}, {tile.BN}, {TM}, {TN}, {is_long}>")
        config = LaunchConfig((tile.count(self.M, self.N), 1, 1), (threads, 1, 1), 0)
        sizes = (Int64(self.M), Int64(self.N), Int64(self.K))
        arguments = (x, w, bias, y, *sizes, *map(UInt32, activation_words(self.activation)))
        # Two blocks per SM of 8 x 8 accumulators per thread leave so few registers that GPUs before sm_90 spill some.
        budget = Budget(min(255, 65536 // (threads * (1 if self.K > PART else 2)) // 8 * 8), spill_bytes=64)
        return KernelLaunch(program, config, arguments, budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductLowering:
    """A Linear and its activation as one launch."""

    product: Product  # at B = 1
    has_bias: bool
    units: int

    def at(self, B: int) -> Steps:
        product = replace(self.product, M=B * self.product.M)
        if not product.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        return Steps((product.launch(self.units, Input(0), Weight("weight"), bias, Output(0)),))


class GemmSimt:
    name = "gemm_simt"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)
    makes = MAKES

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts; a float64 Linear alone, as a 1x1 convolution."""
        if isinstance(net.nodes[start].layer, Linear) and net.types[net.nodes[start].name].dtype == "float64":
            if not job.is_training and device.arch in ARCHITECTURES:
                yield _double_claim(net, net.nodes[start], device)
            return
        found = plain_layer(net, start, device, job)
        if isinstance(found, str):
            yield Refusal(self.name, net.nodes[start].name, found)
        elif found is not None and job.precision in EXACT:
            yield _claim(net, found, device, job)


def plain_layer(net: Network, start: int, device: Device, job: Job) -> Chain | str | None:
    """The Linear at `start` with its activation and surrounding Casts, where it does not fit in mlp_tensor_core.

    None: no such layer, or mlp_tensor_core runs it. A string: the reason for a refusal.
    """
    chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
    if chain is None:
        return None
    one = one_layer(net, chain)
    if not (why_not := mlp_tensor_core.why_not(net, chain, device, job)):
        return one if isinstance(mlp_tensor_core.make_lowering(net, one, device, job), str) else None
    # float64 at one end or in the weights: retry without the Casts; the recipes round the weights.
    bare = find_chain(net, start, ACTIVATIONS, most=1)
    can_run = device.arch in ARCHITECTURES and not job.is_training
    if bare is not None and can_run and set(end_dtypes(net, one := one_layer(net, bare))) <= ELEMENT_TYPES.keys():
        return one
    return why_not


def one_layer(net: Network, chain: Chain) -> Chain:
    """The first layer of the chain, without a softmax or other normaliser."""
    chain = chain.first(1)
    if not chain.normaliser:
        return chain
    end = next(i for i, name in enumerate(chain.nodes) if net.by_name[name].layer.kind == chain.normaliser)
    return replace(chain, nodes=chain.nodes[:end], normaliser="", ends=(end,))


def _claim(net: Network, chain: Chain, device: Device, job: Job) -> Claim:
    (layer,) = chain.layers
    recipes = weight_recipes(layer, "fp32")
    cost = forward_cost(net, chain)
    product = Product(chain.vectors, layer.D_out, layer.D_in, "fp32", end_dtypes(net, chain), layer.activation)
    return Claim(
        kernel=GemmSimt.name,
        label=f"{GemmSimt.name}<{chain.label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop,
            cost.row_bytes,
            sum(made.nbytes for made in recipes.values()),
            precision="fp32",
            rate=replace(product, M=max(1, job.batch * product.M)).rate(device.units),
        ),
        why="too large to stay on the chip",
        recipes=recipes,
        order=f"k in order, parts of {PART}",
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per column of tiles
        facts=ProductLowering(product, layer.bias is not None, device.units),
    )


def _double_claim(net: Network, node: Node, device: Device) -> Claim | Refusal:
    """A float64 Linear, as a 1x1 convolution in NHWC."""
    x, y = net.types[node.inputs[0]], net.types[node.name]
    name, bias = node.weights["weight"], node.weights.get("bias")
    N, K = net.weights[name].shape
    sides = (1, x.row_size // K)
    geometry = Geometry(False, K, N, 1, sides, sides, (1, 1), (1, 1), (0, 0), (1, 1))
    if geometry.reach >= MOST:
        return Refusal(GemmSimt.name, node.name, f"{x} in float64: rows of up to {MOST:,} numbers")
    recipes = {"weight": Recipe.of(transposed, (name,), (K, N), "float64", axes=(1, 0))}
    if bias is not None:
        recipes["bias"] = Recipe.of(as_is, (bias,), (N,), "float64")
    weight_bytes = sum(recipe.nbytes for recipe in recipes.values())
    rate = DOUBLE_RATE * max(tile.rate_for(N) for tile in DOUBLE_TILES)
    return Claim(
        GemmSimt.name, f"{GemmSimt.name}<{K},{N}>", (node.name,),
        Cost(net.row_flop(node), x.row_bytes + y.row_bytes, weight_bytes, precision="fp32", rate=rate),
        "float64 is multiplied by itself", recipes, order=f"k in order, parts of {PART}",
        reads={node.inputs[0]: Use(is_read_often=True)},
        facts=ConvLowering(geometry, ("float64", "float64"), (True, True), bias is not None, device.units),
    )  # fmt: skip


def weight_recipes(layer: Dense, precision: str) -> dict[str, Recipe]:
    """w (N, K) in the type of the precision; the bias in float32."""
    op, dtype = narrow_weight if precision == "fp16" else as_is, PRECISIONS[precision].dtype
    recipes = {"weight": Recipe.of(op, (layer.weight,), (layer.D_out, layer.D_in), dtype)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def _instance(
    name: str, M: int, N: int, K: int, precision: str = "fp32", dtypes: tuple[str, str] = ("float32", "float32")
) -> Instance:
    product, nothing = Product(M, N, K, precision, dtypes), Int64(0)
    return Instance(name, lambda device: product.launch(device.units, nothing, nothing, nothing, nothing))


INSTANCES = (
    _instance("large fp32", 4096, 4096, 512),
    _instance("long sums fp32", 4096, 4096, 4096),
    _instance("middling fp32", 512, 512, 512),
    _instance("few rows fp32", 7, 4096, 4096),
    _instance("few columns fp32, rows in fp16", 65536, 10, 512, dtypes=("float16", "bfloat16")),
    _instance("long sums in double precision", 4096, 4096, 4096, precision="fp64"),
)
