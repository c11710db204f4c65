"""The step that a training run repeats, as a network."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.errors import InputError
from onchip.network.graph import Network
from onchip.network.names import match_names
from onchip.network.recipe import Recipe, materialise
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step, weights_with_gradient
from onchip.plan.rewrites import drop_idle


def step_of(net: Network, how: TrainingStep, decays: bool = False, frozen: Sequence[str] = ()) -> Network:
    """The training step of a network as `fit` runs it: derived weights are trained, too, and no layer drops.

    decays  weights decay
    frozen  patterns of the names of weights that are not trained
    """
    net, _ = drop_idle(net)
    used = dict.fromkeys(name for node in net.nodes for name in node.weights.values())
    derived = {name: materialise(name, net.weights) for name in used if isinstance(net.weights[name], Recipe)}
    if derived:
        net = net.replace(weights={**net.weights, **derived})
    kept = match_names(frozen, tuple(used), "frozen")
    trained = weights_with_gradient(net)
    if trained and kept.keys() >= set(trained):
        raise InputError(
            "every weight is frozen", got=", ".join(frozen), expected="a weight to train",
            hint=f"patterns that leave some of {', '.join(trained)}",
        )  # fmt: skip
    return training_step(net, how, decays=decays, trainable=lambda name: name not in kept)
