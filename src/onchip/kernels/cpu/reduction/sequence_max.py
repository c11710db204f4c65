"""sequence_max: the largest over time of sequences of different lengths, by itself; behind token convolutions it is
token_max's.

Idea      A sequence ends where its last window does: what lies behind is not read. x lies in rows, a channel behind
          the other, or with channels last, where vectors run along them.
Floor     Memory: x in, y out.
Limits    float32; others are plain's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int32_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.reduction.reduce import MAX, reduce_columns, reduce_row
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import SequenceMax
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

_TASK_NUMBERS = 1 << 12  # that a thread takes at a time, at least
_ZERO = np.float32(0)

# What `_run` is told of a layer once; totals: C numbers of float64 of each worker.
_C, _P, _WINDOW, _STRIDE, _ID_BYTES, _IS_LAST, _TOTALS, _WORDS = range(8)


@compiled()
def _rows(worker: int, piece: int, layer: Array, x: int, lengths: int, y: int, B: int, together: int) -> None:
    C, P, window, stride = layer[_C], layer[_P], layer[_WINDOW], layer[_STRIDE]
    for row in range(piece * together, min(B, (piece + 1) * together)):
        length = int_at(lengths + row * 8) if layer[_ID_BYTES] == 8 else int32_at(lengths + row * 4)
        count = min(P, (length - window) // stride + 1) if length >= window else 0
        given, to = x + row * C * P * 4, y + row * C * 4
        if count == 0:
            made = floats_at(to, C)
            for c in range(C):
                made[c] = _ZERO
        elif layer[_IS_LAST]:
            reduce_columns(given, to, layer[_TOTALS] + worker * C * 8, count, C, MAX)
        else:
            for c in range(C):
                reduce_row(given + c * P * 4, to + c * 4, count, MAX)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer = ints_at(facts, _WORDS)
    numbers = layer[_C] * layer[_P]
    together = max(1, _TASK_NUMBERS // max(1, numbers))
    given = (layer, int_at(operands), int_at(operands + 8), int_at(operands + 16), B, together)
    run_tasks(_rows, given, (B + together - 1) // together, max(1, min(threads, B * numbers // _TASK_NUMBERS)))


@dataclass(frozen=True)
class Facts:
    layer: SequenceMax
    C: int
    P: int
    id_bytes: int
    layout: str


class SequenceMaxKernel:
    name = "sequence_max"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training or not isinstance(node.layer, SequenceMax):
            return
        (x, lengths), y = net.input_types(node), net.types[node.name]
        if x.dtype != "float32":
            yield Refusal(self.name, node.name, f"computes on float32, got {x.dtype}")
            return
        C, P = x.row_shape
        cost = CoreCost(
            net.row_flop(node), x.row_bytes + lengths.row_bytes + y.row_bytes, row_cache_bytes=x.row_bytes // 2
        )
        may_be_nhwc = has_channels(x) and node.inputs[0] not in net.inputs
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc else (ROWS,):
            facts = Facts(node.layer, C, P, DTYPE_BYTES[lengths.dtype], layout)
            yield Claim(
                self.name, f"{self.name}<{C},{P}>", (node.name,), cost, "one layer by itself", facts=facts,
                reads={node.inputs[0]: Use(layout)} if layout == CHANNELS_LAST else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        told = claim.facts
        assert isinstance(told, Facts)

        def facts(threads: int) -> tuple[int, object]:
            totals = np.empty((threads, told.C))
            layer = words(
                told.C,
                told.P,
                told.layer.window,
                told.layer.stride,
                told.id_bytes,
                told.layout == CHANNELS_LAST,
                totals,
            )
            return address(layer), (layer, totals)

        return CompiledLaunch(address_of(_run), facts)
