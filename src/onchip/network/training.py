"""What a step of training computes: the loss and the optimiser, with their options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onchip.errors import InputError
from onchip.network.names import known_name
from onchip.network.reading import show

LOSSES = ("cross_entropy", "half_sse", "mse", "bce_with_logits", "mae", "huber")
# With the number of state values per weight; "nesterov" is momentum whose step looks ahead.
OPTIMISERS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2}
MAX_NORM = 3.4028234e38  # float32's largest
BETA1 = 0.9  # of Adam's first moment


@dataclass(frozen=True)
class OutputLoss:
    """The loss of an output, and its factor in the sum that is trained."""

    output: str
    loss: str  # one of LOSSES
    weight: float = 1.0


@dataclass(frozen=True)
class TrainingStep:
    """What a step of training computes from the rows of a batch."""

    # One of LOSSES; for "cross_entropy" and "bce_with_logits" the network's output is logits. "": see `outputs`
    loss: str
    optimiser: str = "sgd"  # one of OPTIMISERS
    label_smoothing: float = 0.0  # of "cross_entropy": the fraction of the target spread evenly over all classes
    clip_norm: float = 0.0  # set: gradients are scaled down to this norm
    is_weighted: bool = False  # rows have weights
    byte_scale: float = 0.0  # set: rows are bytes times this
    ema: float = 0.0  # set: the decay of an exponential moving average of the weights
    beta1: float = BETA1  # of "adam" and "adamw"
    outputs: tuple[OutputLoss, ...] = ()  # set: the loss is the sum of those of these outputs

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", tuple(self.outputs))  # a list in JSON
        for each in self.outputs:
            known_name(each.loss, LOSSES, "loss", hint=LOSSES[0])
            if not 0 < each.weight < math.inf:
                raise InputError("bad weight of a loss", got=show(each.weight), expected="a finite number above 0")
        for name, known in (("loss", ("",) if self.outputs else LOSSES), ("optimiser", tuple(OPTIMISERS))):
            object.__setattr__(self, name, known_name(getattr(self, name), known, name, hint=known[0]))
        if any(each.loss == "half_sse" for each in self.outputs):
            hint = "loss mse, with a weight"
            raise InputError(
                "a sum cannot be added to means", got="half_sse", expected="losses that are means", hint=hint
            )
        for name, most in (("label_smoothing", 1.0), ("clip_norm", MAX_NORM)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= most:
                raise InputError(f"bad {name}", got=show(value), expected=f"0 to {most:g}", hint="0: none")
        if not isinstance(self.ema, int | float) or not 0 <= self.ema < 1:
            raise InputError("bad ema", got=show(self.ema), expected="0 to below 1", hint="0: none")
        if not isinstance(self.beta1, int | float) or not 0 <= self.beta1 < 1:
            raise InputError("bad beta1", got=show(self.beta1), expected="0 to below 1", hint=f"{BETA1}: Adam's own")
        if not isinstance(self.is_weighted, bool):
            raise InputError("bad is_weighted", got=show(self.is_weighted), expected="true or false", hint="false")
        if not isinstance(self.byte_scale, float) or not 0 <= self.byte_scale <= 1:
            raise InputError("bad scale of bytes", got=show(self.byte_scale), expected="0.0 to 1.0", hint="0.0: none")
