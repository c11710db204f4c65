"""mlp_fused on the CPU: a whole MLP forward in one parallel loop over row tiles.

Idea    A row tile runs through every layer while it is in L1/L2. x is read once, y is written once, and hidden
        activations never reach main memory. Bias and ReLU run in the GEMM epilogue, other activations in cache.
Floor   A row moves (D_in + D_out) * 4 B and costs 2 * params flop. 72-64-64-4: 304 B and 17,920 flop, 59 flop/B:
        compute-bound on any CPU (two AVX-512 cores: some 300 Gflop/s and 40 GB/s, 8 flop/B).
Cache   2 * tile rows * padded width * 4 B per thread for activations; weights stay in L2, their K chunks in L1.
Limits  float32; any widths, any number of layers and rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import Chain, find_chain, forward_cost, layer_before, why_not_float32
from onchip.kernels.cpu.compiler.compile_ahead import queue_functions
from onchip.kernels.cpu.compiler.jit import address, address_of, code_call, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels import dot, tile
from onchip.kernels.cpu.microkernels.activation import NORMALISERS, activate, normalise
from onchip.kernels.cpu.microkernels.dense import dense, padded_width
from onchip.kernels.cpu.microkernels.dot import NARROW, dense_narrow
from onchip.kernels.cpu.microkernels.packed_layers import layer_table, packed_recipes
from onchip.kernels.cpu.microkernels.tile import PANEL, ROWS_NARROW, packed_size, padded
from onchip.kernels.cpu.threading.launches import CompiledLaunch
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.pointwise import RELU
from onchip.network.graph import Network
from onchip.network.layers import Activation, Linear, Reshape
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

MAX_TILE_ROWS = 64  # larger tiles exceed L1 and are no faster (bench decode)
STREAMED_TILE_ROWS = 256  # if the weights exceed L2, so that every tile streams them again
_SPLIT_BYTES = 256 << 10  # of weights: above this, splitting layers by columns pays for a barrier per layer
MIN_THREAD_ROWS = 32  # below this, threads split the columns, so that each reads only its share of the weights
MIN_THREAD_FMAS = 50_000  # below this, waking a thread takes longer than the work
_WAKE_BYTES = 32 << 10  # of weights: a smaller layer finishes before the other threads wake up
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)
_TABLE_COLUMNS = 5  # of layer_table

# Layout of `args`, the array that the compiled functions read: addresses, then sizes and flags.
(
    _W, _BIAS, _TABLE, _SCRATCH, _HALF, _L, _NORMALISE, _CODE, _MAX_ROWS, _ROW_FMAS, _IS_HEAVY, _VECTORS, _FIELDS,
) = range(13)  # fmt: skip


@linked(*(types.int64,) * 9)
def _layer_columns(
    src: int, src_row: int, rows: int, w: int, bias: int, dst: int, row: int, first: int, columns: int
) -> None:
    """Compute some columns of a layer, from a multiple of PANEL on: packed panels are contiguous.

    src, w, bias, dst  addresses; w and bias point to those of all layers
    row                address of the layer's table row: K, N, offset of w, offset of bias, activation
    """
    layer = ints_at(row, _TABLE_COLUMNS)
    K, N, code, stride = layer[0], layer[1], layer[4], padded_width(layer[1])
    floor = _ZERO if code == RELU else _NO_FLOOR
    if N <= NARROW:  # at most one panel, so `columns` covers all of it
        dense_narrow(src, src_row, rows, w + layer[2] * 4, K, N, bias + layer[3] * 4, dst, stride * 4, floor)
    else:
        dense(
            src, src_row, rows, w + (layer[2] + first * K) * 4, K, columns, bias + (layer[3] + first) * 4,
            dst + first * 4, stride * 4, floor,
        )  # fmt: skip
    if code > RELU:
        if N > NARROW and columns == stride:  # padding is scratch: one long loop without a remainder
            activate(dst, 1, rows * stride, 0, code)
        else:
            activate(dst + first * 4, rows, min(columns, N - first), stride, code)


@compiled(inline=True)
def _table_row(args: Array, i: int) -> int:
    """Address of the table row of layer i."""
    return args[_TABLE] + i * _TABLE_COLUMNS * 8  # type: ignore[no-any-return]


@compiled(inline=True)
def _width(args: Array, i: int) -> int:
    """Input width of layer i; for i = L, the output width of the network."""
    return int_at(_table_row(args, i)) if i < args[_L] else int_at(_table_row(args, i - 1) + 8)  # type: ignore[no-any-return]


@compiled()
def _forward_tile(x: int, rows: int, y: int, scratch: int, args: Array) -> None:
    """Run the network on `rows` rows in the calling thread; layers alternate between the two halves of scratch.

    x, y, scratch  addresses
    """
    src, src_row = x, _width(args, 0) * 4
    for i in range(args[_L]):
        dst, width = scratch + (i % 2) * args[_HALF], padded_width(_width(args, i + 1))
        _layer_columns(src, src_row, rows, args[_W], args[_BIAS], dst, _table_row(args, i), 0, width)
        src, src_row = dst, width * 4
    _finish(src, rows, _width(args, args[_L]), args[_NORMALISE], args[_CODE], y)


_normalise = code_call(5)  # address, rows, width, stride, code of the normaliser


@linked(*(types.int64,) * 6)
def _finish(src: int, rows: int, D_out: int, normaliser: int, code: int, y: int) -> None:
    """Apply the normaliser (softmax; its address or 0), then copy the last layer's padded rows to y."""
    stride = padded_width(D_out)
    if normaliser:
        _normalise(normaliser, src, rows, D_out, stride, code)
    for r in range(rows):
        source, target = floats_at(src + r * stride * 4, D_out), floats_at(y + r * D_out * 4, D_out)
        for n in range(D_out):
            target[n] = source[n]


@compiled()
def _tile_task(worker: int, task: int, x: int, B: int, y: int, args: Array, tile_rows: int) -> None:
    """One row tile of the batch; worker i uses the two scratch halves from 2 * i * half on."""
    first, scratch = task * tile_rows, args[_SCRATCH] + 2 * worker * args[_HALF]
    x, y = x + first * _width(args, 0) * 4, y + first * _width(args, args[_L]) * 4
    _forward_tile(x, min(tile_rows, B - first), y, scratch, args)


@compiled()
def _column_task(worker: int, task: int, src: int, src_row: int, B: int, args: Array, dst: int, i: int, N: int) -> None:
    """One task of _forward_few: N columns of layer i."""
    first = task * N
    columns = min(N, padded_width(_width(args, i + 1)) - first)
    _layer_columns(src, src_row, B, args[_W], args[_BIAS], dst, _table_row(args, i), first, columns)


@compiled()
def _forward_few(x: int, B: int, y: int, args: Array, threads: int) -> None:
    """Forward pass for few rows: threads split every layer by columns, so each reads only its share of the weights."""
    src, src_row = x, _width(args, 0) * 4
    for i in range(args[_L]):
        dst, width = args[_SCRATCH] + (i % 2) * args[_HALF], padded_width(_width(args, i + 1))
        columns = width
        if src_row * width > _WAKE_BYTES:
            columns = (width + threads * PANEL - 1) // (threads * PANEL) * PANEL
        run_tasks(_column_task, (src, src_row, B, args, dst, i, columns), (width + columns - 1) // columns, threads)
        src, src_row = dst, width * 4
    _finish(src, B, _width(args, args[_L]), args[_NORMALISE], args[_CODE], y)


def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Run the network on B batch rows; entry point of a CompiledLaunch."""
    args, x, y = ints_at(facts, _FIELDS), int_at(operands), int_at(operands + 8)
    B = B * args[_VECTORS]
    threads = max(1, min(threads, B * args[_ROW_FMAS] // MIN_THREAD_FMAS))
    thread_rows = (B + threads - 1) // threads  # small batches: one tile per thread rather than one full tile
    tile_rows = min(args[_MAX_ROWS], (thread_rows + ROWS_NARROW - 1) // ROWS_NARROW * ROWS_NARROW)
    if args[_IS_HEAVY] and threads > 1 and thread_rows < MIN_THREAD_ROWS:
        _forward_few(x, B, y, args, threads)
    else:
        run_tasks(_tile_task, (x, B, y, args, tile_rows), (B + tile_rows - 1) // tile_rows, threads)


@functools.cache
def _code() -> int:
    """Compiled or loaded for the first network that needs it."""
    return address_of(linked(*(types.int64,) * 4)(_run))


@dataclass(frozen=True)
class Facts:
    chain: Chain
    vectors: int  # rows of the chain per batch row
    max_tile_rows: int


class MlpFusedKernel(CpuKernel):
    name = "mlp_fused"
    layers = (Linear, Reshape)
    dtypes = DTYPE_BYTES  # why_not_float32 decides

    def applies(self, net: Network, start: int) -> bool:
        return not _is_covered(net, start) and find_chain(net, start, (Activation,)) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        chain = find_chain(net, start, (Activation,))
        assert chain is not None
        if why_not := why_not_float32(net, chain):
            yield Refusal(self.name, chain.nodes[0], why_not)
            return
        widest = max(padded(width) for width in chain.widths[1:])
        cached_rows = device.fast_bytes // 2 // (8 * widest) // ROWS_NARROW * ROWS_NARROW
        weight_bytes = 4 * sum(packed_size(layer.D_in, layer.D_out) for layer in chain.layers)
        tile_rows = max(ROWS_NARROW, min(MAX_TILE_ROWS, cached_rows))
        if weight_bytes > device.fast_bytes:
            tile_rows = STREAMED_TILE_ROWS
        activation_bytes = 2 * tile_rows * widest * 4
        work = forward_cost(net, chain)
        cost = CoreCost(
            work.row_flop, work.row_bytes, work.fixed_bytes,
            rows_per_core=0 if weight_bytes > _SPLIT_BYTES else ROWS_NARROW, tile_rows=tile_rows,
            tile_bytes=weight_bytes if weight_bytes > device.cache_bytes else 0,
        )  # fmt: skip
        yield Claim(
            self.name, f"mlp_fused<{chain.label}>", chain.nodes, cost,
            why=f"tiles of {tile_rows} rows ({activation_bytes // 1024} KiB) stay in cache from layer to layer",
            recipes=packed_recipes(net, chain, NARROW), fast_bytes=activation_bytes, order=_order(chain),
            facts=Facts(chain, net.types[net.nodes[start].inputs[0]].row_size // chain.widths[0], tile_rows),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        assert isinstance(claim.facts, Facts)
        chain, rows, vectors = claim.facts.chain, claim.facts.max_tile_rows, claim.facts.vectors
        table, half = layer_table(chain), rows * max(padded(width) for width in chain.widths[1:])
        row_fmas = sum(layer.D_in * layer.D_out for layer in chain.layers)
        is_heavy = weights["w"].nbytes > _SPLIT_BYTES
        if chain.normaliser:
            queue_functions((normalise,))
        code = _code()
        normaliser = (address_of(normalise) if chain.normaliser else 0), NORMALISERS[chain.normaliser]
        sizes = half * 4, len(table), *normaliser, rows, row_fmas, is_heavy, vectors

        def facts(threads: int) -> tuple[int, object]:
            scratch = aligned_zeros(threads * 2 * half)
            addresses = (address(array) for array in (weights["w"], weights["bias"], table, scratch))
            args = np.array((*addresses, *sizes), np.int64)
            return address(args), (args, scratch, table, weights)

        return CompiledLaunch(code, facts)


def _order(chain: Chain) -> str:
    orders = [dot.ORDER if layer.D_out <= NARROW else tile.ORDER for layer in chain.layers]
    return "; ".join(dict.fromkeys([*orders, "softmax in order"] if chain.normaliser else orders))


def _is_covered(net: Network, start: int) -> bool:
    """Whether a chain that starts earlier covers this layer: only maximal chains are claimed."""
    before = layer_before(net, start, (Activation,))
    operands = [] if before is None else [net.types[before.inputs[0]], *net.node_weight_types(before).values()]
    return bool(operands) and all(operand.dtype == "float32" for operand in operands)
