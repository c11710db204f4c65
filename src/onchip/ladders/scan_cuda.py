"""The scan ladder on a GPU: one thread, the report's sliding block, two levels, one pass, and the engine's own.

The kernels are in cuda/scan_*.cu, where each says what it does and why. The numbers are on the GPU before the clock
starts; clearing what a kernel finds zero is in its time.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from onchip.kernels.cuda.program import EVERY_CHIP, LaunchConfig, Program
from onchip.ladders.device import (
    KERNELS,
    THREADS,
    DeviceRows,
    DeviceRun,
    Launch,
    count,
    line_launch,
    rung_instances,
)
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.scan import ScanTruth, device_floor_ms
from onchip.runtime.gpu import Buffer, Gpu
from onchip.runtime.gpu_scan import ScanCall
from onchip.spec.network import Network
from onchip.spec.scan_op import ScanOp
from onchip.workloads import scan

TILE = 4096  # numbers that a block of scan_tile.cuh takes
BLOCK = 1024  # threads of a block of scan_block.cuh


class CudaRung(Rung[DeviceRows]):
    """Kernels of one file that make y of x."""

    file: ClassVar[str]
    kernels: ClassVar[tuple[str, ...]]  # in the order in which `launches` wants them
    max_registers: ClassVar[int] = 64  # a thread; four blocks of 256 then fit into a multiprocessor's 65,536

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return tuple(Program(KERNELS / cls.file, kernel) for kernel in cls.kernels)

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, N = Gpu.get(), len(x)
        y = gpu.allocate(4 * N)
        return DeviceRun(gpu, self.launches(gpu, x.on(gpu, "float32"), y, N), y, (N,), "float32")

    @abc.abstractmethod
    def launches(self, gpu: Gpu, x: Buffer, y: Buffer, N: int) -> list[Launch]: ...


class OneThread(CudaRung):
    name = "one-thread"
    idea = "the definition: one thread goes along the row; each addition waits for a load and for the one before"
    file, kernels = "scan_one_thread.cu", ("one_thread",)
    max_rows = 1 << 16

    def launches(self, gpu: Gpu, x: Buffer, y: Buffer, N: int) -> list[Launch]:
        (function,) = map(gpu.load, self.programs())
        return [Launch(function, LaunchConfig((1, 1, 1), (1, 1, 1), 0), (x, y, count(N)))]


class SlidingBlock(CudaRung):
    name = "sliding-block"
    idea = "1024 threads slide along the row: warps sweep up and down by shuffles, the first adds up the warps' totals"
    file, kernels = "scan_sliding_block.cu", ("sliding_block",)

    def launches(self, gpu: Gpu, x: Buffer, y: Buffer, N: int) -> list[Launch]:
        (function,) = map(gpu.load, self.programs())
        return [Launch(function, LaunchConfig((1, 1, 1), (BLOCK, 1, 1), 0), (x, y, count(N)))]


class TwoLevel(CudaRung):
    name = "two-level"
    idea = "every block scans a tile, one block scans the tiles' totals, every block adds its own: four passes"
    file, kernels = "scan_two_level.cu", ("scan_tiles", "scan_totals", "add_before")

    def launches(self, gpu: Gpu, x: Buffer, y: Buffer, N: int) -> list[Launch]:
        scan_tiles, scan_totals, add_before = map(gpu.load, self.programs())
        tiles = -(-N // TILE)
        totals = gpu.allocate(4 * tiles)
        return [
            line_launch(scan_tiles, tiles, x, totals, y, count(N)),
            Launch(scan_totals, LaunchConfig((1, 1, 1), (BLOCK, 1, 1), 0), (totals, count(tiles))),
            line_launch(add_before, tiles, totals, y, count(N)),
        ]


class SinglePass(CudaRung):
    name = "single-pass"
    idea = "one pass: a tile says its total at once, and looks back at what the tiles before it have said"
    file, kernels = "scan_single_pass.cu", ("clear_words", "single_pass")

    def launches(self, gpu: Gpu, x: Buffer, y: Buffer, N: int) -> list[Launch]:
        clear_words, single_pass = map(gpu.load, self.programs())
        tiles = -(-N // TILE)
        words = gpu.allocate(8 * (1 + tiles))
        return [
            line_launch(clear_words, -(-(1 + tiles) // THREADS), words, count(1 + tiles)),
            line_launch(single_pass, tiles, x, words, y, count(N)),
        ]


class CallRun(DeviceRun):
    """A run of the engine's own scan, which launches by itself."""

    def __init__(self, gpu: Gpu, x: Buffer, N: int) -> None:
        self._call, self._x = ScanCall(gpu, ScanOp("sum"), "float32", (1, N, 1)), x
        self._scratch = gpu.reserve(self._call.scratch_bytes)
        super().__init__(gpu, (), gpu.allocate(4 * N), (N,), "float32")

    @property
    def facts(self) -> dict[str, int | str]:
        functions = self._call.functions
        return {
            "launches": self._call.launches,
            "registers": max(each.registers for each in functions),
            "shared bytes": max(each.static_shared_bytes for each in functions),
        }

    def _enqueue(self, stream: int, calls: int = 1) -> None:
        for _ in range(calls):
            self._call.enqueue(self._x.pointer, self._y.pointer, stream, self._scratch.pointer)


class Onchip(Rung[DeviceRows]):
    name = "onchip"
    idea = "the engine: one pass, the totals of tiles added in a fixed order and in float64: the same bits every time"

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> CallRun:
        gpu = Gpu.get()
        return CallRun(gpu, x.on(gpu, "float32"), len(x))


RUNGS: tuple[type[CudaRung], ...] = (OneThread, SlidingBlock, TwoLevel, SinglePass)
LADDER = Ladder(
    name="scan",
    title="running sums of a row of numbers, on a GPU",
    rungs=(*RUNGS, Onchip),
    network=scan.network,
    inputs=lambda N: DeviceRows(scan.inputs(N)),
    floor_ms=lambda net, N, precision: device_floor_ms(Gpu.get().device, N),
    rows=scan.NUMBERS,
    truth=lambda net, x: ScanTruth(net, x.host),
    device="cuda",
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
