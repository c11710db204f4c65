"""A Linear that computes an image: its output in NHWC, the order in which convolutions read it."""

from __future__ import annotations

import dataclasses

from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Elementwise, Linear, Permute, Reshape, TransposedConvolution
from onchip.plan.layout import has_channels
from onchip.plan.rewrites.edit import Draft, Rewritten
from onchip.plan.rewrites.linear import rows_in_order


def make_channels_last(net: Network) -> Rewritten:
    """Linear -> activations, Reshape to (C, H, W) -> Conv   becomes
    Linear with its rows in the order of (H, W, C) -> activations -> Reshape to (H, W, C) -> Permute -> Conv.

    If the convolution reads NHWC, the Permute is a view; else it is a pass over memory.
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        if isinstance(node.layer, Linear) and len(net.types[node.name].shape) == 2:
            chain = _chain_to_image(draft, node)
            if chain:
                _to_channels_last(draft, node, chain)
                notes.append(f"stored {chain[-1].name} in NHWC: permuted the weights of {node.name}")
    return draft.done(notes)


def _chain_to_image(draft: Draft, linear: Node) -> list[Node]:
    """The Reshapes and activations between a Linear and a convolution that reads its output as an image, or none."""
    chain: list[Node] = []
    while True:
        last = chain[-1] if chain else linear
        readers = draft.readers(last.name)
        if any(isinstance(reader.layer, Convolution | TransposedConvolution) for reader in readers):
            return chain if has_channels(draft.types[last.name]) else []
        reader = draft.sole_reader(last.name)
        if reader is None or not isinstance(reader.layer, Reshape | Elementwise):
            return []
        chain.append(reader)


def _to_channels_last(draft: Draft, linear: Node, chain: list[Node]) -> None:
    image = chain[-1].name
    C, *pixels = draft.types[image].row_shape
    rank = 1 + len(pixels)
    moves = (("reshape", (C, *pixels)), ("permute", (*range(1, rank), 0)))
    roles = {
        role: draft.derive(
            f"{linear.name}.{role}.last", rows_in_order, (name,), draft.weights[name].shape, moves=moves
        )
        for role, name in linear.weights.items()
    }  # fmt: skip
    draft.put(dataclasses.replace(linear, weights=roles))
    new_nodes, value = list[Node](), linear.name
    for node in chain:
        if isinstance(node.layer, Elementwise):
            new_nodes.append(Node(draft.fresh(f"{node.name}.flat"), node.layer, (value,)))
            value = new_nodes[-1].name
    new_nodes.append(Node(draft.fresh(f"{image}.pixels"), Reshape((*pixels, C)), (value,)))
    draft.put(*new_nodes, Node(image, Permute((0, rank, *range(1, rank))), (new_nodes[-1].name,)))
    for node in chain[:-1]:
        draft.drop(node)
