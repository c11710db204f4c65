"""The gradient of a Linear's or a convolution's weight on tensor cores: host side of gradient/weight_grad_mma.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Argument
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES, FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program
from onchip.kernels.cuda.gradient.weight_grad import Tile, WeightGradGemm, WeightGradKernel, WeightGradLowering, Windows
from onchip.network.graph import Network
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
BN, DEPTH, LINES, THREADS = 128, 32, 16, 256  # as in gradient/weight_grad_mma.cu
TILES = tuple(Tile(BM, BN, DEPTH, blocks) for BM, blocks in ((16, 2), (32, 2), (64, 2), (128, 1)))
REGISTERS = 65536  # per SM
MAX_ROW = 1 << 30  # elements per row of a convolution's x
# Gradients in fp16 overflow or vanish; tf32 has as long a mantissa.
MULTIPLIED = {"bf16": "bf16", "tf32": "tf32", "fp16": "tf32"}


@dataclass(frozen=True)
class WeightGradMmaLowering(WeightGradGemm):
    """weight_grad_mma(dy, x, dw, bias, M, N, tiles_n, groups, K, split_k, split_stride, windows)"""

    precision: str = "bf16"  # of the job

    @property
    def tile(self) -> Tile:
        """The smallest of those with the fewest tiles along M, since each loads x; the same for every batch."""
        return min(TILES, key=lambda tile: -(-self.M // tile.BM))

    @property
    def computed(self) -> str:
        return MULTIPLIED[self.precision]

    def rate(self, B: int, device: Device) -> float:
        """Loads and mma of a block, one after the other; counts tile overhang and idle SMs."""
        costs, tile = costs_of(device).weight_grad, self.tile
        tiles_m, tiles_n = -(-self.M // tile.BM), -(-self.N // tile.BN)
        loaded = tiles_n * round_up(self.M, LINES) + tiles_m * round_up(self.N, LINES)
        instructions = costs.row_instructions if self.vectors else costs.pixel_instructions
        peak = device.flops[self.computed]
        multiplied = 2 * tiles_m * tile.BM * tiles_n * tile.BN / (costs.mma_share * peak)
        seconds = multiplied + 2 * instructions * loaded / device.flops["fp32"]  # per k; an FFMA is two flop
        return 2 * self.M * self.N / (peak * seconds) * self.busy(B)

    @property
    def shared_bytes(self) -> int:
        element = 4 // PRECISIONS[self.computed].per_word
        rows = self.tile.BM + BN
        slice_bytes = DEPTH * (rows + 16) * element if self.vectors else rows * (DEPTH * element + 16)
        return 2 * slice_bytes

    def launch(self, K: int, written: str, grid: tuple[int, int, int], arguments: tuple[Argument, ...]) -> KernelLaunch:
        types = f"{PRECISIONS[self.computed].name}, {FLOATS[self.dtype]}, {FLOATS[written]}"
        program = Program(SOURCE, f"weight_grad_mma<{self.template(K)}, {types}, {self.tile.BM}>")
        config = LaunchConfig(grid, (THREADS, 1, 1), self.shared_bytes)
        registers = min(255, REGISTERS // (THREADS * self.tile.blocks_per_sm) // 8 * 8)
        return KernelLaunch(program, config, arguments, Budget(registers))


class WeightGradMmaKernel(WeightGradKernel):
    name = "weight_grad_mma"
    dtypes = tuple(ELEMENT_TYPES)
    order = "splits of K, each in order by mma"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if job.precision not in MULTIPLIED:  # fp32: weight_grad
            return
        node = net.nodes[start]
        if max(net.types[value].row_size for value in node.inputs) >= MAX_ROW:
            yield Refusal(self.name, node.name, "supports fewer than 2^30 elements per row")
            return
        yield from super().offers(net, start, device, job)

    def gemm(self, lowering: WeightGradLowering, precision: str) -> WeightGradMmaLowering:
        return WeightGradMmaLowering(**vars(lowering), precision=precision)


def _instance(precision: str, M: int, N: int, dtype: str = "float32", vectors: int = 0, B: int = 1000) -> Instance:
    windows = Windows() if vectors else Windows((28, 28), (28, 28), (3, 3))
    lowering = WeightGradMmaLowering(M, N, 1, vectors, windows, 1, True, 132, dtype, precision=precision)
    return instance(f"{precision} on {dtype}, {'Linear' if vectors else 'convolution'}, {M} x {N}", lowering, B)


INSTANCES = (
    *(_instance(precision, M, 144) for precision in ("bf16", "tf32") for M in (16, 32, 64, 128)),
    *(_instance(precision, M, 784, vectors=1) for precision in ("bf16", "tf32") for M in (10, 32, 64, 128)),
    _instance("tf32", 64, 54, B=1 << 22), _instance("bf16", 128, 54, B=1 << 22),
    _instance("fp16", 64, 144, "float16"), _instance("bf16", 64, 144, "bfloat16"),
    _instance("bf16", 128, 784, "bfloat16", vectors=1, B=64),
)  # fmt: skip
