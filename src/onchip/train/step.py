"""The step that a training run repeats, as a network, and what evaluates the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.errors import InputError
from onchip.network.graph import Network
from onchip.network.layers import Dropout
from onchip.network.names import match_names
from onchip.network.recipe import Recipe, materialise
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import averages_of, losses_of, training_step, weights_with_gradient
from onchip.plan.rewrites import drop_idle

OF_LOGITS = ("cross_entropy", "bce_with_logits")  # losses that apply a softmax or a sigmoid to the output
WeightDecay = float | tuple[tuple[str, float], ...]  # of all weights; or patterns of names, each with its own


def step_of(
    net: Network, how: TrainingStep, weight_decay: WeightDecay = 0.0, frozen: Sequence[str] = (), *,
    counts: bool = False,
) -> Network:  # fmt: skip
    """The training step of a network as `fit` runs it: derived weights are trained, too.

    weight_decay  of the step's values; by patterns, a weight decays by the first that matches its name, and the step's
                  value must be 1
    frozen        patterns of the names of weights that are not trained
    counts        as of training_step
    """
    net = trained_form(net)
    check_outputs(net, how)
    used = weights_used(net)
    kept = match_names(frozen, used, "frozen")
    trained = weights_with_gradient(net)
    if trained and kept.keys() >= set(trained):
        raise InputError(
            "every weight is frozen", got=", ".join(frozen), expected="a weight to train",
            hint=f"patterns that leave some of {', '.join(trained)}",
        )  # fmt: skip
    decays = decays_of(weight_decay, used)
    return training_step(net, how, decays=decays, trainable=lambda name: name not in kept, counts=counts)


def decays_of(weight_decay: WeightDecay, names: Sequence[str]) -> bool | dict[str, float]:
    """As training_step accepts it: whether all weights decay; or those that do, each with its weight decay."""
    if not isinstance(weight_decay, tuple):
        return weight_decay > 0
    first = match_names([pattern for pattern, _ in weight_decay], names, "weight_decay")
    by_pattern = dict(reversed(weight_decay))
    return {name: by_pattern[pattern] for name, pattern in first.items() if by_pattern[pattern]}


def check_outputs(net: Network, how: TrainingStep) -> None:
    """InputError for an output that its loss computes itself."""
    for each in losses_of(net, how):
        last = net.by_name.get(each.output)
        if each.loss in OF_LOGITS and last is not None and last.layer.kind in ("Softmax", "Sigmoid"):
            or_mse = ", or loss mse" if last.layer.kind == "Sigmoid" else ""
            raise InputError(
                f"{each.loss} expects logits", got=f"layer '{last.name}' ({last.layer.kind}) at the end",
                expected="its input", hint=f"train without it: the loss computes it{or_mse}",
            )  # fmt: skip


def averages_of_weights(step: Network) -> dict[str, str]:
    """The state with the average of each weight, by weight, if `ema` is set; InputError unless it has their type."""
    found = averages_of(step)
    for name, average in found.items():
        if step.weight_type(name) != step.weight_type(average):
            got = f"weight '{name}' in {step.weight_type(name).dtype}"
            raise InputError("only float32 weights are averaged", got=got, expected="ema=0")
    return found


def trained_form(net: Network) -> Network:
    """The network without layers that change nothing in training, all of its weights as arrays."""
    net, _ = drop_idle(net, keep=lambda layer: isinstance(layer, Dropout) and layer.p > 0)
    derived = {
        name: materialise(name, net.weights) for name in weights_used(net) if isinstance(net.weights[name], Recipe)
    }
    return net.replace(weights={**net.weights, **derived}) if derived else net


def weights_used(net: Network) -> tuple[str, ...]:
    """The weights of the layers, in their order."""
    return tuple(dict.fromkeys(name for node in net.nodes for name in node.weights.values()))
