"""Builds a torch.fx graph from calls of torch functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Add, BatchNorm1d, BatchNorm2d, Convolution, Linear, TransposedConvolution
from onchip.network.recipe import Array, Evaluated, materialise

Value = Any  # a node of the fx graph
Weights = Mapping[str, Value]  # by role
Form = Callable[..., Value]  # (builder, node, weights, *inputs) -> output

# Their output is a new tensor that no gradient needs: a ReLU that is its only reader may work in place.
_OVERWRITABLE = (Linear, Convolution, TransposedConvolution, BatchNorm1d, BatchNorm2d, Add)


class Builder:
    """The graph so far: all values, and methods that append calls of torch functions."""

    def __init__(self, torch: Any, net: Network, trains: bool = False) -> None:
        self.torch, self.net, self.trains = torch, net, trains
        self.root, self.graph = torch.nn.Module(), torch.fx.Graph()
        self.values: dict[str, Value] = {name: self.graph.placeholder(f"x{i}") for i, name in enumerate(net.inputs)}
        self._weights: dict[str, Value] = {}
        self._constants = 0
        self._materialised: Evaluated = {}

    def add(self, node: Node, form: Form) -> None:
        w = {role: self._weight(name, role in node.layer.constants) for role, name in node.weights.items()}
        self.values[node.name] = form(self, node, w, *(self.values[name] for name in node.inputs))

    def call(self, function: str, *arguments: Any, **options: Any) -> Value:
        """Call a function of torch.nn.functional or torch, by name."""
        functional = self.torch.nn.functional
        target = getattr(functional, function, None) or getattr(self.torch, function)
        return self.graph.call_function(target, arguments, options)

    def getitem(self, x: Value, *indices: Any) -> Value:
        """x[indices]."""
        return self.graph.call_function(operator.getitem, (x, indices if len(indices) > 1 else indices[0]))

    def array(self, name: str) -> Array:
        """The values of a weight."""
        return np.array(materialise(name, self.net.weights, self._materialised))  # a copy: the network's is read-only

    def constant(self, array: Array) -> Value:
        """A constant, not trained; floats get the dtype of the weights."""
        attribute, self._constants = f"c{self._constants}", self._constants + 1
        self.root.register_buffer(attribute, self.torch.from_numpy(np.ascontiguousarray(array)))
        return self.graph.get_attr(attribute)

    def parameter(self, array: Array) -> Value:
        """A weight that is no weight of the network as it is there."""
        attribute, self._constants = f"p{self._constants}", self._constants + 1
        tensor = self.torch.from_numpy(np.ascontiguousarray(array))
        self.root.register_parameter(attribute, self.torch.nn.Parameter(tensor))
        return self.graph.get_attr(attribute)

    def _weight(self, name: str, is_constant: bool) -> Value:
        """A weight as a parameter of the module."""
        is_constant = (is_constant and self.trains) or "float" not in self.net.weight_type(name).dtype
        if name not in self._weights and is_constant:
            self._weights[name] = self.constant(self.array(name))  # torch trains only floats
        if name not in self._weights:
            attribute = f"w{len(self._weights)}"
            tensor = self.torch.from_numpy(self.array(name))
            self.root.register_parameter(attribute, self.torch.nn.Parameter(tensor))
            self._weights[name] = self.graph.get_attr(attribute)
        return self._weights[name]

    def producer_with_one_reader(self, value: str) -> Node | None:
        """The node that computes a value with exactly one reader; else None."""
        is_only = len(self.net.readers(value)) == 1 and value not in self.net.outputs
        return self.net.by_name.get(value) if is_only else None

    def may_overwrite(self, value: str) -> bool:
        producer = self.producer_with_one_reader(value)
        return producer is not None and isinstance(producer.layer, _OVERWRITABLE)

    def pad(self, x: Value, before: Sequence[int], after: Sequence[int], fill: float = 0.0) -> Value:
        """Pad the last axes; torch expects the last axis first."""
        pads = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
        return self.call("pad", x, pads, value=fill)
