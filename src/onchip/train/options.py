"""Training options as data, with the same names in `fit`, the estimators, the command line and config files."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onchip.errors import InputError
from onchip.network.names import did_you_mean, known_name
from onchip.network.reading import show
from onchip.network.training import LOSSES, OutputLoss, TrainingStep
from onchip.plan.kernel import TRAINING_PRECISIONS

OPTIMISERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "step", "cosine", "one_cycle")
# Between the layers of a new network. Names of TRAINED in kernels/pointwise.py, repeated so that --help needs no NumPy.
ACTIVATIONS = ("ReLU", "LeakyReLU", "Sigmoid", "Tanh")
MIN_FLOAT32, MAX_FLOAT32 = 1.1754944e-38, 3.4028234e38  # the kernels compute in float32
MAX_COUNT = 2**63 - 1  # and count in int64
# Accepted aliases from other libraries.
ALIASES = {"learning_rate": "lr", "optimizer": "optimiser"}


@dataclass(frozen=True)
class TrainOptions:
    """All options of a training run. Runs with equal options, data and initial weights give equal bits."""

    # One of LOSSES: a mean over the batch, except "half_sse": half the sum of squares. Of several outputs
    # {output: loss}, whose sum is trained (outputs that it does not name are not), or one loss for every output
    loss: Any = "cross_entropy"
    loss_weights: Any = None  # of several outputs: {output: factor of its loss in the sum}; 1 if not named
    label_smoothing: float = 0.0  # for cross_entropy: this share of a row's target is spread evenly over all classes
    class_weight: Any = None  # for cross_entropy: "balanced", one weight per class, or {class: weight}; default 1
    optimiser: str = "sgd"  # "adam", "adamw": as in torch.optim, betas 0.9 and 0.999, eps 1e-8
    lr: float = 0.03
    momentum: float = 0.0  # for sgd: v = momentum v + gradient; w = w - lr v
    nesterov: bool = False  # for momentum: w = w - lr (gradient + momentum v), as in torch
    # L2: weight_decay w is added to the gradient, biases too, as in torch; adamw: decoupled. By name, with the patterns
    # of `frozen`: {"*.bias": 0, "*": 1e-4} or "*.bias=0,*=1e-4". The first that matches counts; 0 if none does
    weight_decay: Any = 0.0
    clip_norm: float = 0.0  # a batch's gradient is scaled down to at most this norm over all weights; 0: no clipping
    # Decay of an exponential moving average of the weights, such as 0.999, which the trained network has; 0: none. It
    # begins with the weights before the first step; each step then sets it to ema average + (1 - ema) w
    ema: float = 0.0
    schedule: str = "constant"  # of lr; see train/schedule.py
    warmup: float = 0.0  # epochs, or a part of one, in which lr first grows linearly, step by step
    step_every: int = 10  # epochs between the drops of "step"
    step_factor: float = 0.1  # factor of lr at each drop
    frozen: Any = ()  # patterns of weights that stay as they are: "embedding.*", or several, in a list or with commas;
    # * ? [abc] as in a shell. A batch norm whose mean is frozen computes as at inference
    batch_size: int = 64  # at most the number of rows; a short last batch is kept
    epochs: int = 30
    validation: float = 0.0  # share of the rows held out and evaluated after every epoch
    patience: int = 0  # stop after so many epochs without a better validation loss, keep the best weights; 0: never
    shuffle: bool = True  # a new row order every epoch; False: the order of x
    seed: int = 0  # of the row order and the validation split
    precision: str = "fp32"  # of gemm inputs; "tf32", "bf16", "fp16" on a GPU; weights and accumulation stay float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", _losses(self.loss))
        object.__setattr__(self, "loss_weights", _loss_weights(self.loss_weights))
        object.__setattr__(self, "class_weight", _class_weight(self.class_weight))
        object.__setattr__(self, "frozen", _patterns(self.frozen))
        object.__setattr__(self, "weight_decay", _weight_decay(self.weight_decay))
        for field in dataclasses.fields(self):  # convert NumPy scalars, common in grids, to Python numbers
            value = getattr(self, field.name)
            if callable(item := getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
                object.__setattr__(self, field.name, item())
            elif isinstance(value, numbers.Real) and not isinstance(value, int | float):
                object.__setattr__(self, field.name, float(value))
        for name, known in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES), ("precision", TRAINING_PRECISIONS)):
            object.__setattr__(self, name, known_name(getattr(self, name), known, name, f"{name}='{known[0]}'"))
        _check_number("lr", self.lr, "a number above 0", 0.03, lambda v: v >= MIN_FLOAT32)
        _check_number("momentum", self.momentum, "at least 0, below 1", 0.9, lambda v: 0 <= v < 1)
        for _, value in self.weight_decay if self.has_decay_groups else (("*", self.weight_decay),):
            _check_number("weight_decay", value, "at least 0", 1e-4, lambda v: v >= 0)
        _check_number("clip_norm", self.clip_norm, "at least 0", 1.0, lambda v: v >= 0)
        _check_number("ema", self.ema, "at least 0, below 1", 0.999, lambda v: 0 <= v < 1)
        _check_number("label_smoothing", self.label_smoothing, "at least 0, below 1", 0.1, lambda v: 0 <= v < 1)
        _check_number("step_factor", self.step_factor, "above 0, at most 1", 0.1, lambda v: 0 < v <= 1)
        _check_number("validation", self.validation, "at least 0, below 1", 0.1, lambda v: 0 <= v < 1)
        _check_number("warmup", self.warmup, "at least 0", 1, lambda v: v >= 0)
        for name, least in (("step_every", 1), ("batch_size", 1), ("epochs", 1), ("patience", 0), ("seed", 0)):
            _check_count(name, getattr(self, name), least)
        for name in ("shuffle", "nesterov"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"bad {name}", got=repr(value), expected="true or false", hint=f"{name}=True")
        losses = (self.loss,) if isinstance(self.loss, str) else tuple(loss for _, loss in self.loss)
        if "cross_entropy" not in losses and (self.label_smoothing or self.class_weight is not None):
            name = "label_smoothing" if self.label_smoothing else "class_weight"
            raise InputError(
                f"{name} is for classes", got=f"{name}={getattr(self, name)} with {', '.join(losses)}",
                expected=f"no {name}", hint="loss='cross_entropy'",
            )  # fmt: skip
        if self.momentum and self.optimiser != "sgd":
            raise InputError(
                "momentum is for sgd", got=f"momentum={self.momentum} with {self.optimiser}", expected="momentum=0",
                hint="optimiser='sgd'",
            )  # fmt: skip
        if self.nesterov and not self.momentum:
            raise InputError(
                "nesterov is a kind of momentum", got="nesterov=True with momentum=0", expected="a momentum above 0",
                hint="optimiser='sgd', momentum=0.9",
            )  # fmt: skip
        if self.warmup and self.schedule == "one_cycle":
            raise InputError(
                "one_cycle warms up by itself", got=f"warmup={self.warmup} with one_cycle", expected="warmup=0",
                hint="schedule='cosine'",
            )  # fmt: skip
        if self.warmup >= self.epochs:
            raise InputError(
                "the run ends before its warm-up", got=f"warmup={self.warmup}, epochs={self.epochs}",
                expected="a warm-up of fewer epochs", hint="more epochs, or warmup=0.5",
            )  # fmt: skip
        if self.patience and not self.validation:
            raise InputError(
                "patience needs validation rows", got=f"patience={self.patience}, validation=0",
                expected="a share above 0", hint="validation=0.1",
            )  # fmt: skip

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainOptions:
        """Build from names and values; an unknown name raises InputError with a suggestion."""
        return cls(**canonical_names(options))

    @property
    def outputs(self) -> tuple[OutputLoss, ...]:
        """The losses of several outputs; empty for one loss."""
        if isinstance(self.loss, str):
            return ()
        weights = dict(self.loss_weights or ())
        return tuple(OutputLoss(output, loss, weights.get(output, 1.0)) for output, loss in self.loss)

    @property
    def several(self) -> tuple[str, ...]:
        """The outputs, if there are several losses, each of which is reported."""
        return tuple(each.output for each in self.outputs) if len(self.outputs) > 1 else ()

    @property
    def step(self) -> TrainingStep:
        """What a step computes, of rows without weights."""
        loss = self.loss if isinstance(self.loss, str) else ""
        rest: dict[str, Any] = {"ema": self.ema, "outputs": self.outputs}
        return TrainingStep(loss, self.step_optimiser, self.label_smoothing, self.clip_norm, **rest)

    @property
    def has_classes(self) -> bool:
        """Whether the only loss is of classes, so that there is an accuracy."""
        return self.loss == "cross_entropy" or [each.loss for each in self.outputs] == ["cross_entropy"]

    @property
    def has_decay_groups(self) -> bool:
        """Whether weight_decay is by name: pairs of a pattern and a number, which `step_of` accepts, too."""
        return isinstance(self.weight_decay, tuple)

    @property
    def step_decay(self) -> float:
        """The weight_decay of every step: with groups 1, as theirs are factors of it."""
        return 1.0 if self.has_decay_groups else float(self.weight_decay)

    @property
    def step_optimiser(self) -> str:
        """The optimiser as a TrainingStep names it."""
        return ("nesterov" if self.nesterov else "momentum") if self.momentum else self.optimiser


def canonical_names(options: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """Map aliases to the names of TrainOptions; unknown names raise InputError, with suggestions also from `others`."""
    known = [field.name for field in dataclasses.fields(TrainOptions)]
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        key = ALIASES.get(name, name)
        check_name(key, known, "training option", [*ALIASES, *others])
        if key in chosen:
            raise InputError(f"two values of {key}", got=", ".join(options), expected="one", hint=f"only {key}")
        chosen[key] = value
    return chosen


def check_name(name: str, known: list[str], what: str, others: Iterable[str] = ()) -> None:
    """Raise InputError if `name` is not known, suggesting the nearest of `known` and `others`."""
    if name not in known:
        hint = did_you_mean(name, [*known, *others])
        raise InputError(f"unknown {what}", got=name, expected=", ".join(known), hint=hint)


def _class_weight(value: Any) -> str | tuple[float, ...] | dict[int, float] | None:
    """Parse class weights: None, "balanced", one per class, or a dict, whose keys are strings in JSON and TOML."""
    if value is None:
        return None
    if callable(to_dict := getattr(value, "to_dict", None)):  # a pandas Series, by its index
        value = to_dict()
    try:
        if isinstance(value, str) and value.lower() != "balanced":
            value = [float(each) for each in value.split(",")]
        if isinstance(value, str):
            return value.lower()
        if isinstance(value, Mapping):
            weights: Any = {_class(label): float(each) for label, each in value.items()}
            values = [*weights.values(), 1.0]  # other classes have weight 1
        else:
            weights = tuple(values := [float(each) for each in value])
    except (TypeError, ValueError):
        values = [math.nan]
    if not all(0 <= each <= MAX_FLOAT32 for each in values) or not any(values):
        raise InputError(
            "bad class weight", got=show(value), expected="'balanced', or weights per class, at least 0, not all 0",
            hint="class_weight='balanced', [1, 5] or {1: 5}",
        )  # fmt: skip
    return weights  # type: ignore[no-any-return]


def _losses(value: Any) -> Any:
    """The name of a loss, or losses by output as a tuple of pairs."""
    pairs = _pairs(value)
    if isinstance(value, str) and pairs is None:
        return known_name(value, LOSSES, "loss", f"loss='{LOSSES[0]}'")
    if not pairs:
        raise InputError(
            "bad loss", got=show(value), expected=f"one of {', '.join(LOSSES)}, or one for each output",
            hint="loss='mse', or loss={'logits': 'cross_entropy', 'box': 'huber'}",
        )  # fmt: skip
    return tuple((output, known_name(loss, LOSSES, f"loss of '{output}'", LOSSES[0])) for output, loss in pairs)


def _loss_weights(value: Any) -> tuple[tuple[str, float], ...] | None:
    """Parse the factors of losses by output as a tuple of pairs; None: all are 1."""
    if value is None:
        return None
    found = tuple((output, _number(weight)) for output, weight in _pairs(value) or ())
    is_good = all(type(weight) is float and MIN_FLOAT32 <= weight <= MAX_FLOAT32 for _, weight in found)
    if not found or not is_good:
        raise InputError(
            "bad loss weights", got=show(value), expected="for outputs by name, a number above 0 each",
            hint="loss_weights={'box': 0.5}; leave an output out of `loss` to not train on it",
        )  # fmt: skip
    return found


def _weight_decay(value: Any) -> Any:
    """Parse weight decays by name as a tuple of pairs; a text from the command line also as a number. Others stay."""
    if isinstance(value, str) and "=" not in value:
        return _number(value)
    if not isinstance(value, str | Mapping | list | tuple):
        return value
    if not (pairs := _pairs(value)):
        raise InputError(
            "bad weight decay", got=show(value), expected="a number, or one for each pattern of names of weights",
            hint="weight_decay={'*.bias': 0, '*': 1e-4}",
        )  # fmt: skip
    return tuple((pattern, _number(number)) for pattern, number in pairs)


def _pairs(value: Any) -> list[tuple[str, Any]] | None:
    """A mapping from names, its pairs, or the text "name=value,name=value", as pairs; None for anything else."""
    if isinstance(value, str):
        value = [part.rpartition("=")[::2] for part in value.split(",")] if "=" in value else None
    elif isinstance(value, Mapping):
        value = value.items()
    elif not isinstance(value, list | tuple):
        return None
    try:
        pairs = [(name, each) for name, each in value]
    except (TypeError, ValueError):
        return None
    is_named = all(isinstance(name, str) and name.strip() for name, _ in pairs)
    return [(name.strip(), each) for name, each in pairs] if is_named else None


def _number(value: Any) -> Any:
    """A float, if it is a number or the text of one."""
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _patterns(value: Any) -> tuple[str, ...]:
    """The patterns of frozen weights; there may be none."""
    return () if isinstance(value, list | tuple) and not value else patterns_of(value, "frozen")


def patterns_of(value: Any, option: str) -> tuple[str, ...]:
    """Parse patterns of the names of weights: one, or several with commas, or a sequence of them; at least one."""
    parts = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
    is_known = isinstance(parts, list | tuple) and all(isinstance(pattern, str) and pattern for pattern in parts)
    if not (is_known and parts):
        raise InputError(
            f"bad {option}", got=show(value), expected="patterns of the names of weights",
            hint=f"{option}='embedding.*', or ['conv1.*', 'conv2.*']",
        )  # fmt: skip
    return tuple(parts)


def _class(label: Any) -> int:
    number = int(label)
    if not isinstance(label, str) and number != label:
        raise ValueError("not a whole number")
    return number


def _check_number(name: str, value: Any, expected: str, example: float, fits: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and abs(value) <= MAX_FLOAT32 and fits(value)):  # also false for NaN
        words = {"lr": "learning rate"}.get(name, name.replace("_", " "))
        hint = f"{name}={example}"
        raise InputError(f"bad {words}", got=show(value), expected=expected, hint=hint)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= MAX_COUNT:
        expected = f"at least {least}, at most {MAX_COUNT:,}"
        words = "number of epochs" if name == "epochs" else name.replace("_", " ")
        example = {"step_every": 10, "batch_size": 64, "epochs": 30, "patience": 5, "seed": 0}[name]
        raise InputError(f"bad {words}", got=show(value), expected=expected, hint=f"{name}={example}")
