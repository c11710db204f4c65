"""The scan ladder on a GPU: one thread, the report's sliding block, two levels, one pass, and the engine's kernel.

The headers of cuda/scan_*.cu explain each kernel. The input is on the GPU before the clock starts. Clearing status
words is part of the measured time.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Scratch
from onchip.kernels.cuda.common.program import EVERY_CHIP, Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.scan.scan import Scan
from onchip.ladders.device import KERNELS, DeviceRows, DeviceRun, cover, grid_1d, rung_instances
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.scan import ScanTruth, device_floor_ms, scan_cost
from onchip.network.graph import Network
from onchip.network.scan_op import ScanOp
from onchip.plan.kernel import Cost
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import scan

TILE = 4096  # values per block in scan_tile.cuh
BLOCK = 1024  # threads per block in scan_block.cuh


class CudaRung(Rung[DeviceRows]):
    """A rung whose kernels, from one file, compute y from x."""

    file: ClassVar[str]
    kernels: ClassVar[tuple[str, ...]]  # in the order that `steps` expects
    max_registers: ClassVar[int] = 64  # per thread; four blocks of 256 threads then fit into an SM's 65,536

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return tuple(Program(KERNELS / cls.file, kernel) for kernel in cls.kernels)

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, N = Gpu.get(), len(x)
        return DeviceRun(gpu, self.steps(N), x.on(gpu, "float32"), {}, (N,), "float32")

    def cost(self, net: Network, B: int) -> Cost:
        return scan_cost()

    @abc.abstractmethod
    def steps(self, N: int) -> Steps: ...

    def launch(self, program: Program, config: LaunchConfig, *arguments: Argument) -> KernelLaunch:
        return KernelLaunch(program, config, arguments, Budget(self.max_registers))


class OneThread(CudaRung):
    name = "one-thread"
    idea = "the definition: one thread walks over the array; each addition waits for a load and the previous addition"
    file, kernels = "scan_one_thread.cu", ("one_thread",)
    max_rows = 1 << 16

    def steps(self, N: int) -> Steps:
        (program,) = self.programs()
        return Steps((self.launch(program, grid_1d(1, 1), Input(0), Output(0), Int64(N)),))


class SlidingBlock(CudaRung):
    name = "sliding-block"
    idea = "1024 threads slide over the array: warps scan by an up-sweep and a down-sweep, the first scans their totals"
    why = "1024 loads in flight instead of one"
    file, kernels = "scan_sliding_block.cu", ("sliding_block",)

    def steps(self, N: int) -> Steps:
        (program,) = self.programs()
        return Steps((self.launch(program, grid_1d(1, BLOCK), Input(0), Output(0), Int64(N)),))


class TwoLevel(CudaRung):
    name = "two-level"
    idea = "each block scans a tile, one block scans the tiles' totals, each block adds its tile's prefix: four passes"
    why = "every SM works, and thousands of loads are in flight"
    file, kernels = "scan_two_level.cu", ("scan_tiles", "scan_totals", "add_prefixes")

    def steps(self, N: int) -> Steps:
        scan_tiles, scan_totals, add_prefixes = self.programs()
        tiles, totals = -(-N // TILE), Scratch(0)
        launches = (
            self.launch(scan_tiles, grid_1d(tiles), Input(0), totals, Output(0), Int64(N)),
            self.launch(scan_totals, grid_1d(1, BLOCK), totals, Int64(tiles)),
            self.launch(add_prefixes, grid_1d(tiles), totals, Output(0), Int64(N)),
        )
        return Steps(launches, 4 * tiles)

    def cost(self, net: Network, B: int) -> Cost:
        """Four passes: x in, sums out, sums in, y out. A second addition per element, for the prefix of its tile."""
        return scan_cost(passes=4, flop=2)


class SinglePass(CudaRung):
    name = "single-pass"
    idea = "one pass: each tile publishes its total at once and looks back at those of the previous tiles"
    why = "two passes over memory instead of four"
    file, kernels = "scan_single_pass.cu", ("clear_words", "single_pass")
    nondeterministic = "which tile has published its prefix depends on timing, and with it the reduction order"

    def steps(self, N: int) -> Steps:
        clear_words, single_pass = self.programs()
        tiles, words = -(-N // TILE), Scratch(0)
        launches = (
            self.launch(clear_words, cover(1 + tiles), words, Int64(1 + tiles)),
            self.launch(single_pass, grid_1d(tiles), Input(0), words, Output(0), Int64(N)),
        )
        return Steps(launches, 8 * (1 + tiles))


class Onchip(Rung[DeviceRows]):
    name = "onchip"
    idea = "the engine: one pass, tile totals added in float64 and in a fixed order: bit-identical runs"
    why = "more bytes in flight: tiles are in shared memory, and totals are published before the tile is scanned"
    is_engine = True

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, N = Gpu.get(), len(x)
        steps = Scan(ScanOp("sum"), "float32", 1, N).steps(gpu.device)
        return DeviceRun(gpu, steps, x.on(gpu, "float32"), {}, (N,), "float32")

    def cost(self, net: Network, B: int) -> Cost:
        return scan_cost()


RUNGS: tuple[type[CudaRung], ...] = (OneThread, SlidingBlock, TwoLevel, SinglePass)
LADDER = Ladder(
    name="scan",
    title="prefix sum of a row, on a GPU",
    rungs=(*RUNGS, Onchip),
    network=scan.network,
    inputs=lambda N: DeviceRows(scan.inputs(N)),
    floor_ms=lambda net, N, precision: device_floor_ms(Gpu.get().device, N),
    rows=scan.ELEMENTS,
    truth=lambda net, x: ScanTruth(net, x.host),
    device="cuda",
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
