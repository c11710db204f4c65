"""The k largest or smallest values along an axis, or their indices: host side of reduction/top_k.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    FLOATS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Output,
    Program,
    Steps,
    grid_1d,
)
from onchip.network.graph import Network
from onchip.network.layers import ArgTopK, TopK
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, BLOCKS_PER_SM = 256, 32


@dataclass(frozen=True)
class TopKLowering:
    """top_rows(x, y, outer, N, k) or top_columns(x, y, outer, N, inner, k)"""

    dtype: str
    gives_indices: bool
    is_min: bool
    outer: int  # per batch row
    N: int
    inner: int
    k: int
    units: int

    def at(self, B: int) -> Steps:
        outer = B * self.outer
        if not outer * self.inner:
            return Steps(())
        is_row, element = self.inner == 1, FLOATS[self.dtype]
        template = f"{element}, {'long long' if self.gives_indices else element}, {'true' if self.is_min else 'false'}"
        name = f"top_{'rows' if is_row else 'columns'}<{template}>"
        sizes = (outer, self.N, self.k) if is_row else (outer, self.N, self.inner, self.k)
        threads = outer * 32 if is_row else outer * self.inner
        config = grid_1d(min(-(-threads // THREADS), self.units * BLOCKS_PER_SM))
        arguments: tuple[Argument, ...] = (Input(0), Output(0), *map(Int64, sizes))
        return Steps((KernelLaunch(Program(SOURCE, name), config, arguments, Budget(registers=64, spill_bytes=16)),))


class TopKKernel:
    name = "top_k"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # comparisons are exact

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, TopK | ArgTopK):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"compares {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        axis = layer.axis % len(x.shape) - 1  # without the batch axis
        outer, inner = math.prod(x.row_shape[:axis]), math.prod(x.row_shape[axis + 1 :])
        yield Claim(
            self.name, f"{layer.kind.lower()}<{layer.k}>", (node.name,),
            Cost(layer.k * net.row_flop(node), x.row_bytes + y.row_bytes), "single layer",
            facts=TopKLowering(
                x.dtype, isinstance(layer, ArgTopK), not layer.largest, outer, x.row_shape[axis], inner, layer.k,
                device.units,
            ),
        )  # fmt: skip


def _instance(dtype: str, gives_indices: bool, is_min: bool, inner: int) -> Instance:
    lowering = TopKLowering(dtype, gives_indices, is_min, 1, 1000, inner, 5, 132)
    return Instance(f"{dtype}, {'columns' if inner > 1 else 'rows'}", lambda device: lowering.at(1000).launches[0])


INSTANCES = (_instance("float32", True, False, 1), _instance("float64", False, True, 1),
             _instance("float16", False, False, 7), _instance("bfloat16", True, True, 7))  # fmt: skip
