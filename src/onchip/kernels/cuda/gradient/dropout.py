"""The mask of a dropout, and its product with x: host side of gradient/dropout.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Memory, Output, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.network.graph import Network
from onchip.network.layers import DropoutMask, Mul
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.plan import values_written

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256


class DropoutStruct(CStruct):
    source, c_name = SOURCE, "Dropout"
    _fields_ = (
        ("draw", c_void_p), ("count", c_int64), ("number", c_uint32), ("dropped", c_uint32), ("kept", c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class DropoutLowering:
    """dropout(x, mask, y, of)"""

    layer: DropoutMask
    row_size: int
    outputs: tuple[str, ...]  # what each is: "mask" or "y"

    def at(self, B: int) -> Steps:
        count = B * self.row_size
        if not count:
            return Steps(())
        made: dict[str, Memory | Int64] = {name: Output(i) for i, name in enumerate(self.outputs)}
        of = DropoutStruct.of(
            draw=Weight("draw"), count=count, number=self.layer.number, dropped=int(self.layer.p * 2**32),
            kept=1 / (1 - self.layer.p),
        )  # fmt: skip
        config = grid_1d(-(-count // (4 * THREADS)), THREADS)
        arguments = Input(0), made.get("mask", NOTHING), made.get("y", NOTHING), of
        return Steps((KernelLaunch(Program(SOURCE, "dropout"), config, arguments, Budget(registers=40)),))


class DropoutKernel(CudaKernel):
    """A DropoutMask, and the Mul of x by it that follows."""

    name = "dropout"
    layers = (DropoutMask,)
    dtypes = ("float32",)

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
        lowering = DropoutLowering(
            mask.layer, net.types[x].row_size, tuple("mask" if name == mask.name else "y" for name in outputs)
        )
        yield self.claim(
            net, mask, lowering, nodes=tuple(node.name for node in nodes),
            cost=Cost(
                sum(map(net.row_flop, nodes)), (len(after) + len(outputs)) * net.types[x].row_bytes, precision="fp32"
            ),
            why="mask and product in one pass" if after else "single layer",
            recipes={"draw": Recipe.of(as_is, (mask.weights["draw"],), (2,), "int64")},
        )  # fmt: skip


INSTANCES = (instance("mask and product", DropoutLowering(DropoutMask(0.5), 1000, ("mask", "y"))),)
