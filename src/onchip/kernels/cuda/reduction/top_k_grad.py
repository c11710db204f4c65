"""dx of the k largest or smallest values along an axis: host side of reduction/top_k_grad.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, Steps
from onchip.kernels.cuda.reduction.axis import Axis
from onchip.network.graph import Network, Node
from onchip.network.layers import InputGrad, TopK
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Cost

SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True)
class TopKGradLowering:
    """top_grad_rows(x, dy, dx, outer, N, k) or top_grad_columns(x, dy, dx, outer, N, inner, k)"""

    dtype: str
    is_min: bool
    axis: Axis
    k: int
    units: int

    def at(self, B: int) -> Steps:
        template, budget = f"{FLOATS[self.dtype]}, {str(self.is_min).lower()}", Budget(registers=64, spill_bytes=16)
        return self.axis.steps(B, self.units, SOURCE, "top_grad", template, budget, self.k, inputs=2)


class TopKGradKernel(CudaKernel):
    name = "top_k_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, TopK)

    def label(self, net: Network, node: Node) -> str:
        return f"topk_grad<{_top_k(node).k}>"

    def cost(self, net: Network, node: Node) -> Cost:
        x, dy = net.types[node.inputs[0]], net.types[node.inputs[-1]]
        return Cost(_top_k(node).k * net.row_flop(node), 2 * x.row_bytes + dy.row_bytes)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> TopKGradLowering:
        of, x = _top_k(node), types[node.inputs[0]]
        return TopKGradLowering(x.dtype, not of.largest, Axis.of(x, of.axis), of.k, device.units)


def _top_k(node: Node) -> TopK:
    layer = node.layer
    assert isinstance(layer, InputGrad)
    assert isinstance(layer.of, TopK)
    return layer.of


def _instance(dtype: str, is_min: bool, inner: int) -> Instance:
    name = f"{dtype}, {'columns' if inner > 1 else 'rows'}"
    return instance(name, TopKGradLowering(dtype, is_min, Axis(1, 1000, inner), 5, 132))


INSTANCES = (_instance("float32", False, 1), _instance("float64", True, 1), _instance("float32", False, 7),
             _instance("bfloat16", True, 7))  # fmt: skip
