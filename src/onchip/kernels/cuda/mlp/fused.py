"""Host side of mlp/fused.cu. Pure Python: it plans for a GPU that is not present.

Chunks, strides and shared bytes match `Layout` in the .cu file. They are template arguments of the kernel, which does
not compile if the two sides disagree.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.errors import PlanError
from onchip.kernels.chain import Chain, Dense, end_dtypes, find_chain, forward_cost
from onchip.kernels.cuda.common.activation import cpp_name
from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Weight
from onchip.kernels.cuda.common.chain import ChainKernel, supported_part
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.layers import Activation
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ROWS = (32, 16, 8)  # rows per warp tile, best first: taller tiles reuse each loaded weight more often
# Not 16 warps: 128 registers per thread are too few for 8 x 8 tiles (sm_90a spills).
MAX_WARPS = 12
PART = 128  # K elements per partial sum; longer K needs a second set of accumulators, hence smaller tiles
_MANY_ROWS = 1 << 20  # rows that fill any GPU; used to check instances without a device
FEWEST_WARPS = 4  # one per warp scheduler of an SM; fewer only if nothing else fits


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a block of mlp_fused."""

    rows: int  # rows of the batch per warp tile
    warps: int  # warps per block
    resident: tuple[bool, ...]  # per layer: in shared memory, or read through L1 from L2


@dataclass(frozen=True)
class MlpFusedLowering:
    """A claimed chain, lowered to one launch."""

    chain: Chain
    dtypes: tuple[str, str]  # dtypes of x and y
    tiling: Tiling
    units: int  # number of SMs; one block each

    @property
    def program(self) -> Program:
        return Program(SOURCE, name_expression(self.chain, self.dtypes, self.tiling))

    @property
    def budget(self) -> Budget:
        """One block per SM owns all 65,536 registers; allocated in multiples of 8, at most 255 per thread."""
        return Budget(registers=min(255, 65536 // (32 * self.tiling.warps) // 8 * 8))

    def count(self, B: int) -> int:
        return B * self.chain.vectors

    def launch_config(self, B: int) -> LaunchConfig:
        return launch_config(self.chain, self.tiling, self.count(B), self.units)

    def at(self, B: int) -> Steps:
        arguments = (Input(0), Weight("weights"), Output(0), Int64(self.count(B)))
        return Steps((KernelLaunch(self.program, self.launch_config(B), arguments, self.budget),))


class MlpFusedKernel(ChainKernel):
    name = "mlp_fused"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Claim the longest prefix of the chain that fits (fp32), or a layer too large for mlp_tensor_core (others)."""
        chain = find_chain(net, start, (Activation,), casts=True, most=mlp_tensor_core.MAX_LAYERS)
        assert chain is not None
        note, is_fp32 = "", job.precision == "fp32"
        prefix = chain.first(max(1, fitting_layers(chain, device.fast_bytes)) if is_fp32 else 1)
        prefix, why_not = supported_part(net, prefix)
        if not is_fp32 and not why_not:
            tried = mlp_tensor_core.make_lowering(net, prefix, device, job)
            if not isinstance(tried, str):
                return
            note = f"; in fp32: for {job.precision} it {tried}"
        tiling = None if why_not else choose_tiling(prefix, device.fast_bytes)
        if tiling is None:
            yield Refusal(self.name, net.nodes[start].name, why_not or _does_not_fit(prefix, device))
        else:
            yield self._claim(net, prefix, device, tiling, job.batch, note)

    def _claim(self, net: Network, chain: Chain, device: Device, tiling: Tiling, B: int, note: str) -> Claim:
        used, count = shared_bytes(chain, tiling), max(1, B * chain.vectors)
        tiles = -(-count // tiling.rows)  # a warp computes full tiles, padding rows included
        busy = min(tiling.warps, tiles / device.units) / FEWEST_WARPS  # warps per scheduler
        warp_share = costs_of(device).mlp_fused.one_warp_share
        rate, cost = min(1.0, warp_share * busy) * count / (tiles * tiling.rows), forward_cost(net, chain)
        return self.claim_chain(
            net, chain, MlpFusedLowering(chain, end_dtypes(net, chain), tiling, device.units),
            cost=replace(cost, precision="fp32", rate=rate, min_us=device.unit_read_us(cost.fixed_bytes)),
            why=_why(chain, tiling, used, device) + note, recipes={"weights": pack_recipe(chain, tiling)},
            fast_bytes=used,
            order=f"k in order, partial sums of {PART}" + ("; softmax in order" if chain.normaliser else ""),
        )  # fmt: skip


# -- same arithmetic as Layout in mlp/fused.cu ---------------------------------------------------------------


@functools.cache
def chunks(D_out: int, rows: int) -> tuple[int, ...]:
    """Widths of the column chunks of a layer: 64 while at least 49 columns remain, then narrower."""
    full = (D_out + 15) // 64
    widths, left = [64] * full, D_out - 64 * full
    while left > 0:
        chunk = 32
        while chunk > 128 // rows and left <= chunk // 2:
            chunk //= 2
        widths.append(chunk)
        left -= chunk
    return tuple(widths)


def strides(chain: Chain, rows: int) -> tuple[int, int]:
    """Floats per row in each of a warp's two activation buffers; the second is 0 if unused."""
    widest, at = [chain.layers[0].D_in, 0], 0
    for layer in chain.layers:
        columns = chunks(layer.D_out, rows)
        if len(columns) > 1:  # cannot overwrite its input: the buffers alternate
            at = 1 - at
        widest[at] = max(widest[at], sum(columns))
    first, second = (((width + 3) // 4 | 1) * 4 if width else 0 for width in widest)
    return first, second


def layer_floats(layer: Dense, rows: int) -> int:
    """Floats of one packed layer: W^T (D_in, padded), then the bias (padded)."""
    return (layer.D_in + (layer.bias is not None)) * sum(chunks(layer.D_out, rows))


def warp_bytes(chain: Chain, rows: int) -> int:
    """Shared memory for one warp's activations."""
    return 4 * rows * sum(strides(chain, rows))


def shared_bytes(chain: Chain, tiling: Tiling) -> int:
    """Dynamic shared memory per block: the resident weights and every warp's activations."""
    staged = (layer for layer, is_resident in zip(chain.layers, tiling.resident, strict=True) if is_resident)
    floats = sum(layer_floats(layer, tiling.rows) for layer in staged)
    return 4 * floats + tiling.warps * warp_bytes(chain, tiling.rows)


def fitting_layers(chain: Chain, limit_bytes: int) -> int:
    """Length of the longest prefix that fits: warp_bytes grows with the number of layers."""
    counts = range(1, len(chain.layers) + 1)
    if warp_bytes(chain, ROWS[-1]) <= limit_bytes:
        return len(counts)
    return bisect.bisect(counts, limit_bytes, key=lambda count: warp_bytes(chain.first(count), ROWS[-1]))


def choose_tiling(chain: Chain, limit_bytes: int) -> Tiling | None:
    """The tiling for `limit_bytes` of shared memory per block; None if not even one warp fits.

    First choice: all weights resident and at least four warps. Second: weights through L1, with the largest layers that
    still fit resident. Taller tiles are preferred over more warps.
    """
    heights = ROWS if max(layer.D_in for layer in chain.layers) <= PART else ROWS[1:]
    for rows in heights:
        staged = 4 * sum(layer_floats(layer, rows) for layer in chain.layers)
        warps = min(MAX_WARPS, (limit_bytes - staged) // warp_bytes(chain, rows))
        if warps >= FEWEST_WARPS:
            return Tiling(rows, warps, (True,) * len(chain.layers))
    for rows in heights:
        each = warp_bytes(chain, rows)
        warps = min(MAX_WARPS, limit_bytes // each)
        if warps >= FEWEST_WARPS or (rows == ROWS[-1] and warps > 0):
            return Tiling(rows, warps, _resident(chain, rows, limit_bytes - warps * each))
    return None


def _resident(chain: Chain, rows: int, free_bytes: int) -> tuple[bool, ...]:
    sizes = [4 * layer_floats(layer, rows) for layer in chain.layers]
    resident = [False] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[i] <= free_bytes:
            resident[i] = True
            free_bytes -= sizes[i]
    return tuple(resident)


# -- interface to the runtime --------------------------------------------------------------------------------


def name_expression(chain: Chain, dtypes: tuple[str, str], tiling: Tiling) -> str:
    """The kernel with all its template arguments: the name expression for NVRTC."""
    layers = (
        f"Dense<{a.D_in}, {a.D_out}, {cpp_name(a.activation)}, {_cpp(a.bias is not None)}, {_cpp(is_resident)}>"
        for a, is_resident in zip(chain.layers, tiling.resident, strict=True)
    )
    floats = sum(layer_floats(layer, tiling.rows) for layer in chain.layers)
    types = ", ".join(ELEMENT_TYPES[dtype] for dtype in dtypes)
    head = f"{tiling.rows}, {tiling.warps}, {floats}, {shared_bytes(chain, tiling)}"
    return f"mlp_fused<{types}, {head}, {chain.normaliser or 'NoNormaliser'}, {', '.join(layers)}>"


def launch_config(chain: Chain, tiling: Tiling, rows: int, units: int) -> LaunchConfig:
    """One persistent block per SM, fewer if there are fewer tiles than SMs."""
    tiles = -(-rows // tiling.rows)
    return LaunchConfig((min(units, tiles), 1, 1), (32 * tiling.warps, 1, 1), shared_bytes(chain, tiling))


def pack_recipe(chain: Chain, tiling: Tiling) -> Recipe:
    """All weights in one flat array, in layer order; columns past D_out are zeros."""
    sources = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
    total = sum(layer_floats(layer, tiling.rows) for layer in chain.layers)
    has_bias = tuple(layer.bias is not None for layer in chain.layers)
    return Recipe.of(pack_columns, sources, (total,), size=total, rows=tiling.rows, has_bias=has_bias)


@recipe_op
def pack_columns(*weights: Array, size: int, rows: int, has_bias: tuple[bool, ...]) -> Array:
    """W (D_out, D_in) and optional b (D_out,) of every layer -> W^T (D_in, columns), then b (columns,)."""
    packed, at, arrays = np.zeros(size, np.float32), 0, iter(weights)
    for with_bias in has_bias:
        weight = next(arrays)
        D_out, D_in = weight.shape
        columns = sum(chunks(D_out, rows))
        block = packed[at : at + (D_in + with_bias) * columns].reshape(-1, columns)
        block[:D_in, :D_out] = weight.T
        if with_bias:
            block[D_in, :D_out] = next(arrays)
        at += block.size
    return packed


# -- reasons -------------------------------------------------------------------------------------------------


def _does_not_fit(chain: Chain, device: Device) -> str:
    need = warp_bytes(chain, ROWS[-1])
    return (
        f"does not fit: {ROWS[-1]} rows of activations take {need:,} B, "
        f"a block has {device.fast_bytes:,} B of shared memory ({device.arch})"
    )


def _why(chain: Chain, tiling: Tiling, used_bytes: int, device: Device) -> str:
    why = f"fits: {used_bytes / 1024:.0f} of {device.fast_bytes / 1024:.0f} KiB"
    streamed = tiling.resident.count(False)
    if streamed:
        why += f", weights of {streamed} of {len(chain.layers)} layers stay in L2"
    return why


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


def _instance(name: str, *widths: int, output: str | None = None) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        chain = find_chain(mlp(*widths, output=output), 0, (Activation,))
        assert chain is not None
        tiling = choose_tiling(chain, device.fast_bytes)
        if tiling is None:
            what = f"{MlpFusedKernel.name} does not support {name} on {device.arch}"
            raise PlanError(what, got=_does_not_fit(chain, device))
        return MlpFusedLowering(chain, ("float32", "float32"), tiling, device.units).at(_MANY_ROWS).launches[0]

    return Instance(name, launch)


INSTANCES = (
    _instance("decode", 72, 64, 64, 4),
    _instance("digits", 784, 320, 160, 10, output="LogSoftmax"),
    _instance("long sums", 3000, 100, 10),
    _instance("odd widths", 7, 13, 5, 3, output="Softmax"),
)
