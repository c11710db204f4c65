"""Finding an MLP in a network: the run of layers that the fused kernels of every device can claim."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from onchip.kernels.pointwise import ACTIVATIONS
from onchip.plan.kernel import Claim, Price, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels
from onchip.spec.layers import (
    Cast,
    Concat,
    Elementwise,
    Identity,
    Linear,
    LogSoftmax,
    Permute,
    Reshape,
    Softmax,
)
from onchip.spec.network import Network, Node


@dataclass(frozen=True)
class Dense:
    """One Linear with what follows it."""

    weight: str  # (D_out, D_in)
    bias: str | None
    D_in: int
    D_out: int
    activation: Elementwise | None

    @property
    def activation_name(self) -> str:
        return "Identity" if self.activation is None else self.activation.kind


@dataclass(frozen=True)
class Chain:
    """Dense layers one behind the other; no value in between is read by anyone else."""

    nodes: tuple[str, ...]
    layers: tuple[Dense, ...]
    normaliser: str  # "", "Softmax" or "LogSoftmax" behind the last layer
    vectors: int  # vectors a batch row: 1, or more where Linear runs over (B, ..., D_in)
    ends: tuple[int, ...]  # for each layer: how many of the nodes are behind when it is done

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.layers[0].D_in, *(layer.D_out for layer in self.layers))

    @property
    def label(self) -> str:
        """Template arguments as they stand in a kernel's name: widths, then each distinct activation."""
        kinds = [layer.activation.kind for layer in self.layers if layer.activation is not None]
        names = dict.fromkeys([*kinds, self.normaliser] if self.normaliser else kinds)
        return ",".join([*map(str, self.widths), *names])

    def first(self, count: int) -> Chain:
        """The chain of the first `count` layers."""
        if count == len(self.layers):
            return self
        nodes, ends = self.nodes[: self.ends[count - 1]], self.ends[:count]
        return Chain(nodes, self.layers[:count], "", self.vectors, ends)

    def parts(self) -> Iterator[Chain]:
        """The chain, and the beginnings of it, longest first: what a kernel tries that may have no room for all."""
        return (self.first(count) for count in range(len(self.layers), 0, -1))


def find_chain(
    net: Network, start: int, activations: tuple[type[Elementwise], ...] = ACTIVATIONS, casts: bool = False
) -> Chain | None:
    """The longest chain beginning at net.nodes[start], or None if no Dense layer begins there.

    casts  Casts before the first layer and behind the last are part of it
    """
    nodes: list[Node] = []
    layers: list[Dense] = []
    ends: list[int] = []
    normaliser, vectors, is_cast = "", 0, False
    for node in net.nodes_from(start):
        if nodes and not _continues(net, nodes[-1], node):
            break
        layer = node.layer
        if is_cast and not isinstance(layer, Cast | Reshape):
            break  # what comes behind reads rounded numbers
        if isinstance(layer, Linear) and not normaliser and (not layers or _width(net, node) == layers[-1].D_out):
            D_out, D_in = net.weights[node.weights["weight"]].shape
            vectors = net.types[node.inputs[0]].row_size // D_in
            layers.append(Dense(node.weights["weight"], node.weights.get("bias"), D_in, D_out, None))
            ends.append(0)
        elif isinstance(layer, activations) and layers and layers[-1].activation is None and not normaliser:
            layers[-1] = dataclasses.replace(layers[-1], activation=layer)
        elif isinstance(layer, Softmax | LogSoftmax) and layers and not normaliser and _is_last_axis(net, node):
            if layers[-1].activation is not None:
                break
            normaliser = layer.kind
        elif casts and isinstance(layer, Cast):
            is_cast = bool(layers)
        elif not isinstance(layer, Reshape):
            break
        nodes.append(node)
        if layers:
            ends[-1] = len(nodes)
    if not layers:
        return None
    return Chain(tuple(n.name for n in nodes), tuple(layers), normaliser, vectors, tuple(ends))


def forward_price(net: Network, chain: Chain) -> Price:
    """What any kernel must pay: x in, y out, every weight once a launch."""
    nodes = [net.by_name[name] for name in chain.nodes]
    weights = sum(layer.D_out * (layer.D_in + (layer.bias is not None)) for layer in chain.layers)
    return Price(
        row_flop=sum(map(net.row_flop, nodes)),
        row_bytes=net.types[nodes[0].inputs[0]].row_bytes + net.types[nodes[-1].name].row_bytes,
        fixed_bytes=4 * weights,
    )


def end_dtypes(net: Network, chain: Chain) -> tuple[str, str]:
    """What x and y are in memory."""
    return net.types[net.by_name[chain.nodes[0]].inputs[0]].dtype, net.types[chain.nodes[-1]].dtype


def why_not_float32(net: Network, chain: Chain) -> str:
    """ "" if all of it is float32, else the first thing that is not: no kernel converts in silence."""
    first = next(node for node in net.nodes if node.name == chain.nodes[0])
    dtypes = {first.inputs[0]: net.types[first.inputs[0]].dtype}
    for layer in chain.layers:
        dtypes |= {name: net.weight_type(name).dtype for name in (layer.weight, layer.bias) if name is not None}
    odd = next(((name, dtype) for name, dtype in dtypes.items() if dtype != "float32"), None)
    return f"computes on float32, and {odd[0]} is {odd[1]}" if odd else ""


def is_closed(net: Network, nodes: list[Node]) -> bool:
    """Nobody outside a run of nodes reads what it makes on the way."""
    inside = {node.name for node in nodes}
    between = inside - {nodes[-1].name}
    outside = {value for node in net.nodes if node.name not in inside for value in node.inputs} | set(net.outputs)
    return not between & outside


def in_layouts(net: Network, node: Node, claim: Claim) -> Iterator[Claim]:
    """The claim of a layer that does not care how its values lie, in every layout that they may all have."""
    yield claim
    if all(has_channels(net.types[value]) for value in (*node.inputs, node.name)) and net.readers(node.name):
        reads = dict.fromkeys(node.inputs, Use(CHANNELS_LAST))
        yield dataclasses.replace(claim, reads=reads, gives={node.name: CHANNELS_LAST})


def given_ids(net: Network, value: str) -> set[str] | None:
    """The inputs whose ids a value holds, only moved; None if anything is computed on the way."""
    makers = {node.name: node for node in net.nodes}
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value in net.inputs:
            found.add(value)
        elif isinstance(makers[value].layer, Reshape | Permute | Concat | Identity):
            waiting += [before for before in makers[value].inputs if before not in seen]
            seen.update(makers[value].inputs)
        else:
            return None
    return found


def _continues(net: Network, before: Node, node: Node) -> bool:
    return node.inputs == (before.name,) and before.name not in net.outputs and len(net.readers(before.name)) == 1


def _width(net: Network, node: Node) -> int:
    return int(net.types[node.inputs[0]].shape[-1])


def _is_last_axis(net: Network, node: Node) -> bool:
    rank = len(net.types[node.name].shape)
    return node.layer.attributes()["axis"] % rank == rank - 1 and _width(net, node) == _last_dense_width(net, node)


def _last_dense_width(net: Network, node: Node) -> int:
    # A Reshape between the Linear and the softmax may have split the row: then the axes differ.
    value = node.inputs[0]
    by_name = {n.name: n for n in net.nodes}
    while isinstance(by_name[value].layer, Reshape):
        value = by_name[value].inputs[0]
    return int(net.types[value].shape[-1])
