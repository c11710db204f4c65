"""matmul: batched gemm, or attention, softmax(scale a b + mask) c, fused with the slices and permutes around it.

Idea      A worker computes _ROWS rows of one matrix. It packs b into panels and multiplies with the register tile. For
          attention it applies the softmax while the scores are in L1, packs c, and writes the second gemm to its final
          layout. Operands are read through strides, so heads are neither sliced nor transposed in memory.
Floor     2 M N (K + D) flop per matrix. 4 heads of 32 x 16, 256 rows: 67 Mflop, 1 ms at 67 Gflop/s.
Order     Sums run over k in order, in the chunks of dense.py; the softmax reduces in order, in float64.
Limits    float32 only; the plain kernel runs other dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.gemm.strided import Run, View, find_run
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.activation import SOFTMAX, normalise
from onchip.kernels.cpu.microkernels.dense import dense, next_panel, padded_width
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_ROWS = 64  # matrix rows per task
_THREAD_FLOP = 100_000  # the least work per thread that is worth waking it
_MAX_BATCH_AXES = 6
_NO_FLOOR, _ONE, _ZERO = np.float32(-np.inf), np.float32(1), np.float32(0)

# Layout of the table that `_run` reads: sizes; softmax and mask flags; address of the scale, or 0; scratch and its
# floats per worker; zeros. Then for each of a, b, c, mask and y: operand index, or -1 and the address of a weight;
# strides of the batch, of matrix rows and of columns; offset. Then for each batch axis: its size and five strides.
_M, _K, _N, _D, _IS_ATTENTION, _HAS_MASK, _SCALE, _SCRATCH, _FLOATS, _ZEROS, _FLOP, _BATCH_AXES, _MATRICES = range(13)
_A, _B, _C, _MASK, _Y, _AXES = 13, 19, 25, 31, 37, 43
_FIELDS = _AXES + 6 * _MAX_BATCH_AXES
_OPERAND, _ADDRESS, _BATCH, _ROW, _COLUMN, _OFFSET = range(6)


@linked(*(types.int64,) * 6)
def pack_panels(source: int, row: int, column: int, K: int, N: int, dst: int) -> None:
    """Pack b (K, N), strides in elements, into the panels that dense reads (tile.pack)."""
    n = 0
    while n < N:
        width = next_panel(padded_width(N) - n)
        count = min(width, N - n)
        for k in range(K):
            src_row, dst_row = (
                floats_at(source + (k * row + n * column) * 4, ALL),
                floats_at(dst + (n * K + k * width) * 4, width),
            )
            if column == 1:
                for i in range(count):
                    dst_row[i] = src_row[i]
            else:
                for i in range(count):
                    dst_row[i] = src_row[i * column]
            for i in range(count, width):
                dst_row[i] = _ZERO
        n += width


@compiled(inline=True)
def _base(table: Array, which: int, operands: int, row: int) -> int:
    """Address of an operand's first matrix for one batch row."""
    base = int_at(operands + table[which + _OPERAND] * 8) if table[which + _OPERAND] >= 0 else table[which + _ADDRESS]
    return base + (row * table[which + _BATCH] + table[which + _OFFSET]) * 4  # type: ignore[no-any-return]


@compiled()
def _gemm(table: Array, source: int, source_row: int, rows: int, K: int, N: int, w: int, dst: int) -> None:
    dense(source, source_row, rows, w, K, padded_width(N), table[_ZEROS], dst, padded_width(N) * 4, _NO_FLOOR)


@compiled()
def _scores(table: Array, at: int, mask: int, rows: int) -> None:
    """Scale the scores and add the mask, in place."""
    N, stride = table[_N], padded_width(table[_N])
    for r in range(rows):
        row = floats_at(at + r * stride * 4, N)
        if table[_SCALE]:
            factor = floats_at(table[_SCALE], 1)[0]
            for n in range(N):
                row[n] = row[n] * factor
        if table[_HAS_MASK]:
            added, column = floats_at(mask + r * table[_MASK + _ROW] * 4, ALL), table[_MASK + _COLUMN]
            for n in range(N):
                row[n] = row[n] + added[n * column]


@compiled()
def _matrix(worker: int, task: int, table: Array, operands: int) -> None:
    """One task: up to _ROWS rows of one matrix."""
    M, K, N, D = table[_M], table[_K], table[_N], table[_D]
    row_blocks = (M + _ROWS - 1) // _ROWS
    matrix, first = task // row_blocks, task % row_blocks * _ROWS
    rows, row = min(_ROWS, M - first), matrix // table[_MATRICES]
    a, b, y = _base(table, _A, operands, row), _base(table, _B, operands, row), _base(table, _Y, operands, row)
    c = _base(table, _C, operands, row) if table[_IS_ATTENTION] else 0
    mask = _base(table, _MASK, operands, row) if table[_HAS_MASK] else 0
    matrix %= table[_MATRICES]
    for axis in range(table[_BATCH_AXES] - 1, -1, -1):
        steps = table[_AXES + 6 * axis : _AXES + 6 * axis + 6]
        i = matrix % steps[0] * 4
        matrix //= steps[0]
        a, b, c, mask, y = a + i * steps[1], b + i * steps[2], c + i * steps[3], mask + i * steps[4], y + i * steps[5]
    panels = table[_SCRATCH] + worker * table[_FLOATS] * 4
    scores = panels + max(K * padded_width(N), N * padded_width(D)) * 4
    result = scores + _ROWS * padded_width(N) * 4
    lines = result + _ROWS * padded_width(D) * 4  # rows of a, copied where they are not contiguous
    a, a_row = a + first * table[_A + _ROW] * 4, table[_A + _ROW] * 4
    if table[_A + _COLUMN] != 1:
        for r in range(rows):
            src, line = floats_at(a + r * a_row, ALL), floats_at(lines + r * K * 4, K)
            for k in range(K):
                line[k] = src[k * table[_A + _COLUMN]]
        a, a_row = lines, K * 4
    pack_panels(b, table[_B + _ROW], table[_B + _COLUMN], K, N, panels)
    _gemm(table, a, a_row, rows, K, N, panels, scores)
    _scores(table, scores, mask + first * table[_MASK + _ROW] * 4, rows)
    width = N
    if table[_IS_ATTENTION]:
        normalise(scores, rows, N, padded_width(N), SOFTMAX)
        pack_panels(c, table[_C + _ROW], table[_C + _COLUMN], N, D, panels)
        _gemm(table, scores, padded_width(N) * 4, rows, N, D, panels, result)
        scores, width = result, D
    for r in range(rows):
        src = floats_at(scores + r * padded_width(width) * 4, width)
        dst, column = floats_at(y + (first + r) * table[_Y + _ROW] * 4, ALL), table[_Y + _COLUMN]
        if column == 1:
            for n in range(width):
                dst[n] = src[n]
        else:
            for n in range(width):
                dst[n * column] = src[n]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    table = ints_at(facts, _FIELDS)
    tasks = B * table[_MATRICES] * ((table[_M] + _ROWS - 1) // _ROWS)
    run_tasks(_matrix, (table, operands), tasks, max(1, min(threads, B * table[_FLOP] // _THREAD_FLOP)))


@dataclass(frozen=True)
class Facts:
    run: Run
    inputs: tuple[str, ...]  # in operand order
    flop: int
    weights: tuple[str, ...]  # names in the network; recipes call them w0, w1, ...


class MatMulKernel(CpuKernel):
    name = "matmul"

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        run = find_run(net, start)
        if run is None:
            return
        views = [view for view in (run.a, run.b, run.c, run.mask) if view is not None]
        weights = tuple(dict.fromkeys([*(view.source for view in views if view.is_weight), *dict(run.scale)]))
        used = [net.types[view.source] for view in views if not view.is_weight]
        if any(t.dtype != "float32" for t in (*used, *map(net.weight_type, weights))):
            yield Refusal(self.name, run.nodes[0].name, "computes on float32")
            return
        if len(run.batch_shape) > _MAX_BATCH_AXES:
            yield Refusal(self.name, run.nodes[0].name, f"more than {_MAX_BATCH_AXES} batch axes")
            return
        inside = {node.name for node in run.nodes}
        inputs = tuple(dict.fromkeys(v for node in run.nodes for v in node.inputs if v not in inside))
        recipes = {
            f"w{i}": Recipe.of(as_is, (name,), tuple(int(d) for d in net.weights[name].shape))
            for i, name in enumerate(weights)
        }
        M, K, N, D = run.sizes
        flop, matrices = sum(map(net.row_flop, run.nodes)), math.prod(run.batch_shape)
        moved = sum(net.types[value].row_bytes for value in (*inputs, run.nodes[-1].name))
        row_blocks = -(-M // _ROWS)
        lines = row_blocks * (K + (N if D else 0)) + M  # packed into panels, and written
        softmax_us = CPU.softmax_us * M * N if D else 0
        cost = CoreCost(
            flop, moved, sum(recipe.nbytes for recipe in recipes.values()),
            share=CPU.tile_share * N * (K + D) / (K * padded(N) + N * padded(D)), tile_rows=1,
            tile_us=matrices * (CPU.matrix_us * row_blocks + CPU.line_us * lines + softmax_us),
        )  # fmt: skip
        label = f"attention<{matrices},{M},{K},{N},{D}>" if run.c else f"matmul<{M},{K},{N}>"
        why = "scores stay in cache, heads are read through strides" if run.c else "gemm of two values"
        yield Claim(
            self.name, label, tuple(node.name for node in run.nodes), cost, why, recipes,
            fast_bytes=4 * _worker_floats(run.sizes), order=f"{tile.ORDER}; softmax in order" if run.c else tile.ORDER,
            facts=Facts(run, inputs, flop, weights),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        run, batch = meta.run, meta.run.batch_shape
        arrays = {name: np.ascontiguousarray(weights[f"w{i}"]) for i, name in enumerate(meta.weights)}
        scale = np.ones(1, np.float32)
        for name, kind in run.scale:
            scale = scale * arrays[name].reshape(1) if kind == "Mul" else scale / arrays[name].reshape(1)
        M, K, N, D = run.sizes
        operands = run.a, run.b, run.c, run.mask, run.y
        view_fields = [field for view in operands for field in _operand_fields(view, meta.inputs, arrays)]
        strides = [view.batch_strides(batch) if view is not None else (0,) * len(batch) for view in operands]
        axes = [field for column in zip(batch, *strides, strict=True) for field in column]
        zeros = aligned_zeros(max(padded(N), padded(D)))

        def facts(threads: int) -> tuple[int, object]:
            floats = _worker_floats(run.sizes)
            scratch = aligned_zeros(threads * floats)
            has = int(run.c is not None), int(run.mask is not None), scale if run.scale else 0
            fields = words(
                M, K, N, D, *has, scratch, floats, zeros, meta.flop, len(batch), math.prod(batch), *view_fields, *axes,
                *[0] * 6 * (_MAX_BATCH_AXES - len(batch)),
            )  # fmt: skip
            return address(fields), (fields, scratch, zeros, scale, arrays)

        return CompiledLaunch(address_of(_run), facts)


def _operand_fields(view: View | None, inputs: tuple[str, ...], weights: dict[str, Array]) -> tuple[int | Array, ...]:
    """One operand's part of the table that `_run` reads."""
    if view is None:
        return (0,) * 6
    # Size 1 broadcasts: a mask may have one row, or one column.
    row, column = (step if size > 1 else 0 for size, step in zip(view.sizes[-2:], view.strides[-2:], strict=True))
    if view.is_weight:
        return -1, weights[view.source], 0, row, column, view.offset
    operand = inputs.index(view.source) if view.source in inputs else len(inputs)
    return operand, 0, view.row, row, column, view.offset


def _worker_floats(sizes: tuple[int, int, int, int]) -> int:
    """Scratch floats per worker: panels of b or c, scores, the result, rows of a; whole cache lines."""
    _, K, N, D = sizes
    floats = max(K * padded(N), N * padded(D)) + _ROWS * (padded(N) + padded(D) + K)
    return -(-floats // 16) * 16
