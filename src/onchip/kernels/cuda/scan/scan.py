"""Scans (prefix sums): host side of scan/tiles.cu, scan/warps.cu, scan/rows.cu and scan/columns.cu.

An array is (outer, N, inner), scanned along the middle axis. The tiling depends on N, inner and the dtype, never on
`outer`, so a row's bits do not depend on its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch, UInt32
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.permute import permute
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps, grid_1d
from onchip.network.graph import Network
from onchip.network.layers import CumSum
from onchip.network.scan_op import ScanOp
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

FOLDER = Path(__file__).parent
ELEMENT_TYPES = {
    "int32": "int", "int64": "long long", "float32": "float", "float64": "double",
    "float16": "f16", "bfloat16": "bf16", "int16": "short", "int8": "signed char", "uint8": "unsigned char",
}  # fmt: skip
THREADS = 256  # per block, in every kernel here
# scan_tiles: 16-byte vectors per thread, and tiles per group. Few tiles should be small, so that every SM has some;
# many should be large, so that totals are passed on less often.
CHUNKS, MORE_CHUNKS, GROUP = 8, 10, 128
MANY_BYTES = 1 << 28  # per row, from which on tiles are large
STATE_BYTES = 16
_ALIGN_BYTES = 256  # of arrays in scratch memory
SHORT_BYTES = 8 << 10  # longest row for one warp
MANY_COLUMNS = 1 << 12  # from here on columns are scanned in place; fewer, if long, are transposed first
BLOCKS_PER_SM = 8
WALK_BUDGET = Budget(registers=80, spill_bytes=16)


@dataclass(frozen=True)
class Scan:
    """One scan: the operation and the shape."""

    how: ScanOp
    dtype: str
    outer: int
    N: int
    inner: int = 1
    row_length: int = 0  # of the row that holds these N elements; 0: they are the whole row
    is_aligned: bool = True  # x and y are 16-byte aligned; kernels check each row

    @property
    def element_bytes(self) -> int:
        """Bytes of the compute type: float or int for narrower dtypes."""
        return max(4, DTYPE_BYTES[self.dtype])

    @property
    def row_bytes(self) -> int:
        return (self.row_length or self.N) * self.element_bytes

    @property
    def template(self) -> str:
        names = self.how.op.capitalize(), ELEMENT_TYPES[self.dtype], str(self.how.exclusive).lower()
        return ", ".join(names)

    @property
    def is_long(self) -> bool:
        """Whether its rows are scanned in tiles."""
        return self.inner == 1 and not self.how.reverse and self.row_bytes > SHORT_BYTES

    @property
    def is_one_tile(self) -> bool:
        """Whether a block scans a whole row."""
        return self.tiles == 1 and not self.row_length

    @property
    def is_narrow(self) -> bool:
        """Whether its columns are so long and so few that they are transposed first."""
        return 1 < self.inner < MANY_COLUMNS and not self.how.reverse and self.row_bytes > SHORT_BYTES

    @property
    def order(self) -> str:
        if self.is_long or self.is_narrow:
            return f"tiles of {self.tile}, groups of {GROUP} tiles, in order"
        return f"{self.lanes} lanes along a row" if self.inner == 1 else "down columns, in order"

    # -- long rows -----------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        return CHUNKS if self.row_bytes < MANY_BYTES else MORE_CHUNKS

    @property
    def tile(self) -> int:
        """Elements per tile."""
        return THREADS * self.chunks * 16 // self.element_bytes

    @property
    def group(self) -> int:
        """Elements per group: a long row may be scanned in chunks that start at multiples of it."""
        return GROUP * self.tile

    @property
    def tiles(self) -> int:
        """Tiles per row, or per chunk of a row."""
        return -(-self.N // self.tile)

    @property
    def states(self) -> int:
        """States of all rows' groups and tiles, cleared before each scan."""
        return self.outer * (self.tiles + -(-self.tiles // GROUP))

    def clearing(self, units: int, states: Scratch) -> KernelLaunch:
        """clear_states(states, count)"""
        program = Program(FOLDER / "tiles.cu", "clear_states")
        config = grid_1d(min(-(-self.states // THREADS), units))
        return KernelLaunch(program, config, (states, Int64(self.states)), Budget(registers=32))

    def by_tiles(self, arch: str, x: Argument, y: Argument, states: Scratch) -> KernelLaunch:
        """scan_tiles(x, y, states, carry_in, carry_out, N, tiles), after clear_states"""
        program = Program(FOLDER / "tiles.cu", f"scan_tiles<{self.template}, {self.chunks}>")
        config = replace(grid_1d(self.outer * self.tiles), overlaps=arch not in ("sm_80", "sm_86", "sm_89"))
        resident = 50 // self.chunks  # blocks per SM, on large SMs
        # Carry in and carry out of a chunk.
        totals: tuple[Argument, Argument] = (Input(1), Output(1)) if self.row_length else (NOTHING, NOTHING)
        arguments = (x, y, states, *totals, Int64(self.N), UInt32(self.tiles))
        return KernelLaunch(program, config, arguments, Budget(65536 // (THREADS * resident) // 8 * 8, spill_bytes=48))

    def by_warps(self, x: Argument, y: Argument) -> KernelLaunch:
        """scan_warps(x, y, N): rows of one tile, in the order of scan_tiles"""
        program = Program(FOLDER / "warps.cu", f"scan_warps<{self.template}>")
        of_warp = self.tile // (THREADS // 32)
        config = LaunchConfig((self.outer, 1, 1), (32 * -(-self.N // of_warp), 1, 1), 0)
        return KernelLaunch(program, config, (x, y, Int64(self.N)), Budget(registers=64, spill_bytes=16))

    # -- short rows and columns ----------------------------------------------------------------------------------

    @property
    def lanes(self) -> int:
        """Lanes per row, 16 bytes each."""
        return min(32, 1 << max(0, math.ceil(self.N * self.element_bytes / 16) - 1).bit_length())

    def walk_template(self) -> str:
        lanes = f", {self.lanes}" if self.inner == 1 else ""
        return f"{self.template}, {str(self.how.reverse).lower()}{lanes}"

    def walk_config(self, units: int) -> LaunchConfig:
        threads = self.outer * (self.lanes if self.inner == 1 else self.inner)
        return grid_1d(min(-(-threads // THREADS), units * BLOCKS_PER_SM))

    def by_walking(self, units: int) -> KernelLaunch:
        """scan_rows(x, y, rows, N) or scan_columns(x, y, outer, N, inner)"""
        name = "rows" if self.inner == 1 else "columns"
        sizes = (self.outer, self.N) if self.inner == 1 else (self.outer, self.N, self.inner)
        program = Program(FOLDER / f"{name}.cu", f"scan_{name}<{self.walk_template()}>")
        arguments: tuple[Argument, ...] = (Input(0), Output(0), *map(Int64, sizes))
        return KernelLaunch(program, self.walk_config(units), arguments, WALK_BUDGET)

    # -- all launches --------------------------------------------------------------------------------------------

    def steps(self, device: Device) -> Steps:
        """From input 0 to output 0, which may alias; a chunk of a row also has its carry in and carry out."""
        if not self.outer * self.N * self.inner:
            return Steps(())
        if self.is_narrow:
            return self._as_rows(device)
        if self.is_long and self.is_one_tile:
            return Steps((self.by_warps(Input(0), Output(0)),))
        if self.is_long:
            return Steps(self._along_rows(device, Input(0), Output(0), Scratch(0)), STATE_BYTES * self.states)
        return Steps((self.by_walking(device.units),))

    def _along_rows(self, device: Device, x: Argument, y: Argument, states: Scratch) -> tuple[KernelLaunch, ...]:
        return self.clearing(device.units, states), self.by_tiles(device.arch, x, y, states)

    def _as_rows(self, device: Device) -> Steps:
        """Few long columns: transposed to rows in scratch memory, scanned there, transposed back."""
        rows = replace(self, outer=self.outer * self.inner, inner=1)
        count, dtypes = self.outer * self.N * self.inner, (self.dtype, self.dtype)
        buffer, states = Scratch(0), Scratch(-(-count * DTYPE_BYTES[self.dtype] // _ALIGN_BYTES) * _ALIGN_BYTES)
        launches = (
            permute(
                dtypes, (self.outer, self.N, self.inner), (0, 2, 1), device.units, Input(0), buffer, self.is_aligned
            ),
            *rows._along_rows(device, buffer, buffer, states),
            permute(
                dtypes, (self.outer, self.inner, self.N), (0, 2, 1), device.units, buffer, Output(0), self.is_aligned
            ),
        )
        return Steps(launches, states.offset + STATE_BYTES * rows.states)


# -- as a layer of a network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScanLowering:
    """CumSum over rows of any length."""

    scan: Scan  # of one batch row
    device: Device

    def at(self, B: int) -> Steps:
        return replace(self.scan, outer=B * self.scan.outer).steps(self.device)


class ScanKernel(CudaKernel):
    name = "scan"
    layers = (CumSum,)
    dtypes = ELEMENT_TYPES  # accumulates in the rows' dtype or wider

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x = node.layer, net.types[node.inputs[0]]
        assert isinstance(layer, CumSum)
        if not x.row_size:
            yield Refusal(self.name, node.name, f"scans rows of at least one element, not {x}")
            return
        axis, shape = layer.axis % len(x.shape), (1, *x.row_shape)
        outer, N, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        scan = Scan(ScanOp("sum", layer.exclusive, layer.reverse), x.dtype, outer, N, inner)
        passes = 3 if scan.is_narrow else 1
        yield self.claim(
            net, node, ScanLowering(scan, device), label=f"{self.name}<{N}>", order=scan.order,
            cost=Cost(net.row_flop(node), passes * 2 * x.row_bytes, launches=len(scan.steps(device).launches)),
        )  # fmt: skip


def _long(how: ScanOp, dtype: str, N: int) -> Callable[[Device], KernelLaunch]:
    return lambda device: Scan(how, dtype, 1, N).steps(device).launches[1]


def _only(scan: Scan) -> Callable[[Device], KernelLaunch]:
    return lambda device: scan.steps(device).launches[0]


INSTANCES = (
    Instance("a long row", _long(ScanOp(), "float32", 1 << 20)),
    Instance("a very long row", _long(ScanOp(), "float32", 1 << 28)),
    Instance("a long row, int32", _long(ScanOp(exclusive=True), "int32", 1 << 28)),
    Instance("a long row, max", _long(ScanOp("max"), "float64", 1 << 28)),
    Instance("a long row, product", _long(ScanOp("product", True), "int64", 1 << 28)),
    Instance("clearing", _only(Scan(ScanOp(), "float32", 1, 1 << 28))),
    Instance("rows of a tile", _only(Scan(ScanOp(), "float32", 1000, 4096))),
    Instance("rows of a tile in half precision", _only(Scan(ScanOp(exclusive=True), "float16", 1000, 4096))),
    Instance("rows of a tile, int64", _only(Scan(ScanOp("max"), "int64", 1000, 4096))),
    Instance("short rows", _only(Scan(ScanOp(), "float32", 1000, 1000))),
    Instance("tiny rows", _only(Scan(ScanOp("min", True), "int64", 1000, 3))),
    Instance("rows from the end", _only(Scan(ScanOp("sum", True, True), "float32", 1000, 77))),
    Instance("a long row in half precision", _long(ScanOp(), "float16", 1 << 28)),
    Instance("short rows of bytes", _only(Scan(ScanOp("sum", True, True), "uint8", 1000, 1000))),
    Instance("columns, bfloat16", _only(Scan(ScanOp(), "bfloat16", 10, 20, 30))),
    Instance("columns", _only(Scan(ScanOp(), "float32", 10, 20, 30))),
    Instance("columns, product", _only(Scan(ScanOp("product"), "float64", 10, 20, 30))),
    Instance("columns from the end", _only(Scan(ScanOp("sum", True, True), "float32", 2, 7, 5))),
)
