"""Shared by the rewrites: an editable draft of a network, and the index maps of Reshapes and Permutes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Permute, Reshape
from onchip.network.names import free_name
from onchip.network.recipe import Array, Attribute, Recipe, Weight
from onchip.network.types import DTYPE_BYTES, TensorType

Rewritten = tuple[Network, list[str]]  # a rewritten network, and notes: one line per change


class Draft:
    """A network that is being rewritten node by node, with constant-time lookup of producers and readers.

    Values keep their types, so `types` are those of the original network. `done` validates the whole network once.
    """

    def __init__(self, net: Network) -> None:
        self.types = net.types
        self.nodes = {node.name: node for node in net.nodes}
        self.weights: dict[str, Weight] = dict(net.weights)
        self._net = net
        self._outputs = list(net.outputs)
        self._taken = {*net.types, *net.weights}
        self._readers: dict[str, list[str]] = {}  # by value; a node is listed once per read
        self._inserted: dict[str, list[str]] = {}  # new nodes, by the node that they precede
        self._renamed: dict[str, str] = {}  # nodes that will take the name of an output
        for node in net.nodes:
            self._add_reads(node)

    # -- queries -------------------------------------------------------------------------------------------

    def sole_reader(self, value: str) -> Node | None:
        """The only node that reads a value, if it reads it once and the value is not an output."""
        readers = self._readers.get(value, [])
        return self.nodes[readers[0]] if len(readers) == 1 and value not in self._outputs else None

    def readers(self, value: str) -> list[Node]:
        """The nodes that read a value, each as often as it reads it."""
        return [self.nodes[name] for name in self._readers.get(value, ())]

    def dtype(self, weight: str) -> str:
        found = self.weights[weight]
        return found.dtype if isinstance(found, Recipe) else found.dtype.name

    # -- edits ---------------------------------------------------------------------------------------------

    def put(self, *nodes: Node) -> None:
        """Replace the node that has the last one's name, and insert the others (new nodes) right before it."""
        *inserted, last = nodes
        self._remove_reads(self.nodes[last.name])
        self._inserted[last.name] = [*self._inserted.get(last.name, []), *(node.name for node in inserted)]
        for node in nodes:
            self.nodes[node.name] = node
            self._add_reads(node)

    def drop(self, node: Node) -> None:
        """Remove a node that is, or will be, unused."""
        self._remove_reads(self.nodes.pop(node.name))

    def bypass(self, name: str) -> bool:
        """Remove a node of one input and connect its readers to its input.

        An output keeps its name: the previous node takes it. If that is an input or another output, the node stays and
        the result is False.
        """
        (source,) = self.nodes[name].inputs
        if name in self._outputs:
            if source not in self.nodes or source in self._outputs:
                return False
            self._renamed[source] = self._renamed.pop(name, name)
            self._outputs = [source if value == name else value for value in self._outputs]
        self.drop(self.nodes[name])
        for reader in tuple(dict.fromkeys(self._readers.get(name, ()))):
            node = self.nodes[reader]
            inputs = tuple(source if value == name else value for value in node.inputs)
            self.put(dataclasses.replace(node, inputs=inputs))
        return True

    def fresh(self, wanted: str) -> str:
        """An unused name for a new weight or value."""
        name = free_name(wanted, self._taken)
        self._taken.add(name)
        return name

    def derive(
        self, wanted: str, op: Callable[..., Array], sources: Sequence[str], shape: Sequence[int], flop: int = 0,
        **attributes: Attribute,
    ) -> str:  # fmt: skip
        """Add a weight that an engine computes from others, and return its name. Its dtype is that of the first source.

        op  a recipe_op, called with the sources and the attributes

        With flop > 0 the dtype is at least float32: one more rounding to half precision would cost accuracy.
        """
        dtype = self.dtype(sources[0])
        if flop and DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"]:
            dtype = "float32"

        name = self.fresh(wanted)
        self.weights[name] = Recipe.of(op, sources, shape, dtype, flop, **attributes)
        return name

    def done(self, notes: list[str]) -> Rewritten:
        """The rewritten network; the original if nothing was done."""
        if not notes:
            return self._net, []
        names = (name for node in self._net.nodes for name in (*self._inserted.get(node.name, ()), node.name))
        nodes = [self._with_final_names(self.nodes[name]) for name in names if name in self.nodes]
        return self._net.replace(nodes=nodes, weights=self.weights), notes

    # -- bookkeeping ---------------------------------------------------------------------------------------

    def _add_reads(self, node: Node) -> None:
        for value in node.inputs:
            self._readers.setdefault(value, []).append(node.name)

    def _remove_reads(self, node: Node) -> None:
        for value in node.inputs:
            self._readers[value].remove(node.name)

    def _with_final_names(self, node: Node) -> Node:
        inputs = tuple(self._renamed.get(value, value) for value in node.inputs)
        return dataclasses.replace(node, name=self._renamed.get(node.name, node.name), inputs=inputs)


# -- moves: Reshapes and Permutes ------------------------------------------------------------------------------


def moves_before(draft: Draft, node: Node) -> tuple[Node | None, list[Node]]:
    """The producer that only `node` reads, and the moves between, first to last; None if there is no such producer."""
    moves: list[Node] = []
    source = _sole_producer(draft, node)
    while source is not None and isinstance(source.layer, Reshape | Permute):
        moves.insert(0, source)
        source = _sole_producer(draft, source)
    return source, moves


def moves_after(draft: Draft, node: Node) -> tuple[Node | None, list[Node]]:
    """The only reader of `node` and the moves between, first to last; None if there are several readers, or none."""
    moves: list[Node] = []
    reader = draft.sole_reader(node.name)
    while reader is not None and isinstance(reader.layer, Reshape | Permute):
        moves.append(reader)
        reader = draft.sole_reader(reader.name)
    return reader, moves


def _sole_producer(draft: Draft, node: Node) -> Node | None:
    """The node that computes the input of `node`, if `node` is the only reader."""
    value = node.inputs[0]
    return draft.nodes.get(value) if draft.sole_reader(value) else None


Moves = tuple[tuple[str, tuple[int, ...]], ...]  # ("reshape", row shape) or ("permute", axes of a row), first to last


def moves_as_data(types: Mapping[str, TensorType], moves: Sequence[Node]) -> Moves:
    """What the moves do to a row, beginning with its shape before them."""
    data: list[tuple[str, tuple[int, ...]]] = [("reshape", types[moves[0].inputs[0]].row_shape)]
    for node in moves:
        if isinstance(node.layer, Permute):
            data.append(("permute", tuple(axis - 1 for axis in node.layer.axes[1:])))
        else:
            data.append(("reshape", types[node.name].row_shape))
    return tuple(data)


def origin(moves: Moves) -> Array:
    """For each element of a flat row after the moves: its index in the flat row before them."""
    indices = np.arange(math.prod(moves[0][1]))
    for kind, sizes in moves:
        indices = indices.reshape(sizes) if kind == "reshape" else indices.transpose(sizes)
    return indices.reshape(-1)
