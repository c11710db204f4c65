"""ArgMax and ArgMin along an axis: host side of reduction/arg_reduce.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, Steps
from onchip.kernels.cuda.reduction.axis import Axis
from onchip.network.graph import Network, Node
from onchip.network.layers import ArgMax, ArgMin
from onchip.network.types import TensorType
from onchip.plan.device import Device

SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class ArgReduceLowering:
    dtype: str
    is_min: bool
    last: bool
    axis: Axis
    units: int

    def at(self, B: int) -> Steps:
        template = f"{FLOATS[self.dtype]}, {str(self.is_min).lower()}, {str(self.last).lower()}"
        return self.axis.steps(B, self.units, SOURCE, "arg_reduce", template, Budget(registers=64))


class ArgReduceKernel(CudaKernel):
    name = "arg_reduce"
    layers = (ArgMax, ArgMin)

    def label(self, net: Network, node: Node) -> str:
        rank = len(net.types[node.inputs[0]].shape)
        return f"{node.layer.kind.lower()}<{node.layer.attributes()['axis'] % rank}>"

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> ArgReduceLowering:
        layer, x = node.layer, types[node.inputs[0]]
        assert isinstance(layer, ArgMax | ArgMin)
        return ArgReduceLowering(x.dtype, isinstance(layer, ArgMin), layer.last, Axis.of(x, layer.axis), device.units)


def _instance(dtype: str, is_min: bool, last: bool, inner: int) -> Instance:
    name = f"{dtype}, {'columns' if inner > 1 else 'rows'}"
    return instance(name, ArgReduceLowering(dtype, is_min, last, Axis(1, 1000, inner), 132))


INSTANCES = (_instance("float32", False, False, 1), _instance("float64", True, True, 1),
             _instance("float16", True, False, 7), _instance("bfloat16", False, True, 7))  # fmt: skip
