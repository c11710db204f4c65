"""sequence_max: max-over-time pooling of variable-length sequences; after token convolutions, token_max fuses it.

Idea      A sequence ends where its last window does: nothing after it is read. x is (C, P) per row, or NHWC, vectorised
          over channels.
Floor     Memory: x in, y out.
Limits    float32; `plain` runs other dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int32_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.reduction.reduce import MAX, reduce_columns, reduce_row
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import SequenceMax
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

_TASK_ELEMENTS = 1 << 12  # minimum per task
_ZERO = np.float32(0)

# Fields of a layer; totals: C float64 values per worker.
_C, _P, _WINDOW, _STRIDE, _ID_BYTES, _IS_LAST, _TOTALS, _WORDS = range(8)


@compiled()
def _rows(worker: int, task: int, layer: Array, x: int, lengths: int, y: int, B: int, per_task: int) -> None:
    C, P, window, stride = layer[_C], layer[_P], layer[_WINDOW], layer[_STRIDE]
    for row in range(task * per_task, min(B, (task + 1) * per_task)):
        length = int_at(lengths + row * 8) if layer[_ID_BYTES] == 8 else int32_at(lengths + row * 4)
        count = min(P, (length - window) // stride + 1) if length >= window else 0
        row_x, to = x + row * C * P * 4, y + row * C * 4
        if count == 0:
            row_y = floats_at(to, C)
            for c in range(C):
                row_y[c] = _ZERO
        elif layer[_IS_LAST]:
            reduce_columns(row_x, to, layer[_TOTALS] + worker * C * 8, count, C, MAX)
        else:
            for c in range(C):
                reduce_row(row_x + c * P * 4, to + c * 4, count, MAX)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer = ints_at(facts, _WORDS)
    elements = layer[_C] * layer[_P]
    per_task = max(1, _TASK_ELEMENTS // max(1, elements))
    arguments = (layer, int_at(operands), int_at(operands + 8), int_at(operands + 16), B, per_task)
    run_tasks(_rows, arguments, (B + per_task - 1) // per_task, max(1, min(threads, B * elements // _TASK_ELEMENTS)))


@dataclass(frozen=True)
class Facts:
    layer: SequenceMax
    C: int
    P: int
    id_bytes: int
    layout: str


class SequenceMaxKernel(CpuKernel):
    name = "sequence_max"
    layers = (SequenceMax,)

    def cost(self, net: Network, node: Node) -> CoreCost:
        (x, lengths), y = net.input_types(node), net.types[node.name]
        moved = x.row_bytes + lengths.row_bytes + y.row_bytes
        return CoreCost(net.row_flop(node), moved, row_cache_bytes=x.row_bytes // 2)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        layer, (x, lengths) = node.layer, net.input_types(node)
        assert isinstance(layer, SequenceMax)
        C, P = x.row_shape
        may_be_nhwc = has_channels(x) and node.inputs[0] not in net.inputs
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc else (ROWS,):
            facts = Facts(layer, C, P, DTYPE_BYTES[lengths.dtype], layout)
            reads = {node.inputs[0]: Use(layout)} if layout == CHANNELS_LAST else {}
            yield self.claim(net, node, facts, label=f"{self.name}<{C},{P}>", reads=reads)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)

        def build_facts(threads: int) -> tuple[int, object]:
            totals = np.empty((threads, facts.C))
            layer = words(
                facts.C,
                facts.P,
                facts.layer.window,
                facts.layer.stride,
                facts.id_bytes,
                facts.layout == CHANNELS_LAST,
                totals,
            )
            return address(layer), (layer, totals)

        return CompiledLaunch(address_of(_run), build_facts)
