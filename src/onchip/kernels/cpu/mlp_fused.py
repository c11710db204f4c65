"""mlp_fused on the CPU: a whole MLP forward in one parallel loop over tiles of rows.

Idea    A tile of rows goes through every layer while it lies in L1/L2; x is read once, y written once,
        nothing in between reaches main memory. Bias and ReLU happen in registers, other activations in cache.
Floor   A row moves (D_in + D_out) * 4 B and costs 2 * params flop. 72-64-64-4: 304 B and 17,920 flop, 59 flop/B:
        compute-bound on any CPU (two AVX-512 cores: some 300 Gflop/s and 40 GB/s, 8 flop/B).
Cache   2 * tile rows * padded width * 4 B a thread for activations; weights stay in L2, their chunks in L1.
Limits  float32; any widths, any number of layers and rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np

from onchip.kernels.chain import Chain, find_chain, forward_price, layer_before, why_not_float32
from onchip.kernels.cpu import dot, tile
from onchip.kernels.cpu.activation import NORMALISERS, activate, code_of, normalise
from onchip.kernels.cpu.dense import dense, padded_width
from onchip.kernels.cpu.dot import NARROW, dense_narrow
from onchip.kernels.cpu.jit import LAUNCH, address, compiled, floats_at, ints_at, take_ticket, use_threads
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.tile import PANEL, ROWS_NARROW, aligned_zeros, pack, packed_size, padded
from onchip.kernels.pointwise import CPU_ACTIVATIONS, RELU
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.spec.network import Network
from onchip.spec.recipe import Array, Recipe, recipe_op

MAX_TILE_ROWS = 64  # past this the tile outgrows L1 and gains nothing (bench decode)
FAR_TILE_ROWS = 256  # where L2 does not hold the weights and every tile fetches them again
_SPLIT_BYTES = 256 << 10  # weights from which on splitting a layer's columns pays for waiting behind each layer
THREAD_WEIGHTS = 50_000  # multiply-adds: to call another thread for fewer takes longer than they do
_WAKE_BYTES = 64 << 10  # of a layer: with fewer it is done before the others are awake
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)


@compiled()
def _columns(
    src: int, src_row: int, rows: int, w: int, bias: int, dst: int, layer: Array, first: int, columns: int
) -> None:
    """Some columns of a layer, from a multiple of a panel on: panels are packed one behind the other.

    src, w, bias, dst  addresses; those of all weights and biases
    layer              K, N, offset of w, offset of bias, activation
    """
    K, N, code, stride = layer[0], layer[1], layer[4], padded_width(layer[1])
    floor = _ZERO if code == RELU else _NO_FLOOR
    if N <= NARROW:  # one panel, so all of its columns
        dense_narrow(src, src_row, rows, w + layer[2] * 4, K, N, bias + layer[3] * 4, dst, stride * 4, floor)
    else:
        dense(
            src, src_row, rows, w + (layer[2] + first * K) * 4, K, columns, bias + (layer[3] + first) * 4,
            dst + first * 4, stride * 4, floor,
        )  # fmt: skip
    if code > RELU:
        activate(dst + first * 4, rows, min(columns, N - first), stride, code)


@compiled()
def _forward_tile(
    x: int, rows: int, y: int, w: int, bias: int, table: Array, normaliser: int, scratch: int, half: int
) -> None:
    """The network on `rows` rows, by the thread that calls; layers use the two halves of scratch in turn.

    x, y, w, bias, scratch  addresses; half is in bytes
    table                   a row a layer
    """
    src, src_row = x, table[0, 0] * 4
    for layer in range(len(table)):
        dst, width = scratch + (layer % 2) * half, padded_width(table[layer, 1])
        _columns(src, src_row, rows, w, bias, dst, table[layer], 0, width)
        src, src_row = dst, width * 4
    _finish(src, rows, table[len(table) - 1, 1], normaliser, y)


@compiled()
def _finish(src: int, rows: int, D_out: int, normaliser: int, y: int) -> None:
    """The last layer's padded rows, normalised, to y."""
    stride = padded_width(D_out)
    if normaliser:
        normalise(src, rows, D_out, stride, normaliser)
    for r in range(rows):
        source, target = floats_at(src + r * stride * 4, D_out), floats_at(y + r * D_out * 4, D_out)
        for n in range(D_out):
            target[n] = source[n]


@compiled(parallel=True)
def _forward(
    x: int, B: int, y: int, w: int, bias: int, table: Array, normaliser: int, scratch: int, half: int, tile_rows: int,
    threads: int, tickets: int,
) -> None:  # fmt: skip
    """The same for any number of rows; worker i has the two halves of scratch from 2 * i * half on."""
    D_in, D_out = table[0, 0], table[len(table) - 1, 1]
    ints_at(tickets, 1)[0] = 0
    for worker in numba.prange(threads):
        while True:
            first = take_ticket(tickets) * tile_rows
            if first >= B:
                break
            rows, mine = min(tile_rows, B - first), scratch + 2 * worker * half
            _forward_tile(
                x + first * D_in * 4, rows, y + first * D_out * 4, w, bias, table, normaliser, mine, half
            )  # fmt: skip


@compiled(parallel=True)
def _forward_few(
    x: int, B: int, y: int, w: int, bias: int, table: Array, normaliser: int, scratch: int, half: int, threads: int
) -> None:
    """The same for so few rows that a thread takes some columns of every layer: it then fetches only their weights."""
    src, src_row = x, table[0, 0] * 4
    for layer in range(len(table)):
        dst, width = scratch + (layer % 2) * half, padded_width(table[layer, 1])
        if table[layer, 0] * width * 4 > _WAKE_BYTES:
            share = (width + threads * PANEL - 1) // (threads * PANEL) * PANEL
            for worker in numba.prange(threads):
                first = worker * share
                if first < width:
                    _columns(src, src_row, B, w, bias, dst, table[layer], first, min(share, width - first))
        else:
            _columns(src, src_row, B, w, bias, dst, table[layer], 0, width)
        src, src_row = dst, width * 4
    _finish(src, B, table[len(table) - 1, 1], normaliser, y)


@dataclass(frozen=True)
class Facts:
    chain: Chain
    max_tile_rows: int


class MlpFused:
    name = "mlp_fused"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        if job.is_training or _is_taken_before(net, start):
            return
        chain = find_chain(net, start, CPU_ACTIVATIONS)
        if chain is None:
            return
        if why_not := why_not_float32(net, chain):
            yield Refusal(self.name, chain.nodes[0], why_not)
            return
        widest = max(padded(width) for width in chain.widths[1:])
        fitting = device.fast_bytes // 2 // (8 * widest) // ROWS_NARROW * ROWS_NARROW
        weight_bytes = 4 * sum(packed_size(layer.D_in, layer.D_out) for layer in chain.layers)
        tile_rows = max(ROWS_NARROW, min(MAX_TILE_ROWS, fitting))
        if weight_bytes > device.fast_bytes:
            tile_rows = FAR_TILE_ROWS
        fast = 2 * tile_rows * widest * 4
        work = forward_price(net, chain)
        price = CorePrice(
            work.row_flop, work.row_bytes, work.fixed_bytes,
            rows_a_core=0 if weight_bytes > _SPLIT_BYTES else ROWS_NARROW, tile_rows=tile_rows,
            tile_bytes=weight_bytes if weight_bytes > device.cache_bytes else 0,
        )  # fmt: skip
        yield Claim(
            self.name, f"mlp_fused<{chain.label}>", chain.nodes, price,
            why=f"{tile_rows} rows at a time stay in {fast // 1024} KiB of cache, layer after layer",
            recipes=packed_recipes(net, chain, NARROW), fast_bytes=fast, order=_order(chain),
            facts=Facts(chain, tile_rows),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        assert isinstance(claim.facts, Facts)
        return Launch(claim.facts, weights)


def _order(chain: Chain) -> str:
    ways = [dot.ORDER if layer.D_out <= NARROW else tile.ORDER for layer in chain.layers]
    return "; ".join(dict.fromkeys([*ways, "softmax in order"] if chain.normaliser else ways))


def _is_taken_before(net: Network, start: int) -> bool:
    """Whether a longer chain, which this kernel takes if it takes the one from here, goes on here: not worth another
    claim for each of its layers."""
    before = layer_before(net, start, CPU_ACTIVATIONS)
    used = [] if before is None else [net.types[before.inputs[0]], *net.node_weight_types(before).values()]
    return bool(used) and all(given.dtype == "float32" for given in used)


class Launch:
    """Runs a claim; `weights` are its recipes, evaluated. It keeps the arrays whose addresses it hands on."""

    def __init__(self, facts: Facts, weights: dict[str, Array]) -> None:
        chain, self.max_tile_rows = facts.chain, facts.max_tile_rows
        self.D_in = chain.widths[0]
        self.row_weights = sum(layer.D_in * layer.D_out for layer in chain.layers)
        half = facts.max_tile_rows * max(padded(width) for width in chain.widths[1:])
        scratch = aligned_zeros(numba.config.NUMBA_NUM_THREADS * 2 * half)
        tickets = aligned_zeros(1, np.int64)
        self.kept = (weights, scratch, tickets)
        self.is_heavy = weights["w"].nbytes > _SPLIT_BYTES
        self.tickets = address(tickets)
        self.arguments = (
            address(weights["w"]), address(weights["bias"]), layer_table(chain), NORMALISERS[chain.normaliser],
            address(scratch), half * 4,
        )  # fmt: skip

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
        x = inputs[0]
        B, most = x.size // self.D_in, self.max_tile_rows
        threads = max(1, min(threads, B * self.row_weights // THREAD_WEIGHTS))
        share = -(-B // threads)  # small batches: a tile for each thread rather than one full tile
        tile_rows = min(most, -(-share // ROWS_NARROW) * ROWS_NARROW)
        given = (address(x), B, address(outputs[0]), *self.arguments)
        with LAUNCH:
            if self.is_heavy and threads > 1 and most >= B:
                use_threads(threads)
                _forward_few(*given, threads)
            elif tile_rows >= B:
                _forward_tile(*given)
            else:
                use_threads(threads)
                _forward(*given, tile_rows, threads, self.tickets)


def layer_table(chain: Chain) -> Array:
    """A row a layer: K, N, where its weights and its bias begin in the packed arrays, its activation."""
    rows, w_offset, bias_offset = [], 0, 0
    for layer in chain.layers:
        rows.append((layer.D_in, layer.D_out, w_offset, bias_offset, code_of(layer.activation)))
        w_offset += packed_size(layer.D_in, layer.D_out)
        bias_offset += padded(layer.D_out)
    return np.array(rows, np.int64)


def packed_recipes(net: Network, chain: Chain, narrow: int) -> dict[str, Recipe]:
    """All weights in one flat packed array, all biases (zero where there is none) in another.

    narrow  layers of up to so many columns stay as they are, (N, K): dense_narrow reads them so
    """
    table = layer_table(chain)
    last = chain.layers[-1]
    w_size = int(table[-1, 2]) + packed_size(last.D_in, last.D_out)
    bias_size = int(table[-1, 3]) + padded(last.D_out)
    with_bias = [(int(row[3]), layer.bias) for row, layer in zip(table, chain.layers, strict=True) if layer.bias]
    starts = tuple(start for start, _ in with_bias)
    return {
        "w": Recipe.of(pack_layers, [layer.weight for layer in chain.layers], (w_size,), size=w_size, narrow=narrow),
        "bias": Recipe.of(pack_biases, [name for _, name in with_bias], (bias_size,), size=bias_size, starts=starts),
    }


@recipe_op
def pack_layers(*weights: Array, size: int, narrow: int) -> Array:
    """(D_out, D_in) each -> one behind the other, in panels (tile.pack); those of up to `narrow` rows as they are."""
    flat, at = aligned_zeros(size), 0
    for weight in weights:
        N, K = weight.shape
        if narrow >= N:
            flat[at : at + N * K] = weight.reshape(-1)
        else:
            pack(weight.T, flat[at : at + packed_size(K, N)])
        at += packed_size(K, N)
    return flat


@recipe_op
def pack_biases(*biases: Array, size: int, starts: tuple[int, ...]) -> Array:
    flat = aligned_zeros(size)
    for bias, start in zip(biases, starts, strict=True):
        flat[start : start + len(bias)] = bias
    return flat
