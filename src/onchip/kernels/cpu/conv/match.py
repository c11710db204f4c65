"""The runs of layers that conv_fused takes: found once a network, from its first layer to its last.

A run is the longest that begins where it does and can be lowered; the next one begins behind it. Inside a run nothing
is offered: to lower what is left of it from each of its layers on would take the square of its length.
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

_WORTH = (Convolution, TransposedConvolution, MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d)
_FIRST_TRIES = 8  # ends that are looked at before any are lowered; four times as many after each time that went well


@dataclass(frozen=True, eq=False)
class Run:
    nodes: tuple[Node, ...]
    program: Program


class Runs:
    """Those of one network, which is given in every call: who keeps it keeps its weights."""

    def __init__(self, net: Network) -> None:
        count = len(net.nodes)
        self.places = {node.name: i for i, node in enumerate(net.nodes)}
        self.last_read = [count if node.name in net.output_names else 0 for node in net.nodes]
        for i, node in enumerate(net.nodes):
            for place in (self.places[value] for value in node.inputs if value in self.places):
                self.last_read[place] = max(i, self.last_read[place])
        # For every node: the first one from there on that is not supported, and the first with which a run is worth it:
        # a convolution or a pool; or a Linear and values that meet, which is more than the chain that mlp_fused takes.
        self.ahead = [(count, count)] * count
        end = conv = linear = meeting = count
        for i in reversed(range(count)):
            node = net.nodes[i]
            end = end if isinstance(node.layer, SUPPORTED) else i
            conv = i if isinstance(node.layer, _WORTH) else conv
            linear = i if isinstance(node.layer, Linear) else linear
            meeting = i if len(node.inputs) > 1 else meeting
            self.ahead[i] = (end, min(conv, max(linear, meeting)))
        self.found: dict[int, Run | str] = {}  # by where they begin; or why none begins there
        self.known = 0  # all that begin before this node are found
        self.barrier = 0  # the node behind the last one that a run could not go past: nor can one that begins later

    def at(self, net: Network, start: int) -> Run | str:
        """The run that begins at net.nodes[start]; or why none does, "" where there is no reason to tell."""
        while self.known <= start:
            found = self._longest(net, self.known)
            self.found[self.known] = found
            self.known += len(found.nodes) if isinstance(found, Run) else 1
        return self.found.get(start, "")

    def _longest(self, net: Network, start: int) -> Run | str:
        best: Run | str = ""
        ends, count = self._ends(net, start), _FIRST_TRIES
        while some := list(itertools.islice(ends, count)):
            run = self._lowered(net, start, some)
            if isinstance(run, str):
                return best or run
            best = run
            if start + len(run.nodes) < some[-1]:
                break
            count *= 4
        return best

    def _ends(self, net: Network, start: int) -> Iterator[int]:
        """Where a run may end, the nearest first: it is worth it, it reads one value, and nobody else reads what it
        makes on the way."""
        end, worth = self.ahead[start]
        end = min(end, self.barrier) if self.barrier > start else end
        reads: set[str] = set()
        reader = 0  # the last one of what is made on the way
        for i in range(start, end if worth < end else start):
            reads.update(value for value in net.nodes[i].inputs if self.places.get(value, -1) < start)
            if len(reads) > 1 or reader >= end:
                break
            if i >= worth and reader <= i:
                yield i + 1
            reader = max(reader, self.last_read[i])

    def _lowered(self, net: Network, start: int, ends: Sequence[int]) -> Run | str:
        """The longest run with one of these ends; or why there is none."""
        why_not, most = "", ends[-1]
        for end in reversed(ends):
            if end > most:
                continue
            try:
                return Run(net.nodes[start:end], lower(net, net.nodes[start:end]))
            except UnsupportedError as reason:
                why_not, at = str(reason), start + reason.at
                most = at if end == at + 1 else at + 1  # what is nothing on the way may be an end
                self.barrier = most
        return why_not


_RUNS: weakref.WeakKeyDictionary[Network, Runs] = weakref.WeakKeyDictionary()


def runs_of(net: Network) -> Runs:
    if net not in _RUNS:
        _RUNS[net] = Runs(net)
    return _RUNS[net]


def conv_begins(net: Network, start: int) -> bool:
    """Whether conv_fused can claim a chain that begins at net.nodes[start]."""
    return isinstance(runs_of(net).at(net, start), Run)
