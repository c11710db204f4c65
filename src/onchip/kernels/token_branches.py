"""Parallel token convolutions, each up to its max over time: fused into one pass over the ids on all devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from onchip.kernels.chain import is_closed
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Cast,
    Concat,
    Elementwise,
    GlobalMax,
    LeakyReLU,
    ReLU,
    SequenceMax,
    Sigmoid,
    Tanh,
    TokenConv,
)

REFUSED = "only token convolutions up to a max over time, with only monotonic activations before the max"


@dataclass(frozen=True)
class Branch:
    """One token convolution, its activation and its max over time. The activation is applied after the max."""

    conv: Node
    activation: Elementwise | None
    has_max: bool
    last: str  # the name of its output value
    window: int = 0  # of a SequenceMax; 0: the max is over all windows
    lengths: str | None = None  # the value that holds the lengths


@dataclass(frozen=True)
class Branches:
    """All branches and their nodes, which are consecutive."""

    branches: tuple[Branch, ...]
    nodes: tuple[Node, ...]

    @property
    def lengths(self) -> str | None:
        """The value that holds the sequence lengths, if any branch reads them: one for all branches."""
        return next((branch.lengths for branch in self.branches if branch.lengths), None)

    def columns(self, net: Network) -> dict[str, int]:
        """The first column of each branch's value in a row of the output."""
        joined = next((node.inputs for node in self.nodes if isinstance(node.layer, Concat)), (self.branches[0].last,))
        found, at = {}, 0
        for value in joined:
            found[value] = at
            at += net.types[value].row_size
        return found


def find_branches(
    net: Network, start: int, activations: tuple[type[Elementwise], ...], casts: tuple[str, ...] = ()
) -> Branches | None:
    """The branches that begin at net.nodes[start]: all of them up to their Concat, else only the first.

    casts  Casts to these dtypes are included: rounding is monotonic, so it may follow the max
    """
    ids = net.nodes[start].inputs
    taken: list[Node] = []
    ends: dict[str, Branch] = {}  # value -> the branch so far
    single: Branches | None = None
    for node in net.nodes_from(start):
        previous = ends.get(node.inputs[0])
        if isinstance(node.layer, TokenConv) and node.inputs == ids:
            ends[node.name] = Branch(node, None, False, node.name)
        elif isinstance(node.layer, Concat) and taken:
            has_all = set(node.inputs) == set(ends) and len(node.inputs) == len(ends)
            has_all &= len({branch.lengths for branch in ends.values()} - {None}) < 2
            is_whole = has_all and all(branch.has_max for branch in ends.values()) and _axis(net, node) == 1
            nodes = [*taken, node]
            if not is_whole or not is_closed(net, nodes):
                return single
            return Branches(tuple(ends.values()), (*nodes, *_following_cast(net, nodes, casts)))
        elif previous is None or (longer := _continued(previous, node, activations, casts)) is None:
            break
        else:
            del ends[node.inputs[0]]
            ends[node.name] = longer
        taken.append(node)
        if len(ends) == 1 and all(branch.has_max for branch in ends.values()) and is_closed(net, taken):
            single = Branches(tuple(ends.values()), tuple(taken))
    return single


def _continued(
    branch: Branch, node: Node, activations: tuple[type[Elementwise], ...], casts: tuple[str, ...]
) -> Branch | None:
    """The branch extended by one layer, if it can be fused."""
    layer = node.layer
    if isinstance(layer, SequenceMax):
        return _up_to_lengths(branch, node, layer)
    if isinstance(layer, GlobalMax):
        over_time = {axis % 3 for axis in layer.axes} == {2}
        return dataclasses.replace(branch, has_max=True, last=node.name) if over_time and not branch.has_max else None
    if isinstance(layer, Cast) and layer.dtype in casts:
        return dataclasses.replace(branch, last=node.name)
    if isinstance(layer, activations) and branch.activation is None and (branch.has_max or is_monotonic(layer)):
        return dataclasses.replace(branch, activation=layer, last=node.name)
    return None


def _up_to_lengths(branch: Branch, node: Node, layer: SequenceMax) -> Branch | None:
    """The branch with a max over windows inside the sequence; without any, the activation is applied to 0."""
    assert isinstance(branch.conv.layer, TokenConv)
    keeps_zero = branch.activation is None or isinstance(branch.activation, ReLU | LeakyReLU | Tanh)
    if branch.has_max or not keeps_zero or layer.stride != branch.conv.layer.stride:
        return None
    return dataclasses.replace(branch, has_max=True, last=node.name, window=layer.window, lengths=node.inputs[1])


def _following_cast(net: Network, nodes: list[Node], casts: tuple[str, ...]) -> tuple[Node, ...]:
    """The Cast after these nodes, if it is the next node and their only reader."""
    after = net.nodes[net.nodes.index(nodes[-1]) + 1 :][:1]
    is_cast = all(isinstance(n.layer, Cast) and n.layer.dtype in casts and n.inputs == (nodes[-1].name,) for n in after)
    return tuple(after) if is_cast and is_closed(net, [*nodes, *after]) else ()


def is_monotonic(layer: Elementwise) -> bool:
    """Whether f is monotonic, f(max x) = max f(x): it may follow the max."""
    return isinstance(layer, ReLU | Sigmoid | Tanh) or (isinstance(layer, LeakyReLU) and layer.slope >= 0)


def _axis(net: Network, node: Node) -> int:
    assert isinstance(node.layer, Concat)
    return node.layer.axis % len(net.types[node.name].shape)
