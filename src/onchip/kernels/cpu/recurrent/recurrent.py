"""recurrent on the CPU: an LSTM, a GRU or an RNN, all steps in one call.

Idea      A task is a tile of sequences in one direction, over all steps. Per step, a gemm of the states and the
          recurrent weights is added to the gates' inputs, then the gates update the states. States and gates stay in
          the core's caches; x is read and y written once. One compiled kernel handles every size. A preceding Linear
          that computes the gates' inputs is fused: its outputs stay in cache, too.
Floor     2 G H^2 flop per step and direction. 256 sequences, 64 steps, LSTM, H = 128: 2.1 Gflop, 7.2 ms at 300 Gflop/s.
Order     A gate sums over the hidden units in order, in chunks of CHUNK, independent of the tiles of sequences.
Limits    float32; `plain` runs other dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import activate, code_of
from onchip.kernels.cpu.microkernels.dense import CHUNK, dense, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.microkernels.exponential import expm1_exp
from onchip.kernels.cpu.microkernels.tile import LINE_PANELS, PANEL, multiply_line, pack, packed_size, padded
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.pointwise import RELU, SIGMOID, TANH
from onchip.network.graph import Network, Node
from onchip.network.layers import GRU, LSTM, RNN, Linear, Recurrent, Sigmoid, Tanh
from onchip.network.recipe import Array, Recipe, as_is, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

LSTM_CELL, GRU_AFTER, GRU_BEFORE, RNN_TANH, RNN_RELU = range(5)
SEQUENCE, LAST, CELL = range(3)
OUTPUTS = {"sequence": SEQUENCE, "last": LAST, "cell": CELL}
MAX_ROWS = 32  # sequences per tile: they share a panel of the recurrence in L1
_NO_FLOOR, _ZERO, _ONE, _TWO = np.float32(-np.inf), np.float32(0), np.float32(1), np.float32(2)
_MAX_EXP = np.float32(28)  # exp(-28) is 7e-13


@linked(*(types.int64,) * 10)
def add_product(
    src: int, src_row: int, rows: int, w: int, K: int, N: int, init: int, init_row: int, dst: int, dst_row: int
) -> None:
    """dst[r, n] = init[r, n] + sum_k src[r, k] w[k, n] for r < rows, n < N, whole vectors.

    Addresses and byte strides, w packed; init may be dst.
    """
    for k in range(0, K, CHUNK):
        steps = min(CHUNK, K - k)
        before, before_row = (init, init_row) if k == 0 else (dst, dst_row)
        n = 0
        while rows == 1 and n + LINE_PANELS * PANEL <= N:
            panel = w + n * K * 4 + k * PANEL * 4
            multiply_line(src + k * 4, panel, K * PANEL * 4, before + n * 4, dst + n * 4, steps, _NO_FLOOR)
            n += LINE_PANELS * PANEL
        while n < N:
            width, out = next_panel(N - n), dst + n * 4
            panel, start = w + n * K * 4 + k * width * 4, before + n * 4
            multiply_panel(
                src + k * 4, src_row, rows, panel, width, start, before_row, out, dst_row, 1, 0, steps, _NO_FLOOR
            )  # fmt: skip
            n += width


@linked(*(types.int64,) * 10)
def feed(x: int, x_row: int, rows: int, steps: int, K: int, w: int, N: int, bias: int, fed: int, fed_row: int) -> None:
    """fed (steps, rows, N) = x (rows, steps, K) @ w + bias: the gates' inputs, in whole vectors.

    Addresses and byte strides, w packed. The rows of each gemm are the rows or the steps, whichever are more.
    """
    if rows >= steps:
        for s in range(steps):
            dense(x + s * K * 4, x_row, rows, w, K, N, bias, fed + s * rows * fed_row, fed_row, _NO_FLOOR)
    else:
        for r in range(rows):
            dense(x + r * x_row, K * 4, steps, w, K, N, bias, fed + r * fed_row, rows * fed_row, _NO_FLOOR)


@linked(*(types.int64,) * 3)
def copy_floats(source: int, target: int, count: int) -> None:
    """Copy `count` floats; zeros if the source address is 0."""
    out = floats_at(target, count)
    if source:
        x = floats_at(source, count)
        for n in range(count):
            out[n] = x[n]
    else:
        for n in range(count):
            out[n] = _ZERO


@linked(*(types.int64,) * 8)
def first_gates(kind: int, x: int, x_row: int, bias: int, gates: int, gates_row: int, rows: int, H: int) -> None:
    """Initialise the gates of a step with their inputs; with `reset_after`, a GRU's new gate with its bias: the reset
    gate multiplies the recurrent part before the input is added."""
    width = 4 * H if kind == LSTM_CELL else H if kind in (RNN_TANH, RNN_RELU) else 2 * H
    for r in range(rows):
        inputs, out = floats_at(x + r * x_row, width), floats_at(gates + r * gates_row, width)
        for n in range(width):
            out[n] = inputs[n]
        if kind == GRU_AFTER:
            late_bias, late = floats_at(bias, H), floats_at(gates + r * gates_row + 2 * H * 4, H)
            for n in range(H):
                late[n] = late_bias[n]


# Elementwise functions are applied in place by `activate`: LLVM does not vectorise a loop with an exponential whose
# output may alias several inputs.


@compiled(inline=True)
def _clamped(x: np.float32) -> np.float32:
    """Clamp x to +-_MAX_EXP, where the product of three exponentials stays finite."""
    low = -_MAX_EXP if x < -_MAX_EXP else x
    return _MAX_EXP if low > _MAX_EXP else low


@compiled(inline=True)
def cell_after(i: np.float32, f: np.float32, g: np.float32, c: np.float32) -> np.float32:
    """An LSTM's cell c after a step, by its gates before their activations: sigmoid(f) c + sigmoid(i) tanh(g).

    With e = exp(-x), sigmoid is 1 / (1 + e); with m = exp(-2 x) - 1, tanh is -m / (2 + m). One shared division.
    """
    _, of_i = expm1_exp(_clamped(-i))
    _, of_f = expm1_exp(_clamped(-f))
    of_g, _ = expm1_exp(_clamped(-_TWO * g))
    keep, added = _ONE + of_f, (_ONE + of_i) * (_TWO + of_g)
    return (c * added - of_g * keep) / (keep * added)


@linked(*(types.int64,) * 3)
def next_cell(gates: int, c: int, H: int) -> None:
    """Update an LSTM's cell in place; the state overwrites its first gate, as with one more array LLVM would need too
    many alias checks to vectorise the loop."""
    i, o = floats_at(gates, H), floats_at(gates + H * 4, H)
    f, g, cell = floats_at(gates + H * 8, H), floats_at(gates + H * 12, H), floats_at(c, H)
    for n in range(H):
        new = cell_after(i[n], f[n], g[n], cell[n])
        cell[n] = new
        _, of_o = expm1_exp(_clamped(-o[n]))
        of_c, _ = expm1_exp(_clamped(-_TWO * new))
        i[n] = -of_c / ((_ONE + of_o) * (_TWO + of_c))


@linked(*(types.int64,) * 7)
def reset_states(gates: int, gates_row: int, x: int, x_row: int, h: int, rows: int, H: int) -> None:
    """For a GRU that resets before its matmul: r becomes r h, and the new gate starts from its input."""
    activate(gates, rows, 2 * H, gates_row // 4, SIGMOID)
    for row in range(rows):
        at = gates + row * gates_row
        r, state, inputs, new = floats_at(at + H * 4, H), floats_at(h + row * H * 4, H), x + row * x_row, at + H * 8
        for n in range(H):
            r[n] = r[n] * state[n]
        copy_floats(inputs + H * 8, new, H)


@linked(*(types.int64,) * 9)
def next_states(kind: int, gates: int, gates_row: int, x: int, x_row: int, h: int, c: int, rows: int, H: int) -> None:
    """Update the states of some rows after a step, in place."""
    stride = gates_row // 4
    if kind == LSTM_CELL:
        for row in range(rows):
            at = gates + row * gates_row
            next_cell(at, c + row * H * 4, H)
            copy_floats(at, h + row * H * 4, H)
    elif kind in (GRU_AFTER, GRU_BEFORE):
        if kind == GRU_AFTER:
            activate(gates, rows, 2 * H, stride, SIGMOID)
            for row in range(rows):
                at = gates + row * gates_row
                r, new, inputs = (
                    floats_at(at + H * 4, H),
                    floats_at(at + H * 8, H),
                    floats_at(x + row * x_row + H * 8, H),
                )
                for n in range(H):
                    new[n] = inputs[n] + r[n] * new[n]
        activate(gates + H * 8, rows, H, stride, TANH)
        for row in range(rows):
            at = gates + row * gates_row
            z, new, state = floats_at(at, H), floats_at(at + H * 8, H), floats_at(h + row * H * 4, H)
            for n in range(H):
                state[n] = (_ONE - z[n]) * new[n] + z[n] * state[n]
    else:
        activate(gates, rows, H, stride, TANH if kind == RNN_TANH else RELU)
        for row in range(rows):
            copy_floats(gates + row * gates_row, h + row * H * 4, H)


@compiled()
def _tile(worker: int, task: int, sizes: Array, ptrs: Array) -> None:
    """Run all steps of a tile of sequences in one direction."""
    N, S, D, G, H = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    kind, output, is_reverse, most, K = sizes[5], sizes[6], sizes[7], sizes[8], sizes[11]
    x, y, first_h, first_c, R, late, bias = ptrs[0], ptrs[1], ptrs[2], ptrs[3], ptrs[4], ptrs[5], ptrs[6]
    all_gates, wide, one = padded_width(G * H), padded_width(2 * H if kind == GRU_BEFORE else G * H), padded_width(H)
    gates_row = sizes[9]
    gates = ptrs[9] + worker * sizes[10]
    h = gates + MAX_ROWS * gates_row
    c = h + MAX_ROWS * H * 4
    fed = gates + sizes[12]
    d, begin = task % D, task // D * most
    rows = min(most, N - begin)
    backwards = is_reverse or d == 1
    block, low = MAX_ROWS // rows, 0  # steps per `feed`, and the first of them
    inputs, inputs_row = fed, gates_row
    for r in range(rows):
        at = ((begin + r) * D + d) * H * 4
        copy_floats(first_h + at if first_h else 0, h + r * H * 4, H)
        copy_floats(first_c + at if first_c else 0, c + r * H * 4, H)
    for step in range(S):
        s = S - 1 - step if backwards else step
        if K == 0:
            inputs, inputs_row = x + ((begin * S + s) * D + d) * G * H * 4, S * D * G * H * 4
        else:
            if step % block == 0:
                steps = min(block, S - step)
                low = s - steps + 1 if backwards else s
                w, start = ptrs[7] + d * all_gates * K * 4, ptrs[8] + d * all_gates * 4
                feed(x + (begin * S + low) * K * 4, S * K * 4, rows, steps, K, w, all_gates, start, fed, gates_row)
            inputs = fed + (s - low) * rows * gates_row
        init, init_row = inputs, inputs_row
        # A copy, if part of the initial gates is a bias, or the inputs are not whole vectors.
        if kind in (GRU_AFTER, GRU_BEFORE) or (K == 0 and wide != G * H):
            first_gates(kind, inputs, inputs_row, bias + d * H * 4, gates, gates_row, rows, H)
            init, init_row = gates, gates_row
        add_product(h, H * 4, rows, R + d * wide * H * 4, H, wide, init, init_row, gates, gates_row)
        if kind == GRU_BEFORE:
            reset_states(gates, gates_row, inputs, inputs_row, h, rows, H)
            new = gates + H * 8
            add_product(gates + H * 4, gates_row, rows, late + d * one * H * 4, H, one, new, gates_row, new, gates_row)
        next_states(kind, gates, gates_row, inputs, inputs_row, h, c, rows, H)
        if output == SEQUENCE:
            for r in range(rows):
                copy_floats(h + r * H * 4, y + (((begin + r) * S + s) * D + d) * H * 4, H)
    if output != SEQUENCE:
        for r in range(rows):
            source = (c if output == CELL else h) + r * H * 4
            copy_floats(source, y + ((begin + r) * D + d) * H * 4, H)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch: x (N, S, D * G * H), or (N, S, K) with a fused Linear; y (N, S, D * H), or
    (N, D * H) of the last step.

    facts  the addresses of the next three, and the sequences per batch row
    sizes  N, S, D, G, H, kind, output, is_reverse for one direction, rows of a tile, bytes per row of gates, scratch
           bytes per thread, K or 0 without a Linear, and the offset of its outputs in scratch
    ptrs   addresses: x, y, the initial state (N, D, H) and cell, 0 for zeros; the packed recurrence per direction, the
           last gate of a GRU that resets before its matmul, the bias; the Linear, packed per direction, and its bias;
           scratch
    which  operand index of x, the state, the cell (-1: none) and y
    """
    fields = ints_at(facts, 4)
    sizes, ptrs, which = ints_at(fields[0], 13), ints_at(fields[1], 10), ints_at(fields[2], 4)
    values = ints_at(operands, ALL)
    ptrs[0], ptrs[1] = values[which[0]], values[which[3]]
    for state in range(2):
        if which[1 + state] >= 0:
            ptrs[2 + state] = values[which[1 + state]]
    N, D = B * fields[3], sizes[2]
    most = max(1, min(MAX_ROWS, (N * D + threads - 1) // threads))
    sizes[0], sizes[8] = N, most
    run_tasks(_tile, (sizes, ptrs), (N + most - 1) // most * D, threads)


@dataclass(frozen=True)
class Facts:
    sizes: tuple[int, ...]  # sequences per batch row, S, D, G, H, kind, output, is_reverse
    K: int  # of the fused Linear; 0: none
    reads: tuple[int, ...]  # input index of x and of each state: a value that is read twice is one input


class RecurrentKernel(CpuKernel):
    name = "recurrent"
    layers = (Linear, Recurrent)
    dtypes = DTYPE_BYTES  # `offers` checks: no Refusal for a Linear of another dtype

    def applies(self, net: Network, start: int) -> bool:
        return isinstance(net.nodes[start].layer, Recurrent) or _input_linear(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        linear = _input_linear(net, start)
        node = net.nodes[start if linear is None else start + 1]
        layer = node.layer
        assert isinstance(layer, Recurrent)
        gates, name = net.types[node.inputs[0]], node.weights["recurrence"]
        if any(each.dtype != "float32" for each in (gates, net.weight_type(name))):
            if linear is None:
                yield Refusal(self.name, node.name, f"computes on float32, got {gates}")
            return
        D, width, H = net.weights[name].shape
        G, S = layer.gates, int(gates.shape[-2])
        kind = kind_of(layer)
        late = H if kind == GRU_BEFORE else 0
        recipes = {"R": Recipe.of(packed_gates, (name,), (D, packed_size(H, width - late)), first=0, last=width - late)}
        if late:
            recipes["late"] = Recipe.of(packed_gates, (name,), (D, packed_size(H, H)), first=width - H, last=width)
        if "bias" in node.weights:
            recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (D, H))
        nodes, K, inputs = [node], 0, node.inputs
        if linear is not None:
            nodes, inputs = [linear, node], (*linear.inputs, *node.inputs[1:])
            weight = linear.weights["weight"]
            K = net.weights[weight].shape[1]
            recipes["W"] = Recipe.of(packed_inputs, (weight,), (D, packed_size(K, width)), directions=D)
            bias = (linear.weights["bias"],) if "bias" in linear.weights else ()
            recipes["b"] = Recipe.of(bias_of_gates, bias, (D, padded(width)), directions=D, size=padded(width))
        values = tuple(dict.fromkeys(inputs))
        sequences = gates.row_size // (S * D * width)
        # Gates are read and written several times, all in cache; a core runs at least one sequence.
        cost = CoreCost(
            sum(map(net.row_flop, nodes)), sum(net.types[value].row_bytes for value in (*values, node.name)),
            sum(recipe.nbytes for recipe in recipes.values()), row_cache_bytes=4 * gates.row_bytes, rows_per_core=1,
        )  # fmt: skip
        sizes = (sequences, S, D, G, H, kind, OUTPUTS[layer.output], int(layer.direction == "reverse"))
        kinds = "-".join(each.layer.kind for each in nodes)
        yield Claim(
            self.name, f"{self.name}<{kinds},{H}>", tuple(each.name for each in nodes), cost,
            f"{S} steps in one call", recipes=recipes, order=f"units in order, chunks of {CHUNK}",
            facts=Facts(sizes, K, tuple(map(values.index, inputs))),
            fast_bytes=4 * MAX_ROWS * ((G + 2) * H + (G * H if K else 0)),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        assert isinstance(claim.facts, Facts)
        for activation in (Sigmoid(), Tanh()):
            code_of(activation)  # compiles the loop that `activate` calls
        reads, K, (sequences, S, D, G, H, *how) = claim.facts.reads, claim.facts.K, claim.facts.sizes
        bias = weights.get("bias", np.zeros((D, H), np.float32))
        gates_row = (padded(G * H) + LANES) * 4
        fed_at = MAX_ROWS * (gates_row + padded(2 * H) * 4)
        thread_bytes = fed_at + (MAX_ROWS * gates_row if K else 0)
        arrays = weights["R"], weights.get("late", bias), bias, weights.get("W", bias), weights.get("b", bias)
        which = np.array([*reads, *[-1] * (3 - len(reads)), len(set(reads))], np.int64)

        def build_facts(threads: int) -> tuple[int, object]:
            scratch = aligned_zeros(threads * thread_bytes // 4)
            sizes = words(0, S, D, G, H, *how, 0, gates_row, thread_bytes, K, fed_at)
            ptrs = words(0, 0, 0, 0, *arrays, scratch)
            fields = words(sizes, ptrs, which, sequences)
            return address(fields), (fields, sizes, ptrs, which, scratch, arrays)

        return CompiledLaunch(address_of(_run), build_facts)


def _input_linear(net: Network, start: int) -> Node | None:
    """The Linear at `start`, if its only reader is the next layer, a recurrent one, as its x."""
    node, following = net.nodes[start], net.nodes[start + 1 : start + 2]
    if not following or not isinstance(node.layer, Linear) or not isinstance(following[0].layer, Recurrent):
        return None
    is_float = all(net.weight_type(name).dtype == "float32" for name in node.weights.values())
    has_one_reader = net.readers(node.name) == [following[0]] and node.name not in net.kept
    return node if is_float and has_one_reader and following[0].inputs.count(node.name) == 1 else None


def kind_of(layer: Recurrent) -> int:
    if isinstance(layer, GRU):
        return GRU_AFTER if layer.reset_after else GRU_BEFORE
    if isinstance(layer, RNN):
        return RNN_TANH if layer.activation == "tanh" else RNN_RELU
    assert isinstance(layer, LSTM)
    return LSTM_CELL


@recipe_op
def packed_gates(recurrence: Array, first: int, last: int) -> Array:
    """(D, G * H, H) -> (D, packed): columns first to last of the gates, as add_product reads them."""
    D, _, H = recurrence.shape
    packed = aligned_zeros(D * packed_size(H, last - first)).reshape(D, -1)
    for one, out in zip(recurrence, packed, strict=True):
        pack(np.asarray(one[first:last].T, np.float32), out)
    return packed


@recipe_op
def packed_inputs(weight: Array, directions: int) -> Array:
    """(D * G * H, K) -> (D, packed), as dense reads them."""
    return packed_gates(weight.reshape(directions, -1, weight.shape[-1]), 0, len(weight) // directions)


@recipe_op
def bias_of_gates(*bias: Array, directions: int, size: int) -> Array:
    """(D * G * H) -> (D, padded); zeros without one."""
    padded_bias = aligned_zeros(directions * size).reshape(directions, size)
    if bias:
        padded_bias[:, : len(bias[0]) // directions] = bias[0].reshape(directions, -1)
    return padded_bias
