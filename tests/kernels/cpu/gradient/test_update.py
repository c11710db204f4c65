"""The optimiser's update on the CPU: parameters of any size, clipped and decayed, and averages, in one launch."""

import numpy as np
import pytest

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Abs,
    AdamStep,
    BatchSum,
    Descent,
    GlobalSum,
    Mul,
    NesterovDescent,
    RunningAverage,
    Velocity,
)
from onchip.network.layers.optimiser import STEP_VALUES
from onchip.network.recipe import value_weight
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import VALUES, add_updates
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan
from step_cases import bind, check_step, run

SHAPES = {"one": (1,), "odd": (3, 5, 7), "chunk": (64, 128), "more": (8193,), "most": (203, 127)}


def updates(step: TrainingStep, decays: bool | dict[str, float]) -> Network:
    """Parameters whose gradients are sums over the batch of an input each."""
    rng = np.random.default_rng(0)
    inputs = {f"{name}.x": TensorType(("B", *shape)) for name, shape in SHAPES.items()}
    build = StepBuilder(
        [], {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}, {**inputs}
    )
    gradients = {name: build.add(f"{name}.grad", BatchSum(), (f"{name}.x",)) for name in SHAPES}
    state = add_updates(build, step, gradients, decays)
    weights = dict(build.weights)
    for name in state:
        if name not in SHAPES:  # moments and averages; no square is negative
            weights[name] = np.abs(rng.standard_normal(weights[name].shape)).astype(np.float32)
    weights[VALUES] = np.array([0.1, 0.02, 0.9, 0.4, 0.3], np.float32)
    return Network(inputs, tuple(build.nodes), ("one.grad",), weights, state=state)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("clip_norm", [0.0, 2.0])
@pytest.mark.parametrize("decays", [False, True, {"odd": 0.5, "more": 3.0}], ids=["", "decays", "groups"])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_every_optimiser(optimiser, decays, clip_norm, ema):
    net = updates(TrainingStep("mse", optimiser, clip_norm=clip_norm, ema=ema), decays)
    rng = np.random.default_rng(1)
    rows = tuple(rng.standard_normal((3, *shape), np.float32) for shape in SHAPES.values())
    check_step(net, "update", rows)
    claims = [group.claim for group in bind(net, "update", 3).plan.groups]
    assert [claim.kernel for claim in claims].count("update") == 1


def average(*nodes: Node, state: dict[str, str], outputs: tuple[str, ...] = ("g",)) -> Network:
    """A network of a gradient g and these nodes."""
    rng = np.random.default_rng(2)
    weights = {name: rng.standard_normal(9).astype(np.float32) for name in ("mean", "weight")}
    weights |= {VALUES: np.linspace(0.1, 0.9, len(STEP_VALUES)).astype(np.float32)}
    weights |= {"number": value_weight("number", ())}
    return Network({"x": TensorType(("B", 9))}, (Node("g", BatchSum(), ("x",)), *nodes), outputs, weights, state=state)


MEAN = Node("mean.new", RunningAverage(0.3), ("g",), {"average": "mean"})
X = np.random.default_rng(3).standard_normal((4, 9), np.float32)


def test_running_averages():
    check_step(average(MEAN, state={"mean": "mean.new"}), "update", (X,))


def test_a_new_state_that_is_also_an_output():
    """It then has an array of its own."""
    bound = bind(average(MEAN, state={"mean": "mean.new"}, outputs=("g", "mean.new")), "update", 4)
    once = run(bound, (X,))
    twice = run(bound, (X,), once)
    assert np.array_equal(once["mean.new"][0], once["mean"])
    assert np.array_equal(twice["mean.new"][0], twice["mean"])
    assert not np.array_equal(twice["mean"], once["mean"])


VELOCITY, WEIGHT = {"velocity": "mean", "values": VALUES}, {"weight": "weight", "values": VALUES}
NO_OPTIMISER = [
    # two velocities; a velocity that another layer reads; moments of no optimiser; an average of an average, and of
    # clipped values
    (Node("v", Velocity(), ("g",), VELOCITY), Node("v2", Velocity(), ("v",), VELOCITY),
     Node("w", Descent(), ("v2",), WEIGHT)),
    (Node("v", Velocity(), ("g",), VELOCITY), Node("w", Descent(), ("v",), WEIGHT), Node("n", Abs(), ("v",))),
    (Node("v", Velocity(), ("g",), VELOCITY), Node("w", NesterovDescent(), ("v", "g"), WEIGHT)),
    (Node("w", NesterovDescent(), ("g", "g"), WEIGHT),),
    (Node("w", AdamStep(), ("g", "g"), WEIGHT),),
    (Node("v", RunningAverage(), ("g",), {"average": "mean"}),
     Node("w", RunningAverage(), ("v",), {"average": "weight"})),
    (Node("number", GlobalSum((1,)), ("g",)), Node("scaled", Mul(), ("g",), {"constant": "number"}),
     Node("w", RunningAverage(), ("scaled",), {"average": "weight"})),
]  # fmt: skip


@pytest.mark.parametrize("nodes", NO_OPTIMISER, ids=[
    "two velocities", "read", "gradient and velocity exchanged", "no velocity", "no moments", "average of an average",
    "scaled average"
])  # fmt: skip
def test_what_no_optimiser_has_is_refused(nodes):
    net = average(*nodes, state={"weight": "w", VALUES: ""}, outputs=("g", nodes[-1].name))
    planned = plan(net, "cpu", Job(batch=4))
    assert "update" in [refusal.kernel for refusal in planned.refusals]
    check_step(net, planned.groups[-1].claim.kernel, (X,))
