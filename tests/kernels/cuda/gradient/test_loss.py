"""Losses and correct rows on an emulated GPU: of every float dtype, alone, their gradients, and both in one claim."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.gradient.loss import LossKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AbsoluteError,
    BatchSum,
    BinaryCrossEntropy,
    Correct,
    CrossEntropy,
    HuberLoss,
    InputGrad,
    Mul,
    SquaredError,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal

CLASSES = TensorType(("B",), "int64")
DTYPES = ["float32", "float16", "bfloat16", "float64"]
LOSSES = [
    CrossEntropy(), CrossEntropy(0.1), SquaredError(), SquaredError(is_mean=True), BinaryCrossEntropy(),
    AbsoluteError(), HuberLoss(),
]  # fmt: skip


def step(layer, row, dtype):
    y, share = TensorType(("B", *row), dtype), TensorType(("B",), dtype)
    nodes = (
        Node("losses", layer, ("y", "target")),
        Node("shared", Mul(), ("losses", "share")),
        Node("total", BatchSum(), ("shared",)),
        Node("dy", InputGrad(layer, 0), ("y", "target", "losses", "share")),
    )
    inputs = {"y": y, "target": CLASSES if isinstance(layer, CrossEntropy) else y, "share": share}
    return Network(inputs, nodes, ("total", "dy"), {})


def rows(net, layer, B):
    """Outputs and targets that are often equal, and logits whose exponentials overflow."""
    rng = np.random.default_rng(B)
    y, target, share = (
        rng.integers(-2, 3, (B, *kind.row_shape)) + rng.integers(0, 2, (B, *kind.row_shape)) * rng.random()
        for kind in net.inputs.values()
    )
    if not isinstance(layer, SquaredError):
        y.reshape(-1)[::7] *= 50
    if isinstance(layer, CrossEntropy):
        return y, rng.integers(0, y.shape[1], B), share
    return y, np.clip(target, 0, 1) if isinstance(layer, BinaryCrossEntropy) else target, share


@needs_gxx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [(1,), (10,), (3, 5, 7), (1025,)], ids=str)
@pytest.mark.parametrize("layer", LOSSES, ids=str)
def test_losses(monkeypatch, layer, row, dtype):
    if isinstance(layer, CrossEntropy):
        row = (int(np.prod(row)),)
    gpu, net = emulated_gpu(monkeypatch), step(layer, row, dtype)
    of_rows, whole = claims_of(net, "loss")
    (of_gradient,) = claims_of(net, "loss", start=3)
    for B in (1, 9, 130):
        xs = tuple(
            x if x.dtype == np.int64 else x.astype(numpy_dtype(kind.dtype))
            for x, kind in zip(rows(net, layer, B), net.inputs.values(), strict=True)
        )
        truth, naive = (reference.forward_all(net, xs, each) for each in ("float64", dtype))
        total, dy = run_claim(gpu, net, whole, *xs)
        y, target, share = xs
        got = {
            "losses": run_claim(gpu, net, of_rows, y, target), "total": total, "dy": dy,
        }  # fmt: skip
        for name, array in got.items():
            assert_error_within(array, truth[name], naive[name], ulps=ulps_of(dtype))
        alone = run_claim(gpu, net, of_gradient, y, target, got["losses"], share)
        assert alone.tobytes() == dy.tobytes()


@needs_gxx
@pytest.mark.parametrize("layer", LOSSES[2:], ids=str)
def test_nan_stays_in_its_element(monkeypatch, layer):
    gpu, net = emulated_gpu(monkeypatch), step(layer, (7,), "float32")
    y, target, share = (x.astype(np.float32) for x in rows(net, layer, 9))
    y[3, 2] = np.nan
    _, dy = run_claim(gpu, net, claims_of(net, "loss")[1], y, target, share)
    assert np.array_equal(np.isnan(dy), np.isnan(y))
    losses = run_claim(gpu, net, claims_of(net, "loss")[0], y, target)
    assert np.array_equal(np.isnan(losses), np.isnan(y).any(axis=1))


@needs_gxx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 2, 10, 33, 1024, 1025, 3001])
def test_correct_rows(monkeypatch, N, dtype):
    """Of equal largest elements the first counts; a row with a NaN, or with a class that does not exist, is wrong."""
    gpu, net = emulated_gpu(monkeypatch), one_layer(Correct(), TensorType(("B", N), dtype), CLASSES)
    (claim,) = claims_of(net, "loss")
    for B in (1, 9, 70):
        rng = np.random.default_rng(B)
        y = rng.integers(0, 3, (B, N)).astype(numpy_dtype(dtype))
        classes = np.where(rng.integers(0, 2, B), y.argmax(1), rng.integers(0, N, B))
        if B > 5:
            y[3, N - 1], classes[4], classes[5] = np.nan, -1, N
        truth = reference.forward(net, (y, classes), "float64")
        assert B < 5 or (not truth[3:6].any() and truth.any())
        assert np.array_equal(run_claim(gpu, net, claim, y, classes).astype(np.float64), truth)


@pytest.mark.parametrize("layer", [Correct(), CrossEntropy()], ids=str)
def test_narrow_classes_are_refused(layer):
    net = one_layer(layer, TensorType(("B", 3)), TensorType(("B",), "int32"))
    (answer,) = LossKernel().claims(net, 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "int64" in answer.why
