"""The loss of a network over rows, as a network: what `fit` runs over the rows that it holds out.

Inputs, outputs and names are those of a training step (step.py), without the update. The weights that a step changes
are state that this network only reads, so both can share one array per weight.
"""

from __future__ import annotations

from collections.abc import Iterable

from onchip.network.graph import Network
from onchip.network.training import TrainingStep
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import add_count, add_loss
from onchip.plan.rewrites import drop_idle


def evaluation_step(net: Network, how: TrainingStep, changing: Iterable[str], *, counts: bool = False) -> Network:
    """The loss of a batch, as at inference: batch norms by their running statistics, nothing dropped.

    changing  the weights that steps of training change
    counts    the second output is the number of correct predictions
    """
    net, _ = drop_idle(net)
    build = StepBuilder(list(net.nodes), dict(net.weights), dict(net.types))
    added = add_loss(build, net, how)
    outputs = (added.loss, *add_count(build, net, added, counts))
    inputs = {**net.inputs, **added.inputs}
    state = {name: "" for name in changing if name in net.weights}
    return Network(inputs, tuple(build.nodes), outputs, build.weights, f"{net.name}, evaluated", state=state)
