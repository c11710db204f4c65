"""Sums over the batch: host side of gradient/batch_sum.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.network.graph import Node
from onchip.network.layers import BatchSum
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device

SOURCE = Path(__file__).with_suffix(".cu")
COLUMNS, LINES = 32, 8
MIN_CHUNK = 128  # rows: fewer per block do not pay for a second launch


def sum_rows(
    dtypes: tuple[str, str],
    rows: int,
    columns: int,
    x: Argument,
    y: Argument,
    y2: Argument = NOTHING,
    first: int = 0,
    chunk: int = 0,
) -> KernelLaunch:
    """Sum the rows of each chunk; chunk 0: all rows. The columns from `first` on go to y2, if first is set.

    dtypes  of x and y
    """
    chunk, first = chunk or max(1, rows), first or columns
    grid = (-(-columns // COLUMNS), max(1, -(-rows // chunk)), 1)
    sizes = (Int64(rows), Int64(columns), Int64(first), Int64(chunk))
    program = Program(SOURCE, f"batch_sum<{FLOATS[dtypes[0]]}, {FLOATS[dtypes[1]]}>")
    return KernelLaunch(program, LaunchConfig(grid, (COLUMNS * LINES, 1, 1), 0), (x, y, y2, *sizes), Budget(48))


def sum_batch(
    dtypes: tuple[str, str], B: int, columns: int, units: int, x: Argument, y: Argument, scratch: int = 0
) -> tuple[tuple[KernelLaunch, ...], int]:
    """The launches that sum B rows, and the end of their scratch memory, which begins at `scratch`."""
    if not columns:
        return (), scratch
    chunks = min(-(-B // MIN_CHUNK), max(1, 2 * units * COLUMNS // columns))
    chunk = -(-B // max(1, chunks))
    if chunks < 2:
        return (sum_rows(dtypes, B, columns, x, y),), scratch
    chunks, partial, total = -(-B // chunk), Scratch(scratch), accumulated(dtypes[0])
    launches = (
        sum_rows((dtypes[0], total), B, columns, x, partial, chunk=chunk),
        sum_rows((total, dtypes[1]), chunks, columns, partial, y),
    )
    return launches, scratch + chunks * columns * DTYPE_BYTES[total]


def accumulated(dtype: str) -> str:
    """The dtype of partial sums."""
    return dtype if dtype == "float64" else "float32"


@dataclass(frozen=True)
class BatchSumLowering:
    dtype: str
    columns: int
    units: int

    def at(self, B: int) -> Steps:
        return Steps(*sum_batch((self.dtype, self.dtype), B, self.columns, self.units, Input(0), Output(0)))


class BatchSumKernel(CudaKernel):
    name = "batch_sum"
    layers = (BatchSum,)
    order = "rows by chunk, 8 threads per column"

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> BatchSumLowering:
        x = types[node.inputs[0]]
        return BatchSumLowering(x.dtype, x.row_size, device.units)


INSTANCES = (
    instance("bias", BatchSumLowering("float32", 1000, 132)),
    instance("float64", BatchSumLowering("float64", 1000, 132)),
)
