"""rowwise: one activation or one softmax over any axis, as a launch of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import in_layouts
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.activation import NO_NORMALISER, NORMALISERS, activate, code_of, normalise
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.pointwise import IDENTITY
from onchip.network.graph import Network, Node
from onchip.network.layers import Activation, Elementwise, Layer, LogSoftmax, Softmax
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

_BLOCK_ELEMENTS = 1 << 12  # per task, at least
_THREAD_ELEMENTS = 1 << 13  # per thread: below this, a thread is not woken

# Layout of the array that `_run` reads.
_WIDTH, _LINES, _ACTIVATION, _NORMALISER, _FIELDS = range(5)


@compiled()
def _block(worker: int, task: int, x: int, y: int, B: int, rows: int, layer: Array) -> None:
    width, first = layer[_WIDTH], task * rows
    rows = min(rows, B - first)
    source, result = floats_at(x + first * width * 4, rows * width), floats_at(y + first * width * 4, rows * width)
    for n in range(rows * width):
        result[n] = source[n]
    if layer[_NORMALISER]:
        normalise(address(result), rows, width, width, layer[_NORMALISER])
    else:
        activate(address(result), rows, width, width, layer[_ACTIVATION])


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch; a batch row is `lines` lines of `width` elements."""
    layer, x, y = ints_at(facts, _FIELDS), int_at(operands), int_at(operands + 8)
    lines, width = B * layer[_LINES], layer[_WIDTH]
    rows = max(1, _BLOCK_ELEMENTS // width)
    threads = max(1, min(threads, lines * width // _THREAD_ELEMENTS))
    run_tasks(_block, (x, y, lines, rows, layer), (lines + rows - 1) // rows, threads)


@dataclass(frozen=True)
class Facts:
    layer: Layer
    row_shape: tuple[int, ...]


class RowwiseKernel(CpuKernel):
    name = "rowwise"
    layers = (Activation, Softmax, LogSoftmax)

    def cost(self, net: Network, node: Node) -> CoreCost:
        x, y = net.types[node.inputs[0]], net.types[node.name]
        # A copy from memory to memory, then an in-place update in cache.
        return CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=2 * y.row_bytes)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        is_elementwise = isinstance(node.layer, Elementwise)
        facts = Facts(node.layer, net.types[node.inputs[0]].row_shape)
        claim = self.claim(net, node, facts, order="" if is_elementwise else "in order")
        yield from in_layouts(net, node, claim) if is_elementwise else (claim,)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        layer, row = facts.layer, facts.row_shape
        if isinstance(layer, Elementwise):
            return _launch(math.prod(row), 1, code_of(layer), NO_NORMALISER)
        axis = layer.attributes()["axis"] % (1 + len(row)) - 1
        last = _launch(row[axis], math.prod(row) // max(1, row[axis]), IDENTITY, NORMALISERS[layer.kind])
        if axis == len(row) - 1:
            return last

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x = np.ascontiguousarray(np.moveaxis(inputs[0], axis + 1, -1))
            result = np.empty_like(x)
            last([x], [result], threads)
            outputs[0][...] = np.moveaxis(result, -1, axis + 1)

        return run


def _launch(width: int, lines: int, activation: int, normaliser: int) -> CompiledLaunch:
    fields = words(width, lines, activation, normaliser)
    return CompiledLaunch(address_of(_run), lambda threads: (address(fields), fields))
