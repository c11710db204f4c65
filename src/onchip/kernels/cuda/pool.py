"""Pools on a GPU: the host's side of pool.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import in_layouts
from onchip.kernels.cuda.divide import divider, index_of
from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.program import (
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
    UInt32,
    in_line,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.layers import AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d
from onchip.spec.layers.conv import geometry
from onchip.spec.network import Network, Node

ARCHITECTURES = EVERY_CHIP
SOURCE = Path(__file__).with_suffix(".cu")
POOLS = (MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d)
THREADS, BLOCKS_A_UNIT = 256, 8


@dataclass(frozen=True)
class PoolLowering:
    how: str  # "Max", "Mean" or "MeanWithPads"
    dtype: str
    is_last: bool  # x and y lie with channels last
    row_size: int  # numbers of a row of y
    sizes: tuple[int, ...]  # C; of each of two axes: size, count, kernel, stride, pad before, dilation, end that counts
    units: int

    def at(self, B: int) -> Steps:
        count = B * self.row_size
        if not count:
            return Steps(())
        name = f"pool<{self.how}, {FLOATS[self.dtype]}, {index_of(count)}, {str(self.is_last).lower()}>"
        config = in_line(min(-(-count // THREADS), self.units * BLOCKS_A_UNIT))
        C, *axes = self.sizes
        numbers: list[Argument] = [divider(C), *map(UInt32, axes)]
        for place in (2, 9):  # of the counts of both axes
            numbers[place] = divider(self.sizes[place])
        arguments: tuple[Argument, ...] = (Input(0), Output(0), Int64(count), *numbers)
        return Steps((KernelLaunch(Program(SOURCE, name), config, arguments, Budget(registers=64)),))


class PoolAlone:
    name = "pool"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # it computes in float32, or in float64

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, POOLS) or job.is_training:
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES or max(x.row_size, y.row_size) >= 1 << 31:
            why = f"computes on rows of less than 2^31 numbers of {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        kernel = ",".join(map(str, node.layer.attributes()["kernel"]))
        price = Price(net.row_flop(node), x.row_bytes + y.row_bytes)
        how = "Max" if isinstance(node.layer, MaxPool1d | MaxPool2d) else "Mean"
        claim = Claim(
            self.name, f"{node.layer.kind.lower()}<{kernel}>", (node.name,), price, "one layer by itself",
            order="" if how == "Max" else "taps in order",
        )  # fmt: skip
        how += "WithPads" if node.layer.attributes().get("count_pads") else ""
        for each in in_layouts(net, node, claim):
            lowering = PoolLowering(how, x.dtype, bool(each.gives), y.row_size, _sizes(net, node), device.units)
            yield replace(each, facts=lowering)


def _sizes(net: Network, node: Node) -> tuple[int, ...]:
    (C, *sizes), (_, *counts) = (net.types[value].row_shape for value in (node.inputs[0], node.name))
    stride, pads, dilation = geometry(node.layer)
    kernel: tuple[int, ...] = node.layer.attributes()["kernel"]
    rank = len(sizes)
    axes = [
        (sizes[a], counts[a], kernel[a], stride[a], pads[a], dilation[a], sizes[a] + pads[rank + a])
        for a in range(rank)
    ]
    if rank == 1:
        axes.insert(0, (1, 1, 1, 1, 0, 1, 1))
    return (C, *axes[0], *axes[1])


def _instance(name: str, how: str, dtype: str, is_last: bool, B: int = 1000) -> Instance:
    axis = (8, 4, 2, 2, 0, 1, 8)
    lowering = PoolLowering(how, dtype, is_last, 64 * 16, (64, *axis, *axis), 132)
    return Instance(name, lambda device: lowering.at(B).launches[0])


INSTANCES = (
    _instance("largest", "Max", "float32", False),
    _instance("largest, channels last", "Max", "float16", True),
    _instance("mean", "Mean", "bfloat16", False),
    _instance("mean with pads", "MeanWithPads", "float64", True),
    _instance("very many", "Max", "float32", False, 1 << 22),
)
