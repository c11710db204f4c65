"""GraphWriter: the ONNX graph to which writers add their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.onnx.tensors import make_tensor
from onchip.network.graph import Network, Node
from onchip.network.names import free_name
from onchip.network.recipe import Array, Evaluated, materialise
from onchip.network.types import numpy_dtype


class OpsetError(InputError):
    """A layer that needs a newer opset."""


class GraphWriter:
    """An ONNX graph under construction. Names are kept where ONNX's single namespace allows."""

    def __init__(self, net: Network, opset: int) -> None:
        self.net = net
        self.opset = opset
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._taken: set[str] = set()
        self._arrays: Evaluated = {}
        self._filed: dict[tuple[str, str, object], str] = {}  # (weight, dtype, change) -> initializer
        # Inputs and outputs before weights: callers of the file use these names.
        self.values = {name: self.fresh(name) for name in dict.fromkeys((*net.inputs, *net.outputs))}
        used = {weight for node in net.nodes for weight in node.weights.values()}
        self._weight_names = {name: self.fresh(name) for name in net.weights if name in used}
        self.values |= {node.name: self.fresh(node.name) for node in net.nodes if node.name not in self.values}

    def fresh(self, wanted: str) -> str:
        """`wanted`, or 'wanted_2', 'wanted_3' ... if that is taken."""
        name = free_name(wanted or "value", self._taken)
        self._taken.add(name)
        return name

    def value(self, node: Node, index: int = 0) -> str:
        """The ONNX name of the node's input value."""
        return self.values[node.inputs[index]]

    def inputs(self, node: Node) -> list[str]:
        return [self.values[name] for name in node.inputs]

    def dtype(self, node: Node) -> str:
        """The dtype of the node's output; ONNX requires it of its weights too."""
        return self.net.types[node.name].dtype

    def numpy_dtype(self, node: Node) -> np.dtype[Any]:
        return numpy_dtype(self.dtype(node))

    def weight(self, node: Node, role: str, change: Callable[[Array], Array] = np.asarray) -> str:
        """The ONNX name of a node's weight, cast to the dtype of the node's output: ONNX does not mix dtypes.

        change  converts the array to ONNX's layout; a module-level function
        """
        name, dtype = node.weights[role], self.dtype(node)
        key = (name, dtype, change)
        if key not in self._filed:
            array = materialise(name, self.net.weights, self._arrays)
            if not np.can_cast(array.dtype, numpy_dtype(dtype)):
                raise InputError(
                    f"layer '{node.name}': ONNX needs weights and values of one dtype",
                    got=f"{array.dtype.name} {role}, {dtype} values",
                    hint="convert the weights, or save as .safetensors",
                )  # fmt: skip
            array = array.astype(numpy_dtype(dtype), copy=False)
            is_first = all(filed[0] != name for filed in self._filed)
            self._filed[key] = self._weight_names[name] if is_first else self.fresh(name)
            self.initializers.append(make_tensor(self._filed[key], change(array)))
        return self._filed[key]

    def weights(self, node: Node, *roles: str) -> list[str]:
        """The ONNX names of those roles that the node has."""
        return [self.weight(node, role) for role in roles if role in node.weights]

    def constant(self, name: str, array: Array) -> str:
        """Add a constant that is not a weight of the network, under a name like `name`."""
        name = self.fresh(name)
        self.initializers.append(make_tensor(name, array))
        return name

    def number(self, node: Node, what: str, value: float) -> str:
        """A scalar constant in the dtype of the node's input."""
        dtype = self.net.input_types(node)[0].dtype
        return self.constant(f"{node.name}_{what}", np.array(value, numpy_dtype(dtype)))

    def emit(self, op_type: str, node: Node, inputs: list[str], **attributes: Any) -> None:
        """Add the ONNX node that computes the layer's output."""
        self.emit_part(op_type, node.name, inputs, self.values[node.name], **attributes)

    def emit_part(self, op_type: str, name: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.emit_outputs(op_type, name, inputs, [output], **attributes)

    def emit_outputs(self, op_type: str, name: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        """Add a node with several outputs, "" for unused ones."""
        import onnx

        self.nodes.append(onnx.helper.make_node(op_type, inputs, outputs, name, **attributes))

    def emit_step(self, op_type: str, node: Node, inputs: list[str], **attributes: Any) -> str:
        """Add an intermediate node of the layer; returns the name of its output."""
        output = self.fresh(f"{node.name}_{op_type.lower()}")
        self.emit_part(op_type, output, inputs, output, **attributes)
        return output
