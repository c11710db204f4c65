"""norm_grad: dx of LayerNorm, RMSNorm and GroupNorm, one normalised part of a row at a time.

Idea      A part of x and dy is read from memory once: mean, variance, the sums of dn = dy weight and of dn (x - mean),
          and dx each read it from cache. dn is written to dx first.
Order     As of microkernels/sums.py: it depends on the part's size only.
Floor     Memory: x and dy in, dx out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.sums import ORDER, PRODUCTS, SQUARES, SUM, sum_terms
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import InputGrad, RowNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_TASK_ELEMENTS = 1 << 12  # minimum per task
_THREAD_ELEMENTS = 1 << 13  # minimum per woken thread
_ZERO = np.float32(0)

# Layout of the array that `_run` reads: parts per batch row, elements per part and per weight; the address of the
# weight, 0 for none; parts with different weights; eps as its bits.
_COUNT, _SIZE, _RUN, _WEIGHT, _GROUPS, _IS_CENTRED, _EPS, _FIELDS = range(8)


@compiled()
def _write_dn(layer: Array, part: int, dy: int, dn: int) -> None:
    """dn = dy weight, of one part."""
    size, run, channels = layer[_SIZE], layer[_RUN], layer[_SIZE] // layer[_RUN]
    d, result = floats_at(dy, size), floats_at(dn, size)
    weight = floats_at(layer[_WEIGHT] + part % layer[_GROUPS] * channels * 4, channels)
    if layer[_WEIGHT] == 0:
        for n in range(size):
            result[n] = d[n]
    elif run == 1:
        for n in range(size):
            result[n] = d[n] * weight[n]
    else:
        for c in range(channels):
            from_run, to_run = floats_at(dy + c * run * 4, run), floats_at(dn + c * run * 4, run)
            for n in range(run):
                to_run[n] = from_run[n] * weight[c]


@compiled()
def _part(layer: Array, x: int, dx: int) -> None:
    """dx of one part, from dn in its place: with n = (x - mean) / s, (dn - mean(dn) - n mean(dn n)) / s."""
    size, eps = layer[_SIZE], np.int32(layer[_EPS]).view(np.float32)
    mean, shift = _ZERO, _ZERO
    if layer[_IS_CENTRED]:
        mean = np.float32(sum_terms(x, 0, size, _ZERO, SUM) / size)
        shift = np.float32(sum_terms(dx, 0, size, _ZERO, SUM) / size)
    variance = sum_terms(x, 0, size, mean, SQUARES) / size
    scale = np.float32(1.0 / np.sqrt(variance + np.float64(eps)))
    slope = np.float32(sum_terms(x, dx, size, mean, PRODUCTS) / size) * scale * scale
    values, result = floats_at(x, size), floats_at(dx, size)
    for n in range(size):
        result[n] = (result[n] - shift - (values[n] - mean) * slope) * scale


@compiled()
def _parts(worker: int, task: int, layer: Array, operands: int, count: int, per_task: int) -> None:
    x, dy, dx, row = int_at(operands), int_at(operands + 8), int_at(operands + 16), layer[_SIZE] * 4
    for part in range(task * per_task, min(count, (task + 1) * per_task)):
        _write_dn(layer, part, dy + part * row, dx + part * row)
        _part(layer, x + part * row, dx + part * row)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    count, size = B * layer[_COUNT], layer[_SIZE]
    per_task = max(1, _TASK_ELEMENTS // size)
    threads = max(1, min(threads, count * size // _THREAD_ELEMENTS))
    run_tasks(_parts, (layer, operands, count, per_task), (count + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    parts: NormSegments
    groups: int  # parts with different weights
    is_centred: bool
    eps: float


class NormGradKernel(CpuKernel):
    name = "norm_grad"
    layers = (InputGrad,)
    order = ORDER

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, RowNorm)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        norm, x, weight = node.layer.attributes()["of"], net.types[node.inputs[0]], node.weights.get("weight", "")
        if weight and net.weight_type(weight).dtype != "float32":
            yield Refusal(self.name, node.name, f"computes on float32, not weights of {net.weight_type(weight).dtype}")
            return
        parts, shape = norm.parts(x), norm.weight_shape(x)
        recipes = {"weight": Recipe.of(as_is, (weight,), shape)} if weight else {}
        groups = max(1, int(np.prod(shape)) * parts.run // parts.size)
        cost = CoreCost(2 * net.row_flop(node), 3 * x.row_bytes, recipe_bytes(recipes), row_cache_bytes=4 * x.row_bytes)
        yield self.claim(
            net, node, Facts(parts, groups, norm.is_centred, norm.eps), cost=cost, recipes=recipes,
            label=f"{norm.kind.lower()}_grad<{parts.size}>",
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        arrays = {role: np.ascontiguousarray(weight) for role, weight in weights.items()}
        parts, eps = meta.parts, int(np.float32(meta.eps).view(np.int32))
        layer = words(parts.count, parts.size, parts.run, arrays.get("weight", 0), meta.groups, meta.is_centred, eps)
        return CompiledLaunch(address_of(_run), lambda threads: (address(layer), (layer, arrays)))
