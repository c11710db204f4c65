"""taps: each element of y is a weighted sum of a few of x along one axis: cubic and smoothed Resize.

Idea      The file readers emit them as Gather, Reshape, Mask, Mul and GlobalSum; run one by one, every tap of every
          output goes through memory three times. Here a line of y is summed tap by tap in a thread's cache. Masked taps
          are not read, so NaN there has no effect. Along the last axis, LANES lines at a time are transposed.
Order     Tap by tap, first to last, in float32.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Gather, GlobalSum, Layer, Mask, Mul, Reshape
from onchip.network.recipe import Array, Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_TASK_ELEMENTS = 1 << 12  # minimum of y per task
_TILE_LINES = LANES  # lines transposed into one if the axis is the last: a vector holds an element of each
_KINDS: tuple[type[Layer], ...] = (Gather, Reshape, Mask, Mul, GlobalSum)

# Fields of a group: addresses of the first tap of each output, of the taps' positions and weights, and of scratch; then
# sizes. A position indexes the reduced axis of x.
_FIRST, _POSITIONS, _FACTORS, _SCRATCH, _OUTPUTS, _INNER, _X_SIZE, _ROW_LINES, _WORDS = range(9)


@intrinsic
def _vector_sum(
    typing_context: Any, x: Any, pitch: Any, positions: Any, factors: Any, begin: Any, end: Any, out: Any
) -> Any:
    """LANES adjacent elements of an output, taps `begin` to `end` - 1, accumulated in a register.

    x, positions, factors, out  addresses
    pitch                       bytes from one position of x to the next
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, pitch, positions, factors, begin, end, out = args

        def add_tap(tap: Any, sums: list[Any]) -> list[Any]:
            position = emit.load(b, b.add(positions, b.mul(tap, emit.INT(8))), emit.INT)
            factor = emit.load(b, b.add(factors, b.mul(tap, emit.INT(4))), emit.FLOAT)
            values = emit.load(b, b.add(x, b.mul(position, pitch)), emit.VECTOR)
            return [emit.multiply_add(b, values, emit.splat(b, factor), sums[0])]

        (total,) = emit.loop(b, begin, end, 1, [emit.zeros()], add_tap)
        emit.store(b, total, out)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), codegen


@compiled()
def _sum_taps(x: int, y: int, inner: int, group: Array) -> None:
    """A line of y, (outputs, inner), from one of x, (x_size, inner)."""
    first = ints_at(group[_FIRST], group[_OUTPUTS] + 1)
    count = first[group[_OUTPUTS]]
    positions, factors = ints_at(group[_POSITIONS], count), floats_at(group[_FACTORS], count)
    for i in range(group[_OUTPUTS]):
        begin, end, out = first[i], first[i + 1], y + i * inner * 4
        if inner < LANES:
            target, values = floats_at(out, inner), floats_at(x, group[_X_SIZE] * inner)
            for n in range(inner):
                total = np.float32(0)
                for tap in range(begin, end):
                    total += factors[tap] * values[positions[tap] * inner + n]
                target[n] = total
        for vector in range(0, inner if inner >= LANES else 0, LANES):
            n = min(vector, inner - LANES)  # the last one overlaps
            _vector_sum(x + n * 4, inner * 4, group[_POSITIONS], group[_FACTORS], begin, end, out + n * 4)


@compiled(inline=True)
def _transpose(to: int, source: int, rows: int, columns: int, pitch_to: int, pitch: int) -> None:
    """(rows, columns) to (columns, rows)."""
    out, x = floats_at(to, columns * pitch_to), floats_at(source, rows * pitch)
    for row in range(rows):
        for column in range(columns):
            out[column * pitch_to + row] = x[row * pitch + column]


@compiled()
def _lines(worker: int, task: int, x: int, y: int, lines: int, per_task: int, group: Array) -> None:
    inner, outputs, x_size = group[_INNER], group[_OUTPUTS], group[_X_SIZE]
    begin, end = task * per_task, min(lines, (task + 1) * per_task)
    if inner > 1:
        for line in range(begin, end):
            _sum_taps(x + line * x_size * inner * 4, y + line * outputs * inner * 4, inner, group)
        return
    scratch = group[_SCRATCH] + worker * (x_size + outputs) * _TILE_LINES * 4
    sums = scratch + x_size * _TILE_LINES * 4
    for line in range(begin, end, _TILE_LINES):
        count = min(_TILE_LINES, end - line)
        _transpose(scratch, x + line * x_size * 4, count, x_size, _TILE_LINES, x_size)
        _sum_taps(scratch, sums, _TILE_LINES, group)
        _transpose(y + line * outputs * 4, sums, outputs, count, outputs, _TILE_LINES)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    group, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, width = B * group[_ROW_LINES], group[_OUTPUTS] * group[_INNER]
    per_task = max(1, _TASK_ELEMENTS // max(1, width))
    if group[_INNER] == 1:
        per_task = (per_task + _TILE_LINES - 1) // _TILE_LINES * _TILE_LINES
    threads = max(1, min(threads, lines * width // _TASK_ELEMENTS))
    run_tasks(_lines, (x, y, lines, per_task, group), (lines + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    positions: tuple[int, ...]  # (taps * outputs,), of the Gather
    outputs: int
    inner: int  # elements after the axis
    x_size: int  # of x along the axis
    row_lines: int


def _group(net: Network, start: int) -> list[Node]:
    """The nodes of a group that begins here, with or without a Mask; [] if none begins."""
    found: list[Node] = []
    for kind in _KINDS:
        node = net.nodes[start + len(found)] if start + len(found) < len(net.nodes) else None
        fits = node is not None and isinstance(node.layer, kind) and len(node.inputs) == 1
        if fits and found:
            assert node is not None
            before = found[-1].name
            fits = node.inputs == (before,) and net.readers(before) == [node] and before not in net.kept
        if fits:
            assert node is not None
            found.append(node)
        elif kind is not Mask:
            return []
    return found


class TapsKernel(CpuKernel):
    name = "taps"
    layers = (Gather,)
    dtypes = DTYPE_BYTES  # silent about groups of other dtypes

    def applies(self, net: Network, start: int) -> bool:
        return bool(_group(net, start))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        nodes = _group(net, start)
        if any(net.changes(name) for node in nodes for name in node.weights.values()):
            yield Refusal(self.name, nodes[0].name, "its weights change, and it reads them once")
            return
        x, y = net.types[nodes[0].inputs[0]], net.types[nodes[-1].name]
        gather, split, total = nodes[0].layer, nodes[1].layer, nodes[-1].layer
        assert isinstance(gather, Gather)
        assert isinstance(split, Reshape)
        assert isinstance(total, GlobalSum)
        axis, row = gather.axis - 1, x.row_shape
        outputs = y.row_shape[axis] if axis < len(y.row_shape) else 0
        taps = len(gather.indices) // max(1, outputs)
        factors = (taps, outputs, *(1,) * (len(row) - axis - 1))
        constants = [net.weights[name].shape for node in nodes for name in node.weights.values()]
        is_split = net.types[nodes[1].name].row_shape == (*row[:axis], taps, outputs, *row[axis + 1 :])
        if not (
            x.dtype == "float32" and is_split and total.axes == (gather.axis,) and all(c == factors for c in constants)
        ):
            return
        recipes = {
            type(node.layer).__name__: Recipe.of(as_is, (name,), factors)
            for node in nodes
            for name in node.weights.values()
        }
        inner, lines = math.prod(row[axis + 1 :]), math.prod(row[:axis])
        # A tap of a vector costs a third of a copy; less than a vector is summed in scalars.
        summed = taps * y.row_bytes // 3 if inner == 1 or inner >= LANES else 4 * taps * y.row_bytes
        transposed = 2 * (x.row_bytes + y.row_bytes) if inner == 1 else 0
        cost = CoreCost(sum(map(net.row_flop, nodes)), x.row_bytes + y.row_bytes, row_cache_bytes=summed + transposed)
        yield Claim(
            self.name, f"{self.name}<{taps}>", tuple(node.name for node in nodes), cost,
            f"{taps} taps along an axis in one pass", recipes=recipes, order="tap by tap",
            facts=Facts(gather.indices, outputs, inner, row[axis], lines),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        # (outputs, taps): the unmasked taps of an output are contiguous.
        factors = weights["Mul"].reshape(-1, facts.outputs).T
        positions = np.array(facts.positions, np.int64).reshape(-1, facts.outputs).T
        is_read = (
            weights["Mask"].reshape(-1, facts.outputs).T != 0 if "Mask" in weights else np.ones(factors.shape, bool)
        )
        first = np.concatenate([[0], np.cumsum(is_read.sum(axis=1))]).astype(np.int64)
        unmasked = np.ascontiguousarray(positions[is_read]), np.ascontiguousarray(factors[is_read], np.float32)

        def build_facts(threads: int) -> tuple[int, object]:
            # Zeros: lanes without a line in the last tile are summed, too.
            scratch = np.zeros(
                (threads, (facts.x_size + facts.outputs) * _TILE_LINES if facts.inner == 1 else 0), np.float32
            )
            group = words(first, *unmasked, scratch, facts.outputs, facts.inner, facts.x_size, facts.row_lines)
            return address(group), (group, scratch, first, unmasked)

        return CompiledLaunch(address_of(_run), build_facts)
