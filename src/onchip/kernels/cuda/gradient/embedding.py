"""The gradients of the tables of Embedding and TokenConv: host side of gradient/embedding.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Input, Output, Scratch, Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS, IDS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.cuda.gradient.sort_ids import sort_ids
from onchip.network.graph import Network
from onchip.network.layers import Embedding, TokenConv, WeightGrad
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, WARPS, ROWS = 256, 8, 4  # as in gradient/embedding.cu
MIN_CHUNK_BITS = 5


class TableRows(CStruct):
    source, c_name = SOURCE, "TableRows<float, 1>"
    _fields_ = (("dy", c_void_p), ("E", c_int64))


class WindowRows(CStruct):
    source, c_name = SOURCE, "WindowRows<float>"
    _fields_ = (
        ("dy", c_void_p), ("S", c_uint32), ("C", c_uint32), ("P", c_uint32), ("stride", c_uint32), ("before", c_uint32),
    )  # fmt: skip


class Table(CStruct):
    source, c_name = SOURCE, "Table"
    _fields_ = tuple((name, c_uint32) for name in ("V", "words", "lane_bits", "tiles", "chunk_bits", "chunks"))


@dataclass(frozen=True)
class Window:
    """Of a TokenConv: how its rows of dy lie."""

    S: int
    C: int
    P: int
    stride: int
    before: int


@dataclass(frozen=True)
class EmbeddingGradLowering:
    """sum_rows(rows, keys, order, ranges, chunk_sums, dw, table), sum_long_rows(the same)"""

    ids_dtype: str
    dtype: str
    ids: int  # per row of the batch
    V: int
    E: int  # elements per row of the table
    window: Window | None = None

    @property
    def width(self) -> int:
        """Adjacent columns per thread."""
        return 4 if self.E % 4 == 0 and self.dtype != "float64" and self.window is None else 1

    @property
    def rows(self) -> tuple[str, Struct]:
        """The type of the rows of dy, and the rows."""
        element = FLOATS[self.dtype]
        if self.window is None:
            return f"TableRows<{element}, {self.width}>", TableRows.of(dy=Input(1), E=self.E)
        return f"WindowRows<{element}>", WindowRows.of(dy=Input(1), **vars(self.window))

    def at(self, B: int) -> Steps:
        N, words = B * self.ids, self.E // self.width
        lane_bits = min(words - 1, 31).bit_length()
        tiles = -(-words >> lane_bits)
        chunk_bits = chunk_bits_of(N)
        chunks = N >> chunk_bits
        sort = sort_ids(self.ids_dtype, N, self.V)
        chunk_sums = Scratch(sort.scratch_bytes)
        sum_bytes = chunks * self.E * (8 if self.dtype == "float64" else 4)
        table = Table.of(V=self.V, words=words, lane_bits=lane_bits, tiles=tiles, chunk_bits=chunk_bits, chunks=chunks)
        kind, rows = self.rows
        arguments = (rows, sort.keys, sort.order, Scratch(0), chunk_sums, Output(0), table)
        row_warps = -(-self.V // ROWS) * tiles
        blocks = {"sum_rows": chunks * tiles - (-row_warps // WARPS)}
        if chunks:
            blocks["sum_long_rows"] = chunks * tiles
        launches = [
            KernelLaunch(Program(SOURCE, f"{name}<{kind}>"), grid_1d(count, THREADS), arguments, Budget(registers=64))
            for name, count in blocks.items()
        ]
        return Steps((*sort.launches, *launches), sort.scratch_bytes + sum_bytes, sort.range_bytes)


def chunk_bits_of(N: int) -> int:
    """log2 of the sorted ids per chunk: the row of an id that occurs N times has chunks, and each chunk ids, to sum."""
    return max(MIN_CHUNK_BITS, (N.bit_length() - 1) // 2 - 2)


class EmbeddingGradKernel(OneDtypeKernel):
    name = "embedding_grad"
    layers = (WeightGrad,)
    dtypes = (*IDS, *FLOATS)
    order = "ids in order, in lines and chunks of the sorted ids"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, WeightGrad) and isinstance(layer.of, Embedding | TokenConv) and layer.role == "weight"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        assert isinstance(node.layer, WeightGrad)
        (ids, dy), dw, layer = net.input_types(node), net.types[node.name], node.layer.of
        V, *row = dw.row_shape
        window = None
        if isinstance(layer, TokenConv):
            C, P = dy.row_shape
            window = Window(ids.row_size, C, P, layer.stride, layer.pads[0])
        lowering = EmbeddingGradLowering(ids.dtype, dy.dtype, ids.row_size, V, math.prod(row), window)
        rows_bytes = ids.row_size * math.prod(row) * DTYPE_BYTES[dy.dtype] if window else dy.row_bytes
        launches = len(lowering.at(job.batch).launches)
        cost = Cost(ids.row_size * math.prod(row), ids.row_bytes + rows_bytes, dw.row_bytes, launches)
        yield self.claim(net, node, lowering, label=f"{self.name}<{V},{math.prod(row)}>", cost=cost)


def _instance(dtype: str, E: int, launch: int, window: Window | None = None) -> Instance:
    lowering = EmbeddingGradLowering("int32", dtype, 50, 20_000, E, window)
    what = "window" if window else f"rows of {E}"
    return instance(f"{what}, {dtype}, {launch}", lowering, 64, launch)


INSTANCES = tuple(
    _instance(dtype, E, launch) for dtype in FLOATS for E in (63, 64) for launch in (1, 2)
) + tuple(
    _instance(dtype, 12, launch, Window(50, 4, 48, 1, 0)) for dtype in FLOATS for launch in (1, 2)
)  # fmt: skip
