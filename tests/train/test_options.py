"""Training options: checked on construction."""

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.train.options import TrainOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "hinge"}, "unknown loss"),
        ({"optimiser": "rmsprop"}, "unknown optimiser"),
        ({"schedule": "linear"}, "unknown schedule"),
        ({"precision": "fp8"}, "expected: +fp32, tf32, bf16, fp16\n"),
        ({"lr": 0}, "learning rate"),
        ({"lr": float("inf")}, "learning rate"),
        ({"lr": 1e300}, "learning rate"),
        ({"weight_decay": 1e300}, "weight decay"),
        ({"lr": "0.1"}, "learning rate"),
        ({"lr": True}, "learning rate"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": 0.9, "optimiser": "adam"}, "momentum is for sgd"),
        ({"nesterov": True}, "nesterov is a kind of momentum"),
        ({"nesterov": True, "optimiser": "adam"}, "nesterov is a kind of momentum"),
        ({"nesterov": 1, "momentum": 0.9}, "bad nesterov"),
        ({"weight_decay": -1}, "weight decay"),
        ({"clip_norm": -1}, "clip norm"),
        ({"label_smoothing": 1.0}, "label smoothing"),
        ({"label_smoothing": 0.1, "loss": "mse"}, "label_smoothing is for classes"),
        ({"class_weight": "balanced", "loss": "half_sse"}, "class_weight is for classes"),
        ({"class_weight": "even"}, "class weight"),
        ({"class_weight": [1, -1]}, "class weight"),
        ({"class_weight": [0, 0]}, "class weight"),
        ({"class_weight": {"cat": 2}}, "class weight"),
        ({"class_weight": {0.9: 2}}, "class weight"),
        ({"class_weight": {1: -1}}, "class weight"),
        ({"lr": np.array([0.1, 0.2])}, "learning rate"),
        ({"lr": 1e-46}, "learning rate"),
        ({"class_weight": 3}, "class weight"),
        ({"weight_decay": "much"}, "weight decay"),
        ({"weight_decay": True}, "weight decay"),
        ({"weight_decay": {}}, "weight decay"),
        ({"weight_decay": {"*": -1}}, "weight decay"),
        ({"weight_decay": {"*": "much"}}, "weight decay"),
        ({"weight_decay": {"*": True}}, "weight decay"),
        ({"weight_decay": {"": 1}}, "weight decay"),
        ({"weight_decay": {3: 1}}, "weight decay"),
        ({"weight_decay": "*.bias=0,1e-4"}, "weight decay"),
        ({"weight_decay": [0.1, 0.2]}, "weight decay"),
        ({"weight_decay": [["*", 0.1, 0.2]]}, "weight decay"),
        ({"weight_decay": {"*": 10**400}}, "weight decay"),
        ({"ema": 1.0}, "ema"),
        ({"ema": -0.1}, "ema"),
        ({"frozen": 3}, "bad frozen"),
        ({"frozen": ["a", 3]}, "bad frozen"),
        ({"frozen": "a,,b"}, "bad frozen"),
        ({"frozen": [""]}, "bad frozen"),
        ({"frozen": ""}, "bad frozen"),
        ({"step_factor": 0.0}, "step factor"),
        ({"step_every": 0}, "step every"),
        ({"batch_size": 0}, "batch size"),
        ({"batch_size": 1.5}, "batch size"),
        ({"epochs": True}, "epochs"),
        ({"validation": 1.0}, "validation"),
        ({"patience": 3}, "patience needs validation rows"),
        ({"patience": -1, "validation": 0.1}, "patience"),
        ({"shuffle": 1}, "shuffle"),
        ({"seed": -1}, "seed"),
        *[
            ({name: sign * 10**digits}, name.replace("_", " "))
            for name in ("epochs", "batch_size", "step_every", "seed", "weight_decay", "validation")
            for sign in (1, -1)
            for digits in (400, 5000)
        ],
    ],
)
def test_bad_options_are_refused(given, message):
    with pytest.raises(InputError, match=message) as caught:
        TrainOptions(**given)
    assert caught.value.got
    assert caught.value.expected


@pytest.mark.parametrize(
    ("name", "nearest"), [("batchsize", "batch_size"), ("learning", ""), ("optimzer", "optimizer")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(InputError, match="unknown training option") as caught:
        TrainOptions.of({"lr": 0.1, name: 1})
    assert caught.value.got == name
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    "given",
    [{"*.bias": 0, "*": 1e-4}, "*.bias=0, *=1e-4", [["*.bias", 0], ["*", np.float64(1e-4)]],
     {"*.bias": "0", "*": Fraction(1, 10_000)}],
)  # fmt: skip
def test_weight_decays_are_by_name(given):
    options = TrainOptions(weight_decay=given)
    assert options.weight_decay == (("*.bias", 0.0), ("*", 1e-4))
    assert (options.has_decay_groups, options.step_decay) == (True, 1.0)
    assert TrainOptions.of(json.loads(json.dumps(dataclasses.asdict(options)))) == options


@pytest.mark.parametrize("given", [1e-4, "1e-4", np.float64(1e-4)])
def test_a_weight_decay_of_all_is_a_number(given):
    options = TrainOptions(weight_decay=given)
    assert (options.weight_decay, options.has_decay_groups, options.step_decay) == (1e-4, False, 1e-4)


@pytest.mark.parametrize(
    ("given", "patterns"),
    [("fc1.*", ("fc1.*",)), ("fc1.*, fc2.bias", ("fc1.*", "fc2.bias")), (["a", "b"], ("a", "b")), ([], ())],
)
def test_frozen_weights_are_patterns(given, patterns):
    assert TrainOptions(frozen=given).frozen == patterns


@pytest.mark.parametrize("given", ["1, 2.5", [1, 2.5], np.array([1, 2.5])])
def test_class_weights_are_numbers_in_the_order_of_the_classes(given):
    assert TrainOptions(class_weight=given).class_weight == (1.0, 2.5)


@pytest.mark.parametrize("given", [{"1": 2.5}, {np.int64(1): np.float32(2.5)}])
def test_class_weights_may_be_of_some_classes(given):
    assert TrainOptions(class_weight=given).class_weight == {1: 2.5}


@pytest.mark.parametrize("given", [{1: 0}, {}, {0: 0, 1: 0}])
def test_classes_that_are_not_named_count_one(given):
    assert TrainOptions(class_weight=given).class_weight == given


def test_class_weights_of_a_series_go_by_its_index():
    pandas = pytest.importorskip("pandas")
    assert TrainOptions(class_weight=pandas.Series([3.0, 2.0], index=[1, 0])).class_weight == {1: 3.0, 0: 2.0}


def test_a_fraction_is_a_number():
    assert type(TrainOptions(lr=Fraction(1, 4)).lr) is float


def test_numpy_scalars_are_numbers():
    options = TrainOptions.of({"lr": np.float64(0.5), "batch_size": np.int64(7), "epochs": np.int32(2)})
    assert (options.lr, options.batch_size, options.epochs) == (0.5, 7, 2)
    assert {type(value) for value in (options.lr, options.batch_size, options.epochs)} == {int, float}


@pytest.mark.parametrize(
    ("given", "name"),
    [({}, "sgd"), ({"momentum": 0.9}, "momentum"), ({"momentum": 0.9, "nesterov": True}, "nesterov"),
     ({"optimiser": "adamw"}, "adamw")],
)  # fmt: skip
def test_momentum_is_an_optimiser_of_steps(given, name):
    assert TrainOptions(**given).step_optimiser == name


def test_other_libraries_names_are_understood():
    assert TrainOptions.of({"learning_rate": 0.5, "optimizer": "adam"}) == TrainOptions(lr=0.5, optimiser="adam")
    with pytest.raises(InputError, match="two values of lr"):
        TrainOptions.of({"learning_rate": 0.5, "lr": 0.5})
