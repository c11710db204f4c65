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
    """The matrices (heads) of a value, in elements: offset of the first element, then the strides from head to head,
    from row to row (sequence) and within a row."""

    value: str
    first: int
    head: int
    step: int
    element: int


@dataclass(frozen=True)
class View:
    """A view of a value. `view` has one byte per element of a row; its strides are the view's strides in elements."""

    value: str
    row: Array  # a whole row of the value, contiguous
    view: Array
    scales: tuple[str, ...] = ()  # scalar weights that it is multiplied by

    @staticmethod
    def of(net: Network, inside: Mapping[str, Node], name: str) -> View:
        """`name` as a view of the input of the chain of `inside` nodes that computes it."""
        chain: list[Node] = []
        while name in inside:
            chain.append(inside[name])
            name = chain[-1].inputs[0]
        row = view = np.empty(net.types[name].row_shape, np.int8)
        scales: list[str] = []
        for node in reversed(chain):
            layer = node.layer
            if isinstance(layer, Permute):
                view = view.transpose([axis - 1 for axis in layer.axes[1:]])
            elif isinstance(layer, Slice):
                ranges = zip(layer.starts, layer.sizes, layer.steps, strict=True)
                view = view[tuple(_range(start, size, step) for start, size, step in ranges)]
            elif isinstance(layer, Reshape):
                view = view.reshape(net.types[node.name].row_shape)
            else:
                scales.append(node.weights["constant"])
        return View(name, row, view, tuple(scales))

    def heads(self, leading: tuple[int, ...], step: int, element: int) -> Heads | None:
        """Strides of (*leading, S, D) or (*leading, D, S); `step` is the axis S, `element` D. None if not strided."""
        broadcast = np.broadcast_to(self.view, (*leading, *self.view.shape[-2:]))
        flat = broadcast.reshape(-1, *broadcast.shape[-2:])
        first = flat.ctypes.data - self.row.ctypes.data
        if not 0 <= first < self.row.size or not flat.size:  # NumPy had to copy it
            return None
        strides = [0 if size == 1 else stride for size, stride in zip(flat.shape, flat.strides, strict=True)]
        return Heads(self.value, first, strides[0], strides[step], strides[element])

    def line(self) -> tuple[int, int] | None:
        """Offset of the first element and the stride to the next, over all elements; None if the stride varies."""
        heads = View(self.value, self.row, self.view.reshape(1, 1, -1)).heads((1,), -2, -1)
        return None if heads is None else (heads.first, heads.element)


def _range(start: int, size: int, step: int) -> slice:
    stop = start + size * step
    return slice(start, None if stop < 0 else stop, step)
