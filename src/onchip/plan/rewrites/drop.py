"""Removal of layers that have no effect: unused ones, and identities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Broadcast,
    Cast,
    Concat,
    Identity,
    Layer,
    LinearResize,
    Permute,
    Reshape,
    Selection,
    Tile,
)
from onchip.plan.rewrites.edit import Draft, Rewritten


def drop_unread(net: Network) -> Rewritten:
    """A layer whose value is unused and not an output   becomes   nothing."""
    needed = set(net.outputs)
    used = []
    for node in reversed(net.nodes):
        if node.name in needed:
            needed.update(node.inputs)
            used.append(node)
    if len(used) == len(net.nodes):
        return net, []
    notes = [f"dropped {node.name}: unused" for node in net.nodes if node.name not in needed]
    return net.replace(nodes=reversed(used)), notes


def drop_idle(net: Network, keep: Callable[[Layer], bool] = lambda layer: False) -> Rewritten:
    """x -> Identity, Dropout, a Concat of one value, or another layer without effect here -> f   becomes   x -> f.

    If the layer is an output, the previous layer takes its name; if that is impossible, the layer stays.

    keep  layers that stay
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        if _is_idle(net, node) and not keep(node.layer) and draft.bypass(node.name):
            notes.append(f"dropped {node.name}: it changes nothing")
    return draft.done(notes)


def drop_tiles(net: Network) -> Rewritten:
    """x -> Tile -> Add, Mul, .. with another value   becomes   x -> Add, Mul, ..: they broadcast axes of size 1."""
    draft = Draft(net)
    notes = []
    for tile in net.nodes:
        if not isinstance(tile.layer, Tile):
            continue
        (x,) = tile.inputs
        if any(n != 1 and times != 1 for n, times in zip(net.types[x].row_shape, tile.layer.repeats, strict=True)):
            continue
        for reader in dict.fromkeys(node.name for node in draft.readers(tile.name)):
            node = draft.nodes[reader]
            direct = dataclasses.replace(node, inputs=tuple(x if name == tile.name else name for name in node.inputs))
            if not isinstance(node.layer, Broadcast):
                continue
            if node.layer.infer(net.input_types(direct), net.node_weight_types(direct)) == net.types[reader]:
                draft.put(direct)
                notes.append(f"broadcast {x} in {reader}, without the Tile")
    return draft.done(notes)


def _is_idle(net: Network, node: Node) -> bool:
    layer = node.layer
    if isinstance(layer, Permute):
        return layer.axes == tuple(sorted(layer.axes))
    has_same_type = net.types[node.name] == net.types[node.inputs[0]]
    if isinstance(layer, Selection):
        return has_same_type and not any(p is not None for p in layer.source_indices(net.types[node.name].row_shape))
    if isinstance(layer, LinearResize):
        return has_same_type and not any(layer.taps(net.types[node.name].row_shape))
    if isinstance(layer, Reshape | Cast):
        return has_same_type
    return isinstance(layer, Identity) or (isinstance(layer, Concat) and len(node.inputs) == 1)
