"""Inputs and outputs of an imported network under the names that its file or module has for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onchip.network.graph import Network, Node
from onchip.network.layers import Identity
from onchip.network.names import free_name


def name_values(net: Network, inputs: Mapping[str, str], outputs: Sequence[str]) -> Network:
    """The network with inputs renamed, and its outputs called `outputs`, in their order.

    A layer has its output's name. An output that is an input, or another output under another name, becomes an
    Identity of it. A name that an input has, or that comes twice, is numbered; so is a layer that has one of them.
    """
    names = {name: inputs.get(name, name) for name in net.inputs}  # the network's name of a value -> its new one
    taken = set(names.values())
    copies: dict[str, Node] = {}
    named: list[str] = []
    for value, output in zip(net.outputs, outputs, strict=True):
        if names.get(value) == output or (output in copies and copies[output].inputs == (value,)):
            named.append(output)  # the same output again, or an input under its own name
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
    types = {names[name]: given for name, given in net.inputs.items()}
    return Network(types, tuple(nodes), tuple(named), net.weights, net.name, net.meaning)
