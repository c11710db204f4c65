"""A plan's launches as one graph, whose kernels are told when the caller's arrays lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.runtime.cuda.launches import Call, Graph


class PlanGraph:
    """Launches for one number of rows on one stream.

    An update is for later launches: those that are under way keep the pointers that they were started with. Not for
    two threads at a time.
    """

    def __init__(
        self, graph: Graph, pointers: Mapping[str, int], nodes: Sequence[tuple[Any, Call, Sequence[tuple[Any, str]]]]
    ) -> None:
        """pointers  of the network's inputs and outputs, that it was made with
        nodes     of each launch: its node, the launch, and its arguments that are pointers of values, by name
        """
        self.graph, self.launch = graph, graph.launch
        self._nodes = []
        for node, call, uses in nodes:
            if given := [(argument, name) for argument, name in uses if name in pointers]:
                now = [pointers[name] for _, name in given]
                self._nodes.append(_Node(graph.update_of(node, call), given, now))

    def point(self, pointers: Mapping[str, int]) -> None:
        """Let the next launches read and write there: the kernels that touch what was moved are updated."""
        for node in self._nodes:
            wanted = [pointers[name] for _, name in node.given]
            if wanted != node.now:
                for (argument, _), pointer in zip(node.given, wanted, strict=True):
                    argument.value = pointer
                node.update()
                node.now = wanted


@dataclass(eq=False)
class _Node:
    """A kernel that touches the caller's arrays."""

    update: Callable[[], None]
    given: list[tuple[Any, str]]  # its arguments that are pointers of these values
    now: list[int]  # where it reads and writes
