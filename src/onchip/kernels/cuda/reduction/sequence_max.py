"""Max-over-time pooling of variable-length sequences: host side of reduction/sequence_max.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    FLOATS,
    IDS,
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
from onchip.network.layers import SequenceMax
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
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


class SequenceMaxKernel:
    name = "sequence_max"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # a maximum is exact

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, SequenceMax):
            return
        (x, lengths), y = net.input_types(node), net.types[node.name]
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"compares {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        C, P = (int(d) for d in x.row_shape)
        may_be_nhwc = has_channels(x) and node.inputs[0] not in net.inputs
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc else (ROWS,):
            is_nhwc = layout == CHANNELS_LAST
            yield Claim(
                self.name, f"{self.name}<{C},{P}>", (node.name,),
                Cost(net.row_flop(node), x.row_bytes + lengths.row_bytes + y.row_bytes), "single layer",
                facts=SequenceMaxLowering(
                    (x.dtype, lengths.dtype), C, P, layer.window, layer.stride, is_nhwc, device.units
                ),
                reads={node.inputs[0]: Use(layout)} if is_nhwc else {},
            )  # fmt: skip


def _instance(dtype: str, lengths: str) -> Instance:
    lowering = SequenceMaxLowering((dtype, lengths), 1024, 14, 3, 1, False, 132)
    return Instance(f"{dtype}, {lengths}", lambda device: lowering.at(1 << 14).launches[0])


INSTANCES = (
    _instance("float32", "int32"), _instance("float16", "int64"), _instance("bfloat16", "int32"),
    _instance("float64", "int64"),
)  # fmt: skip
