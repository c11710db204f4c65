"""Sums over the batch on the CPU: columns and channels of any number and length, and batches of any size."""

import numpy as np
import pytest

from onchip.kernels.cpu.reduction.batch_sums import BatchSumsKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchMean,
    BatchNorm1d,
    BatchNorm2d,
    BatchSum,
    BatchVariance,
    GlobalSum,
    WeightGrad,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job, Refusal
from onchip.runtime.cpu.backend import this_cpu
from step_cases import check_step, one_gradient

ROWS = [(), (1,), (3,), (257,), (5, 7), (6, 2000), (300, 17, 3)]
BATCHES = [0, 1, 5, 64, 300]


def rows(B, *shape):
    return np.random.default_rng(B).standard_normal((B, *shape), np.float32) + np.float32(0.5)


def sums(*nodes: Node, row: tuple[int, ...]) -> Network:
    x = TensorType(("B", *row))
    return Network({"x": x}, nodes, (nodes[-1].name,), {"s": np.zeros(1, np.float32)}, state={"s": ""})


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_sums_of_columns(row, B):
    check_step(sums(Node("y", BatchSum(), ("x",)), row=row), "batch_sums", (rows(B, *row),))


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize(
    ("row", "axes"), [((6, 30, 30), (2, 3)), ((7, 5), (1,)), ((3, 4, 300), (1, 2)), ((9, 1), (2,))]
)
def test_gradients_of_biases(row, axes, B):
    nodes = Node("rows", GlobalSum(axes), ("x",)), Node("y", BatchSum(), ("rows",))
    check_step(sums(*nodes, row=row), "batch_sums", (rows(B, *row),))


def test_other_axes_are_two_launches():
    nodes = Node("rows", GlobalSum((2,)), ("x",)), Node("y", BatchSum(), ("rows",))
    check_step(sums(*nodes, row=(3, 4, 5)), "batch_sums", (rows(4, 3, 4, 5),))


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("row", [(3,), (300,), (5, 7), (6, 30, 30)], ids=str)
@pytest.mark.parametrize("layer", [BatchMean(), BatchVariance(), BatchVariance(is_unbiased=True)], ids=str)
def test_statistics(layer, row, B):
    weights = {"mean": np.linspace(0.4, 0.6, row[0]).astype(np.float32)} if layer.required else {}
    net = one_gradient(layer, {"x": TensorType(("B", *row))}, weights) if weights else sums(
        Node("y", layer, ("x",)), row=row
    )  # fmt: skip
    check_step(net, "batch_sums", (rows(B, *row),))


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("role", ["weight", "bias"])
@pytest.mark.parametrize("row", [(3,), (300,), (5, 7), (6, 30, 30)], ids=str)
def test_gradients_of_batch_norms(row, role, B):
    rng, x = np.random.default_rng(7), TensorType(("B", *row))
    layer = BatchNorm2d() if len(row) == 3 else BatchNorm1d(1e-3)
    weights = {name: rng.random(row[0], np.float32) + np.float32(0.5) for name in ("mean", "var", "weight", "bias")}
    net = one_gradient(WeightGrad(layer, role), {"x": x, "dy": x}, weights)
    check_step(net, "batch_sums", (rows(B, *row), rows(B, *row) * 3))


def test_the_gradient_of_a_narrow_weight_is_refused():
    x, dtype = TensorType(("B", 3)), numpy_dtype("bfloat16")
    weights = {name: np.ones(3, np.float32) for name in ("mean", "var")} | {"weight": np.ones(3, dtype)}
    net = one_gradient(WeightGrad(BatchNorm1d()), {"x": x, "dy": x}, weights)
    (refusal,) = BatchSumsKernel().claims(net, 0, this_cpu(), Job())
    assert isinstance(refusal, Refusal)


def test_nan_stays_in_its_column():
    x = rows(5, 40)
    clean = check_step(sums(Node("y", BatchSum(), ("x",)), row=(40,)), "batch_sums", (x,))["y"]
    x[3, 7] = np.nan
    got = check_step(sums(Node("y", BatchSum(), ("x",)), row=(40,)), "batch_sums", (x,))["y"]
    assert np.isnan(got[0, 7])
    assert np.array_equal(np.delete(got, 7, 1), np.delete(clean, 7, 1))
