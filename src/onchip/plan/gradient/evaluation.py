"""The loss of a network over rows, as a network: what `fit` runs over the rows that it holds out.

Inputs, outputs and names are those of a training step (step.py), without the update. The weights that a step changes
are state that this network only reads, so both can share one array per weight.
"""

from __future__ import annotations

from collections.abc import Iterable

from onchip.network.graph import Network
from onchip.network.training import TrainingStep
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import add_counts, add_loss, needed_nodes
from onchip.plan.rewrites import drop_idle


def evaluation_step(net: Network, how: TrainingStep, changing: Iterable[str], *, counts: bool = False) -> Network:
    """The loss of a batch, as at inference: batch norms by their running statistics, nothing dropped.

    changing  the weights that steps of training change
    counts    as of training_step
    """
    net, _ = drop_idle(net)
    build = StepBuilder(list(net.nodes), dict(net.weights), dict(net.types))
    added = add_loss(build, net, how)
    outputs = (added.loss, *(add_counts(build, added) if counts else ()))
    inputs = {**net.inputs, **added.inputs}
    state = {name: "" for name in changing if name in net.weights}
    nodes = needed_nodes(build.nodes, build.weights, set(outputs))
    return Network(inputs, nodes, outputs, build.weights, f"{net.name}, evaluated", state=state)
