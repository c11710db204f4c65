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
    told = []
    for node in net.nodes:
        if isinstance(node.layer, Linear) and len(net.types[node.name].shape) == 2:
            run = _run_to_image(draft, node)
            if run:
                _turn(draft, node, run)
                told.append(f"made {run[-1].name} with its channels last: the weights of {node.name} take that order")
    return draft.done(told)


def _run_to_image(draft: Draft, linear: Node) -> list[Node]:
    """The Reshapes and activations between a Linear and a convolution that reads its output as an image, or none."""
    run: list[Node] = []
    while True:
        last = run[-1] if run else linear
        readers = draft.readers(last.name)
        if any(isinstance(reader.layer, Convolution | TransposedConvolution) for reader in readers):
            return run if has_channels(draft.types[last.name]) else []
        reader = draft.sole_reader(last.name)
        if reader is None or not isinstance(reader.layer, Reshape | Elementwise):
            return []
        run.append(reader)


def _turn(draft: Draft, linear: Node, run: list[Node]) -> None:
    image = run[-1].name
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
    ahead, value = list[Node](), linear.name
    for node in run:
        if isinstance(node.layer, Elementwise):
            ahead.append(Node(draft.fresh(f"{node.name}.flat"), node.layer, (value,)))
            value = ahead[-1].name
    ahead.append(Node(draft.fresh(f"{image}.pixels"), Reshape((*pixels, C)), (value,)))
    draft.put(*ahead, Node(image, Permute((0, rank, *range(1, rank))), (ahead[-1].name,)))
    for node in run[:-1]:
        draft.drop(node)
