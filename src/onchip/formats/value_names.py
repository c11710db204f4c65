"""Names for the inputs and outputs of an imported network, as in its file or module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onchip.network.graph import Network, Node
from onchip.network.layers import Identity
from onchip.network.names import free_name


def name_values(net: Network, inputs: Mapping[str, str], outputs: Sequence[str]) -> Network:
    """Rename the network's inputs, and its outputs to `outputs`, in order.

    A layer has its output's name. An output that is an input, or another output under a second name, becomes an
    Identity. A name that an input has or that occurs twice gets a numeric suffix; so does a layer with such a name.
    """
    names = {name: inputs.get(name, name) for name in net.inputs}  # old name of a value -> new name
    taken = set(names.values())
    copies: dict[str, Node] = {}
    named: list[str] = []
    for value, output in zip(net.outputs, outputs, strict=True):
        if names.get(value) == output or (output in copies and copies[output].inputs == (value,)):
            named.append(output)  # a repeated output, or an input under its own name
            continue
        output = free_name(output, taken)
        taken.add(output)
        if value in names:
            copies[output] = Node(output, Identity(), (value,))
        else:
            names[value] = output
        named.append(output)
    for node in net.nodes:
        if node.name not in names:
            names[node.name] = free_name(node.name, taken)
            taken.add(names[node.name])
    nodes = [
        dataclasses.replace(node, name=names.get(node.name, node.name), inputs=tuple(names[v] for v in node.inputs))
        for node in (*net.nodes, *copies.values())
    ]
    types = {names[name]: input_type for name, input_type in net.inputs.items()}
    return Network(types, tuple(nodes), tuple(named), net.weights, net.name, net.meaning)
