"""Max and average pooling: host side of pool/pool.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import in_layouts
from onchip.kernels.cuda.common.arguments import Input, Output
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.common.window import Windows
from onchip.kernels.window import POOLS, Axis, axes_of
from onchip.network.graph import Network, Node
from onchip.network.layers import MaxPool1d, MaxPool2d
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
UNROLLED = ((2, 2, 2), (3, 3, 2), (3, 3, 1), (1, 2, 1), (1, 3, 1))
MAX_ROWS = (4, 4)


@dataclass(frozen=True)
class PoolLowering:
    """pool(x, y, windows)"""

    mode: str  # "Max", "Mean" or "MeanWithPads"
    element: str  # element type in pool/pool.cu
    windows: Windows

    @property
    def vector(self) -> int:
        """Channels per thread: 16 bytes in NHWC if that divides C, else one."""
        V = 16 // self.windows.element_bytes
        return V if self.windows.is_nhwc and self.windows.C % V == 0 else 1

    def at(self, B: int) -> Steps:
        if not B:
            return Steps(())
        cut, config, windows = self.windows.arguments(B, self.vector)
        program = Program(SOURCE, f"pool<{self.mode}, {self.element}, {cut}>")
        # 3 x 3 in NHWC spills one word on sm_80.
        budget = Budget(registers=128, spill_bytes=4)
        return Steps((KernelLaunch(program, config, (Input(0), Output(0), windows), budget),))


def _lowering(mode: str, dtype: str, windows: Windows) -> PoolLowering:
    """A 16-bit max pool in NHWC treats two channels as one element."""
    is_in_pairs = mode == "Max" and windows.is_nhwc and windows.element_bytes == 2 and windows.C % 2 == 0
    if not is_in_pairs:
        return PoolLowering(mode, FLOATS[dtype], windows)
    halved = replace(windows, C=windows.C // 2, N=windows.N // 2, element_bytes=4)
    return PoolLowering(mode, f"Pairs<{FLOATS[dtype]}>", halved)


class PoolKernel(CudaKernel):
    name = "pool"
    layers = POOLS

    def label(self, net: Network, node: Node) -> str:
        return f"{node.layer.kind.lower()}<{','.join(map(str, node.layer.attributes()['kernel']))}>"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if why := _windows(net, node, False, device).why_not():
            yield Refusal(self.name, node.name, why)
            return
        mode = "Max" if isinstance(node.layer, MaxPool1d | MaxPool2d) else "Mean"
        claim = self.claim(net, node, None, order="" if mode == "Max" else "rows of taps in order")
        mode += "WithPads" if node.layer.attributes().get("count_pads") else ""
        dtype = net.types[node.inputs[0]].dtype
        for each in in_layouts(net, node, claim):
            yield replace(each, facts=_lowering(mode, dtype, _windows(net, node, bool(each.writes), device)))


def _windows(net: Network, node: Node, is_nhwc: bool, device: Device) -> Windows:
    (C, *sizes), (_, *counts) = (net.types[value].row_shape for value in (node.inputs[0], node.name))
    h, w = axes_of(node.layer, tuple(sizes), tuple(counts), node.layer.attributes()["kernel"])
    return Windows(C, C, h, w, is_nhwc, DTYPE_BYTES[net.types[node.name].dtype], UNROLLED, MAX_ROWS, device.units)


def _instance(
    name: str, mode: str, dtype: str, is_nhwc: bool, taps: int = 2, stride: int = 2, B: int = 1000
) -> Instance:
    axis = Axis(16, 8, taps, stride, 0, 1, 16)
    windows = Windows(64, 64, axis, axis, is_nhwc, DTYPE_BYTES[dtype], UNROLLED, MAX_ROWS, 132)
    lowering = _lowering(mode, dtype, windows)
    return instance(name, lowering, B)


INSTANCES = (
    _instance("largest", "Max", "float32", False),
    _instance("largest, NHWC", "Max", "float16", True),
    _instance("largest of 3 x 3, NHWC", "Max", "float32", True, 3),
    _instance("mean", "Mean", "bfloat16", False),
    _instance("mean of 3 x 3, NHWC", "Mean", "float16", True, 3, 1),
    _instance("mean with pads", "MeanWithPads", "float64", True),
    _instance("largest of any window", "Max", "float32", False, 4),
    _instance("mean of any window, NHWC", "Mean", "float16", True, 4),
    _instance("largest of any window that slides", "Max", "float32", False, 7, 1),
    _instance("largest of any window that slides, NHWC", "Max", "float16", True, 7, 1),
    _instance("mean of any window that slides", "Mean", "float16", False, 7, 1),
    _instance("mean of any window that slides, NHWC", "Mean", "bfloat16", True, 7, 1),
    _instance("mean of 3 x 3", "Mean", "float16", False, 3, 1),
    _instance("very many", "Max", "float32", False, B=1 << 24),
)
