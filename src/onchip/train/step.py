"""The step that a training run repeats, as a network, and what evaluates the held-out rows."""

from __future__ import annotations

from onchip.network.graph import Network
from onchip.network.layers import Dropout
from onchip.network.recipe import Recipe, materialise
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step
from onchip.plan.rewrites import drop_idle


def step_of(net: Network, how: TrainingStep, decays: bool = False, *, counts: bool = False) -> Network:
    """The training step of a network as `fit` runs it: all weights are trained, derived ones too.

    decays  weights decay
    counts  as of training_step
    """
    return training_step(trained_form(net), how, decays=decays, counts=counts)


def trained_form(net: Network) -> Network:
    """The network without layers that change nothing in training, all of its weights as arrays."""
    net, _ = drop_idle(net, keep=lambda layer: isinstance(layer, Dropout) and layer.p > 0)
    used = dict.fromkeys(name for node in net.nodes for name in node.weights.values())
    derived = {name: materialise(name, net.weights) for name in used if isinstance(net.weights[name], Recipe)}
    return net.replace(weights={**net.weights, **derived}) if derived else net
