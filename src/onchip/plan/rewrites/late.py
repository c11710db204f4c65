"""Node order: move data movement right before its reader."""

from __future__ import annotations

from collections import deque

from onchip.network.graph import Network, Node
from onchip.network.layers import Embedding, Permute, Reshape, Slice
from onchip.plan.rewrites.edit import Rewritten


def sink_moves(net: Network) -> Rewritten:
    """move a, layer b, reader of a   becomes   layer b, move a, reader of a.

    A kernel claims consecutive nodes, so this lets it fuse the slices of attention heads, or the lookup of rows.
    """
    waiting = {node.name: node for node in net.nodes if isinstance(node.layer, Reshape | Permute | Slice | Embedding)}
    order: list[Node] = []
    others = deque(node for node in net.nodes if node.name not in waiting)
    while others or waiting:
        # Unused nodes come last.
        first = others.popleft() if others else waiting.pop(next(iter(waiting)))
        path = [(first, iter(first.inputs))]  # a node, and its inputs that are not yet visited
        while path:
            source = next((value for value in path[-1][1] if value in waiting), None)
            if source is None:
                order.append(path.pop()[0])
            else:
                path.append((waiting[source], iter(waiting.pop(source).inputs)))
    if [node.name for node in order] == [node.name for node in net.nodes]:
        return net, []
    return net.replace(nodes=order), []
