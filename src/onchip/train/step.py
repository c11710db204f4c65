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

WeightDecay = float | tuple[tuple[str, float], ...]  # of all weights; or patterns of names, each with its own


def step_of(net: Network, how: TrainingStep, weight_decay: WeightDecay = 0.0, frozen: Sequence[str] = ()) -> Network:
    """The training step of a network as `fit` runs it: derived weights are trained, too, and no layer drops.

    weight_decay  of the step's values; by patterns, a weight decays by the first that matches its name, and the step's
                  value must be 1
    frozen        patterns of the names of weights that are not trained
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
    decays = _decays(weight_decay, tuple(used))
    return training_step(net, how, decays=decays, trainable=lambda name: name not in kept)


def _decays(weight_decay: WeightDecay, names: Sequence[str]) -> bool | dict[str, float]:
    """As training_step accepts it: whether all weights decay; or those that do, each with its weight decay."""
    if not isinstance(weight_decay, tuple):
        return weight_decay > 0
    first = match_names([pattern for pattern, _ in weight_decay], names, "weight_decay")
    by_pattern = dict(reversed(weight_decay))
    return {name: by_pattern[pattern] for name, pattern in first.items() if by_pattern[pattern]}
