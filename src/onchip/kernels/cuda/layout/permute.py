"""Permute, and the layout conversions that a plan needs, with an optional Cast: one launch of common/permute.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onchip.kernels.cuda.common.permute import ARCHITECTURES, MAX_AXES, merge_axes, permute
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import ELEMENT_TYPES, Input, Output, Steps
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Permute
from onchip.network.types import TensorType
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


class PermuteKernel:
    name = "permute"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training:
            return
        if isinstance(node.layer, Cast):
            yield from self._casts(net, node, device)
        if not isinstance(node.layer, Permute):
            return
        x = net.types[node.inputs[0]]
        if device.arch not in ARCHITECTURES or len(merge_axes((2, *x.row_shape), node.layer.axes)[0]) > MAX_AXES:
            why = f"permutes up to {MAX_AXES} axes on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        label, why = f"{self.name}<{','.join(map(str, node.layer.axes))}>", "single layer"
        yield Claim(
            self.name,
            label,
            (node.name,),
            Cost(0, 2 * x.row_bytes),
            why,
            facts=PermuteLowering((x.dtype, x.dtype), x.row_shape, node.layer.axes, device.units),
        )

    def _casts(self, net: Network, node: Node, device: Device) -> Iterator[Claim]:
        """A Cast that also changes the layout, in one pass."""
        (value,) = node.inputs
        x, y = net.types[value], net.types[node.name]
        if not {x.dtype, y.dtype} <= ELEMENT_TYPES.keys() or not has_channels(x) or device.arch not in ARCHITECTURES:
            return
        for source, target in ((ROWS, CHANNELS_LAST), (CHANNELS_LAST, ROWS)):
            is_end = value in net.inputs if source == CHANNELS_LAST else not net.readers(node.name)
            if not is_end:  # network inputs and outputs stay row-major
                yield Claim(
                    self.name, f"{self.name}<{target},{y.dtype}>", (node.name,), Cost(0, x.row_bytes + y.row_bytes),
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
