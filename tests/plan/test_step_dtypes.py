"""Training steps of networks whose weights are not float32: gradients and state have the dtype of their weight."""

import numpy as np
import pytest

from onchip.errors import InputError, ShapeError
from onchip.kernels.cpu import KERNELS
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm1d, Cast, Dropout, Linear, ToInts
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.step import CpuStep
from takers import CPU


def weight(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (np.random.default_rng(shape).standard_normal(shape) / 2).astype(numpy_dtype(dtype))


def mixed() -> Network:
    """A norm in float16, a Linear of float32 rows with a float16 weight, and one with a float64 weight."""
    norm = {role: f"n.{role}" for role in ("weight", "bias", "mean", "var")}
    nodes = (
        Node("n", BatchNorm1d(), ("x",), norm),
        Node("c", Cast("float32"), ("n",)),
        Node("a", Linear(), ("c",), {"weight": "a.weight"}),
        Node("y", Linear(), ("a",), {"weight": "y.weight"}),
    )
    weights = {name: np.abs(weight(5, dtype="float16")) for name in norm.values()}
    weights |= {"a.weight": weight(4, 5, dtype="float16"), "y.weight": weight(3, 4, dtype="float64")}
    return Network({"x": TensorType(("B", 5), "float16")}, nodes, ("y",), weights)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_state_keeps_its_dtype(optimiser, clip_norm):
    net = mixed()
    step = training_step(net, TrainingStep("mse", optimiser, clip_norm=clip_norm, ema=0.9), decays=True)
    assert {name: step.weights[name].dtype for name in net.weights} == {n: w.dtype for n, w in net.weights.items()}
    moments = {name: step.weights[name].dtype for name in step.state.keys() - net.weights.keys() - {VALUES}}
    assert len(moments) == {"sgd": 0, "momentum": 4, "nesterov": 4, "adam": 8, "adamw": 8}[optimiser] + 4
    for name, dtype in moments.items():
        assert dtype == ("float64" if name.startswith("y.") else "float32"), name


def test_norms_of_gradients_do_not_overflow():
    """Of 300 elements of 60,000: the norm is infinite in float16."""
    net = Network(
        {"x": TensorType(("B", 300), "float16")}, (Node("y", Linear(), ("x",), {"weight": "w"}),), ("y",),
        {"w": np.zeros((1, 300), np.float16)},
    )  # fmt: skip
    step = CpuStep(make_plan(training_step(net, TrainingStep("half_sse", clip_norm=1.0)), CPU, KERNELS), 1)
    step.state[VALUES][...] = 1, 0, 0, 1, 1
    step.run({"x": np.full((1, 300), 300.0, np.float16), "target": np.full((1, 1), -200, np.float16),
              "share": np.ones(1, np.float16)}, 1)  # fmt: skip
    assert np.linalg.norm(step.state["w"].astype(np.float64)) == pytest.approx(1.0, rel=2e-3)


def test_a_dropout_of_ints_is_refused():
    nodes = (
        Node("i", ToInts("int32"), ("x",)),
        Node("d", Dropout(), ("i",)),
        Node("y", Linear(), ("x",), {"weight": "w"}),
    )
    net = Network({"x": TensorType(("B", 5))}, nodes, ("y",), {"w": weight(2, 5)})
    with pytest.raises(ShapeError, match=r"layer 'd' \(Dropout\)[\s\S]*int32\[B, 5\]"):
        training_step(net, TrainingStep("mse"))


def test_a_weight_that_the_output_does_not_depend_on():
    nodes = (Node("a", Linear(), ("x",), {"weight": "a"}), Node("y", Linear(), ("x",), {"weight": "w"}))
    net = Network({"x": TensorType(("B", 5))}, nodes, ("y",), {"w": weight(2, 5), "a": weight(3, 5)})
    with pytest.raises(InputError, match="nothing to train"):
        training_step(net, TrainingStep("mse", clip_norm=1.0), trainable=lambda name: name == "a")
