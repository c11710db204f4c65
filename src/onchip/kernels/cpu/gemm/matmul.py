"""matmul: batched gemm of two values, and attention: softmax(scale a b + mask) c, with the moves around them fused.

Idea      A worker computes _ROWS rows of one matrix. It packs b into panels and multiplies with the register tile. For
          attention it applies the softmax while the scores are in L1, packs c, and writes the second gemm to its final
          layout. Operands are read through strides, so heads are neither sliced nor transposed in memory.
Floor     2 M N (K + D) flop per matrix. 4 heads of 32 x 16, 256 rows: 67 Mflop, 1 ms at 67 Gflop/s.
Order     Sums run over k in order, in chunks of dense's size; the softmax reduces in order, in float64.
Limits    float32 only; the plain kernel runs other dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import TILE_SHARE, CoreCost
from onchip.kernels.cpu.gemm.strided import Run, Seen, find_run
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

_ROWS = 64  # matrix rows per work item
_THREAD_FLOP = 100_000  # per thread: below this a thread is not woken
_MAX_FRONT = 6
# Time on one core besides the gemms: per row block of a matrix, per copied line, per softmax element. Measured at
# 2.5 GHz with 512-bit vectors.
_MATRIX_US, _LINE_US, _WEIGHT_US = 0.2, 0.015, 0.003
_NO_FLOOR, _ONE, _ZERO = np.float32(-np.inf), np.float32(1), np.float32(0)

# Layout of the table that `_run` reads: sizes; softmax and mask flags; address of the scale, or 0; scratch and its
# floats per worker; zeros. Then for each of a, b, c, mask and y: operand index or, for a weight, -1; its address then;
# strides of the batch, of matrix rows and of columns; offset. Then for each batch axis: its size and these five
# strides.
_M, _K, _N, _D, _IS_ATTENTION, _HAS_MASK, _SCALE, _SCRATCH, _OWN, _ZEROS, _FLOP, _FRONT, _MATRICES = range(13)
_A, _B, _C, _MASK, _Y, _AXES = 13, 19, 25, 31, 37, 43
_WORDS = _AXES + 6 * _MAX_FRONT
_FROM, _WHERE, _BATCH, _ROW, _ALONG, _AT = range(6)


@linked(*(types.int64,) * 6)
def pack_panels(source: int, row: int, along: int, K: int, N: int, to: int) -> None:
    """Pack b (K, N), strides in elements, into the panels that dense reads (tile.pack)."""
    n = 0
    while n < N:
        width = next_panel(padded_width(N) - n)
        some = min(width, N - n)
        for k in range(K):
            given, made = (
                floats_at(source + (k * row + n * along) * 4, ALL),
                floats_at(to + (n * K + k * width) * 4, width),
            )
            if along == 1:
                for i in range(some):
                    made[i] = given[i]
            else:
                for i in range(some):
                    made[i] = given[i * along]
            for i in range(some, width):
                made[i] = _ZERO
        n += width


@compiled(inline=True)
def _place(run: Array, which: int, operands: int, row: int) -> int:
    """Address of an operand's first matrix for one batch row."""
    base = int_at(operands + run[which + _FROM] * 8) if run[which + _FROM] >= 0 else run[which + _WHERE]
    return base + (row * run[which + _BATCH] + run[which + _AT]) * 4  # type: ignore[no-any-return]


@compiled()
def _product(run: Array, source: int, source_row: int, rows: int, K: int, N: int, w: int, to: int) -> None:
    dense(source, source_row, rows, w, K, padded_width(N), run[_ZEROS], to, padded_width(N) * 4, _NO_FLOOR)


@compiled()
def _scores(run: Array, at: int, mask: int, rows: int) -> None:
    """Scale the scores and add the mask, in place."""
    N, stride = run[_N], padded_width(run[_N])
    for r in range(rows):
        row = floats_at(at + r * stride * 4, N)
        if run[_SCALE]:
            factor = floats_at(run[_SCALE], 1)[0]
            for n in range(N):
                row[n] = row[n] * factor
        if run[_HAS_MASK]:
            added, along = floats_at(mask + r * run[_MASK + _ROW] * 4, ALL), run[_MASK + _ALONG]
            for n in range(N):
                row[n] = row[n] + added[n * along]


@compiled()
def _matrix(worker: int, piece: int, run: Array, operands: int) -> None:
    """One work item: up to _ROWS rows of one matrix."""
    M, K, N, D = run[_M], run[_K], run[_N], run[_D]
    parts = (M + _ROWS - 1) // _ROWS
    number, first = piece // parts, piece % parts * _ROWS
    rows, row = min(_ROWS, M - first), number // run[_MATRICES]
    a, b, y = _place(run, _A, operands, row), _place(run, _B, operands, row), _place(run, _Y, operands, row)
    c = _place(run, _C, operands, row) if run[_IS_ATTENTION] else 0
    mask = _place(run, _MASK, operands, row) if run[_HAS_MASK] else 0
    number %= run[_MATRICES]
    for axis in range(run[_FRONT] - 1, -1, -1):
        steps = run[_AXES + 6 * axis : _AXES + 6 * axis + 6]
        i = number % steps[0] * 4
        number //= steps[0]
        a, b, c, mask, y = a + i * steps[1], b + i * steps[2], c + i * steps[3], mask + i * steps[4], y + i * steps[5]
    panels = run[_SCRATCH] + worker * run[_OWN] * 4
    scores = panels + max(K * padded_width(N), N * padded_width(D)) * 4
    made = scores + _ROWS * padded_width(N) * 4
    lines = made + _ROWS * padded_width(D) * 4  # rows of a, copied where they are not contiguous
    a, a_row = a + first * run[_A + _ROW] * 4, run[_A + _ROW] * 4
    if run[_A + _ALONG] != 1:
        for r in range(rows):
            given, line = floats_at(a + r * a_row, ALL), floats_at(lines + r * K * 4, K)
            for k in range(K):
                line[k] = given[k * run[_A + _ALONG]]
        a, a_row = lines, K * 4
    pack_panels(b, run[_B + _ROW], run[_B + _ALONG], K, N, panels)
    _product(run, a, a_row, rows, K, N, panels, scores)
    _scores(run, scores, mask + first * run[_MASK + _ROW] * 4, rows)
    width = N
    if run[_IS_ATTENTION]:
        normalise(scores, rows, N, padded_width(N), SOFTMAX)
        pack_panels(c, run[_C + _ROW], run[_C + _ALONG], N, D, panels)
        _product(run, scores, padded_width(N) * 4, rows, N, D, panels, made)
        scores, width = made, D
    for r in range(rows):
        source = floats_at(scores + r * padded_width(width) * 4, width)
        target, along = floats_at(y + (first + r) * run[_Y + _ROW] * 4, ALL), run[_Y + _ALONG]
        if along == 1:
            for n in range(width):
                target[n] = source[n]
        else:
            for n in range(width):
                target[n * along] = source[n]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    run = ints_at(facts, _WORDS)
    pieces = B * run[_MATRICES] * ((run[_M] + _ROWS - 1) // _ROWS)
    run_tasks(_matrix, (run, operands), pieces, max(1, min(threads, B * run[_FLOP] // _THREAD_FLOP)))


@dataclass(frozen=True)
class Facts:
    run: Run
    inputs: tuple[str, ...]  # in operand order
    flop: int
    weights: tuple[str, ...]  # names in the network; recipes call them w0, w1, ...


class MatMulKernel:
    name = "matmul"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        run = None if job.is_training else find_run(net, start)
        if run is None:
            return
        seen = [each for each in (run.a, run.b, run.c, run.mask) if each is not None]
        weights = tuple(dict.fromkeys([*(each.source for each in seen if each.is_weight), *dict(run.scale)]))
        used = [net.types[each.source] for each in seen if not each.is_weight]
        if any(given.dtype != "float32" for given in (*used, *map(net.weight_type, weights))):
            yield Refusal(self.name, run.nodes[0].name, "computes on float32")
            return
        if len(run.front) > _MAX_FRONT:
            yield Refusal(self.name, run.nodes[0].name, f"walks over {_MAX_FRONT} axes in front of its matrices")
            return
        inside = {node.name for node in run.nodes}
        inputs = tuple(dict.fromkeys(v for node in run.nodes for v in node.inputs if v not in inside))
        recipes = {
            f"w{i}": Recipe.of(as_is, (name,), tuple(int(d) for d in net.weights[name].shape))
            for i, name in enumerate(weights)
        }
        M, K, N, D = run.sizes
        flop, matrices = sum(map(net.row_flop, run.nodes)), math.prod(run.front)
        moved = sum(net.types[value].row_bytes for value in (*inputs, run.nodes[-1].name))
        parts = -(-M // _ROWS)
        lines = parts * (K + (N if D else 0)) + M  # packed into panels, and written
        cost = CoreCost(
            flop, moved, sum(recipe.nbytes for recipe in recipes.values()),
            share=TILE_SHARE * N * (K + D) / (K * padded(N) + N * padded(D)), tile_rows=1,
            tile_us=matrices * (_MATRIX_US * parts + _LINE_US * lines + (_WEIGHT_US * M * N if D else 0)),
        )  # fmt: skip
        label = f"attention<{matrices},{M},{K},{N},{D}>" if run.c else f"matmul<{M},{K},{N}>"
        why = "scores stay in cache, heads are read where they lie" if run.c else "a product of two values"
        yield Claim(
            self.name, label, tuple(node.name for node in run.nodes), cost, why, recipes,
            fast_bytes=4 * _own(run.sizes), order=f"{tile.ORDER}; softmax in order" if run.c else tile.ORDER,
            facts=Facts(run, inputs, flop, weights),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        told = claim.facts
        assert isinstance(told, Facts)
        run, front = told.run, told.run.front
        kept = {name: np.ascontiguousarray(weights[f"w{i}"]) for i, name in enumerate(told.weights)}
        scale = np.ones(1, np.float32)
        for name, kind in run.scale:
            scale = scale * kept[name].reshape(1) if kind == "Mul" else scale / kept[name].reshape(1)
        M, K, N, D = run.sizes
        operands = run.a, run.b, run.c, run.mask, run.y
        placed = [number for seen in operands for number in _placed(seen, told.inputs, kept)]
        stacks = [seen.stack(front) if seen is not None else (0,) * len(front) for seen in operands]
        axes = [number for column in zip(front, *stacks, strict=True) for number in column]
        zeros = aligned_zeros(max(padded(N), padded(D)))

        def facts(threads: int) -> tuple[int, object]:
            own = _own(run.sizes)
            scratch = aligned_zeros(threads * own)
            has = int(run.c is not None), int(run.mask is not None), scale if run.scale else 0
            numbers = words(
                M, K, N, D, *has, scratch, own, zeros, told.flop, len(front), math.prod(front), *placed, *axes,
                *[0] * 6 * (_MAX_FRONT - len(front)),
            )  # fmt: skip
            return address(numbers), (numbers, scratch, zeros, scale, kept)

        return CompiledLaunch(address_of(_run), facts)


def _placed(seen: Seen | None, inputs: tuple[str, ...], weights: dict[str, Array]) -> tuple[int | Array, ...]:
    """One operand's part of the table that `_run` reads."""
    if seen is None:
        return (0,) * 6
    # Size 1 broadcasts: a mask may have one row, or one column.
    row, along = (step if size > 1 else 0 for size, step in zip(seen.sizes[-2:], seen.steps[-2:], strict=True))
    if seen.is_weight:
        return -1, weights[seen.source], 0, row, along, seen.at
    number = inputs.index(seen.source) if seen.source in inputs else len(inputs)
    return number, 0, seen.row, row, along, seen.at


def _own(sizes: tuple[int, int, int, int]) -> int:
    """Scratch floats per worker: panels of b or c, scores, the result, rows of a; whole cache lines."""
    _, K, N, D = sizes
    whole = max(K * padded(N), N * padded(D)) + _ROWS * (padded(N) + padded(D) + K)
    return -(-whole // 16) * 16
