"""Concat on a GPU: the host's side of copy_rows.cu, a launch an operand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import in_layouts
from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.permute import WORDS
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.plan.layout import lying, row_axis_lying
from onchip.spec.layers import Concat
from onchip.spec.network import Network
from onchip.spec.types import DTYPE_BYTES

ARCHITECTURES = EVERY_CHIP
SOURCE = Path(__file__).with_name("copy_rows.cu")
LONG_WORDS = WORDS | {16: "uint4"}
THREADS, BLOCKS_A_UNIT = 256, 8


def copy_rows(rows: int, width: int, pitch: int, offset: int, units: int, x: Argument, y: Argument) -> KernelLaunch:
    """copy_rows(x, y, rows, width, pitch, offset), all sizes in bytes"""
    word = math.gcd(16, width, pitch, offset)
    blocks = -(-rows * width // (word * THREADS))
    config = LaunchConfig((max(1, min(blocks, units * BLOCKS_A_UNIT)), 1, 1), (THREADS, 1, 1), 0)
    arguments = (x, y, Int64(rows), *(Int64(size // word) for size in (width, pitch, offset)))
    return KernelLaunch(Program(SOURCE, f"copy_rows<{LONG_WORDS[word]}>"), config, arguments, Budget(registers=40))


@dataclass(frozen=True)
class ConcatLowering:
    reads: tuple[int, ...]  # which of the group's inputs each operand is: a value that is read twice comes in once
    outer: int  # rows of a row of the batch
    widths: tuple[int, ...]  # bytes of each operand's rows
    units: int

    def at(self, B: int) -> Steps:
        launches, offset, pitch = [], 0, sum(self.widths)
        for index, width in zip(self.reads, self.widths, strict=True):
            if B * self.outer * width:
                at = (B * self.outer, width, pitch, offset)
                launches.append(copy_rows(*at, self.units, Input(index), Output(0)))
            offset += width
        return Steps(tuple(launches))


@dataclass(frozen=True)
class CopyLowering:
    """The same bytes elsewhere: what a view needs that must lie in memory of its own."""

    row_bytes: int
    units: int

    def at(self, B: int) -> Steps:
        nbytes = B * self.row_bytes
        return Steps((copy_rows(1, nbytes, nbytes, 0, self.units, Input(0), Output(0)),) if nbytes else ())


class ConcatAlone:
    name = "concat"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Concat) or job.is_training:
            return
        if device.arch not in ARCHITECTURES:
            yield Refusal(self.name, node.name, f"runs on {', '.join(ARCHITECTURES)}, not on {device.arch}")
            return
        y = net.types[node.name]
        values = tuple(dict.fromkeys(node.inputs))
        axis = node.layer.axis % len(y.shape)
        claim = Claim(
            self.name, f"{self.name}<{len(node.inputs)}>", (node.name,),
            Price(0, 2 * y.row_bytes, launches=len(node.inputs)), "one layer by itself, a launch an operand",
        )  # fmt: skip
        for each in in_layouts(net, node, claim):
            layout = each.layout_read(values[0])
            shape = lying(y, layout).row_shape
            at = row_axis_lying(axis, len(y.shape), layout)
            inner = math.prod(shape[at + 1 :]) * DTYPE_BYTES[y.dtype]
            widths = tuple(inner * int(net.types[value].shape[axis]) for value in node.inputs)
            reads = tuple(values.index(value) for value in node.inputs)
            yield replace(each, facts=ConcatLowering(reads, math.prod(shape[:at]), widths, device.units))


def _instance(word: int) -> Instance:
    sizes = (100, 3 * word, 7 * word, word)
    return Instance(f"{word} bytes", lambda device: copy_rows(*sizes, device.units, Input(0), Output(0)))


INSTANCES = tuple(map(_instance, LONG_WORDS))
