"""Losses and correct rows on an emulated GPU."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.gradient.loss import LossKernel
from onchip.network.layers import Correct, CrossEntropy
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal

CLASSES = TensorType(("B",), "int64")


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
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
