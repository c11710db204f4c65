"""batch_norm_grad: dx of a batch norm in training, with the gradients of its weights.

Idea      A task is some channels of the whole batch: their sums, then their dx, while x and dy are in cache. Channels
          of few pixels are columns, summed side by side.
Order     Rows in order, in float64; pixels as of microkernels/sums.py, fewer than 64 each in a sum of its own.
Floor     Memory: x and dy in, dx out.
Tried     The Mask before it, the gradient of a ReLU, in the same launch: slower than on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onchip.kernels.batch_norm_run import BatchNormGradRun, find_gradients
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, doubles_at, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.sums import PRODUCTS, SUM, sum_terms
from onchip.kernels.cpu.threading.launches import CompiledLaunch, operand_at, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import BatchNormGrad, WeightGrad
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.plan import values_read, values_written

_RUN = 64  # pixels per channel from which on they are summed channel by channel
_COLUMNS = 256  # per task, of channels with fewer pixels
_THREAD_ELEMENTS = 1 << 14  # per thread: below this, a thread is not woken
_ZERO = np.float32(0)
_OPERANDS = ("x", "dy", "dx", "new_d_weight", "new_d_bias")
_ROLES = ("mean", "var", "weight", "d_weight", "d_bias")

# Layout of the array that `_run` reads: sizes; bits of eps as a float64; scratch; operands, -1 for none; addresses of
# weights, 0 for none. Without gradients of the weights to write, D_WEIGHT and D_BIAS are given.
(
    _C, _P, _EPS, _SCRATCH, _X, _DY, _DX, _NEW_D_WEIGHT, _NEW_D_BIAS, _MEAN, _VAR, _WEIGHT, _D_WEIGHT, _D_BIAS, _FIELDS,
) = range(15)  # fmt: skip
# Arrays of _COLUMNS elements in a worker's scratch, in bytes: two of float64, then four of float32.
_SUMS, _PRODUCTS, _MEANS, _SHIFTS, _SLOPES, _FACTORS, _SCRATCH_BYTES = (
    _COLUMNS * i for i in (0, 8, 16, 20, 24, 28, 32)
)


@compiled()
def _sum_rows(layer: Array, x: int, dy: int, rows: int, width: int, scratch: int) -> None:
    """Sums over rows of dy and of (x - mean) dy: of one channel, or of each of `width` columns."""
    row, is_run = layer[_C] * layer[_P] * 4, layer[_P] >= _RUN
    sums, products = doubles_at(scratch + _SUMS, width), doubles_at(scratch + _PRODUCTS, width)
    means = floats_at(scratch + _MEANS, width)
    for i in range(1 if is_run else width):
        sums[i] = products[i] = 0.0
    for r in range(rows):
        at, d_at = x + r * row, dy + r * row
        if is_run:
            sums[0] += sum_terms(d_at, 0, width, _ZERO, SUM)
            products[0] += sum_terms(at, d_at, width, means[0], PRODUCTS)
        else:
            values, d = floats_at(at, width), floats_at(d_at, width)
            for i in range(width):
                sums[i] += np.float64(d[i])
                products[i] += np.float64(values[i] - means[i]) * np.float64(d[i])


@compiled()
def _set_gradients(layer: Array, operands: int, first: int, channels: int, n: float, scratch: int) -> None:
    """From the sums of some channels: the gradients of their weights, and what dx needs, for every column."""
    C, P, eps = layer[_C], layer[_P], np.int64(layer[_EPS]).view(np.float64)
    new_d_weight, new_d_bias = operand_at(layer, _NEW_D_WEIGHT, operands), operand_at(layer, _NEW_D_BIAS, operands)
    columns = 1 if P >= _RUN else P
    width = channels * columns
    sums, products = doubles_at(scratch + _SUMS, width), doubles_at(scratch + _PRODUCTS, width)
    shifts, slopes = floats_at(scratch + _SHIFTS, width), floats_at(scratch + _SLOPES, width)
    factors = floats_at(scratch + _FACTORS, width)
    for channel in range(channels):
        c, begin = first + channel, channel * columns
        inverse = 1.0 / np.sqrt(np.float64(floats_at(layer[_VAR], C)[c]) + eps)
        d_weight, d_bias = 0.0, 0.0
        if layer[_D_WEIGHT] != 0:
            d_weight += np.float64(floats_at(layer[_D_WEIGHT], C)[c])
            d_bias += np.float64(floats_at(layer[_D_BIAS], C)[c])
        else:
            for i in range(begin, begin + columns):
                d_bias += sums[i]
                d_weight += products[i]
            d_weight *= inverse
            if new_d_weight != 0:
                floats_at(new_d_weight, C)[c] = np.float32(d_weight)
            if new_d_bias != 0:
                floats_at(new_d_bias, C)[c] = np.float32(d_bias)
        shift, slope = np.float32(d_bias / n), np.float32(d_weight / n * inverse)
        factor = np.float32(np.float64(floats_at(layer[_WEIGHT], C)[c]) * inverse)
        for i in range(begin, begin + columns):
            shifts[i], slopes[i], factors[i] = shift, slope, factor


@compiled()
def _write_dx(layer: Array, x: int, dy: int, dx: int, rows: int, width: int, scratch: int) -> None:
    row, means, shifts = (
        layer[_C] * layer[_P] * 4,
        floats_at(scratch + _MEANS, width),
        floats_at(scratch + _SHIFTS, width),
    )
    slopes, factors = floats_at(scratch + _SLOPES, width), floats_at(scratch + _FACTORS, width)
    for r in range(rows):
        values, d = floats_at(x + r * row, width), floats_at(dy + r * row, width)
        result = floats_at(dx + r * row, width)
        if layer[_P] >= _RUN:
            mean, shift, slope, factor = means[0], shifts[0], slopes[0], factors[0]
            for i in range(width):
                result[i] = (d[i] - shift - (values[i] - mean) * slope) * factor
        else:
            for i in range(width):
                result[i] = (d[i] - shifts[i] - (values[i] - means[i]) * slopes[i]) * factors[i]


@compiled()
def _channels(worker: int, task: int, layer: Array, operands: int, rows: int, channels: int) -> None:
    """Some channels over all rows."""
    C, P, scratch = layer[_C], layer[_P], layer[_SCRATCH] + worker * _SCRATCH_BYTES
    first = task * channels
    count = min(channels, C - first)
    offset, width = first * P * 4, count * P
    x, dy = operand_at(layer, _X, operands) + offset, operand_at(layer, _DY, operands) + offset
    dx = operand_at(layer, _DX, operands) + offset
    mean, columns = floats_at(layer[_MEAN], C), 1 if P >= _RUN else P
    means = floats_at(scratch + _MEANS, count * columns)
    for i in range(count * columns):
        means[i] = mean[first + i // columns]
    if layer[_D_WEIGHT] == 0:
        _sum_rows(layer, x, dy, rows, width, scratch)
    _set_gradients(layer, operands, first, count, np.float64(max(1, rows * P)), scratch)
    _write_dx(layer, x, dy, dx, rows, width, scratch)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    C, P = layer[_C], layer[_P]
    channels = 1 if P >= _RUN else max(1, min(_COLUMNS // P, C))
    threads = max(1, min(threads, B * C * P // _THREAD_ELEMENTS))
    run_tasks(_channels, (layer, operands, B, channels), (C + channels - 1) // channels, threads)


@dataclass(frozen=True)
class Facts:
    C: int
    P: int  # pixels per channel
    operands: tuple[int, ...]  # indices of _OPERANDS; -1 for none
    eps: float


class BatchNormGradKernel(CpuKernel):
    name = "batch_norm_grad"
    layers = (WeightGrad, BatchNormGrad)
    order = "rows in order, in float64; pixels by their number"

    def applies(self, net: Network, start: int) -> bool:
        return _run_of(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        run = _run_of(net, start)
        assert run is not None
        x, weights = net.types[run.norm.inputs[0]], run.dx[0].weights
        roles = [role for role in _ROLES if not (run.sums and role in ("d_weight", "d_bias"))]
        kinds = [*(net.weight_type(weights[role]) for role in roles), *(net.types[name] for name in run.nodes)]
        if odd := next((kind.dtype for kind in kinds if kind.dtype != "float32"), ""):
            yield Refusal(self.name, run.norm.name, f"computes on float32, not {odd}")
            return
        C, P = x.row_shape[0], math.prod(x.row_shape[1:])
        if not C * P:
            yield Refusal(self.name, run.norm.name, "needs channels with elements")
            return
        recipes = {role: Recipe.of(as_is, (weights[role],), (C,)) for role in roles}
        cost = CoreCost(
            sum(net.row_flop(net.by_name[name]) for name in run.nodes), 3 * x.row_bytes, recipe_bytes(recipes),
            row_cache_bytes=x.row_bytes,
        )  # fmt: skip
        claim = self.claim(
            net, run.norm, None, nodes=run.nodes, label=f"{self.name}<{run.label}>", cost=cost, recipes=recipes,
            why="sums and dx of a channel while it is in cache",
        )  # fmt: skip
        values = [run.operands[name] for name in values_read(net, claim)]
        values += [run.sums.get(name, "dx") for name in values_written(net, run.nodes)]
        operands = tuple(values.index(each) if each in values else -1 for each in _OPERANDS)
        yield replace(claim, facts=Facts(C, P, operands, run.eps))

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        arrays = {role: np.ascontiguousarray(weight) for role, weight in weights.items()}
        eps = int(np.float64(meta.eps).view(np.int64))

        def facts(threads: int) -> tuple[int, object]:
            scratch = np.empty(threads * _SCRATCH_BYTES, np.uint8)
            layer = words(meta.C, meta.P, eps, scratch, *meta.operands, *(arrays.get(role, 0) for role in _ROLES))
            return address(layer), (layer, scratch, arrays)

        return CompiledLaunch(address_of(_run), facts)


def _run_of(net: Network, start: int) -> BatchNormGradRun | None:
    """The gradients of a norm from net.nodes[start] on, if dx is one; sums alone are those of batch_sums."""
    run = find_gradients(net, start)
    return run if run is not None and run.dx and not run.mask else None
