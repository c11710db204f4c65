"""The gradients of GlobalMax, GlobalMin, TopK and SequenceMax: host side of gradient/extreme_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64, c_uint32
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS, IDS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.network.graph import Network
from onchip.network.layers import GlobalMax, GlobalMin, InputGrad, SequenceMax, TopK
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCKS_PER_SM, WAVES = 256, 8, 32


class ExtremesStruct(CStruct):
    source, c_name = SOURCE, "Extremes"
    _fields_ = (
        ("inner", Divider), ("N", Divider), ("channels", Divider), ("count", c_int64), ("k", c_uint32),
        ("window", c_uint32), ("stride", c_uint32),
    )  # fmt: skip


@dataclass(frozen=True)
class ExtremeGradLowering:
    """extreme_grad(x, y, dy, dx, lengths, extremes)"""

    dtype: str
    inputs: tuple[int, int, int]  # indices of x, y and dy
    outer: int  # per row of the batch
    N: int
    inner: int
    k: int
    units: int
    lengths: tuple[int, str] | None = None  # index and dtype
    window: int = 1
    stride: int = 1

    def at(self, B: int) -> Steps:
        count = B * self.outer * self.N * self.inner
        if not count:
            return Steps(())
        extremes = ExtremesStruct.of(
            inner=divider(self.inner), N=divider(self.N), channels=divider(self.outer), count=count, k=self.k,
            window=self.window, stride=self.stride,
        )  # fmt: skip
        lengths, ids = (Input(self.lengths[0]), IDS[self.lengths[1]]) if self.lengths else (NOTHING, "int")
        program = Program(SOURCE, f"extreme_grad<{FLOATS[self.dtype]}, {ids}, {index_of(count)}>")
        config = grid_1d(min(-(-count // THREADS), self.units * BLOCKS_PER_SM * WAVES), THREADS)
        arguments = (*map(Input, self.inputs), Output(0), lengths, extremes)
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=48)),))


class ExtremeGradKernel(CudaKernel):
    name = "extreme_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        assert isinstance(layer, InputGrad)
        return isinstance(layer.of, GlobalMax | GlobalMin | TopK | SequenceMax)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        assert isinstance(node.layer, InputGrad)
        x, layer, values = net.types[node.inputs[0]], node.layer.of, tuple(dict.fromkeys(node.inputs))
        rank, k, lengths, options = len(x.shape), 1, None, {}
        if isinstance(layer, SequenceMax):
            axes, lengths = [2], (values.index(node.inputs[1]), net.types[node.inputs[1]].dtype)
            options = layer.attributes()
        elif isinstance(layer, TopK):
            axes, k = [layer.axis % rank], layer.k
        else:
            axes = sorted(axis % rank for axis in layer.attributes()["axes"])
        sizes, end = x.row_shape, axes[-1] + 1
        N = math.prod(sizes[axis - 1] for axis in axes)
        if axes != list(range(axes[0], end)) or N >= MAX_ELEMENTS:
            why = f"supports adjacent axes of fewer than {MAX_ELEMENTS:,} elements, not axes {axes} of {x}"
            yield Refusal(self.name, node.name, why)
            return
        inputs = values.index(node.inputs[0]), values.index(node.inputs[-2]), values.index(node.inputs[-1])
        outer, inner = math.prod(sizes[: axes[0] - 1]), math.prod(sizes[end - 1 :])
        lowering = ExtremeGradLowering(x.dtype, inputs, outer, N, inner, k, device.units, lengths, **options)
        yield self.claim(net, node, lowering, label=f"{layer.kind.lower()}_grad<{N}>")


def _instance(dtype: str, ids: str, B: int = 1000) -> Instance:
    lowering = ExtremeGradLowering(dtype, (0, 1, 2), 8, 50, 1, 1, 132, (3, ids) if ids else None)
    return instance(f"{dtype}, {ids or 'no'} lengths", lowering, B)


INSTANCES = (
    *(_instance(dtype, "") for dtype in FLOATS), _instance("float32", "int64"), _instance("float32", "int32", 1 << 23),
)  # fmt: skip
