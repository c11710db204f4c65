"""Weight gradients of Linears and convolutions on the emulated GPU: any geometry, splits of K, and the bias."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.gradient.weight_grad import MIN_SPLIT, WeightGradKernel
from onchip.network.types import numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from weight_gradients import CASES, network, run

pytestmark = needs_gxx
# Of x and dy, and of the weight.
DTYPES = [
    *((dtype, dtype) for dtype in FLOATS),
    ("float64", "float32"),
    ("float32", "bfloat16"),
    ("float16", "float64"),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("B", [1, 7, 2 * MIN_SPLIT + 9])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_weight_gradient(monkeypatch, case, B, with_bias, dtypes):
    if with_bias and "transposed" in case:
        pytest.skip("its bias is a sum of its own")
    net, rng, x_dtype = network(*CASES[case], with_bias, *dtypes), np.random.default_rng(B), numpy_dtype(dtypes[0])
    xs = [rng.standard_normal((B, *kind.row_shape), np.float32).astype(x_dtype) for kind in net.inputs.values()]
    claim = list(WeightGradKernel().claims(net, 0, H200, Job(batch=B)))[-1]
    if dtypes[0] == dtypes[1]:
        assert claim.nodes == tuple(node.name for node in net.nodes)
    else:  # the bias' gradient has the dtype of dy
        assert claim.nodes == ("dw",)
    outputs = run(emulated_gpu(monkeypatch), net, claim, *xs)
    layer = CASES[case][0]
    for dtype in (np.float64, np.float32):
        x, dy = (each.astype(dtype) for each in xs)
        weight = np.zeros(CASES[case][2], dtype)
        found = layer.backward((x,), {"weight": weight, "bias": np.zeros(len(dy[0]), dtype)}, dy, dy)[1]
        if dtype == np.float64:
            truth = found
    for name, got in zip(("weight", "bias"), outputs, strict=False):
        naive = found[name] if name in found else dy.sum(axis=tuple(range(dy.ndim - 1)))
        allowed = FACTOR * scaled_error(naive, truth[name]) + ULPS * max(
            DTYPE_ULP.get(of, ULP["fp32"]) for of in dtypes
        )
        assert scaled_error(got, truth[name]) <= allowed


def test_splits_depend_on_the_sizes_alone():
    (claim,) = WeightGradKernel().claims(network(*CASES["conv"], False), 0, H200, Job(batch=1))
    for B in (1, 100, 5000, 1 << 22):
        splits, split = claim.facts.splits(B)
        K = B * claim.facts.row_terms
        assert (splits - 1) * split < K <= splits * split
        assert split % 16 == 0
