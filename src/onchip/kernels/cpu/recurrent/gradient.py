"""recurrent_grad on the CPU: back through the steps of an LSTM, GRU or RNN in one call: the gradients of all gates.

Idea      A task is a tile of sequences in one direction, over all steps from the last to the first. What the states add
          to the gates is known, so a step is elementwise but for one gemm: the gradients of the gates by the recurrent
          weights, which are those of the previous state. Gradients and weights stay in the core's caches. An LSTM first
          computes its cells, step by step, without a gemm.
Floor     2 G H^2 flop per step and direction. 64 sequences, 64 steps, LSTM, H = 128: 0.54 Gflop, 1.8 ms at 300 Gflop/s.
          It reads and writes 14 H values per step, 29 MB.
Order     K in order, in chunks of CHUNK, independent of the tiles of sequences.
Limits    float32; `plain` runs other dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import activate, code_of
from onchip.kernels.cpu.microkernels.dense import CHUNK, padded_width
from onchip.kernels.cpu.microkernels.tile import pack, packed_size, padded
from onchip.kernels.cpu.recurrent.recurrent import (
    CELL,
    GRU_AFTER,
    GRU_BEFORE,
    LSTM_CELL,
    MAX_ROWS,
    OUTPUTS,
    RNN_RELU,
    SEQUENCE,
    add_product,
    cell_after,
    copy_floats,
    kind_of,
)
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.pointwise import SIGMOID, TANH
from onchip.network.graph import Network
from onchip.network.layers import RecurrentGrad, Sigmoid, Tanh
from onchip.network.recipe import Array, Recipe, as_is, recipe_op
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_ZERO, _ONE = np.float32(0), np.float32(1)

# The array that `_run` reads. X to Y are operands, -1 for none; SUMS and BEFORE one per direction. R to SCRATCH are
# addresses. G counts the gates of the result. GATES_ROW and THREAD_BYTES are bytes; GRADIENTS and CELLS are offsets in
# a thread's scratch.
(
    _SEQUENCES, _S, _D, _H, _G, _KIND, _OUTPUT, _IS_REVERSE, _INDEX, _X, _DY, _SUMS, _, _BEFORE, _, _FIRST_C, _Y,
    _R, _LATE, _BIAS, _SCRATCH, _GATES_ROW, _THREAD_BYTES, _GRADIENTS, _CELLS, _FIELDS,
) = range(26)  # fmt: skip


@linked(*(types.int64,) * 4)
def add_floats(a: int, b: int, out: int, count: int) -> None:
    """out = a + b; out may be a."""
    x, y, z = floats_at(a, count), floats_at(b, count), floats_at(out, count)
    for n in range(count):
        z[n] = x[n] + y[n]


@linked(*(types.int64,) * 10)
def step_gates(
    kind: int, x: int, x_row: int, sums: int, sums_row: int, bias: int, gates: int, gates_row: int, rows: int, H: int
) -> None:
    """The gates of a step after their activations, from their inputs and what the states add to them.

    Of a GRU that resets after its matmul: z, r, what the states add to n, and n. A ReLU is not applied.
    """
    stride, count = gates_row // 4, 4 * H if kind == LSTM_CELL else H
    if kind == GRU_AFTER:
        count = 2 * H
    elif kind == GRU_BEFORE:
        count = 3 * H
    for row in range(rows):
        add_floats(x + row * x_row, sums + row * sums_row, gates + row * gates_row, count)
    if kind == LSTM_CELL:
        activate(gates, rows, 3 * H, stride, SIGMOID)
        activate(gates + 12 * H, rows, H, stride, TANH)
    elif kind == GRU_AFTER:
        activate(gates, rows, 2 * H, stride, SIGMOID)
        for row in range(rows):
            at, n_at = gates + row * gates_row, x + row * x_row + 8 * H
            add_floats(sums + row * sums_row + 8 * H, bias, at + 8 * H, H)
            r, of_n, new, inputs = (
                floats_at(at + 4 * H, H), floats_at(at + 8 * H, H), floats_at(at + 12 * H, H), floats_at(n_at, H),
            )  # fmt: skip
            for n in range(H):
                new[n] = inputs[n] + r[n] * of_n[n]
        activate(gates + 12 * H, rows, H, stride, TANH)
    elif kind == GRU_BEFORE:
        activate(gates, rows, 2 * H, stride, SIGMOID)
        activate(gates + 8 * H, rows, H, stride, TANH)
    elif kind != RNN_RELU:
        activate(gates, rows, H, stride, TANH)


@linked(*(types.int64,) * 4)
def add_cell(gates: int, before: int, after: int, H: int) -> None:
    """An LSTM's cell after a step, by the gates before their activations."""
    i, f, g = floats_at(gates, H), floats_at(gates + 8 * H, H), floats_at(gates + 12 * H, H)
    c, out = floats_at(before, H), floats_at(after, H)
    for n in range(H):
        out[n] = cell_after(i[n], f[n], g[n], c[n])


# Several loops with few arrays each: with more, LLVM would need too many alias checks to vectorise them.


@linked(*(types.int64,) * 6)
def lstm_back(gates: int, before: int, t: int, dh: int, dc: int, H: int) -> None:
    """Replace the gates of a sequence by their gradients, and those of the state and the cell after the step by those
    of before, without what goes through the gates.

    before  the cell before the step
    t       tanh of the cell after it
    """
    i, o, f, g = (
        floats_at(gates, H), floats_at(gates + 4 * H, H), floats_at(gates + 8 * H, H), floats_at(gates + 12 * H, H),
    )  # fmt: skip
    of_h, of_c, tanh_c, c = floats_at(dh, H), floats_at(dc, H), floats_at(t, H), floats_at(before, H)
    for n in range(H):
        of_c[n] += of_h[n] * o[n] * (_ONE - tanh_c[n] * tanh_c[n])
        o[n] = of_h[n] * tanh_c[n] * o[n] * (_ONE - o[n])
    for n in range(H):
        of_i = of_c[n] * g[n] * i[n] * (_ONE - i[n])
        g[n] = of_c[n] * i[n] * (_ONE - g[n] * g[n])
        i[n] = of_i
    for n in range(H):
        of_f = of_c[n] * c[n] * f[n] * (_ONE - f[n])
        of_c[n] = of_c[n] * f[n]
        f[n] = of_f
    for n in range(H):
        of_h[n] = _ZERO


@linked(*(types.int64,) * 5)
def gru_back(kind: int, gates: int, h: int, dh: int, H: int) -> None:
    """The same for a GRU, h the state before the step. One that resets before its matmul keeps r: its gradient needs
    a product first."""
    new_at = gates + (12 * H if kind == GRU_AFTER else 8 * H)
    z, new, state, of_h = floats_at(gates, H), floats_at(new_at, H), floats_at(h, H), floats_at(dh, H)
    for n in range(H):
        of_n = of_h[n] * (_ONE - z[n]) * (_ONE - new[n] * new[n])
        of_z = of_h[n] * (state[n] - new[n]) * z[n] * (_ONE - z[n])
        of_h[n] = of_h[n] * z[n]
        z[n] = of_z
        new[n] = of_n
    if kind == GRU_AFTER:
        r, sums = floats_at(gates + 4 * H, H), floats_at(gates + 8 * H, H)
        for n in range(H):
            of_r = new[n] * sums[n] * r[n] * (_ONE - r[n])
            sums[n] = new[n] * r[n]
            r[n] = of_r


@linked(*(types.int64,) * 5)
def reset_back(r: int, h: int, of_product: int, dh: int, H: int) -> None:
    """The gradient of the reset gate r of a GRU that resets before its matmul, in place, and that of the state."""
    reset, state, of_rh, of_h = floats_at(r, H), floats_at(h, H), floats_at(of_product, H), floats_at(dh, H)
    for n in range(H):
        of_h[n] += of_rh[n] * reset[n]
        reset[n] = of_rh[n] * state[n] * reset[n] * (_ONE - reset[n])


@linked(*(types.int64,) * 4)
def rnn_back(kind: int, gates: int, dh: int, H: int) -> None:
    """The same as lstm_back for an RNN: its tanh, or its gate before a ReLU."""
    y, of_h = floats_at(gates, H), floats_at(dh, H)
    if kind == RNN_RELU:
        for n in range(H):
            y[n] = of_h[n] if y[n] > _ZERO else _ZERO
    else:
        for n in range(H):
            y[n] = of_h[n] * (_ONE - y[n] * y[n])
    for n in range(H):
        of_h[n] = _ZERO


@compiled(inline=True)
def _operand(facts: Array, which: int, operands: int) -> int:
    return int_at(operands + facts[which] * 8) if facts[which] >= 0 else 0


@compiled(inline=True)
def _step_of(facts: Array, d: int, k: int) -> int:
    """The index of the k-th step of a direction."""
    return facts[_S] - 1 - k if facts[_IS_REVERSE] or d == 1 else k


@compiled()
def _gates(facts: Array, operands: int, d: int, begin: int, rows: int, k: int, gates: int) -> None:
    """step_gates of sequences begin to begin + rows at the k-th step of a direction."""
    S, D, H, kind = facts[_S], facts[_D], facts[_H], facts[_KIND]
    width = (facts[_G] - 1 if kind == GRU_AFTER else facts[_G]) * H * 4
    at = begin * S + _step_of(facts, d, k)
    x, sums = _operand(facts, _X, operands) + (at * D + d) * width, _operand(facts, _SUMS + d, operands) + at * width
    bias = facts[_BIAS] + d * H * 4
    step_gates(kind, x, S * D * width, sums, S * width, bias, gates, facts[_GATES_ROW], rows, H)


@compiled()
def _find_cells(facts: Array, operands: int, d: int, begin: int, rows: int, gates: int, cells: int) -> None:
    """An LSTM's cells (S + 1, rows, H) before each step, and after the last; `gates` of one row is overwritten."""
    S, D, H, first = facts[_S], facts[_D], facts[_H], _operand(facts, _FIRST_C, operands)
    x, sums = _operand(facts, _X, operands), _operand(facts, _SUMS + d, operands)
    for r in range(rows):
        n = begin + r
        copy_floats(first + (n * D + d) * H * 4 if first else 0, cells + r * H * 4, H)
        for k in range(S):
            at, before = n * S + _step_of(facts, d, k), cells + (k * rows + r) * H * 4
            add_floats(x + (at * D + d) * H * 16, sums + at * H * 16, gates, 4 * H)
            add_cell(gates, before, before + rows * H * 4, H)


@compiled()
def _product(facts: Array, d: int, rows: int, gates: int, dh: int, of_reset: int, h: int, h_row: int) -> None:
    """Add to dh what goes through the gates, whose gradients are known except for the reset of a GRU_BEFORE.

    of_reset  for that reset's product
    h         the state before the step
    """
    H, kind, gates_row, wide = facts[_H], facts[_KIND], facts[_GATES_ROW], padded_width(facts[_H])
    row, K = wide * 4, (facts[_G] - 1 if kind in (GRU_AFTER, GRU_BEFORE) else facts[_G]) * H
    if kind == GRU_BEFORE:
        copy_floats(0, of_reset, rows * wide)
        late = facts[_LATE] + d * wide * H * 4
        add_product(gates + 8 * H, gates_row, rows, late, H, wide, of_reset, row, of_reset, row)
        for r in range(rows):
            reset_back(gates + r * gates_row + 4 * H, h + r * h_row, of_reset + r * row, dh + r * row, H)
    add_product(gates, gates_row, rows, facts[_R] + d * wide * K * 4, K, wide, dh, row, dh, row)


@compiled()
def _tile(worker: int, task: int, facts: Array, operands: int, N: int, most: int) -> None:
    """Go back through all steps of a tile of sequences in one direction."""
    S, D, H, G, kind, output = facts[_S], facts[_D], facts[_H], facts[_G], facts[_KIND], facts[_OUTPUT]
    d, begin, gates_row, row = task % D, task // D * most, facts[_GATES_ROW], padded_width(H) * 4
    rows = min(most, N - begin)
    gates = facts[_SCRATCH] + worker * facts[_THREAD_BYTES]
    dh, cells = gates + facts[_GRADIENTS], gates + facts[_CELLS]
    dc, extra = dh + MAX_ROWS * row, dh + 2 * MAX_ROWS * row
    dy, y, before = _operand(facts, _DY, operands), _operand(facts, _Y, operands), 0
    if kind == LSTM_CELL:
        _find_cells(facts, operands, d, begin, rows, gates, cells)
    elif kind in (GRU_AFTER, GRU_BEFORE):
        before = _operand(facts, _BEFORE + d, operands)
    copy_floats(0, dh, rows * padded_width(H))
    copy_floats(0, dc, rows * padded_width(H))
    for r in range(rows):
        at = r * row
        if output != SEQUENCE:
            copy_floats(dy + ((begin + r) * D + d) * H * 4, (dc if output == CELL else dh) + at, H)
    for step in range(S):
        k = S - 1 - step
        first, cell = begin * S + _step_of(facts, d, k), cells + k * rows * H * 4
        after = cell + rows * H * 4
        _gates(facts, operands, d, begin, rows, k, gates)
        if kind == LSTM_CELL:
            activate(after, rows, H, H, TANH)
        for r in range(rows):
            at, of_h, state = gates + r * gates_row, dh + r * row, before + (first + r * S) * H * 4
            if output == SEQUENCE:
                add_floats(of_h, dy + ((first + r * S) * D + d) * H * 4, of_h, H)
            if kind == LSTM_CELL:
                lstm_back(at, cell + r * H * 4, after + r * H * 4, of_h, dc + r * row, H)
            elif kind in (GRU_AFTER, GRU_BEFORE):
                gru_back(kind, at, state, of_h, H)
            else:
                rnn_back(kind, at, of_h, H)
        _product(facts, d, rows, gates, dh, extra, before + first * H * 4, S * H * 4)
        if facts[_INDEX] == 0:
            for r in range(rows):
                copy_floats(gates + r * gates_row, y + ((first + r * S) * D + d) * G * H * 4, G * H)
    if facts[_INDEX]:
        for r in range(rows):
            copy_floats((dc if facts[_INDEX] == 2 else dh) + r * row, y + ((begin + r) * D + d) * H * 4, H)


@linked(*(types.int64,) * 4)
def _run(facts_at: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch. Inputs as in RecurrentGrad, N the batch rows times the sequences of each:
    x (N, S, D, gates, H); dy (N, S, D, H), or (N, D, H) of the last step; y (N, S, D, G, H), or (N, D, H)."""
    facts = ints_at(facts_at, _FIELDS)
    N, D = B * facts[_SEQUENCES], facts[_D]
    most = max(1, min(MAX_ROWS, (N * D + threads - 1) // threads))
    run_tasks(_tile, (facts, operands, N, most), (N + most - 1) // most * D, threads)


@dataclass(frozen=True)
class Facts:
    sizes: tuple[int, ...]  # sequences per batch row, S, D, H, G, kind, output, is_reverse, index
    operands: tuple[int, ...]  # X to Y


class RecurrentGradKernel(CpuKernel):
    name = "recurrent_grad"
    layers = (RecurrentGrad,)
    order = f"K in order, in chunks of {CHUNK}"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, name = node.layer, node.weights["recurrence"]
        assert isinstance(layer, RecurrentGrad)
        if net.weight_type(name).dtype != "float32":
            yield Refusal(self.name, node.name, f"computes on float32, got {net.weight_type(name)}")
            return
        x, (D, width, H) = net.types[node.inputs[0]], net.weights[name].shape
        S, kind, values = int(x.shape[-2]), kind_of(layer.of), tuple(dict.fromkeys(node.inputs))
        reads = [values.index(value) for value in node.inputs]
        pairs = [[*each, -1][:2] for each in (reads[2 : 2 + D], reads[2 + D : 2 + 2 * D])]
        operands = *reads[:2], *pairs[0], *pairs[1], *[*reads[2 + 2 * D :], -1][:1], len(values)
        sequences, last = x.row_size // (S * D * width), width - (H if kind == GRU_BEFORE else 0)
        recipes = {"R": Recipe.of(packed_rows, (name,), (D, packed_size(last, H)), first=0, last=last)}
        if kind == GRU_BEFORE:
            recipes["late"] = Recipe.of(packed_rows, (name,), (D, packed_size(H, H)), first=last, last=width)
        if "bias" in node.weights:
            recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (D, H))
        is_reverse = int(layer.of.direction == "reverse")
        sizes = sequences, S, D, H, layer.gates, kind, OUTPUTS[layer.of.output], is_reverse, layer.index
        # Gates are read and written several times, all in cache; a core runs at least one sequence.
        cost = CoreCost(
            net.row_flop(node), sum(net.types[value].row_bytes for value in (*values, node.name)),
            recipe_bytes(recipes), row_cache_bytes=4 * x.row_bytes, rows_per_core=1,
        )  # fmt: skip
        yield self.claim(
            net, node, Facts(sizes, operands), label=f"{self.name}<{layer.of.kind},{H}>", cost=cost, recipes=recipes,
            why=f"{S} steps in one call", fast_bytes=4 * MAX_ROWS * (layer.gates + 2) * H,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        assert isinstance(claim.facts, Facts)
        for activation in (Sigmoid(), Tanh()):
            code_of(activation)  # compiles the loop that `activate` calls
        facts, (_, S, D, H, G, kind, *_) = claim.facts, claim.facts.sizes
        bias = weights.get("bias", np.zeros((D, H), np.float32))
        arrays = weights["R"], weights.get("late", bias), bias
        gates_row = (padded(G * H) + LANES) * 4
        gradients = MAX_ROWS * gates_row
        cells = gradients + MAX_ROWS * 3 * padded(H) * 4
        thread_bytes = cells + (MAX_ROWS * padded((S + 1) * H) * 4 if kind == LSTM_CELL else 0)

        def build_facts(threads: int) -> tuple[int, object]:
            scratch = aligned_zeros(threads * thread_bytes // 4)
            fields = words(*facts.sizes, *facts.operands, *arrays, scratch, gates_row, thread_bytes, gradients, cells)
            return address(fields), (fields, scratch, arrays)

        return CompiledLaunch(address_of(_run), build_facts)


@recipe_op
def packed_rows(recurrence: Array, first: int, last: int) -> Array:
    """(D, G * H, H) -> (D, packed): rows first to last, as add_product reads them."""
    D, _, H = recurrence.shape
    packed = aligned_zeros(D * packed_size(last - first, H)).reshape(D, -1)
    for one, out in zip(recurrence, packed, strict=True):
        pack(np.asarray(one[first:last], np.float32), out)
    return packed
