"""Layers that do nothing here: those that nobody reads, and those that hand on what they get."""

from __future__ import annotations

from onchip.plan.rewrites.edit import Draft, Told
from onchip.spec.layers import Cast, Concat, Identity, LinearResize, Permute, Reshape, Selection
from onchip.spec.network import Network, Node


def drop_unread(net: Network) -> Told:
    """A layer whose value nobody reads and that is no output   becomes   nothing."""
    needed = set(net.outputs)
    kept = []
    for node in reversed(net.nodes):
        if node.name in needed:
            needed.update(node.inputs)
            kept.append(node)
    if len(kept) == len(net.nodes):
        return net, []
    told = [f"dropped {node.name}: nobody reads it" for node in net.nodes if node.name not in needed]
    return net.replace(nodes=reversed(kept)), told


def drop_idle(net: Network) -> Told:
    """x -> Identity, Dropout, a layer that changes nothing here, a Concat of one -> f   becomes   x -> f.

    One that is an output gives its name to the layer before it, and stays where there is none to take it.
    """
    draft = Draft(net)
    told = []
    for node in net.nodes:
        if _is_idle(net, node) and draft.bypass(node.name):
            told.append(f"dropped {node.name}: it changes nothing")
    return draft.done(told)


def _is_idle(net: Network, node: Node) -> bool:
    layer = node.layer
    if isinstance(layer, Permute):
        return layer.axes == tuple(sorted(layer.axes))
    is_alike = net.types[node.name] == net.types[node.inputs[0]]
    if isinstance(layer, Selection):
        return is_alike and not any(p is not None for p in layer.places(net.types[node.name].row_shape))
    if isinstance(layer, LinearResize):
        return is_alike and not any(layer.taps(net.types[node.name].row_shape))
    if isinstance(layer, Reshape | Cast):
        return is_alike
    return isinstance(layer, Identity) or (isinstance(layer, Concat) and len(node.inputs) == 1)
