"""dx of softmax and log-softmax: host side of gradient/softmax_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.rows import THREADS, RowThreads
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import InputGrad, LogSoftmax, Softmax
from onchip.network.types import TensorType
from onchip.plan.device import Device

SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS_PER_SM, WAVES = 8, 32


@dataclass(frozen=True)
class SoftmaxGradLowering:
    """softmax_grad_lanes or softmax_grad_rows(y, dy, dx, outer, N), or softmax_grad_columns(..., N, inner)"""

    kind: str  # "Softmax" or "LogSoftmax"
    dtype: str
    outer: int  # of a batch row
    N: int
    inner: int
    units: int

    def at(self, B: int) -> Steps:
        outer = B * self.outer
        if not outer * self.inner:
            return Steps(())
        threads, count = RowThreads.of(self.N, self.dtype), outer * THREADS
        types = f"{self.kind}, {FLOATS[self.dtype]}"
        sizes: tuple[Argument, ...] = (Int64(outer), Int64(self.N))
        if self.inner > 1:
            name, sizes, count = f"columns<{types}>", (*sizes, Int64(self.inner)), outer * self.inner
        elif threads.lanes:
            name = f"lanes<{types}, {threads.vector}, {threads.lanes}, {threads.items}>"
            count = outer * threads.lanes
        else:
            name = f"rows<{types}, {threads.vector}>"
        config = grid_1d(min(-(-count // THREADS), self.units * BLOCKS_PER_SM * WAVES))
        program = Program(SOURCE, f"softmax_grad_{name}")
        budget = Budget(256, spill_bytes=8) if self.dtype == "float64" else Budget(128)
        return Steps((KernelLaunch(program, config, (Input(0), Input(1), Output(0), *sizes), budget),))


class SoftmaxGradKernel(OneDtypeKernel):
    name = "softmax_grad"
    layers = (InputGrad,)
    order = "in threads, then in a tree"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, Softmax | LogSoftmax)

    def label(self, net: Network, node: Node) -> str:
        of = node.layer.attributes()["of"]
        return f"{of.kind.lower()}_grad<{net.types[node.name].shape[of.axis]}>"

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> object:
        of, dx = node.layer.attributes()["of"], types[node.name]
        row = dx.row_shape
        axis = of.axis % (len(row) + 1) - 1
        outer, inner = math.prod(row[:axis]), math.prod(row[axis + 1 :])
        return SoftmaxGradLowering(of.kind, dx.dtype, outer, row[axis], inner, device.units)


def _instance(name: str, kind: str, N: int, inner: int = 1, dtype: str = "float32") -> Instance:
    return instance(name, SoftmaxGradLowering(kind, dtype, 12, N, inner, 132))


INSTANCES = (
    _instance("rows", "Softmax", 512), _instance("short rows", "LogSoftmax", 10),
    _instance("rows of a warp", "Softmax", 1021), _instance("rows of a block", "LogSoftmax", 8191),
    _instance("long rows", "LogSoftmax", 50257), _instance("columns", "Softmax", 21, 4096),
    _instance("rows of float16", "Softmax", 512, dtype="float16"),
    _instance("rows of a block, bfloat16", "LogSoftmax", 8191, dtype="bfloat16"),
    _instance("doubles", "LogSoftmax", 1021, dtype="float64"),
    _instance("many doubles", "Softmax", 8191, dtype="float64"),
    _instance("columns of doubles", "LogSoftmax", 21, 4096, "float64"),
)  # fmt: skip
