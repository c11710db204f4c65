"""Permute, and the layout conversions that a plan needs, with an optional Cast: one launch of common/permute.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onchip.kernels.cuda.common.arguments import Input, Output
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.permute import MAX_AXES, merge_axes, permute
from onchip.kernels.cuda.common.program import Steps
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Permute
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_type


@dataclass(frozen=True)
class PermuteLowering:
    dtypes: tuple[str, str]
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, batch first
    units: int

    def at(self, B: int) -> Steps:
        shape = (B, *self.row_shape)
        if not math.prod(shape):
            return Steps(())
        return Steps((permute(self.dtypes, shape, self.axes, self.units, Input(0), Output(0)),))


class PermuteKernel(CudaKernel):
    name = "permute"
    layers = (Permute, Cast)
    dtypes = DTYPE_BYTES

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        x, y = net.types[node.inputs[0]], net.types[node.name]
        return isinstance(node.layer, Permute) or ({x.dtype, y.dtype} <= ELEMENT_TYPES.keys() and has_channels(x))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        yield from (
            self._casts(net, node, device) if isinstance(node.layer, Cast) else super().offers(net, start, device, job)
        )

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> PermuteLowering | str:
        layer, x = node.layer, types[node.inputs[0]]
        assert isinstance(layer, Permute)
        if len(merge_axes((2, *x.row_shape), layer.axes)[0]) > MAX_AXES:
            return f"permutes up to {MAX_AXES} axes, not {x}"
        return PermuteLowering((x.dtype, x.dtype), x.row_shape, layer.axes, device.units)

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<{','.join(map(str, node.layer.attributes()['axes']))}>"

    def _casts(self, net: Network, node: Node, device: Device) -> Iterator[Claim]:
        """A Cast that also changes the layout, in one pass."""
        (value,) = node.inputs
        x, y = net.types[value], net.types[node.name]
        for source, target in ((ROWS, CHANNELS_LAST), (CHANNELS_LAST, ROWS)):
            is_end = value in net.inputs if source == CHANNELS_LAST else not net.readers(node.name)
            if not is_end:  # network inputs and outputs stay row-major
                yield Claim(
                    self.name, f"{self.name}<{target},{y.dtype}>", (node.name,), self.cost(net, node),
                    f"{value} is stored in {source} layout", facts=_conversion(x, source, y.dtype, device),
                    reads={value: Use(source)}, writes={} if target == ROWS else {node.name: target},
                )  # fmt: skip

    def conversion(self, net: Network, value: str, source: str, target: str, device: Device, job: Job) -> Claim | None:
        x = net.types[value]
        return Claim(
            self.name, f"{self.name}<{target}>", (), Cost(0, 2 * x.row_bytes), f"{value} is stored in {source} layout",
            facts=_conversion(x, source, x.dtype, device), reads={value: Use(source)}, writes={value: target},
        )  # fmt: skip


def _conversion(x: TensorType, source: str, dtype: str, device: Device) -> PermuteLowering:
    """Conversion from layout `source` to the other one."""
    to_last = (0, *range(2, len(x.shape)), 1)
    axes = to_last if source == ROWS else _inverse(to_last)
    return PermuteLowering((x.dtype, dtype), stored_type(x, source).row_shape, axes, device.units)


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The inverse permutation."""
    return tuple(sorted(range(len(axes)), key=lambda i: axes[i]))
