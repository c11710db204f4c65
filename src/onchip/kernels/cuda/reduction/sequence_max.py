"""Max-over-time pooling of variable-length sequences: host side of reduction/sequence_max.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Input, Int64, Output
from onchip.kernels.cuda.common.dtypes import FLOATS, IDS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.network.graph import Network
from onchip.network.layers import SequenceMax
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCKS_PER_SM = 256, 32


@dataclass(frozen=True)
class SequenceMaxLowering:
    """sequence_max(x, lengths, y, B, C, P, channel_step, window_step, window, stride)"""

    dtypes: tuple[str, str]  # x, lengths
    C: int
    P: int
    window: int
    stride: int
    channels_last: bool
    units: int

    def at(self, B: int) -> Steps:
        if not B * self.C:
            return Steps(())
        program = Program(SOURCE, f"sequence_max<{FLOATS[self.dtypes[0]]}, {IDS[self.dtypes[1]]}>")
        steps = (1, self.C) if self.channels_last else (self.P, 1)
        sizes = map(Int64, (B, self.C, self.P, *steps, self.window, self.stride))
        config = grid_1d(min(-(-B * self.C // THREADS), self.units * BLOCKS_PER_SM))
        return Steps((KernelLaunch(program, config, (Input(0), Input(1), Output(0), *sizes), Budget(registers=48)),))


class SequenceMaxKernel(CudaKernel):
    name = "sequence_max"
    layers = (SequenceMax,)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        layer, (x, lengths) = node.layer, net.input_types(node)
        assert isinstance(layer, SequenceMax)
        C, P = x.row_shape
        may_be_nhwc = has_channels(x) and node.inputs[0] not in net.inputs
        for is_nhwc in (False, True) if may_be_nhwc else (False,):
            lowering = SequenceMaxLowering(
                (x.dtype, lengths.dtype), C, P, layer.window, layer.stride, is_nhwc, device.units
            )
            reads = {node.inputs[0]: Use(CHANNELS_LAST)} if is_nhwc else {}
            yield self.claim(net, node, lowering, label=f"{self.name}<{C},{P}>", reads=reads)


def _instance(dtype: str, lengths: str) -> Instance:
    lowering = SequenceMaxLowering((dtype, lengths), 1024, 14, 3, 1, False, 132)
    return instance(f"{dtype}, {lengths}", lowering, B=1 << 14)


INSTANCES = (
    _instance("float32", "int32"), _instance("float16", "int64"), _instance("bfloat16", "int32"),
    _instance("float64", "int64"),
)  # fmt: skip
