"""The losses of a network's outputs: which output has which, and why one does not fit."""

from __future__ import annotations

from dataclasses import replace

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.names import did_you_mean
from onchip.network.types import TensorType
from onchip.plan.gradient.step import losses_of
from onchip.train.options import TrainOptions


def with_losses(net: Network, options: TrainOptions) -> TrainOptions:
    """The options with the loss as the network needs it: a name for its only output, else losses by output, in order.

    InputError for an output that the network does not have, or that does not fit its loss.
    """
    options = _by_output(net, options)
    for each in losses_of(net, options.step):
        check_output_type(net.types[each.output], each.loss)
    return options


def _by_output(net: Network, options: TrainOptions) -> TrainOptions:
    is_single = len(net.outputs) == 1
    if isinstance(options.loss, str) and is_single and not options.loss_weights:
        return options
    losses = dict.fromkeys(net.outputs, options.loss) if isinstance(options.loss, str) else dict(options.loss)
    for what, names, known in (
        ("loss", losses, net.outputs), ("loss_weights", dict(options.loss_weights or ()), tuple(losses)),
    ):  # fmt: skip
        if unknown := [name for name in names if name not in known]:
            of = f"of network '{net.name}'" if what == "loss" else "with a loss"
            raise InputError(
                f"{what} names an unknown output", got=unknown[0], expected=f"outputs {of}: {', '.join(known)}",
                hint=did_you_mean(unknown[0], known) or "a name of net.outputs",
            )  # fmt: skip
    if is_single and not options.loss_weights:
        return replace(options, loss=losses[net.outputs[0]])
    ordered = {name: losses[name] for name in net.outputs if name in losses}
    if sums := [name for name, loss in ordered.items() if loss == "half_sse"]:
        raise InputError(
            "half_sse is a sum, which cannot be added to means", got=f"half_sse for '{sums[0]}'",
            expected="losses that are means over the batch", hint="loss mse, with a weight in loss_weights",
        )  # fmt: skip
    if options.class_weight is not None:
        raise InputError(
            "class_weight is for a network with one output", got=f"class_weight and losses of {', '.join(ordered)}",
            expected="no class_weight", hint="sample_weight, which multiplies all losses of a row",
        )  # fmt: skip
    return replace(options, loss=ordered)


def check_output_type(output: TensorType, loss: str) -> None:
    """ShapeError if the loss is not of such an output."""
    if "float" not in output.dtype or (loss == "cross_entropy" and len(output.shape) != 2):
        expected, hint = "a float output", "end the network before it becomes integers"
        if loss == "cross_entropy":
            expected, hint = "logits, float32[B, classes]", "end the network with a Linear, or another loss"
        raise ShapeError(f"loss '{loss}' does not fit the output", got=str(output), expected=expected, hint=hint)
