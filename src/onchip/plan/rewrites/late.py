"""The order of nodes: what only moves numbers stands right before who reads it."""

from __future__ import annotations

from collections import deque

from onchip.network.graph import Network, Node
from onchip.network.layers import Embedding, Permute, Reshape, Slice
from onchip.plan.rewrites.edit import Told


def sink_moves(net: Network) -> Told:
    """move a, product b, reader of a   becomes   product b, move a, reader of a.

    A kernel takes a run of neighbours: so heads of attention are cut out, and rows looked up, where they are read.
    """
    waiting = {node.name: node for node in net.nodes if isinstance(node.layer, Reshape | Permute | Slice | Embedding)}
    order: list[Node] = []
    kept = deque(node for node in net.nodes if node.name not in waiting)
    while kept or waiting:
        # What nobody reads comes last.
        first = kept.popleft() if kept else waiting.pop(next(iter(waiting)))
        path = [(first, iter(first.inputs))]  # a node, and what it reads that was not looked at
        while path:
            ahead = next((value for value in path[-1][1] if value in waiting), None)
            if ahead is None:
                order.append(path.pop()[0])
            else:
                path.append((waiting[ahead], iter(waiting.pop(ahead).inputs)))
    if [node.name for node in order] == [node.name for node in net.nodes]:
        return net, []
    return net.replace(nodes=order), []
