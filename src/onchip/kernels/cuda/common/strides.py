"""Strided views: folds Slice, Reshape and Permute into strides where that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Permute, Reshape, Slice
from onchip.network.recipe import Array


@dataclass(frozen=True)
class Heads:
    """The matrices (heads) of a value: offset of the first element, then strides over heads, sequence and head
    elements."""

    value: str
    first: int
    head: int
    step: int
    each: int


@dataclass(frozen=True)
class View:
    """A view of a value. `seen` has one byte per element of a row; its strides are the view's strides in elements."""

    value: str
    row: Array  # the whole row, contiguous
    seen: Array
    scales: tuple[str, ...] = ()  # scalar weights that it is multiplied by

    @staticmethod
    def of(net: Network, inside: Mapping[str, Node], name: str) -> View:
        """`name` as a view of the value that the chain of nodes among `inside` starts from."""
        moves: list[Node] = []
        while name in inside:
            moves.append(inside[name])
            name = moves[-1].inputs[0]
        row = seen = np.empty(net.types[name].row_shape, np.int8)
        scales: list[str] = []
        for node in reversed(moves):
            layer = node.layer
            if isinstance(layer, Permute):
                seen = seen.transpose([axis - 1 for axis in layer.axes[1:]])
            elif isinstance(layer, Slice):
                places = zip(layer.starts, layer.sizes, layer.steps, strict=True)
                seen = seen[tuple(_range(start, size, step) for start, size, step in places)]
            elif isinstance(layer, Reshape):
                seen = seen.reshape(net.types[node.name].row_shape)
            else:
                scales.append(node.weights["constant"])
        return View(name, row, seen, tuple(scales))

    def heads(self, front: tuple[int, ...], step: int, each: int) -> Heads | None:
        """Strides of (*front, S, D) or (*front, D, S); S is axis `step`, D axis `each`. None if not strided."""
        stretched = np.broadcast_to(self.seen, (*front, *self.seen.shape[-2:]))
        flat = stretched.reshape(-1, *stretched.shape[-2:])
        first = flat.ctypes.data - self.row.ctypes.data
        if not 0 <= first < self.row.size or not flat.size:  # NumPy had to copy it
            return None
        strides = [0 if size == 1 else stride for size, stride in zip(flat.shape, flat.strides, strict=True)]
        return Heads(self.value, first, strides[0], strides[step], strides[each])

    def line(self) -> tuple[int, int] | None:
        """Offset of the first element and the stride to the next, over all elements; None if the stride varies."""
        found = View(self.value, self.row, self.seen.reshape(1, 1, -1)).heads((1,), -2, -1)
        return None if found is None else (found.first, found.each)


def _range(start: int, size: int, step: int) -> slice:
    stop = start + size * step
    return slice(start, None if stop < 0 else stop, step)
