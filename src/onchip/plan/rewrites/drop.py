"""Removal of layers that have no effect: unused ones, and identities."""

from __future__ import annotations

import dataclasses

from onchip.network.graph import Network, Node
from onchip.network.layers import Broadcast, Cast, Concat, Identity, LinearResize, Permute, Reshape, Selection, Tile
from onchip.plan.rewrites.edit import Draft, Rewritten


def drop_unread(net: Network) -> Rewritten:
    """A layer whose value is unused and is no output   becomes   nothing."""
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


def drop_idle(net: Network) -> Rewritten:
    """x -> Identity, Dropout, a layer that changes nothing here, a Concat of one -> f   becomes   x -> f.

    If it is an output, the layer before it takes its name; it stays if there is none that can.
    """
    draft = Draft(net)
    told = []
    for node in net.nodes:
        if _is_idle(net, node) and draft.bypass(node.name):
            told.append(f"dropped {node.name}: it changes nothing")
    return draft.done(told)


def drop_stretches(net: Network) -> Rewritten:
    """x -> Tile -> Add, Mul, .. with another value   becomes   x -> Add, Mul, ..: these broadcast sizes of 1 anyway."""
    draft = Draft(net)
    told = []
    for tile in net.nodes:
        if not isinstance(tile.layer, Tile):
            continue
        (x,) = tile.inputs
        if any(n != 1 and times != 1 for n, times in zip(net.types[x].row_shape, tile.layer.repeats, strict=True)):
            continue
        for reader in dict.fromkeys(node.name for node in draft.readers(tile.name)):
            node = draft.nodes[reader]
            plain = dataclasses.replace(node, inputs=tuple(x if name == tile.name else name for name in node.inputs))
            if not isinstance(node.layer, Broadcast):
                continue
            if node.layer.infer(net.input_types(plain), net.node_weight_types(plain)) == net.types[reader]:
                draft.put(plain)
                told.append(f"stretched {x} in {reader}, not before it")
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
