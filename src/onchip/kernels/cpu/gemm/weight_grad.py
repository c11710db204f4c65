"""weight_grad: the gradient of a Linear's weight, dw = dy^T x over all rows of the batch.

Idea      A task computes a tile of dw over a part of the rows, SUM_ROWS at a time: it copies their columns of dy and x
          to contiguous tiles, padded with zeros, and multiplies with the register tile, vectors along columns of x.
Order     Rows in order, in sums of SUM_ROWS. If dw has few tiles, the rows are divided into parts, whose sums are added
          in order: how many depends on the sizes only.
Floor     2 N K flop per row. 784-320, batch 64: 32 Mflop, 0.11 ms at 300 Gflop/s.
Limits    float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.dense import padded_width
from onchip.kernels.cpu.microkernels.tile import ORDER, PANEL, ROWS_WIDE, VECS_WIDE, multiply_tile, padded
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, WeightGrad
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim

SUM_ROWS = 128  # rows of a sum: their tiles of x (32 KiB with AVX-512) and dy stay in cache
_TILE = 10 * ROWS_WIDE  # rows of dw per task, as many columns of dy
_PART_ROWS = 8 * SUM_ROWS  # per part of the rows, at least
_PARTS = 16  # at most, and with as many tiles of dw the rows are not divided
_THREAD_FLOP = 100_000  # the least work per thread that is worth waking it
_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)

# Layout of the array that `_run` reads: sizes; operands; addresses of sums of parts, of scratch, of zeros.
_N, _K, _VECTORS, _X, _DY, _Y, _SUMS, _SCRATCH, _ZEROS, _FIELDS = range(10)
# Floats of a worker's scratch: a tile of x, one of dy, and their product.
_DY_AT, _OUT_AT = SUM_ROWS * PANEL, SUM_ROWS * (PANEL + _TILE)
_SCRATCH_FLOATS = _OUT_AT + _TILE * PANEL


@compiled(inline=True)
def _copy_tile(source: int, row: int, rows: int, count: int, dst: int, width: int) -> None:
    """dst[r, :width] = the first `count` elements of each row, then zeros; `row`: bytes between rows of the source."""
    for r in range(rows):
        x, y = floats_at(source + r * row, count), floats_at(dst + r * width * 4, width)
        for i in range(count):
            y[i] = x[i]
        for i in range(count, width):
            y[i] = _ZERO


@linked(*(types.int64,) * 7)
def _multiply(dy: int, x: int, rows: int, height: int, width: int, init: int, out: int) -> None:
    """out[n, k] = init[n, k] + sum over rows of dy[row, n] x[row, k], for n < height, whole tiles, and k < width.

    init  `out`, or one row of zeros
    """
    dy_row, out_row = height * 4, width * 4
    init_row = out_row if init == out else 0
    for n in range(0, height, ROWS_WIDE):
        a, y = dy + n * 4, out + n * out_row
        start = init + n * init_row
        if width == PANEL:
            multiply_tile(
                a, 4, dy_row, x, out_row, start, init_row, y, out_row, 1, 0, rows, _NO_FLOOR, ROWS_WIDE, VECS_WIDE
            )
        elif width == 2 * LANES:
            multiply_tile(a, 4, dy_row, x, out_row, start, init_row, y, out_row, 1, 0, rows, _NO_FLOOR, ROWS_WIDE, 2)
        else:
            multiply_tile(a, 4, dy_row, x, out_row, start, init_row, y, out_row, 1, 0, rows, _NO_FLOOR, ROWS_WIDE, 1)


@compiled()
def _task(worker: int, task: int, layer: Array, operands: int, rows: int, part_rows: int, parts: int) -> None:
    """A tile of dw over a part of the rows."""
    N, K = layer[_N], layer[_K]
    bands = (N + _TILE - 1) // _TILE
    part, n, k = task % parts, task // parts % bands * _TILE, task // parts // bands * PANEL
    rows_of_dw, columns = min(_TILE, N - n), min(PANEL, K - k)
    height = (rows_of_dw + ROWS_WIDE - 1) // ROWS_WIDE * ROWS_WIDE
    width = PANEL if columns > 2 * LANES else padded_width(columns)
    x, dy = int_at(operands + layer[_X] * 8) + k * 4, int_at(operands + layer[_DY] * 8) + n * 4
    tile = layer[_SCRATCH] + worker * _SCRATCH_FLOATS * 4
    dy_tile, out = tile + _DY_AT * 4, tile + _OUT_AT * 4
    begin, end = part * part_rows, min(rows, (part + 1) * part_rows)
    for r in range(begin, end, SUM_ROWS):
        some = min(SUM_ROWS, end - r)
        _copy_tile(x + r * K * 4, K * 4, some, columns, tile, width)
        _copy_tile(dy + r * N * 4, N * 4, some, rows_of_dw, dy_tile, height)
        _multiply(dy_tile, tile, some, height, width, layer[_ZEROS] if r == begin else out, out)
    dw = int_at(operands + layer[_Y] * 8) if parts == 1 else layer[_SUMS] + part * N * K * 4
    for i in range(rows_of_dw):
        source, target = floats_at(out + i * width * 4, columns), floats_at(dw + ((n + i) * K + k) * 4, columns)
        if begin < end:
            for j in range(columns):
                target[j] = source[j]
        else:
            for j in range(columns):
                target[j] = _ZERO


def tile_count(N: int, K: int) -> int:
    return (N + _TILE - 1) // _TILE * ((K + PANEL - 1) // PANEL)


def most_parts(tiles: int) -> int:
    """Parts into which many rows are divided."""
    return (_PARTS + tiles - 1) // tiles if tiles < _PARTS else 1


_tile_count, _most_parts = compiled(inline=True)(tile_count), compiled(inline=True)(most_parts)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    N, K, rows = layer[_N], layer[_K], B * layer[_VECTORS]
    tiles = _tile_count(N, K)
    parts = max(1, min(_most_parts(tiles), rows // _PART_ROWS))
    part_rows = ((rows + parts - 1) // parts + SUM_ROWS - 1) // SUM_ROWS * SUM_ROWS
    threads = max(1, min(threads, 2 * rows * N * K // _THREAD_FLOP))
    run_tasks(_task, (layer, operands, rows, part_rows, parts), tiles * parts, threads)
    if parts > 1:
        dw, first = floats_at(int_at(operands + layer[_Y] * 8), N * K), floats_at(layer[_SUMS], N * K)
        for i in range(N * K):
            dw[i] = first[i]
        for part in range(1, parts):
            more = floats_at(layer[_SUMS] + part * N * K * 4, N * K)
            for i in range(N * K):
                dw[i] += more[i]


@dataclass(frozen=True)
class Facts:
    N: int
    K: int
    vectors: int  # rows of dy and x per batch row
    operands: tuple[int, int, int]  # indices of x, dy and dw


class WeightGradKernel(CpuKernel):
    name = "weight_grad"
    layers = (WeightGrad,)
    order = f"{ORDER}, in sums of {SUM_ROWS}; parts of the rows by the sizes"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, WeightGrad) and isinstance(layer.of, Linear) and layer.role == "weight"

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> Facts | str:
        x, dy = types[node.inputs[0]], types[node.inputs[-1]]
        values = list(dict.fromkeys(node.inputs))
        if dy.dtype != "float32":
            return "computes on float32"
        operands = 0, values.index(node.inputs[-1]), len(values)
        return Facts(int(dy.shape[-1]), int(x.shape[-1]), x.row_size // int(x.shape[-1]), operands)

    def label(self, net: Network, node: Node) -> str:
        x, dy = net.types[node.inputs[0]], net.types[node.inputs[-1]]
        return f"{self.name}<{x.shape[-1]},{dy.shape[-1]}>"

    def cost(self, net: Network, node: Node) -> CoreCost:
        x, dy, dw = (net.types[value] for value in (node.inputs[0], node.inputs[-1], node.name))
        N, K = int(dy.shape[-1]), int(x.shape[-1])
        bands, columns = -(-N // _TILE), -(-K // PANEL)
        share = CPU.tile_share * N * K / (-(-N // ROWS_WIDE) * ROWS_WIDE * padded(K))
        return CoreCost(
            2 * N * x.row_size, x.row_bytes + dy.row_bytes, dw.row_bytes, share=share,
            row_cache_bytes=2 * (bands * x.row_bytes + columns * dy.row_bytes), fixed_cache_bytes=2 * dw.row_bytes,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        parts, zeros = most_parts(tile_count(meta.N, meta.K)), aligned_zeros(PANEL)

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty(parts * meta.N * meta.K if parts > 1 else 0, np.float32)
            scratch = aligned_zeros(threads * _SCRATCH_FLOATS)
            layer = words(meta.N, meta.K, meta.vectors, *meta.operands, sums, scratch, zeros)
            return address(layer), (layer, sums, scratch, zeros)

        return CompiledLaunch(address_of(_run), facts)
