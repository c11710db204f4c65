"""The nodes of a training step while it is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onchip.network.graph import Node
from onchip.network.layers import Layer
from onchip.network.recipe import Recipe, Weight, value_weight
from onchip.network.types import TensorType


@dataclass
class StepBuilder:
    """The nodes and weights of a step so far."""

    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def add(self, name: str, layer: Layer, inputs: Iterable[str], weights: Mapping[str, str] | None = None) -> str:
        """Append a node; returns the name of its value, `name` or like it."""
        return self.add_node(Node(self._unused(name), layer, tuple(inputs), weights or {}))

    def add_node(self, node: Node) -> str:
        """Append a node as it is; returns its name."""
        kinds = {role: self.weight_type(weight) for role, weight in node.weights.items()}
        read = tuple(self.types[value] for value in node.inputs)
        found = node.layer.infer(read, kinds)
        first = found.shape[:1] if read[0].is_batched else (1,)
        self.types[node.name] = TensorType((*first, *found.shape[1:]), found.dtype)
        self.nodes.append(node)
        return node.name

    def add_weight(self, name: str, weight: Weight) -> str:
        """Add a weight; returns its name, `name` or like it."""
        name = self._unused(name)
        self.weights[name] = weight
        return name

    def as_weight(self, value: str) -> str:
        """The weight that is the only row of a value."""
        kind = self.types[value]
        return self.add_weight(f"{value}.row", value_weight(value, kind.row_shape, kind.dtype))

    def weight_type(self, name: str) -> TensorType:
        weight = self.weights[name]
        return TensorType(weight.shape, weight.dtype if isinstance(weight, Recipe) else weight.dtype.name)

    def _unused(self, name: str) -> str:
        while name in self.types or name in self.weights:
            name += "'"
        return name
