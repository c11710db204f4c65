"""ArgMax and ArgMin along an axis: host side of reduction/arg_reduce.cu."""

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
from onchip.network.layers import ArgMax, ArgMin
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, BLOCKS_PER_SM = 256, 32


@dataclass(frozen=True)
class ArgReduceLowering:
    """arg_reduce_rows(x, y, outer, N) or arg_reduce_columns(x, y, outer, N, inner)"""

    dtype: str
    is_min: bool
    last: bool
    outer: int  # per batch row
    N: int
    inner: int
    units: int

    def at(self, B: int) -> Steps:
        outer = B * self.outer
        if not outer * self.inner:
            return Steps(())
        flags = ", ".join("true" if flag else "false" for flag in (self.is_min, self.last))
        is_row = self.inner == 1
        name = f"arg_reduce_{'rows' if is_row else 'columns'}<{FLOATS[self.dtype]}, {flags}>"
        sizes = (outer, self.N) if is_row else (outer, self.N, self.inner)
        threads = outer * 32 if is_row else outer * self.inner
        config = grid_1d(min(-(-threads // THREADS), self.units * BLOCKS_PER_SM))
        arguments: tuple[Argument, ...] = (Input(0), Output(0), *map(Int64, sizes))
        return Steps((KernelLaunch(Program(SOURCE, name), config, arguments, Budget(registers=64)),))


class ArgReduceKernel:
    name = "arg_reduce"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # comparisons are exact

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, ArgMax | ArgMin):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"compares {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        axis = layer.axis % len(x.shape) - 1  # without the batch axis
        outer, inner = math.prod(x.row_shape[:axis]), math.prod(x.row_shape[axis + 1 :])
        yield Claim(
            self.name, f"{layer.kind.lower()}<{1 + axis}>", (node.name,),
            Cost(net.row_flop(node), x.row_bytes + y.row_bytes), "single layer",
            facts=ArgReduceLowering(
                x.dtype, isinstance(layer, ArgMin), layer.last, outer, x.row_shape[axis], inner, device.units
            ),
        )  # fmt: skip


def _instance(dtype: str, is_min: bool, last: bool, inner: int) -> Instance:
    lowering = ArgReduceLowering(dtype, is_min, last, 1, 1000, inner, 132)
    return Instance(f"{dtype}, {'columns' if inner > 1 else 'rows'}", lambda device: lowering.at(1000).launches[0])


INSTANCES = (_instance("float32", False, False, 1), _instance("float64", True, True, 1),
             _instance("float16", True, False, 7), _instance("bfloat16", False, True, 7))  # fmt: skip
