"""The step that a training run repeats, as a network."""

from __future__ import annotations

from onchip.network.graph import Network
from onchip.network.recipe import Recipe, materialise
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step
from onchip.plan.rewrites import drop_idle


def step_of(net: Network, how: TrainingStep, decays: bool = False) -> Network:
    """The training step of a network as `fit` runs it: all weights are trained, derived ones too, and no layer drops.

    decays  weights decay
    """
    net, _ = drop_idle(net)
    used = dict.fromkeys(name for node in net.nodes for name in node.weights.values())
    derived = {name: materialise(name, net.weights) for name in used if isinstance(net.weights[name], Recipe)}
    if derived:
        net = net.replace(weights={**net.weights, **derived})
    return training_step(net, how, decays=decays)
