"""norm: LayerNorm, RMSNorm and GroupNorm, one normalised part of a row at a time.

Idea      A part is read from memory once: mean, variance and result each read it from cache.
Order     As of microkernels/sums.py: it depends on the part's size only.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.sums import ORDER, SQUARES, SUM, sum_terms
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import RowNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_TASK_ELEMENTS = 1 << 12  # minimum per task
_THREAD_ELEMENTS = 1 << 13  # minimum per woken thread


@linked(*(types.int64,) * 10, types.float32)
def _normalise(
    x: int, y: int, first: int, parts: int, size: int, run: int, weight: int, bias: int, groups: int, is_centred: int,
    eps: np.float32,
) -> None:  # fmt: skip
    """Normalise `parts` parts of `size` elements, from part `first`. weight or bias of 0: none."""
    channels = size // run
    for part in range(first, first + parts):
        offset = part * size * 4
        shift = np.float32(sum_terms(x + offset, 0, size, np.float32(0), SUM) / size) if is_centred else np.float32(0)
        scale = np.float32(1) / np.sqrt(np.float32(sum_terms(x + offset, 0, size, shift, SQUARES) / size) + eps)
        at = part % groups * channels * 4
        if run > 1:
            for c in range(channels):
                factor = scale * floats_at(weight + at, channels)[c] if weight != 0 else scale
                addend = floats_at(bias + at, channels)[c] if bias != 0 else np.float32(0)
                x_run, y_run = floats_at(x + offset + c * run * 4, run), floats_at(y + offset + c * run * 4, run)
                for n in range(run):
                    y_run[n] = (x_run[n] - shift) * factor + addend
        else:
            x_run, y_run = floats_at(x + offset, size), floats_at(y + offset, size)
            factors, shifts = floats_at(weight + at, size), floats_at(bias + at, size)
            if weight != 0 and bias != 0:
                for n in range(size):
                    y_run[n] = (x_run[n] - shift) * scale * factors[n] + shifts[n]
            elif weight != 0:
                for n in range(size):
                    y_run[n] = (x_run[n] - shift) * scale * factors[n]
            elif bias != 0:
                for n in range(size):
                    y_run[n] = (x_run[n] - shift) * scale + shifts[n]
            else:
                for n in range(size):
                    y_run[n] = (x_run[n] - shift) * scale


@compiled()
def _normalise_task(
    worker: int, task: int, x: int, y: int, count: int, per_task: int, size: int, run: int, weight: int, bias: int,
    groups: int, is_centred: int, eps: np.float32,
) -> None:  # fmt: skip
    first = task * per_task
    parts = min(per_task, count - first)
    _normalise(x, y, first, parts, size, run, weight, bias, groups, is_centred, eps)


# Fields of a layer; eps as its bits.
_COUNT, _PER_TASK, _SIZE, _RUN, _WEIGHT, _BIAS, _GROUPS, _IS_CENTRED, _EPS, _WORDS = range(10)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """B rows of `count` parts; the code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    count, per_task, eps = B * layer[_COUNT], layer[_PER_TASK], np.int32(layer[_EPS]).view(np.float32)
    arguments = (
        x, y, count, per_task, layer[_SIZE], layer[_RUN], layer[_WEIGHT], layer[_BIAS], layer[_GROUPS],
        layer[_IS_CENTRED], eps,
    )  # fmt: skip
    threads = max(1, min(threads, count * layer[_SIZE] // _THREAD_ELEMENTS))
    run_tasks(_normalise_task, arguments, (count + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    parts: NormSegments
    groups: int  # parts with different weights
    is_centred: bool
    eps: float


class NormKernel(CpuKernel):
    name = "norm"
    layers = (RowNorm,)
    order = ORDER

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x, weights = node.layer, net.types[node.inputs[0]], node.weights.items()
        assert isinstance(layer, RowNorm)
        if odd := next((d for _, w in weights if (d := net.weight_type(w).dtype) != "float32"), ""):
            yield Refusal(self.name, node.name, f"computes on float32, not weights of {odd}")
            return
        parts, shape = layer.parts(x), layer.weight_shape(x)
        recipes = {role: Recipe.of(as_is, (name,), shape) for role, name in weights}
        groups = max(1, int(np.prod(shape)) * parts.run // parts.size)
        cost = CoreCost(
            net.row_flop(node), 2 * x.row_bytes, sum(recipe.nbytes for recipe in recipes.values()),
            row_cache_bytes=2 * x.row_bytes,
        )  # fmt: skip
        facts = Facts(parts, groups, layer.is_centred, layer.attributes()["eps"])
        label = f"{self.name}<{layer.kind},{parts.size}>"
        yield self.claim(net, node, facts, label=label, cost=cost, recipes=recipes)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        arrays = {role: np.ascontiguousarray(weight) for role, weight in weights.items()}
        parts, eps = facts.parts, int(np.float32(facts.eps).view(np.int32))
        fields = words(
            parts.count, max(1, _TASK_ELEMENTS // parts.size), parts.size, parts.run, arrays.get("weight", 0),
            arrays.get("bias", 0), facts.groups, int(facts.is_centred), eps,
        )  # fmt: skip
        return CompiledLaunch(address_of(_run), lambda threads: (address(fields), (fields, arrays)))
