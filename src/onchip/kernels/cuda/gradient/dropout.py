"""The mask of a dropout, and its product with x: host side of gradient/dropout.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_double, c_float, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Memory, Output, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.network.graph import Network
from onchip.network.layers import DropoutMask, Mul
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import numpy_dtype
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.plan import values_written

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256


FIELDS = (("draw", c_void_p), ("count", c_int64), ("number", c_uint32), ("dropped", c_uint32))


class DropoutStruct(CStruct):
    source, c_name = SOURCE, "Dropout<float>"
    _fields_ = (*FIELDS, ("kept", c_float))


class DoubleDropoutStruct(CStruct):
    source, c_name = SOURCE, "Dropout<double>"
    _fields_ = (*FIELDS, ("kept", c_double))


@dataclass(frozen=True)
class DropoutLowering:
    """dropout(x, mask, y, of)"""

    layer: DropoutMask
    dtype: str
    row_size: int
    outputs: tuple[str, ...]  # what each is: "mask" or "y"

    def at(self, B: int) -> Steps:
        count = B * self.row_size
        if not count:
            return Steps(())
        made: dict[str, Memory | Int64] = {name: Output(i) for i, name in enumerate(self.outputs)}
        of = (DoubleDropoutStruct if self.dtype == "float64" else DropoutStruct).of(
            draw=Weight("draw"), count=count, number=self.layer.number, dropped=int(self.layer.p * 2**32),
            kept=float(numpy_dtype(self.dtype).type(1 / (1 - self.layer.p))),
        )  # fmt: skip
        config = grid_1d(-(-count // (4 * THREADS)), THREADS)
        arguments = Input(0), made.get("mask", NOTHING), made.get("y", NOTHING), of
        program = Program(SOURCE, f"dropout<{FLOATS[self.dtype]}>")
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=40)),))


class DropoutKernel(OneDtypeKernel):
    """A DropoutMask, and the Mul of x by it that follows."""

    name = "dropout"
    layers = (DropoutMask,)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        mask, (x,) = net.nodes[start], net.nodes[start].inputs
        assert isinstance(mask.layer, DropoutMask)
        after = [
            node
            for node in net.nodes[start + 1 : start + 2]
            if isinstance(node.layer, Mul) and node.inputs == (x, mask.name) and not node.weights
        ]
        nodes = (mask, *after)
        outputs = values_written(net, [node.name for node in nodes])
        made = tuple("mask" if name == mask.name else "y" for name in outputs)
        lowering = DropoutLowering(mask.layer, net.types[x].dtype, net.types[x].row_size, made)
        yield self.claim(
            net, mask, lowering, nodes=tuple(node.name for node in nodes),
            cost=Cost(
                sum(map(net.row_flop, nodes)), (len(after) + len(outputs)) * net.types[x].row_bytes, precision="fp32"
            ),
            why="mask and product in one pass" if after else "single layer",
            recipes={"draw": Recipe.of(as_is, (mask.weights["draw"],), (2,), "int64")},
        )  # fmt: skip


INSTANCES = tuple(
    instance(f"mask and product, {dtype}", DropoutLowering(DropoutMask(0.5), dtype, 1000, ("mask", "y")))
    for dtype in FLOATS
)
