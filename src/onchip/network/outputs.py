"""Some outputs of a network, without the layers that only the others need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onchip.errors import InputError
from onchip.network.graph import Network
from onchip.network.names import did_you_mean
from onchip.network.recipe import reach
from onchip.network.text import plural


def keep_outputs(net: Network, names: Sequence[str]) -> Network:
    """The network with these outputs, in this order; InputError for a name that is none of its outputs."""
    if unknown := [name for name in names if name not in net.outputs]:
        hint = did_you_mean(unknown[0], net.outputs) or net.outputs[0]
        expected = ", ".join(net.outputs)
        raise InputError(f"'{net.name}' has no such output", got=unknown[0], expected=expected, hint=hint)
    if tuple(names) == net.outputs:
        return net
    nodes, needed = [], set(names)
    for node in reversed(net.nodes):
        if node.name in needed:
            nodes.append(node)
            needed |= {*node.inputs, *net.values_as_weights(node)}
    nodes.reverse()
    weights = reach([weight for node in nodes for weight in node.weights.values()], net.weights)
    kept = {name: weight for name, weight in net.weights.items() if name in weights}
    meaning = replace(net.meaning, classes=()) if len(names) > 1 else net.meaning
    return net.replace(nodes=nodes, outputs=names, weights=kept, meaning=meaning)


def one_output(net: Network, name: str | None, option: str) -> Network:
    """The network with the output of this name, which only a network with several needs."""
    if name is not None:
        return keep_outputs(net, [name])
    if len(net.outputs) > 1:
        outputs = ", ".join(f"{name}: {net.types[name]}" for name in net.outputs)
        raise InputError(
            f"'{net.name}' has {plural(len(net.outputs), 'output')}", got=outputs, expected="the name of one",
            hint=f"{option} {net.outputs[-1]}",
        )  # fmt: skip
    return net
