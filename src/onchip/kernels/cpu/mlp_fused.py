"""mlp_fused on the CPU: a whole MLP forward in one parallel loop over tiles of rows.

Idea    A tile of rows goes through every layer while it lies in L1/L2; x is read once, y written once,
        nothing in between reaches main memory. Bias and ReLU happen in registers, other activations in cache.
Floor   A row moves (D_in + D_out) * 4 B and costs 2 * params flop. 72-64-64-4: 304 B and 17,920 flop, 59 flop/B:
        compute-bound on any CPU (two AVX-512 cores: some 300 Gflop/s and 40 GB/s, 8 flop/B).
Cache   2 * tile rows * padded width * 4 B a thread for activations; weights stay in L2, their chunks in L1.
Limits  float32; any widths, any number of layers and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np

from onchip.kernels.chain import Chain, find_chain, forward_price, why_not_float32
from onchip.kernels.cpu.activation import ACTIVATIONS, NORMALISERS, RELU, activate, code_of, normalise
from onchip.kernels.cpu.dense import dense, padded_width
from onchip.kernels.cpu.jit import LAUNCH, address, compiled, take_ticket, use_threads
from onchip.kernels.cpu.tile import PANEL, ROWS_NARROW, aligned_zeros, pack, packed_size, padded
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.spec.network import Network
from onchip.spec.recipe import Array, Recipe

MAX_TILE_ROWS = 64  # past this the tile outgrows L1 and gains nothing (bench decode)
FAR_TILE_ROWS = 256  # where L2 does not hold the weights and every tile fetches them again
_SPLIT_BYTES = 256 << 10  # weights from which on splitting a layer's columns pays for waiting behind each layer
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)


@compiled()
def _forward_tile(
    x: int, rows: int, y: Array, y_begin: int, w: Array, bias: Array, table: Array, normaliser: int, scratch: Array,
    mine: int, half: int,
) -> None:  # fmt: skip
    """The network on `rows` rows from address x on, into y[y_begin:]; layers use scratch[mine:] two halves in turn."""
    L = len(table)
    D_in, D_out = table[0, 0], table[L - 1, 1]
    src, src_row = x, D_in * 4
    into = mine
    for layer in range(L):
        N, code = table[layer, 1], table[layer, 4]
        into = mine + (layer % 2) * half
        width = padded_width(N)
        dst = address(scratch) + into * 4
        dense(
            src, src_row, rows, address(w) + table[layer, 2] * 4, table[layer, 0], width,
            address(bias) + table[layer, 3] * 4, dst, width * 4, _ZERO if code == RELU else _NO_FLOOR,
        )  # fmt: skip
        if code > RELU:
            activate(dst, rows, N, width, code)
        src, src_row = dst, width * 4
    stride = padded_width(D_out)
    if normaliser:
        normalise(address(scratch) + into * 4, rows, D_out, stride, normaliser)
    for r in range(rows):
        source, target = scratch[into + r * stride :], y[y_begin + r * D_out :]
        for n in range(D_out):
            target[n] = source[n]


@compiled(parallel=True)
def _forward(
    x: int, B: int, y: Array, w: Array, bias: Array, table: Array, normaliser: int, tile_rows: int, scratch: Array,
    half: int, threads: int, tickets: Array,
) -> None:  # fmt: skip
    """y = the network on x, the address of (B, D_in) rows.

    table    a row a layer: K, N, offset of w, offset of bias, activation
    scratch  flat; worker i has the two halves from 2 * i * half on
    """
    D_in, D_out = table[0, 0], table[len(table) - 1, 1]
    tickets[0] = 0
    for worker in numba.prange(threads):
        while True:
            first = take_ticket(address(tickets)) * tile_rows
            if first >= B:
                break
            rows = min(tile_rows, B - first)
            _forward_tile(
                x + first * D_in * 4,
                rows,
                y,
                first * D_out,
                w,
                bias,
                table,
                normaliser,
                scratch,
                2 * worker * half,
                half,
            )


@compiled(parallel=True)
def _forward_few(
    x: int,
    B: int,
    y: Array,
    w: Array,
    bias: Array,
    table: Array,
    normaliser: int,
    scratch: Array,
    half: int,
    threads: int,
) -> None:
    """The same for so few rows that there is no tile for each thread: in every layer a thread takes some columns."""
    src, src_row = x, table[0, 0] * 4
    into = 0
    for layer in range(len(table)):
        K, N, code = table[layer, 0], table[layer, 1], table[layer, 4]
        width = padded_width(N)
        into = (layer % 2) * half
        # Whole panels: those are packed one behind the other.
        share = (width + threads * PANEL - 1) // (threads * PANEL) * PANEL
        dst = address(scratch) + into * 4
        for worker in numba.prange(threads):
            first = worker * share
            columns = min(share, width - first)
            if columns > 0:
                dense(
                    src, src_row, B, address(w) + (table[layer, 2] + first * K) * 4, K, columns,
                    address(bias) + (table[layer, 3] + first) * 4, dst + first * 4, width * 4,
                    _ZERO if code == RELU else _NO_FLOOR,
                )  # fmt: skip
                if code > RELU:
                    activate(dst + first * 4, B, min(columns, N - first), width, code)
        src, src_row = dst, width * 4
    D_out = table[len(table) - 1, 1]
    stride = padded_width(D_out)
    if normaliser:
        normalise(address(scratch) + into * 4, B, D_out, stride, normaliser)
    for r in range(B):
        source, target = scratch[into + r * stride :], y[r * D_out :]
        for n in range(D_out):
            target[n] = source[n]


@dataclass(frozen=True)
class Facts:
    chain: Chain
    max_tile_rows: int


class MlpFused:
    name = "mlp_fused"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        chain = find_chain(net, start, ACTIVATIONS)
        if chain is None or job.is_training:
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
        yield Claim(
            self.name, f"mlp_fused<{chain.label}>", chain.nodes, forward_price(net, chain),
            why=f"{tile_rows} rows at a time stay in {fast // 1024} KiB of cache, layer after layer",
            recipes=packed_recipes(net, chain), fast_bytes=fast, facts=Facts(chain, tile_rows),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        """A function (inputs, outputs, threads) that runs the claim; `weights` are its recipes, evaluated."""
        assert isinstance(claim.facts, Facts)
        chain, max_tile_rows = claim.facts.chain, claim.facts.max_tile_rows
        table, normaliser = layer_table(chain), NORMALISERS[chain.normaliser]
        w, bias = weights["w"], weights["bias"]
        widest = max(padded(width) for width in chain.widths[1:])
        D_in = chain.widths[0]
        half = max_tile_rows * widest
        scratch = aligned_zeros(numba.config.NUMBA_NUM_THREADS * 2 * half)
        tickets = aligned_zeros(1, np.int64)

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = inputs[0], outputs[0].reshape(-1)
            B = x.size // D_in
            share = -(-B // threads)  # small batches: a tile for each thread rather than one full tile
            tile_rows = min(max_tile_rows, -(-share // ROWS_NARROW) * ROWS_NARROW)
            with LAUNCH:
                use_threads(threads)
                if tile_rows >= B and threads > 1 and w.nbytes > _SPLIT_BYTES:
                    _forward_few(x.ctypes.data, B, y, w, bias, table, normaliser, scratch, half, threads)
                    return
                _forward(x.ctypes.data, B, y, w, bias, table, normaliser, tile_rows, scratch, half, threads, tickets)

        return run


def layer_table(chain: Chain) -> Array:
    """A row a layer: K, N, where its weights and its bias begin in the packed arrays, its activation."""
    rows, w_offset, bias_offset = [], 0, 0
    for layer in chain.layers:
        rows.append((layer.D_in, layer.D_out, w_offset, bias_offset, code_of(layer.activation)))
        w_offset += packed_size(layer.D_in, layer.D_out)
        bias_offset += padded(layer.D_out)
    return np.array(rows, np.int64)


def packed_recipes(net: Network, chain: Chain) -> dict[str, Recipe]:
    """All weights in one flat packed array, all biases (zero where there is none) in another."""
    table = layer_table(chain)
    last = chain.layers[-1]
    w_size = int(table[-1, 2]) + packed_size(last.D_in, last.D_out)
    bias_size = int(table[-1, 3]) + padded(last.D_out)

    def weights(*arrays: Array) -> Array:
        flat = aligned_zeros(w_size)
        for array, (K, N, offset, _, _) in zip(arrays, table, strict=True):
            pack(array.T, flat[offset : offset + packed_size(K, N)])
        return flat

    with_bias = [(i, layer.bias) for i, layer in enumerate(chain.layers) if layer.bias]

    def biases(*arrays: Array) -> Array:
        flat = aligned_zeros(bias_size)
        for array, (i, _) in zip(arrays, with_bias, strict=True):
            flat[table[i, 3] : table[i, 3] + len(array)] = array
        return flat

    sources = tuple(layer.weight for layer in chain.layers)
    return {
        "w": Recipe("pack_panels", sources, (w_size,), "float32", 0, weights),
        "bias": Recipe("pack_bias", tuple(name for _, name in with_bias), (bias_size,), "float32", 0, biases),
    }
