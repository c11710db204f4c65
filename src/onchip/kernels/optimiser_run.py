"""Finding the optimiser's layers in a training step: a run of nodes that one launch per device can compute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AdamStep,
    Decayed,
    Descent,
    FirstMoment,
    Layer,
    Mul,
    NesterovDescent,
    RunningAverage,
    SecondMoment,
    Velocity,
)
from onchip.network.layers.optimiser import Update

DESCENT, MOMENTUM, NESTEROV, ADAM, ADAMW, AVERAGE = range(6)  # as gradient/update.cu has them


@dataclass(frozen=True)
class ParameterUpdate:
    """A weight and how it is updated, by the names of the network; "" where there is none."""

    kind: int
    gradient: str
    states: tuple[tuple[str, str], ...]  # the weight, then its moments; each with the value that replaces it
    values: str = ""  # the optimiser's values of the step
    scale: str = ""  # of the gradient
    decay: float = 0.0  # the factor of weight_decay times the weight that the gradient has added; of ADAMW its own
    rate: float = 0.0  # of a running average
    average: tuple[tuple[str, str], ...] = ()  # of the weight: none, or one with the value that replaces it
    beta1: float = 0.0  # of ADAM and ADAMW

    @property
    def replaced(self) -> tuple[tuple[str, str], ...]:
        """All states, each with the value that replaces it."""
        return self.states + self.average


def begins_updates(net: Network, start: int) -> bool:
    """Whether a run of the optimiser's nodes begins at net.nodes[start]."""
    return _belongs(net, net.nodes[start]) and not (start and _belongs(net, net.nodes[start - 1]))


def find_updates(net: Network, start: int) -> tuple[tuple[str, ...], list[ParameterUpdate] | str]:
    """The run of nodes from net.nodes[start] on, and the parameters that it updates, or why that cannot be told."""
    nodes = list(itertools.takewhile(lambda node: _belongs(net, node), net.nodes_from(start)))
    return tuple(node.name for node in nodes), _parameters(net, nodes)


def _belongs(net: Network, node: Node) -> bool:
    """An update, or the clipping of its gradient."""
    if not isinstance(node.layer, Mul):
        return isinstance(node.layer, Update)
    is_scaled = len(node.inputs) == 1 and net.weight_type(node.weights["constant"]).shape == ()
    readers = net.readers(node.name)
    return is_scaled and bool(readers) and all(isinstance(reader.layer, Update) for reader in readers)


def _parameters(net: Network, nodes: Sequence[Node]) -> list[ParameterUpdate] | str:
    made = {node.name: node for node in nodes}
    found, used = list[ParameterUpdate](), set[str]()
    weights: dict[str, int] = {}  # index of the parameter by its weight's new value
    for node in nodes:
        if isinstance(node.layer, RunningAverage) and (at := weights.pop(node.inputs[0], None)) is not None:
            average = ((node.weights["average"], node.name),)
            found[at] = replace(found[at], rate=node.layer.momentum, average=average)
            used.add(node.name)
            continue
        if isinstance(node.layer, Descent | NesterovDescent | AdamStep | RunningAverage):
            parameter, chain = _parameter(made, node)
            if parameter is None or parameter.gradient in made:
                return f"no optimiser has the layers before '{node.name}'"
            if parameter.kind != AVERAGE:
                weights[node.name] = len(found)
            found.append(parameter)
            used.update(chain)
    new = {value for each in found for _, value in each.replaced}
    is_read = any(reader.name not in made for node in nodes for reader in net.readers(node.name))
    if is_read or used != made.keys() or made.keys() & net.kept != new:
        return "other layers read what it computes, or it is not the new value of a state"
    return found


def _parameter(made: Mapping[str, Node], last: Node) -> tuple[ParameterUpdate | None, list[str]]:
    """What these nodes update, and their names, from the one that computes the new weight; made: all of the run.

    None if its moments are of no optimiser.
    """
    used = [last.name]

    def before(value: str, kind: type[Layer], **weights: str) -> Node | None:
        """The node that computes a value, if it is of this kind and has these weights."""
        node = made.get(value)
        if node is None or not isinstance(node.layer, kind) or not weights.items() <= node.weights.items():
            return None
        used.append(value)
        return node

    (g, *others), layer = last.inputs, last.layer
    if isinstance(layer, RunningAverage):
        return ParameterUpdate(AVERAGE, g, ((last.weights["average"], last.name),), rate=layer.momentum), used
    kind, weight, values, decay = DESCENT, last.weights["weight"], last.weights["values"], 0.0
    moments: list[tuple[str, str]] = []
    beta1 = 0.0
    if isinstance(layer, AdamStep):
        first, second = before(g, FirstMoment), before(others[0], SecondMoment)
        if first is None or second is None or first.inputs != second.inputs:
            return None, used
        assert isinstance(first.layer, FirstMoment)
        beta1 = first.layer.beta1
        kind, (g,) = ADAMW if layer.is_decoupled else ADAM, first.inputs
        decay = layer.decay_factor if layer.is_decoupled else 0.0
        moments = [(first.weights["moment"], first.name), (second.weights["moment"], second.name)]
    elif isinstance(layer, NesterovDescent):
        ahead = before(others[0], Velocity, values=values)
        if ahead is None or ahead.inputs != (g,):
            return None, used
        kind, moments = NESTEROV, [(ahead.weights["velocity"], ahead.name)]
    elif (velocity := before(g, Velocity, values=values)) is not None:
        kind, (g,), moments = MOMENTUM, velocity.inputs, [(velocity.weights["velocity"], velocity.name)]
    if kind != ADAMW and (decayed := before(g, Decayed, weight=weight, values=values)) is not None:
        assert isinstance(decayed.layer, Decayed)
        decay, (g,) = decayed.layer.decay_factor, decayed.inputs
    clipped = before(g, Mul)
    g, scale = (g, "") if clipped is None else (clipped.inputs[0], clipped.weights["constant"])
    return ParameterUpdate(kind, g, ((weight, last.name), *moments), values, scale, decay, beta1=beta1), used
