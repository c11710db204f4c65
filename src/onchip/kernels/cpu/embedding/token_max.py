"""token_max on the CPU: a folded text network up to its features: ids in, max-over-time features out, in one pass.

Idea    A token convolution is a sum of table rows (plan/rewrites/embedding.py). For each batch row, the table rows of
        every position are summed block by block in registers, and only the running maximum is written; parallel
        convolutions fill their columns of one output row. An activation before the maximum is applied after it, which
        is equivalent for monotonic ones (ReLU, but not GELU).
Floor   Memory: a sentence reads positions * taps rows of C elements, at random from tables larger than any cache.
        Sentiment (K = 3, 5, 7, 9 over 16 tokens, C = 1024): 244 rows of 4 KiB, 1.0 MB per sentence: 43 us at 23 GB/s.
        The direct convolution is 2.05 Gflop: 6.8 ms at 300 Gflop/s.
Order   A position's rows are read completely before the next position's: each is one page, and the hardware prefetches
        it. Block by block over all positions took 1.4 times as long on two Xeon cores (TLB misses); prefetch
        instructions gained nothing. Branches are the outermost loop: frequent rows of one table stay in L2 (1.13x with
        Zipf ids).
Limits  float32 tables, or 16-bit and 8-bit ones on request; int32 and int64 ids; any sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import KernelError
from onchip.kernels.chain import ids_input
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, compiled
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.embedding.gather import BFLOAT16, BLOCK, FLOAT8, FLOAT16, FLOAT32, VECS, gather_max
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import activate, code_of
from onchip.kernels.cpu.microkernels.tile import padded, padded_bias
from onchip.kernels.cpu.threading.threads import FreeList, run_tasks
from onchip.kernels.fp8_tables import in_fp8, peaks_of, table_peaks
from onchip.kernels.fp8_tables import scales as channel_scales
from onchip.kernels.token_branches import REFUSED, find_branches
from onchip.network.graph import Network
from onchip.network.layers import Activation, TokenConv
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.recipe import Array, Recipe, as_is, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_STORED = {
    "fp32": ("float32", FLOAT32), "fp16": ("int16", FLOAT16), "bf16": ("int16", BFLOAT16), "fp8": ("uint8", FLOAT8),
}  # fmt: skip
_LOWEST, _NO_FEATURE = np.float32(-np.inf), np.float32(0)


@compiled()
def _block(rows: int, K: int, c: int, bias: int, out: int, wide: bool, dtype: int) -> None:
    if dtype == FLOAT32:
        if wide:
            gather_max(rows, K, c * 4, bias, out, VECS, FLOAT32)
        else:
            gather_max(rows, K, c * 4, bias, out, 1, FLOAT32)
    elif dtype == FLOAT16:
        if wide:
            gather_max(rows, K, c * 2, bias, out, VECS, FLOAT16)
        else:
            gather_max(rows, K, c * 2, bias, out, 1, FLOAT16)
    elif dtype == FLOAT8:
        if wide:
            gather_max(rows, K, c, bias, out, VECS, FLOAT8)
        else:
            gather_max(rows, K, c, bias, out, 1, FLOAT8)
    elif wide:
        gather_max(rows, K, c * 2, bias, out, VECS, BFLOAT16)
    else:
        gather_max(rows, K, c * 2, bias, out, 1, BFLOAT16)


@compiled()
def _branch(ids: Array, P: int, table: int, bias: int, facts: Array, dtype: int, rows: Array, out: Array) -> None:
    """The maxima over the first P positions of one token convolution on one row of ids, into out[: padded C]."""
    K, stride, before, C_row = facts[0], facts[1], facts[2], facts[4]
    size = 4 if dtype == FLOAT32 else 1 if dtype == FLOAT8 else 2
    S = len(ids)
    for n in range(C_row):
        out[n] = _LOWEST if P else _NO_FEATURE
    for p in range(P):
        count = 0
        for k in range(K):
            at = p * stride - before + k
            if 0 <= at < S:  # pads contribute nothing
                rows[count] = table + (ids[at] * K + k) * C_row * size
                count += 1
        c = 0
        while c < C_row:
            wide = c + BLOCK <= C_row
            _block(address(rows), count, c, bias + c * 4, address(out) + c * 4, wide, dtype)
            c += BLOCK if wide else LANES


@compiled()
def _features(
    worker: int, task: int, ids: Array, lengths: Array, tables: Array, biases: Array, scales: Array, facts: Array,
    dtype: int, y: Array, scratch: Array, addresses: Array,
) -> None:  # fmt: skip
    """One branch's maxima for one sentence, in their columns of y; tasks are ordered by branch."""
    i, b = divmod(task, len(ids))
    C, code, column, window = facts[i, 5], facts[i, 6], facts[i, 7], facts[i, 8]
    P = facts[i, 3]
    if window:
        P = min(P, (lengths[b] - window) // facts[i, 1] + 1) if lengths[b] >= window else 0
    out = scratch[worker]
    _branch(ids[b], P, tables[i], biases[i], facts[i], dtype, addresses[worker], out)
    if dtype == FLOAT8 and P:
        for n in range(C):
            out[n] = out[n] * scales[i, 0, n] + scales[i, 1, n]
    activate(address(out), 1, C, C, code)
    dst = y[b, column : column + C]
    for n in range(C):
        dst[n] = out[n]


@compiled()
def _run(
    ids: Array, lengths: Array, tables: Array, biases: Array, scales: Array, facts: Array, dtype: int, y: Array,
    scratch: Array, addresses: Array, threads: int,
) -> None:  # fmt: skip
    """y (B, D_out): each branch's maxima in its columns.

    lengths (B) int64, read where a branch has a window
    scales  (branches, 2, padded C) for 8-bit tables: scale and bias, applied to the maxima
    facts   per branch: K, stride, leading pads, positions, padded C, C, activation, first column of y, window
    scratch, addresses  one row per thread
    """
    arguments = (ids, lengths, tables, biases, scales, facts, dtype, y, scratch, addresses)
    run_tasks(_features, arguments, len(ids) * len(facts), threads)


@dataclass(frozen=True, eq=False)
class Facts:
    table: Array  # one row per branch, as _run reads it
    dtype: int


class TokenMaxKernel(CpuKernel):
    name = "token_max"
    layers = (TokenConv,)
    dtypes = ID_DTYPES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        found = find_branches(net, start, (Activation,))
        if found is None:
            yield Refusal(self.name, net.nodes[start].name, REFUSED)
            return
        branches, nodes, column = found.branches, found.nodes, found.columns(net)
        if ids_input(net, branches[0].conv.inputs[0]) is None:
            yield Refusal(self.name, nodes[0].name, "ids are computed, so they cannot be checked before the launch")
            return
        if any(net.weight_type(name).dtype != "float32" for b in branches for name in b.conv.weights.values()):
            yield Refusal(self.name, nodes[0].name, "float32 tables only")
            return
        stored, dtype = _STORED[job.tables]
        rows, recipes = [], {}
        reads = 0
        for i, branch in enumerate(branches):
            conv = branch.conv
            assert isinstance(conv.layer, TokenConv)
            V, K, C = net.weights[conv.weights["weight"]].shape
            P = int(net.types[conv.name].shape[2])
            code = code_of(branch.activation)
            window = (conv.layer.stride, conv.layer.pads[0], P)
            rows.append((K, *window, padded(C), C, code, column[branch.last], branch.window))
            table, width = conv.weights["weight"], padded(C)
            recipe = Recipe.of(token_table, (table,), (V, K, width), stored, width=width, tables=job.tables)
            if job.tables == "fp32" and width == C:  # no copy of a large table
                recipe = Recipe.of(as_is, (table,), (V, K, C))
            recipes[f"table{i}"] = recipe
            bias = conv.weights.get("bias")
            recipes[f"bias{i}"] = padded_bias(bias, C)
            if dtype == FLOAT8:
                recipes[f"peaks{i}"] = peaks_of(conv.weights["weight"], C)
            reads += net.row_lookup_elements(conv) * DTYPE_BYTES[stored]
        added = 4 * sum(net.row_lookup_elements(branch.conv) for branch in branches)  # in float32, for any table dtype
        if sum(recipe.nbytes for recipe in recipes.values()) <= device.fast_bytes:
            reads = 0  # the tables stay in cache
        ids = net.types[branches[0].conv.inputs[0]]
        cost = CoreCost(
            sum(map(net.row_flop, nodes)), ids.row_bytes + reads + net.types[nodes[-1].name].row_bytes,
            row_cache_bytes=added, rows_per_core=1,
        )  # fmt: skip
        taps = "+".join(str(row[0]) for row in rows)
        yield Claim(
            self.name, f"token_max<{taps},{rows[0][5]}{'' if job.tables == 'fp32' else ',' + job.tables}>",
            tuple(node.name for node in nodes), cost,
            why=f"{sum(row[0] * row[3] for row in rows)} table rows summed per sentence, maxima in registers",
            recipes=recipes, fast_bytes=4 * sum(row[4] for row in rows), facts=Facts(np.array(rows, np.int64), dtype),
            order="the bias, then taps in order",
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        assert isinstance(claim.facts, Facts)
        facts, dtype = claim.facts.table, claim.facts.dtype
        count = len(facts)

        def make(threads: int) -> tuple[Array, Array]:
            scratch = aligned_zeros(threads * int(facts[:, 4].max())).reshape(threads, -1)
            return scratch, np.zeros((threads, int(facts[:, 0].max())), np.int64)

        spare = FreeList(make)
        scales = np.zeros((count, 2, int(facts[:, 4].max())), np.float32)
        if dtype == FLOAT8:  # the bias is added after scaling
            for i in range(count):
                scales[i, 0, : facts[i, 5]] = channel_scales(weights[f"peaks{i}"])
                scales[i, 1, : facts[i, 4]] = weights[f"bias{i}"]
            weights = {**weights, **{f"bias{i}": np.zeros_like(weights[f"bias{i}"]) for i in range(count)}}

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            ids = inputs[0].astype(np.int64, copy=False)
            lengths = inputs[-1].reshape(-1).astype(np.int64, copy=False)  # the ids, if no branch reads lengths
            y = outputs[0].reshape(len(ids), -1)
            tables = np.array([weights[f"table{i}"].ctypes.data for i in range(count)])
            biases = np.array([weights[f"bias{i}"].ctypes.data for i in range(count)])
            memory = spare.take(threads)
            _run(ids, lengths, tables, biases, scales, facts, dtype, y, *memory, threads)
            spare.give_back(memory)

        return run


@recipe_op
def token_table(T: Array, width: int, tables: str) -> Array:
    """(V, K, C) -> (V, K, width), padded with zeros; 16-bit and 8-bit dtypes as integers."""
    V, K, C = T.shape
    out = np.zeros((V, K, width), _STORED[tables][0])
    if tables == "fp8":
        _check_finite(T, tables)
        out[:, :, :C] = in_fp8(T, table_peaks(T)).view(np.uint8)
        return out
    for v in range(0, V, 1024):  # in chunks: tables are large
        chunk = T[v : v + 1024]
        out[v : v + 1024, :, :C] = chunk if tables == "fp32" else _half_bits(chunk, tables)
    return out


def _half_bits(chunk: Array, tables: str) -> Array:
    """float32 rounded to float16 or bfloat16, as int16 bits."""
    import ml_dtypes

    with np.errstate(over="ignore"):
        half = chunk.astype(np.float16 if tables == "fp16" else ml_dtypes.bfloat16)
    _check_finite(half.astype(np.float32), tables)
    bits: Array = half.view(np.int16)
    return bits


def _check_finite(rounded: Array, tables: str) -> None:
    if not np.isfinite(rounded).all():
        raise KernelError(
            f"a table does not fit into {tables}", got="values that overflow, or are inf or NaN",
            expected="finite values within its range", hint="tables bf16 (the range of fp32), or fp32",
        )  # fmt: skip
