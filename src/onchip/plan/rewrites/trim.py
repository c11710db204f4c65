"""Convolutions that compute only the pixels that are used."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Slice
from onchip.network.layers.conv import geometry
from onchip.plan.rewrites.edit import Draft, Rewritten


def trim_convs(net: Network) -> Rewritten:
    """Conv -> Slice of adjacent pixels   becomes   Conv with less padding, if the Slice removes what the padding adds:
    as in a causal convolution, which is padded on both sides and cropped at the end.
    """
    if not any(isinstance(node.layer, Slice) for node in net.nodes):
        return net, []
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        cut = draft.sole_reader(node.name) if isinstance(node.layer, Convolution) else None
        if cut is None or not isinstance(cut.layer, Slice):
            continue
        pads = _pads(draft, node, cut.layer)
        if pads is not None:
            layer = type(node.layer)(**{**node.layer.attributes(), "pads": pads})
            draft.put(Node(cut.name, layer, node.inputs, node.weights))
            draft.drop(node)
            notes.append(f"folded {cut.name} into {node.name}: it computes only those pixels")
    return draft.done(notes)


def _pads(draft: Draft, conv: Node, cut: Slice) -> Sequence[int] | None:
    """The padding with which the convolution computes only the sliced pixels; None if there is none."""
    assert isinstance(conv.layer, Convolution)
    rank, (stride, pads, dilation) = conv.layer.rank, geometry(conv.layer)
    kernel = draft.weights[conv.weights["weight"]].shape[2:]
    x, y = (draft.types[value].row_shape for value in (conv.inputs[0], conv.name))
    if set(cut.steps) != {1} or cut.starts[0] or cut.sizes[0] != y[0]:
        return None
    before, after = [], []
    for axis in range(rank):
        first = pads[axis] - cut.starts[axis + 1] * stride[axis]
        last = (cut.sizes[axis + 1] - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1 - x[axis + 1] - first
        if cut.sizes[axis + 1] == y[axis + 1]:  # all of them
            last = pads[rank + axis]  # includes elements after the last window, which no padding changes
        if not cut.sizes[axis + 1] or first < 0 or not 0 <= last <= pads[rank + axis]:
            return None
        before.append(first)
        after.append(last)
    return (*before, *after)
