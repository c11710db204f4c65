"""The subgraphs of consecutive layers that conv_fused claims: found once per network, from first to last layer.

Each subgraph is the longest that starts at its first node and can be lowered; the next one starts after it. No claim
starts inside a subgraph: lowering the rest of it from each of its layers would take quadratic time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onchip.kernels.cpu.conv.program import SUPPORTED, Program, lower
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.network.graph import Network, Node
from onchip.network.layers import AvgPool1d, AvgPool2d, Convolution, Linear, MaxPool1d, MaxPool2d, TransposedConvolution

_WORTHWHILE = (Convolution, TransposedConvolution, MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d)
_FIRST_TRIES = 8  # candidate ends in the first batch; each successful batch is followed by one four times as large


@dataclass(frozen=True, eq=False)
class Subgraph:
    nodes: tuple[Node, ...]
    program: Program


class Subgraphs:
    """Subgraphs of one network. The network is passed in each call: a reference to it would keep its weights alive."""

    def __init__(self, net: Network) -> None:
        count = len(net.nodes)
        self.indices = {node.name: i for i, node in enumerate(net.nodes)}
        self.last_read = [count if node.name in net.kept else 0 for node in net.nodes]
        for i, node in enumerate(net.nodes):
            for producer in (self.indices[value] for value in node.inputs if value in self.indices):
                self.last_read[producer] = max(i, self.last_read[producer])
        # Per node: the next unsupported node, and the next one that makes a subgraph worthwhile: a convolution, a pool,
        # or a Linear plus a node with several inputs, which mlp_fused does not support.
        self.ahead = [(count, count)] * count
        end = conv = linear = merge = count
        for i in reversed(range(count)):
            node = net.nodes[i]
            end = end if isinstance(node.layer, SUPPORTED) else i
            conv = i if isinstance(node.layer, _WORTHWHILE) else conv
            linear = i if isinstance(node.layer, Linear) else linear
            merge = i if len(node.inputs) > 1 else merge
            self.ahead[i] = (end, min(conv, max(linear, merge)))
        self.found: dict[int, Subgraph | str] = {}  # by first node; or the reason why there is none
        self.known = 0  # subgraphs that start before this node are known
        self.barrier = 0  # lowering failed at the node before this one: no later subgraph extends past it

    def starting_at(self, net: Network, start: int) -> Subgraph | str:
        """The subgraph that starts at net.nodes[start]; else the reason why there is none, if known."""
        while self.known <= start:
            found = self._longest(net, self.known)
            self.found[self.known] = found
            self.known += len(found.nodes) if isinstance(found, Subgraph) else 1
        return self.found.get(start, "")

    def _longest(self, net: Network, start: int) -> Subgraph | str:
        best: Subgraph | str = ""
        ends, count = self._ends(net, start), _FIRST_TRIES
        while batch := list(itertools.islice(ends, count)):
            subgraph = self._lowered(net, start, batch)
            if isinstance(subgraph, str):
                return best or subgraph
            best = subgraph
            if start + len(subgraph.nodes) < batch[-1]:
                break
            count *= 4
        return best

    def _ends(self, net: Network, start: int) -> Iterator[int]:
        """Possible ends, nearest first: the subgraph is worthwhile and reads one value, and no node outside it reads an
        intermediate value."""
        end, worth = self.ahead[start]
        end = min(end, self.barrier) if self.barrier > start else end
        reads: set[str] = set()
        reader = 0  # last reader of any intermediate
        for i in range(start, end if worth < end else start):
            reads.update(value for value in net.nodes[i].inputs if self.indices.get(value, -1) < start)
            if len(reads) > 1 or reader >= end:
                break
            if i >= worth and reader <= i:
                yield i + 1
            reader = max(reader, self.last_read[i])

    def _lowered(self, net: Network, start: int, ends: Sequence[int]) -> Subgraph | str:
        """The longest subgraph with one of these ends; or the reason why there is none."""
        why_not, last = "", ends[-1]
        for end in reversed(ends):
            if end > last:
                continue
            try:
                return Subgraph(net.nodes[start:end], lower(net, net.nodes[start:end]))
            except UnsupportedError as reason:
                why_not, failed = str(reason), start + reason.index
                last = failed if end == failed + 1 else failed + 1  # it may still be the last node
                self.barrier = last
        return why_not


_SUBGRAPHS: weakref.WeakKeyDictionary[Network, Subgraphs] = weakref.WeakKeyDictionary()


def subgraphs_of(net: Network) -> Subgraphs:
    if net not in _SUBGRAPHS:
        _SUBGRAPHS[net] = Subgraphs(net)
    return _SUBGRAPHS[net]


def conv_begins(net: Network, start: int) -> bool:
    """Whether conv_fused can claim a subgraph that starts at net.nodes[start]."""
    return isinstance(subgraphs_of(net).starting_at(net, start), Subgraph)
