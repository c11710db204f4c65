"""Finding an MLP in a network: the chain of layers that the fused kernels of every device can claim."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Set
from dataclasses import dataclass

from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import (
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
from onchip.plan.kernel import Claim, Cost, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels


@dataclass(frozen=True)
class Dense:
    """One Linear with the activation that follows it."""

    weight: str  # (D_out, D_in)
    bias: str | None
    D_in: int
    D_out: int
    activation: Elementwise | None


@dataclass(frozen=True)
class Chain:
    """Consecutive dense layers; no value between them has another reader."""

    nodes: tuple[str, ...]
    layers: tuple[Dense, ...]
    normaliser: str  # "", "Softmax" or "LogSoftmax" after the last layer
    vectors: int  # vectors per batch row: 1, or more if Linear runs over (B, ..., D_in)
    ends: tuple[int, ...]  # per layer: how many of the nodes are done when it is

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.layers[0].D_in, *(layer.D_out for layer in self.layers))

    @property
    def label(self) -> str:
        """Template arguments as in a kernel's name: widths, then each distinct activation."""
        kinds = [layer.activation.kind for layer in self.layers if layer.activation is not None]
        names = dict.fromkeys([*kinds, self.normaliser] if self.normaliser else kinds)
        return ",".join([*map(str, self.widths), *names])

    def first(self, count: int) -> Chain:
        """The chain of the first `count` layers."""
        return self if count == len(self.layers) else self.part(0, count)

    def part(self, start: int, stop: int) -> Chain:
        """The chain of layers `start` up to `stop`."""
        begin = self.ends[start - 1] if start else 0
        nodes, ends = self.nodes[begin : self.ends[stop - 1]], self.ends[start:stop]
        normaliser = self.normaliser if stop == len(self.layers) else ""
        return Chain(nodes, self.layers[start:stop], normaliser, self.vectors, tuple(end - begin for end in ends))

    def with_leading(self, nodes: tuple[str, ...]) -> Chain:
        """The chain preceded by nodes that do not compute."""
        ends = tuple(end + len(nodes) for end in self.ends)
        return dataclasses.replace(self, nodes=(*nodes, *self.nodes), ends=ends)


# Cached chains of a network, per query: the node index of a layer -> its chain, and its index in it. A kernel may query
# every layer of a chain, and walking it each time would be quadratic in its length.
_Found = dict[int, tuple[Chain, int]]
_FOUND: weakref.WeakKeyDictionary[Network, dict[object, _Found]] = weakref.WeakKeyDictionary()


def find_chain(
    net: Network,
    start: int,
    activations: tuple[type[Elementwise], ...] = ACTIVATIONS,
    casts: bool = False,
    most: int | None = None,
) -> Chain | None:
    """The longest chain beginning at net.nodes[start], or None if no Dense layer begins there.

    casts  include Casts before the first layer and after the last
    most   maximum number of layers; None: any number
    """
    first = first_layer(net, start, casts)
    if first is None:
        return None
    found = _FOUND.setdefault(net, {}).setdefault((activations, casts), {})
    if first not in found:
        found |= _walk(net, first, activations, casts)
    chain, index = found[first]
    stop = len(chain.layers) if most is None else min(index + most, len(chain.layers))
    chain = chain if stop - index == len(chain.layers) else chain.part(index, stop)
    return chain if first == start else chain.with_leading(tuple(net.nodes[i].name for i in range(start, first)))


def first_layer(net: Network, start: int, casts: bool = False) -> int | None:
    """The index of the first Linear of a chain that begins at net.nodes[start]: nothing before it computes."""
    skipped = (Reshape, Cast) if casts else (Reshape,)
    for i in range(start, len(net.nodes)):
        if i > start and not _continues(net, net.nodes[i - 1], net.nodes[i]):
            break
        if isinstance(net.nodes[i].layer, Linear):
            return i
        if not isinstance(net.nodes[i].layer, skipped):
            break
    return None


def layer_before(net: Network, start: int, activations: tuple[type[Elementwise], ...]) -> Node | None:
    """The Linear whose chain continues at net.nodes[start]; None if a chain begins there."""
    first, is_active = first_layer(net, start), False
    for i in range(start, 0, -1) if first is not None else ():
        before = net.nodes[i - 1]
        if not _continues(net, before, net.nodes[i]):
            break
        if isinstance(before.layer, Linear):
            return before if net.types[before.name].shape[-1] == _width(net, net.nodes[first or 0]) else None
        if isinstance(before.layer, activations) and not is_active:
            is_active = True
        elif not isinstance(before.layer, Reshape):
            break
    return None


def _walk(net: Network, start: int, activations: tuple[type[Elementwise], ...], casts: bool) -> _Found:
    """The longest chain from a Linear on, for each of its layers."""
    nodes: list[Node] = []
    layers: list[Dense] = []
    ends: list[int] = []
    normaliser, vectors, is_cast = "", 0, False
    for node in net.nodes_from(start):
        if nodes and not _continues(net, nodes[-1], node):
            break
        layer = node.layer
        if is_cast and not isinstance(layer, Cast | Reshape):
            break  # the next layer reads rounded values
        if isinstance(layer, Linear) and not normaliser and (not layers or _width(net, node) == layers[-1].D_out):
            D_out, D_in = net.weights[node.weights["weight"]].shape
            vectors = net.types[node.inputs[0]].row_size // D_in
            layers.append(Dense(node.weights["weight"], node.weights.get("bias"), D_in, D_out, None))
            ends.append(0)
        elif isinstance(layer, activations) and layers[-1].activation is None and not normaliser:
            layers[-1] = dataclasses.replace(layers[-1], activation=layer)
        elif isinstance(layer, Softmax | LogSoftmax) and not normaliser and _is_last_axis(net, node):
            if layers[-1].activation is not None:
                break
            normaliser = layer.kind
        elif casts and isinstance(layer, Cast):
            is_cast = True
        elif not isinstance(layer, Reshape):
            break
        nodes.append(node)
        ends[-1] = len(nodes)
    chain = Chain(tuple(n.name for n in nodes), tuple(layers), normaliser, vectors, tuple(ends))
    begins = [0, *ends[:-1]]
    return {start + begin: (chain, index) for index, begin in enumerate(begins)}


def forward_cost(net: Network, chain: Chain) -> Cost:
    """The bytes and flop of any kernel: x in, y out, every weight once per launch."""
    nodes = [net.by_name[name] for name in chain.nodes]
    weights = sum(layer.D_out * (layer.D_in + (layer.bias is not None)) for layer in chain.layers)
    return Cost(
        row_flop=sum(map(net.row_flop, nodes)),
        row_bytes=net.types[nodes[0].inputs[0]].row_bytes + net.types[nodes[-1].name].row_bytes,
        fixed_bytes=4 * weights,
    )


def end_dtypes(net: Network, chain: Chain) -> tuple[str, str]:
    """The dtypes of x and y in memory."""
    return net.types[net.by_name[chain.nodes[0]].inputs[0]].dtype, net.types[chain.nodes[-1]].dtype


def why_not_float32(net: Network, chain: Chain) -> str:
    """ "" if x and all weights are float32, else the first that is not: no kernel converts silently."""
    first = net.by_name[chain.nodes[0]]
    dtypes = {first.inputs[0]: net.types[first.inputs[0]].dtype}
    for layer in chain.layers:
        dtypes |= {name: net.weight_type(name).dtype for name in (layer.weight, layer.bias) if name is not None}
    odd = next(((name, dtype) for name, dtype in dtypes.items() if dtype != "float32"), None)
    return f"computes on float32, and {odd[0]} is {odd[1]}" if odd else ""


def shares_rows(net: Network, before: Node, node: Node, inside: Set[str]) -> bool:
    """Whether two nodes can run in one pass over rows: both over those of the batch, or both over one.

    inside  the values that the pass computes before `node`: none of them may be its weight
    """
    is_same = net.types[before.name].is_batched == net.types[node.name].is_batched
    return is_same and inside.isdisjoint(net.values_as_weights(node))


def is_closed(net: Network, nodes: list[Node]) -> bool:
    """Whether no intermediate value of these nodes is read outside them."""
    inside = {node.name for node in nodes}
    between = nodes[:-1]
    is_read = any(reader.name not in inside for node in between for reader in net.readers(node.name))
    return not is_read and not any(node.name in net.kept for node in between)


def with_activation(net: Network, start: int, activations: tuple[type[Elementwise], ...]) -> tuple[Node, ...]:
    """The node at `start`, and the activation after it, if that is the only reader of the node."""
    node, after = net.nodes[start], net.nodes[start + 1 : start + 2]
    is_next = all(isinstance(each.layer, activations) and each.inputs == (node.name,) for each in after)
    return (node, *after) if is_next and is_closed(net, [node, *after]) else (node,)


def in_layouts(net: Network, node: Node, claim: Claim) -> Iterator[Claim]:
    """The claim of a layer that accepts any layout, in every layout that all its values can have."""
    yield claim
    if all(has_channels(net.types[value]) for value in (*node.inputs, node.name)) and net.readers(node.name):
        reads = dict.fromkeys(node.inputs, Use(CHANNELS_LAST))
        yield dataclasses.replace(claim, reads=reads, writes={node.name: CHANNELS_LAST})


def ids_input(net: Network, value: str) -> set[str] | None:
    """The network inputs whose ids a value holds, only reordered; None if anything is computed in between."""
    nodes = net.by_name
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value in net.inputs:
            found.add(value)
        elif isinstance(nodes[value].layer, Reshape | Permute | Concat | Identity):
            waiting += [source for source in nodes[value].inputs if source not in seen]
            seen.update(nodes[value].inputs)
        else:
            return None
    return found


def _continues(net: Network, before: Node, node: Node) -> bool:
    return node.inputs == (before.name,) and before.name not in net.kept and len(net.readers(before.name)) == 1


def _width(net: Network, node: Node) -> int:
    return int(net.types[node.inputs[0]].shape[-1])


def _is_last_axis(net: Network, node: Node) -> bool:
    rank = len(net.types[node.name].shape)
    return node.layer.attributes()["axis"] % rank == rank - 1 and _width(net, node) == _last_dense_width(net, node)


def _last_dense_width(net: Network, node: Node) -> int:
    # A Reshape between the Linear and the softmax may have split the row: then the axes differ.
    value = node.inputs[0]
    while isinstance(net.by_name[value].layer, Reshape):
        value = net.by_name[value].inputs[0]
    return int(net.types[value].shape[-1])
