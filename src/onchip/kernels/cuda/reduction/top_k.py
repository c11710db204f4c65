"""The k largest or smallest values along an axis, or their indices: host side of reduction/top_k.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, Steps
from onchip.kernels.cuda.reduction.axis import Axis
from onchip.network.graph import Network, Node
from onchip.network.layers import ArgTopK, TopK
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Cost

SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class TopKLowering:
    dtype: str
    gives_indices: bool
    is_min: bool
    axis: Axis
    k: int
    units: int

    def at(self, B: int) -> Steps:
        element = FLOATS[self.dtype]
        template = f"{element}, {'long long' if self.gives_indices else element}, {str(self.is_min).lower()}"
        return self.axis.steps(B, self.units, SOURCE, "top", template, Budget(registers=64, spill_bytes=16), self.k)


class TopKKernel(CudaKernel):
    name = "top_k"
    layers = (TopK, ArgTopK)

    def label(self, net: Network, node: Node) -> str:
        return f"{node.layer.kind.lower()}<{node.layer.attributes()['k']}>"

    def cost(self, net: Network, node: Node) -> Cost:
        x, y = net.types[node.inputs[0]], net.types[node.name]
        return Cost(node.layer.attributes()["k"] * net.row_flop(node), x.row_bytes + y.row_bytes)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> TopKLowering:
        layer, x = node.layer, types[node.inputs[0]]
        assert isinstance(layer, TopK | ArgTopK)
        axis = Axis.of(x, layer.axis)
        return TopKLowering(x.dtype, isinstance(layer, ArgTopK), not layer.largest, axis, layer.k, device.units)


def _instance(dtype: str, gives_indices: bool, is_min: bool, inner: int) -> Instance:
    name = f"{dtype}, {'columns' if inner > 1 else 'rows'}"
    return instance(name, TopKLowering(dtype, gives_indices, is_min, Axis(1, 1000, inner), 5, 132))


INSTANCES = (_instance("float32", True, False, 1), _instance("float64", False, True, 1),
             _instance("float16", False, False, 7), _instance("bfloat16", True, True, 7))  # fmt: skip
