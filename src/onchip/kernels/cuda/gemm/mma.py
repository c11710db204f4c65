"""mma.sync GEMM: the host side of gemm/mma.cu. A Linear of any shape on the tensor cores of sm_80 and up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import Chain, Dense
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Int64, UInt32
from onchip.kernels.cuda.common.chain import FitsInBlock
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, round_up, tensor_core_cost
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, LaunchConfig, Program
from onchip.kernels.cuda.common.weights import multiplied_weight, spread_taps
from onchip.kernels.cuda.gemm.linear import FusedLinear, GemmKernel, LinearGemm, LinearLowering, large_layer
from onchip.kernels.cuda.mma.mma_tile import PART, TILES, MmaTile, depth_of, scale_of, tiles_of, unit_of
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.recipe import Recipe
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class MmaGemm(LinearGemm):
    """w is (N, pitch), in fp32 (2, N, pitch)."""

    @property
    def pitch(self) -> int:
        """Row stride of w: K padded to whole 16-byte units."""
        return round_up(self.K, unit_of(self.precision))

    @property
    def alignment(self) -> int:
        """Alignment of rows of x in bytes, up to 16."""
        return math.gcd(self.K * DTYPE_BYTES[self.dtypes[0]], 16)

    @property
    def is_whole(self) -> bool:
        """Whether rows of x are whole 16-byte units."""
        return self.pitch == self.K and self.alignment == 16

    def work(self, device: Device, tile: MmaTile) -> float:
        """Estimated cost, in multiply-adds at the device's peak rate: whole waves of tiles."""
        waves = math.ceil(tile.count(self.M, self.N) / device.units)
        K, scale = round_up(self.K, depth_of(self.precision)), scale_of(device, self.precision)
        return waves * device.units * tile.work(K, scale, self.is_whole, costs_of(device).mma_tile)

    def tile(self, device: Device) -> MmaTile:
        """The tile with the least estimated cost. Results are bit-identical for all tiles."""
        return min(tiles_of(self.precision, self.is_whole), key=lambda tile: self.work(device, tile))

    def rate(self, device: Device) -> float:
        """Estimated share of the device's peak rate."""
        return self.M * self.N * self.K / self.work(device, self.tile(device))

    def launch(self, device: Device, *arrays: Argument) -> KernelLaunch:
        return self.launch_tile(self.tile(device), *arrays)

    def launch_tile(self, tile: MmaTile, *arrays: Argument) -> KernelLaunch:
        """arrays: x, w, bias (N) float32 or NOTHING, y"""
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        types = f"{PRECISIONS[self.precision].name}, {x_type}, {y_type}"
        tiling = f"{tile.template(self.precision, self.dtypes[0])}, {'true' if self.is_whole else 'false'}"
        program = Program(SOURCE, f"gemm_mma<{types}, {tiling}>")
        shared = tile.shared_bytes(self.precision, self.dtypes[0])
        config = LaunchConfig((tile.count(self.M, self.N), 1, 1), (tile.threads, 1, 1), shared)
        sizes = (Int64(self.M), Int64(self.N), Int64(self.K), Int64(self.pitch))
        arguments = (*arrays, *sizes, UInt32(self.alignment), *map(UInt32, activation_words(self.activation)))
        return KernelLaunch(program, config, arguments, tile.budget(self.precision))


class GemmMmaKernel(GemmKernel):
    name = "gemm_mma"

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        """One Linear with its activation and surrounding Casts, where it does not fit in a block."""
        chain = large_layer(net, start, device, job, self.fits_in_block)
        if not isinstance(chain, Chain):
            return
        linear = FusedLinear(chain)
        gemm = MmaGemm.of(net, linear, job.precision)
        recipes = linear.recipes(_weight(net, linear.layer, gemm))
        factors = costs_of(device).mma_tile.hopper_factors
        share = factors[PRECISIONS[job.precision].splits] if device.arch == "sm_90a" else 1.0
        rate = share * replace(gemm, M=max(1, job.batch * gemm.M)).rate(device)
        yield self.claim_linear(
            net, linear, LinearLowering(gemm, linear.arrays(net), device), recipes=recipes,
            cost=tensor_core_cost(job.precision, *linear.work(net), recipe_bytes(recipes), rate=rate),
            why="tensor cores, one tile per block", order=order_of(job.precision, "mma", PART),
        )  # fmt: skip


def _weight(net: Network, layer: Dense, gemm: MmaGemm) -> Recipe:
    weight: str | Recipe = layer.weight
    shape = (gemm.N, gemm.pitch)
    if gemm.pitch != gemm.K:
        dtype = net.weight_type(layer.weight).dtype
        weight = Recipe.of(spread_taps, (weight,), shape, dtype, channels=gemm.pitch)
    return multiplied_weight(weight, shape, gemm.precision)


def _instance(name: str, precision: str, dtypes: tuple[str, str], tile: MmaTile, K: int = 4096) -> Instance:
    gemm = MmaGemm(4096, 4096, K, precision, dtypes)
    return Instance(name, lambda device: gemm.launch_tile(tile, *[NOTHING] * 4))


INSTANCES = (
    _instance("128 x 128 fp16", "fp16", ("float16", "float16"), TILES[0]),
    _instance("128 x 128 bf16, rows in float32", "bf16", ("float32", "float32"), TILES[0]),
    _instance("128 x 128 tf32", "tf32", ("float32", "float32"), TILES[0]),
    _instance("128 x 64 fp32", "fp32", ("float32", "float32"), TILES[1]),
    _instance("128 x 32 bf16, rows in float16", "bf16", ("float16", "bfloat16"), TILES[2]),
    _instance("32 x 64 fp32", "fp32", ("float32", "float32"), TILES[3]),
    _instance("128 x 128 bf16, unaligned rows", "bf16", ("bfloat16", "float32"), TILES[0], 4095),
)
