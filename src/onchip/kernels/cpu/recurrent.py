"""recurrent on the CPU: an LSTM, a GRU or an RNN, all steps in one call.

Idea      A core takes some sequences and one direction and goes through all steps with them: the product of their
          states with the recurrence is added to what the input gives to the gates, then gates become states. States
          and gates stay in its caches; x is read and y written once. Any sizes are served by one compiled kernel.
Floor     2 G H^2 flop a step and direction. 256 sequences of 64 steps, LSTM, H = 128: 2.1 Gflop, 7.2 ms at 300 Gflop/s.
Same bits A sum of a gate runs over the units in order, in chunks of dense's size, however sequences are grouped.
Limits    float32; others are plain's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.activation import activate, expm1_exp, link_activation
from onchip.kernels.cpu.dense import CHUNK, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.jit import ALL, address, address_of, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.late_numba import types
from onchip.kernels.cpu.launches import CompiledLaunch, words
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.threads import run_pieces
from onchip.kernels.cpu.tile import LINE_PANELS, PANEL, aligned_zeros, multiply_line, pack, packed_size, padded
from onchip.kernels.pointwise import RELU, SIGMOID, TANH
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.spec.layers import GRU, LSTM, RNN, Recurrent
from onchip.spec.network import Network
from onchip.spec.recipe import Array, Recipe, as_is, recipe_op

_LSTM, _GRU_AFTER, _GRU_BEFORE, _RNN_TANH, _RNN_RELU = range(5)
_SEQUENCE, _LAST, _CELL = range(3)
_OUTPUTS = {"sequence": _SEQUENCE, "last": _LAST, "cell": _CELL}
_MOST_ROWS = 32  # sequences that a core takes: a panel of the recurrence then serves them all from L1
_NO_FLOOR, _ZERO, _ONE, _TWO = np.float32(-np.inf), np.float32(0), np.float32(1), np.float32(2)
_FAR = np.float32(28)  # exp(-28) is 7e-13


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


@linked(*(types.int64,) * 3)
def copy_floats(source: int, target: int, count: int) -> None:
    """`count` numbers; zeros where the source is no address."""
    out = floats_at(target, count)
    if source:
        given = floats_at(source, count)
        for n in range(count):
            out[n] = given[n]
    else:
        for n in range(count):
            out[n] = _ZERO


@linked(*(types.int64,) * 8)
def first_gates(kind: int, x: int, x_row: int, bias: int, gates: int, gates_row: int, rows: int, H: int) -> None:
    """What the recurrence is added to: the input's part; of a GRU's new state its bias, as the reset comes between."""
    wide = 4 * H if kind == _LSTM else H if kind in (_RNN_TANH, _RNN_RELU) else 2 * H
    for r in range(rows):
        given, out = floats_at(x + r * x_row, wide), floats_at(gates + r * gates_row, wide)
        for n in range(wide):
            out[n] = given[n]
        if kind == _GRU_AFTER:
            inside, behind = floats_at(bias, H), floats_at(gates + r * gates_row + 2 * H * 4, H)
            for n in range(H):
                behind[n] = inside[n]


# Functions of single numbers are activate's, in place: loops with an exponential inside that may write to what many
# other arrays read do not become vector code.


@compiled(inline=True)
def _gate(x: np.float32) -> np.float32:
    """As far as an exponential matters, and three of them have a product."""
    inside = -_FAR if x < -_FAR else x
    return _FAR if inside > _FAR else inside


@linked(*(types.int64,) * 3)
def next_cell(gates: int, c: int, H: int) -> None:
    """An LSTM's cell behind a step, in place, and its state in the place of its first gate: to a place of its own would
    be one array too many for LLVM to tell them apart."""
    i, o = floats_at(gates, H), floats_at(gates + H * 4, H)
    f, g, cell = floats_at(gates + H * 8, H), floats_at(gates + H * 12, H), floats_at(c, H)
    for n in range(H):
        # With e = exp(-x), sigmoid is 1 / (1 + e); with m = exp(-2 x) - 1, tanh is -m / (2 + m). One division for all.
        _, of_i = expm1_exp(_gate(-i[n]))
        _, of_f = expm1_exp(_gate(-f[n]))
        of_g, _ = expm1_exp(_gate(-_TWO * g[n]))
        kept, added = _ONE + of_f, (_ONE + of_i) * (_TWO + of_g)
        new = (cell[n] * added - of_g * kept) / (kept * added)
        cell[n] = new
        _, of_o = expm1_exp(_gate(-o[n]))
        of_c, _ = expm1_exp(_gate(-_TWO * new))
        i[n] = -of_c / ((_ONE + of_o) * (_TWO + of_c))


@linked(*(types.int64,) * 7)
def reset_states(gates: int, gates_row: int, x: int, x_row: int, h: int, rows: int, H: int) -> None:
    """Of a GRU whose reset comes first: r becomes r h, and its new state begins with the input's part."""
    activate(gates, rows, 2 * H, gates_row // 4, SIGMOID)
    for row in range(rows):
        at = gates + row * gates_row
        r, before, given, new = floats_at(at + H * 4, H), floats_at(h + row * H * 4, H), x + row * x_row, at + H * 8
        for n in range(H):
            r[n] = r[n] * before[n]
        copy_floats(given + H * 8, new, H)


@linked(*(types.int64,) * 9)
def next_states(kind: int, gates: int, gates_row: int, x: int, x_row: int, h: int, c: int, rows: int, H: int) -> None:
    """The states of some rows behind a step, in place."""
    stride = gates_row // 4
    if kind == _LSTM:
        for row in range(rows):
            at = gates + row * gates_row
            next_cell(at, c + row * H * 4, H)
            copy_floats(at, h + row * H * 4, H)
    elif kind in (_GRU_AFTER, _GRU_BEFORE):
        if kind == _GRU_AFTER:
            activate(gates, rows, 2 * H, stride, SIGMOID)
            for row in range(rows):
                at = gates + row * gates_row
                r, new, given = (
                    floats_at(at + H * 4, H),
                    floats_at(at + H * 8, H),
                    floats_at(x + row * x_row + H * 8, H),
                )
                for n in range(H):
                    new[n] = given[n] + r[n] * new[n]
        activate(gates + H * 8, rows, H, stride, TANH)
        for row in range(rows):
            at = gates + row * gates_row
            z, new, state = floats_at(at, H), floats_at(at + H * 8, H), floats_at(h + row * H * 4, H)
            for n in range(H):
                state[n] = (_ONE - z[n]) * new[n] + z[n] * state[n]
    else:
        activate(gates, rows, H, stride, TANH if kind == _RNN_TANH else RELU)
        for row in range(rows):
            copy_floats(gates + row * gates_row, h + row * H * 4, H)


@compiled()
def _tile(worker: int, piece: int, sizes: Array, places: Array) -> None:
    """Some sequences in one direction."""
    N, S, D, G, H = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    kind, output, is_reverse, most = sizes[5], sizes[6], sizes[7], sizes[8]
    x, y, first_h, first_c, R, late, bias = places[0], places[1], places[2], places[3], places[4], places[5], places[6]
    wide, one = padded_width(2 * H if kind == _GRU_BEFORE else G * H), padded_width(H)
    gates_row, x_row = sizes[9], S * D * G * H * 4
    gates = places[7] + worker * sizes[10]
    h = gates + most * gates_row
    c = h + most * H * 4
    d, begin = piece % D, piece // D * most
    rows = min(most, N - begin)
    backwards = is_reverse or d == 1
    for r in range(rows):
        place = ((begin + r) * D + d) * H * 4
        copy_floats(first_h + place if first_h else 0, h + r * H * 4, H)
        copy_floats(first_c + place if first_c else 0, c + r * H * 4, H)
    for step in range(S):
        s = S - 1 - step if backwards else step
        given = x + ((begin * S + s) * D + d) * G * H * 4
        init, init_row = given, x_row
        if wide != G * H or kind in (_GRU_AFTER, _GRU_BEFORE):  # not all of it is the input's, in whole vectors
            first_gates(kind, given, x_row, bias + d * H * 4, gates, gates_row, rows, H)
            init, init_row = gates, gates_row
        add_product(h, H * 4, rows, R + d * wide * H * 4, H, wide, init, init_row, gates, gates_row)
        if kind == _GRU_BEFORE:
            reset_states(gates, gates_row, given, x_row, h, rows, H)
            new = gates + H * 8
            add_product(gates + H * 4, gates_row, rows, late + d * one * H * 4, H, one, new, gates_row, new, gates_row)
        next_states(kind, gates, gates_row, given, x_row, h, c, rows, H)
        if output == _SEQUENCE:
            for r in range(rows):
                copy_floats(h + r * H * 4, y + (((begin + r) * S + s) * D + d) * H * 4, H)
    if output != _SEQUENCE:
        for r in range(rows):
            source = (c if output == _CELL else h) + r * H * 4
            copy_floats(source, y + ((begin + r) * D + d) * H * 4, H)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """x (N, S, D * G * H); y (N, S, D * H), or (N, D * H) of the last step; the code of a CompiledLaunch.

    facts   the addresses of the next three, and the sequences of a row of the batch
    sizes   N, S, D, G, H, kind, output, whether the one direction is the reverse, rows of a tile, bytes from row to row
            of its gates, and from thread to thread of scratch
    places  addresses: x, y, the state before the first step (N, D, H) and the cell, 0 for zeros; the recurrence packed
            for each direction, the last gate of a GRU whose reset comes first, the bias; scratch
    which   of the operands x, the state, the cell (-1: none) and y are
    """
    told = ints_at(facts, 4)
    sizes, places, which, given = ints_at(told[0], 11), ints_at(told[1], 8), ints_at(told[2], 4), ints_at(operands, ALL)
    places[0], places[1] = given[which[0]], given[which[3]]
    for state in range(2):
        if which[1 + state] >= 0:
            places[2 + state] = given[which[1 + state]]
    N, D = B * told[3], sizes[2]
    most = max(1, min(_MOST_ROWS, (N * D + threads - 1) // threads))
    sizes[0], sizes[8] = N, most
    run_pieces(_tile, (sizes, places), (N + most - 1) // most * D, threads)


@dataclass(frozen=True)
class Facts:
    sizes: tuple[int, ...]  # sequences of a row, S, D, G, H, kind, output, is_reverse
    reads: tuple[int, ...]  # which of the launch's inputs x and the states are: a value that is read twice comes once


class RecurrentAlone:
    name = "recurrent"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, Recurrent):
            return
        x, name = net.types[node.inputs[0]], node.weights["recurrence"]
        if any(given.dtype != "float32" for given in (x, net.weight_type(name))):
            yield Refusal(self.name, node.name, f"computes on float32, got {x}")
            return
        D, width, H = net.weights[name].shape
        G, S = layer.gates, int(x.shape[-2])
        kind = kind_of(layer)
        late = H if kind == _GRU_BEFORE else 0
        recipes = {"R": Recipe.of(packed_gates, (name,), (D, packed_size(H, width - late)), first=0, last=width - late)}
        if late:
            recipes["late"] = Recipe.of(packed_gates, (name,), (D, packed_size(H, H)), first=width - H, last=width)
        if "bias" in node.weights:
            recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (D, H))
        values = tuple(dict.fromkeys(node.inputs))
        sequences = x.row_size // (S * D * width)
        # Gates are read and written several times on their way, all in cache; sequences are a core's at the least.
        price = CorePrice(
            net.row_flop(node), sum(net.types[value].row_bytes for value in (*values, node.name)),
            sum(recipe.nbytes for recipe in recipes.values()), row_cache_bytes=4 * x.row_bytes, rows_a_core=1,
        )  # fmt: skip
        sizes = (sequences, S, D, G, H, kind, _OUTPUTS[layer.output], int(layer.direction == "reverse"))
        yield Claim(
            self.name, f"{self.name}<{layer.kind},{H}>", (node.name,), price, f"{S} steps in one call",
            recipes=recipes, order=f"units in order, chunks of {CHUNK}",
            facts=Facts(sizes, tuple(map(values.index, node.inputs))),
            fast_bytes=4 * _MOST_ROWS * (G + 2) * H,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        assert isinstance(claim.facts, Facts)
        for activation in (SIGMOID, TANH):
            link_activation(activation)
        reads, (sequences, S, D, G, H, *how) = claim.facts.reads, claim.facts.sizes
        bias = weights.get("bias", np.zeros((D, H), np.float32))
        gates_row = (padded(G * H) + LANES) * 4
        kept = weights["R"], weights.get("late", bias), bias
        which = np.array([*reads, *[-1] * (3 - len(reads)), len(set(reads))], np.int64)

        def facts(threads: int) -> tuple[int, object]:
            scratch = aligned_zeros(threads * _MOST_ROWS * (gates_row // 4 + padded(2 * H))).reshape(threads, -1)
            sizes = words(0, S, D, G, H, *how, 0, gates_row, scratch.strides[0])
            places = words(0, 0, 0, 0, *kept, scratch)
            told = words(sizes, places, which, sequences)
            return address(told), (told, sizes, places, which, scratch, kept)

        return CompiledLaunch(address_of(_run), facts)


def kind_of(layer: Recurrent) -> int:
    if isinstance(layer, GRU):
        return _GRU_AFTER if layer.reset_after else _GRU_BEFORE
    if isinstance(layer, RNN):
        return _RNN_TANH if layer.activation == "tanh" else _RNN_RELU
    assert isinstance(layer, LSTM)
    return _LSTM


@recipe_op
def packed_gates(recurrence: Array, first: int, last: int) -> Array:
    """(D, G * H, H) -> (D, packed): numbers first to last of the gates, as add_product reads them."""
    D, _, H = recurrence.shape
    made = aligned_zeros(D * packed_size(H, last - first)).reshape(D, -1)
    for one, out in zip(recurrence, made, strict=True):
        pack(np.asarray(one[first:last].T, np.float32), out)
    return made
