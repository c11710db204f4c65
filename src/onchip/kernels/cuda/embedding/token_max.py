"""Token convolutions and their max over time: host side of embedding/token_max.cu."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from ctypes import c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, StatusWord, Struct, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES, IDS
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.embedding.gather import HALF
from onchip.kernels.cuda.embedding.token_slices import (
    FP8_ARCHITECTURES,
    MAX_TAPS,
    MAX_TOKENS,
    STORED,
    check_fp8,
    narrow_tables,
    slice_count,
    sliced,
    split_tables,
    token_taps,
)
from onchip.kernels.cuda.mma import wgmma_tile
from onchip.kernels.cuda.mma.wgmma_tile import WgmmaGemm
from onchip.kernels.fp8_tables import FP8, peaks_of
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.kernels.token_branches import REFUSED, Branch, Branches, find_branches
from onchip.network.graph import Network
from onchip.network.layers import Elementwise, TokenConv
from onchip.network.recipe import Recipe, as_is, op_name
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.rewrites.embedding import token_tables

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, LANES, MAX_BRANCHES = 128, 8, 16  # as in token_max.cu
MAX_SHARE_BITS, WARP_BITS = (THREADS // LANES).bit_length() - 1, (32 // LANES).bit_length() - 1
BLOCKS_PER_SM = 6


class BranchStruct(CStruct):
    source, c_name = SOURCE, "Branch"
    _fields_ = (
        ("K", c_uint32), ("C", c_uint32), ("P", c_uint32), ("stride", c_uint32), ("before", c_uint32),
        ("column", c_uint32), ("slices", c_uint32), ("window", c_uint32), ("activation", c_uint32 * 3),
    )  # fmt: skip


class BranchesStruct(CStruct):
    source, c_name = SOURCE, "Branches"
    _fields_ = (
        ("tables", c_void_p * MAX_BRANCHES), ("biases", c_void_p * MAX_BRANCHES), ("peaks", c_void_p * MAX_BRANCHES),
        ("branch", BranchStruct * MAX_BRANCHES),
    )  # fmt: skip


@dataclass(frozen=True)
class GatherCost(Cost):
    """Cost of look-ups: table rows are read from L2, and at most the whole table from device memory."""

    row_looked_up_bytes: int = 0  # per batch row
    table_bytes: int = 0
    slice_bytes: int = 0  # working set of concurrent blocks

    def floor_us(self, device: Device, precision: str, B: int) -> float:
        # Device memory reads of tables count as zero: all sentences may look up the same few rows.
        moved = dataclasses.replace(self, row_bytes=self.row_bytes - self.row_looked_up_bytes)
        cached = self.row_looked_up_bytes * B / device.peak.cache_bandwidth * 1e6
        return max(Cost.floor_us(moved, device, precision, B), cached + self.launches * device.peak.launch_us)

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        looked_up = self.row_looked_up_bytes * B
        l2_rate = costs_of(device).token_max.l2_share * device.peak.cache_bandwidth
        rate = l2_rate if self.slice_bytes <= device.cache_bytes else device.bandwidth
        from_memory = self.row_bytes * B - looked_up + min(looked_up, self.table_bytes)
        launch_us = device.graph_launch_us or device.launch_us
        return max(looked_up / rate, from_memory / device.bandwidth) * 1e6 + self.launches * launch_us


@dataclass(frozen=True)
class TokenBranch:
    """A token convolution, as passed to the kernel."""

    K: int
    C: int
    P: int
    stride: int
    before: int
    column: int  # first column in y
    activation: Elementwise | None
    has_bias: bool
    window: int = 0  # of a SequenceMax; 0: the maximum is over all positions

    @property
    def span(self) -> int:
        """Positions of a sentence that its windows cover, padding included."""
        return (self.P - 1) * self.stride + self.K

    def packed(self, slices: int) -> Struct:
        return BranchStruct.of(
            K=self.K, C=self.C, P=self.P, stride=self.stride, before=self.before, column=self.column, slices=slices,
            window=self.window, activation=activation_words(self.activation),
        )  # fmt: skip


@dataclass(frozen=True)
class TokenMaxLowering:
    """One launch per 16 branches:

    token_max(ids, lengths, y, status, branches, B, S, V, D_out, length_bytes, count, share_bits, pitch)
    """

    ids: StatusWord
    dtypes: tuple[str, str, str]  # of ids, tables and y
    branches: tuple[TokenBranch, ...]
    D_out: int
    units: int
    shared_limit: int  # bytes per block
    length_bytes: int = 0  # per sentence length; 0: no lengths

    @property
    def program(self) -> Program:
        ids, table, y = self.dtypes
        return Program(SOURCE, f"token_max<{IDS[ids]}, {STORED[table]}, {ELEMENT_TYPES[y]}>")

    @property
    def pitch(self) -> int:
        """Row indices per sentence in shared memory; odd, so that sentences start in different banks."""
        return max(branch.span for branch in self.branches) | 1

    def share_bits(self, B: int) -> int:
        """log2 of the thread groups per sentence: enough to fill all SMs, with their row indices in shared memory."""
        slices = sum(slice_count(branch.C, self.dtypes[1]) for branch in self.branches)
        enough, capacity, bits = self.units * BLOCKS_PER_SM, self.shared_limit // BLOCKS_PER_SM, 0
        while bits < MAX_SHARE_BITS and (self._blocks(slices, B, bits) < enough or self._shared_bytes(bits) > capacity):
            bits += 1
        return bits

    def fits(self) -> bool:
        return self._shared_bytes(MAX_SHARE_BITS) <= self.shared_limit

    def _sentences(self, bits: int) -> int:
        return THREADS // LANES >> bits

    def _blocks(self, slices: int, B: int, bits: int) -> int:
        return slices * math.ceil(B / self._sentences(bits))

    def _shared_bytes(self, bits: int) -> int:
        maxima = THREADS * 16 // DTYPE_BYTES[self.dtypes[1]] if bits > WARP_BITS else 0
        return 4 * (self._sentences(bits) * self.pitch + maxima)

    def at(self, B: int) -> Steps:
        if not B:
            return Steps(())
        bits = self.share_bits(B)
        starts = range(0, len(self.branches), MAX_BRANCHES)
        return Steps(tuple(self._launch(B, bits, range(n, min(n + MAX_BRANCHES, len(self.branches)))) for n in starts))

    def _launch(self, B: int, bits: int, indices: Sequence[int]) -> KernelLaunch:
        slices = [slice_count(self.branches[n].C, self.dtypes[1]) for n in indices]
        branches = BranchesStruct.of(
            tables=[Weight(f"table{n}") for n in indices],
            biases=[Weight(f"bias{n}") if self.branches[n].has_bias else NOTHING for n in indices],
            peaks=[Weight(f"peaks{n}") for n in indices] if self.dtypes[1] == FP8 else [],
            branch=[self.branches[n].packed(count) for n, count in zip(indices, slices, strict=True)],
        )  # fmt: skip
        sizes = Int64(B), Int64(*self.ids.row_shape), Int64(self.ids.limit), Int64(self.D_out)
        counts = UInt32(self.length_bytes), UInt32(len(indices)), UInt32(bits), UInt32(self.pitch)
        lengths = Input(1) if self.length_bytes else NOTHING
        grid = self._blocks(sum(slices), B, bits)
        config = LaunchConfig((grid, 1, 1), (THREADS, 1, 1), self._shared_bytes(bits))
        arguments = (Input(0), lengths, Output(0), self.ids, branches, *sizes, *counts)
        return KernelLaunch(self.program, config, arguments, Budget(registers=80, spill_bytes=32))  # on sm_120


class TokenMaxKernel(CudaKernel):
    name = "token_max"
    layers = (TokenConv,)
    dtypes = IDS

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        found = find_branches(net, start, ACTIVATIONS, casts=tuple(ELEMENT_TYPES))
        if found is None:
            yield Refusal(self.name, node.name, REFUSED)
        elif why := _why_not(net, found, device, job):
            yield Refusal(self.name, node.name, why)
        elif not (lowering := _lowering(net, found, device, job)).fits():
            needed = f"{4 * lowering.pitch:,} B for the ids of a sentence"
            yield Refusal(self.name, node.name, f"needs {needed}, and a block has {device.fast_bytes:,}")
        else:
            yield self._branches(net, found, lowering, device, job)

    def _branches(self, net: Network, found: Branches, lowering: TokenMaxLowering, device: Device, job: Job) -> Claim:
        stored = lowering.dtypes[1]
        recipes: dict[str, Recipe] = {}
        for n, branch in enumerate(found.branches):
            weights = branch.conv.weights
            unsliced = unsliced_tables(net, weights["weight"], stored, device, job)
            shape = net.weights[weights["weight"]].shape
            recipes[f"table{n}"] = sliced(unsliced, (shape[0], shape[1], shape[2]), stored)
            if stored == FP8:
                recipes[f"peaks{n}"] = peaks_of(unsliced, shape[2])
            if "bias" in weights:
                recipes[f"bias{n}"] = Recipe.of(as_is, (weights["bias"],), net.weights[weights["bias"]].shape)
        tables = [recipes[f"table{n}"] for n in range(len(found.branches))]
        ids = net.types[found.branches[0].conv.inputs[0]]
        looked_up = DTYPE_BYTES[stored] * sum(net.row_lookup_elements(branch.conv) for branch in found.branches)
        cost = GatherCost(
            sum(map(net.row_flop, found.nodes)), ids.row_bytes + looked_up + net.types[found.nodes[-1].name].row_bytes,
            launches=len(lowering.at(1).launches), precision="fp32", row_looked_up_bytes=looked_up,
            table_bytes=sum(table.nbytes for table in tables),
            slice_bytes=max(table.nbytes // table.shape[0] for table in tables),
            why_slow=f"table rows come from L2 at {costs_of(device).token_max.l2_share:.2g} of its peak",
        )  # fmt: skip
        taps = "+".join(str(branch.K) for branch in lowering.branches)
        rows = sum(branch.K * branch.P for branch in lowering.branches)
        return self.claim(
            net, found.nodes[0], lowering, label=f"{self.name}<{taps},{lowering.branches[0].C},{stored}>",
            nodes=tuple(node.name for node in found.nodes), cost=cost, recipes=recipes,
            why=f"{rows} looked-up rows summed per sentence, maxima in registers",
            order="taps in order, in float16, then the bias" if stored == FP8 else "taps in order, then the bias",
            reads={found.branches[0].conv.inputs[0]: Use(is_read_often=True)},  # once per slice
        )  # fmt: skip


def _why_not(net: Network, found: Branches, device: Device, job: Job) -> str:
    if job.tables == "fp8" and device.arch not in FP8_ARCHITECTURES:
        return f"runs on {', '.join(FP8_ARCHITECTURES)}, not {device.arch}"
    tables = [net.weight_type(branch.conv.weights["weight"]) for branch in found.branches]
    if unsupported := next((table.dtype for table in tables if table.dtype not in ELEMENT_TYPES), ""):
        return f"sums {', '.join(ELEMENT_TYPES)}, not {unsupported}"
    if job.tables == "fp8" and any(int(table.shape[1]) > MAX_TAPS for table in tables):
        return f"sums at most {MAX_TAPS} taps of 8-bit tables"
    if len({table.shape[0] for table in tables}) > 1:
        return "needs tables of the same number of rows"
    return "" if int(tables[0].shape[0]) < MAX_TOKENS else f"supports fewer than {MAX_TOKENS:,} tokens"


def _lowering(net: Network, found: Branches, device: Device, job: Job) -> TokenMaxLowering:
    first, y = found.branches[0].conv, net.types[found.nodes[-1].name]
    ids, columns = net.types[first.inputs[0]], found.columns(net)
    V = net.weights[first.weights["weight"]].shape[0]
    return TokenMaxLowering(
        StatusWord(first.inputs[0], ids.row_shape, V), (ids.dtype, _stored(net, found, job), y.dtype),
        tuple(_branch(net, branch, columns[branch.last]) for branch in found.branches), y.row_size, device.units,
        device.fast_bytes, DTYPE_BYTES[net.types[found.lengths].dtype] if found.lengths else 0,
    )  # fmt: skip


def _branch(net: Network, branch: Branch, column: int) -> TokenBranch:
    conv = branch.conv
    assert isinstance(conv.layer, TokenConv)
    _, K, C = net.weights[conv.weights["weight"]].shape
    P = int(net.types[conv.name].shape[2])
    stride, before = conv.layer.stride, conv.layer.pads[0]
    return TokenBranch(K, C, P, stride, before, column, branch.activation, "bias" in conv.weights, branch.window)


def _stored(net: Network, found: Branches, job: Job) -> str:
    """The table dtype: as requested, else the job's half precision, else as stored."""
    if job.tables == "fp8":
        return FP8
    dtypes = {net.weight_type(branch.conv.weights["weight"]).dtype for branch in found.branches}
    half = HALF.get(job.tables) or HALF.get(job.precision)
    return half or (dtypes.pop() if len(dtypes) == 1 else "float32")


def unsliced_tables(net: Network, weight: str, stored: str, device: Device, job: Job) -> str | Recipe:
    """The table before slicing; a folded one is computed by a tensor core gemm where supported."""
    folded = _folded(net, weight)
    if folded is None or device.arch not in wgmma_tile.ARCHITECTURES:
        return weight
    is_narrow = stored in (FP8, HALF.get(job.precision)) and job.precision in HALF
    return _tensor_tables(net, folded, job.precision if is_narrow else "fp32") or weight


def _folded(net: Network, weight: str) -> Recipe | None:
    """The recipe of a folded weight, before any rounding; None if the weight is not folded."""
    found = net.weights[weight]
    while isinstance(found, Recipe) and found.op == op_name(as_is):
        (source,) = found.sources
        found = source if isinstance(source, Recipe) else net.weights[source]
    return found if isinstance(found, Recipe) and found.op == op_name(token_tables) else None


def _tensor_tables(net: Network, folded: Recipe, precision: str) -> Recipe | None:
    """The same tables as a tensor core gemm of rows and taps; None if too small or unsupported."""
    (rows, W), (V, K, C) = folded.sources, folded.shape
    assert isinstance(rows, str)
    E, dtype = net.weights[rows].shape[1], PRECISIONS[precision].dtype
    is_small = K * C * E < wgmma_tile.MIN_WEIGHTS
    if (
        is_small
        or net.weight_type(rows).dtype != "float32"
        or WgmmaGemm(V, K * C, E, precision, (dtype, dtype)).why_not()
    ):
        return None
    taps = Recipe.of(token_taps, (W,), (K * C, E), dtype, E=E)
    if precision == "fp32":
        split = multiplied_weight(taps, (K * C, E), precision)
        return Recipe.of(split_tables, (rows, split), folded.shape, dtype, folded.flop, K=K)
    narrow = Recipe.of(as_is, (rows,), (V, E), dtype)
    return Recipe.of(narrow_tables, (narrow, taps), folded.shape, dtype, folded.flop, K=K)


def _instance(*dtypes: str) -> Instance:
    branches = tuple(TokenBranch(K, 1024, 17 - K, 1, 0, 1024 * n, None, True) for n, K in enumerate((3, 5, 7, 9)))
    status = StatusWord("ids", (16,), 21_635)

    def launch(device: Device) -> KernelLaunch:
        if dtypes[1] == FP8:
            check_fp8(device)
        lowering = TokenMaxLowering(
            status, (dtypes[0], dtypes[1], dtypes[2]), branches, 4096, device.units, device.fast_bytes
        )
        return lowering.at(16_384).launches[0]

    return Instance(", ".join(dtypes), launch)


INSTANCES = (
    _instance("int32", "float16", "float16"), _instance("int32", "float16", "float32"),
    _instance("int32", "bfloat16", "bfloat16"), _instance("int64", "bfloat16", "float32"),
    _instance("int32", "float32", "float32"), _instance("int64", "float32", "float16"),
    _instance("int32", FP8, "float16"), _instance("int32", FP8, "float32"),
)  # fmt: skip
