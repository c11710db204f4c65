"""dropout: the factors of a dropout from a counter, and their product with x.

Idea      A block of Philox4x32-10 gives four words, for four adjacent elements. Key and counter depend on seed, step,
          dropout and element alone, so the bits are those of every other device.
Floor     Memory: the mask out; with the product, x in and y out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, operand_at, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import DropoutMask, Mul
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job
from onchip.plan.plan import values_written

_TASK_ELEMENTS = 1 << 12  # whole blocks of four words
_THREAD_ELEMENTS = 1 << 12  # per thread: below this, a thread is not woken
_ZERO = np.float32(0)
_LOW, _FIRST_FACTOR, _SECOND_FACTOR, _FIRST_STEP, _SECOND_STEP = (
    0xFFFFFFFF, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85,
)  # fmt: skip

# Layout of the array that `_run` reads: elements per row; address of seed and step; the number of the dropout; below
# which word an element is dropped; bits of the factor of the others; operands of the mask and of y, -1 for none.
_SIZE, _DRAW, _NUMBER, _DROPPED, _KEPT, _MASKED, _Y, _FIELDS = range(8)


@compiled(inline=True)
def _round(a: int, b: int, c: int, d: int, key: int, second_key: int) -> tuple[int, int, int, int]:
    """Of 32-bit words in int64: the upper half of a product that overflows is still right."""
    first, second = a * _FIRST_FACTOR, c * _SECOND_FACTOR
    return ((second >> 32) & _LOW) ^ b ^ key, second & _LOW, ((first >> 32) & _LOW) ^ d ^ second_key, first & _LOW


@compiled(inline=True)
def _two_rounds(a: int, b: int, c: int, d: int, key: int, second_key: int, done: int) -> tuple[int, int, int, int]:
    """The two rounds after `done`."""
    key, second_key = key + done * _FIRST_STEP, second_key + done * _SECOND_STEP
    a, b, c, d = _round(a, b, c, d, key & _LOW, second_key & _LOW)
    return _round(a, b, c, d, (key + _FIRST_STEP) & _LOW, (second_key + _SECOND_STEP) & _LOW)


@compiled(inline=True)
def _philox(block: int, step: int, number: int, key: int, second_key: int) -> tuple[int, int, int, int]:
    """Four words. No loop over the rounds: LLVM vectorises the one over blocks."""
    a, b, c, d = block & _LOW, (block >> 32) & _LOW, step & _LOW, number & _LOW
    a, b, c, d = _two_rounds(a, b, c, d, key, second_key, 0)
    a, b, c, d = _two_rounds(a, b, c, d, key, second_key, 2)
    a, b, c, d = _two_rounds(a, b, c, d, key, second_key, 4)
    a, b, c, d = _two_rounds(a, b, c, d, key, second_key, 6)
    return _two_rounds(a, b, c, d, key, second_key, 8)


@compiled()
def _write_mask(layer: Array, mask: Array, first: int) -> None:
    """The factors of the elements from `first` on, a multiple of four."""
    draw, dropped = ints_at(layer[_DRAW], 2), layer[_DROPPED]
    seed, step, number, kept = draw[0], draw[1], layer[_NUMBER], np.int32(layer[_KEPT]).view(np.float32)
    key, second_key, count = seed & _LOW, (seed >> 32) & _LOW, len(mask)
    for i in range(count // 4):
        a, b, c, d = _philox(first // 4 + i, step, number, key, second_key)
        mask[4 * i] = _ZERO if a < dropped else kept
        mask[4 * i + 1] = _ZERO if b < dropped else kept
        mask[4 * i + 2] = _ZERO if c < dropped else kept
        mask[4 * i + 3] = _ZERO if d < dropped else kept
    if count % 4:
        a, b, c, _ = _philox(first // 4 + count // 4, step, number, key, second_key)
        for i in range(count % 4):
            word = a if i == 0 else b if i == 1 else c
            mask[count - count % 4 + i] = _ZERO if word < dropped else kept


@compiled()
def _task(worker: int, task: int, layer: Array, operands: int, elements: int) -> None:
    first = task * _TASK_ELEMENTS
    count = min(_TASK_ELEMENTS, elements - first)
    mask_at, y_at = operand_at(layer, _MASKED, operands), operand_at(layer, _Y, operands)
    mask = floats_at((mask_at if mask_at != 0 else y_at) + first * 4, count)
    _write_mask(layer, mask, first)
    if y_at != 0:
        x, y = floats_at(int_at(operands) + first * 4, count), floats_at(y_at + first * 4, count)
        for i in range(count):
            y[i] = x[i] * mask[i]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    elements = B * layer[_SIZE]
    threads = max(1, min(threads, elements // _THREAD_ELEMENTS))
    run_tasks(_task, (layer, operands, elements), (elements + _TASK_ELEMENTS - 1) // _TASK_ELEMENTS, threads)


@dataclass(frozen=True)
class Facts:
    layer: DropoutMask
    size: int  # elements per row
    operands: tuple[int, int]  # of the mask and of y; -1 for none


class DropoutKernel(CpuKernel):
    """A DropoutMask, and the Mul of x by it that follows."""

    name = "dropout"
    layers = (DropoutMask,)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        mask, (x,) = net.nodes[start], net.nodes[start].inputs
        assert isinstance(mask.layer, DropoutMask)
        product = [
            node.name
            for node in net.nodes[start + 1 : start + 2]
            if isinstance(node.layer, Mul) and node.inputs == (x, mask.name) and not node.weights
        ]
        recipes = {"draw": Recipe.of(as_is, (mask.weights["draw"],), (2,), "int64")}
        for nodes in filter(None, ((mask.name,), (mask.name, *product) if product else ())):
            values = [x, *values_written(net, nodes)]
            operands = [values.index(name) if name in values else -1 for name in (mask.name, *product)]
            operands += [-1] * (2 - len(operands))
            cost = CoreCost(
                sum(net.row_flop(net.by_name[name]) for name in nodes),
                (len(values) - (len(nodes) == 1)) * net.types[x].row_bytes,
            )
            yield self.claim(
                net, mask, Facts(mask.layer, net.types[x].row_size, (operands[0], operands[1])), nodes=nodes,
                label=f"{self.name}<{','.join(net.by_name[name].layer.kind for name in nodes)}>", cost=cost,
                why="mask and product in one pass" if len(nodes) > 1 else "single layer", recipes=recipes,
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta, draw = claim.facts, weights["draw"]
        assert isinstance(meta, Facts)
        p = meta.layer.p
        kept = int(np.float32(1 / (1 - p)).view(np.int32))
        layer = words(meta.size, draw, meta.layer.number, int(p * 2**32), kept, *meta.operands)
        return CompiledLaunch(address_of(_run), lambda threads: (address(layer), (layer, draw)))
