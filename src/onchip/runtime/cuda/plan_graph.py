"""A plan's launches as one graph, updated when the caller's arrays move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.runtime.cuda.launches import Call, Graph


class PlanGraph:
    """Launches for one batch size on one stream.

    An update affects later launches; those in flight keep their pointers. Not thread-safe.
    """

    def __init__(
        self, graph: Graph, pointers: Mapping[str, int], nodes: Sequence[tuple[Any, Call, Sequence[tuple[Any, str]]]]
    ) -> None:
        """pointers  of the network's inputs and outputs at build time
        nodes     per launch: its node, the launch, and its pointer arguments with the names of their values
        """
        self.graph, self.launch = graph, graph.launch
        self._nodes = []
        for node, call, uses in nodes:
            if arguments := [(argument, name) for argument, name in uses if name in pointers]:
                pointers_now = [pointers[name] for _, name in arguments]
                self._nodes.append(_Node(graph.update_of(node, call), arguments, pointers_now))

    def point(self, pointers: Mapping[str, int]) -> None:
        """Make the next launches use these pointers: updates the kernels whose arrays moved."""
        for node in self._nodes:
            wanted = [pointers[name] for _, name in node.arguments]
            if wanted != node.pointers:
                for (argument, _), pointer in zip(node.arguments, wanted, strict=True):
                    argument.value = pointer
                node.update()
                node.pointers = wanted


@dataclass(eq=False)
class _Node:
    """A kernel that uses the caller's arrays."""

    update: Callable[[], None]
    arguments: list[tuple[Any, str]]  # its pointer arguments, with the names of their values
    pointers: list[int]  # their current pointers
