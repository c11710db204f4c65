"""Weight gradients on tensor cores: any geometry, tile and split of K, and the bias, in every precision."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda.common.precision import round_tf32
from onchip.kernels.cuda.gradient.weight_grad import MIN_SPLIT, WeightGradKernel
from onchip.kernels.cuda.gradient.weight_grad_mma import MULTIPLIED, WeightGradMmaKernel
from onchip.network.layers import Conv2d, Linear
from onchip.network.types import numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cuda.gpu import Gpu
from weight_gradients import CASES as SMALL
from weight_gradients import network, run

FEW = ("linear", "linear, aligned", "conv")  # of CASES
CASES = {
    **SMALL,
    "linear, aligned": (Linear(), (132,), (36, 132)),
    "linear, two tiles": (Linear(), (260,), (131, 260)),
    "conv, two tiles": (Conv2d((1, 1), (1, 1, 1, 1)), (16, 4, 4), (130, 16, 3, 3)),
    "wide groups": (Conv2d(groups=2), (6, 5, 5), (34, 3, 2, 2)),
}
# The case, the precision, the dtypes of x and dy, and of the weight.
RUNS = [
    *((case, precision, "float32", "float32") for case in CASES for precision in MULTIPLIED),
    *((case, *dtypes) for case in FEW for dtypes in (
        ("bf16", "bfloat16", "bfloat16"), ("fp16", "float16", "float32"), ("tf32", "float32", "bfloat16"),
    )),
]  # fmt: skip


def rounded(x, precision):
    """As the kernel rounds it when it stores it to shared memory."""
    if MULTIPLIED[precision] == "tf32":
        return round_tf32(x.astype(np.float32))
    return x.astype(numpy_dtype("bfloat16"))


def gradients(layer, weight, x, dy, dtype):
    """dw and the bias' gradient."""
    x, dy = (each.astype(dtype) for each in (x, dy))
    over = tuple(range(dy.ndim - 1)) if isinstance(layer, Linear) else (0, *range(2, dy.ndim))
    found = layer.backward((x,), {"weight": np.zeros(weight, dtype)}, dy, dy)[1]
    return found["weight"], dy.sum(axis=over)


def claims_of(net, precision, B, kernel=WeightGradMmaKernel):
    return list(kernel().claims(net, 0, H200, Job(precision, B)))


def check(gpu, case, precision, B, with_bias, dtypes, exact):
    """exact: dw is that of rounded x and dy, in float32; else within the promise of the precision."""
    layer, row, weight = CASES[case]
    net, rng = network(layer, row, weight, with_bias, *dtypes), np.random.default_rng(B)
    xs = [rng.standard_normal((B, *kind.row_shape), np.float32).astype(numpy_dtype(kind.dtype))
          for kind in net.inputs.values()]  # fmt: skip
    claim = claims_of(net, precision, B)[-1]
    found = run(gpu, net, claim, *xs)
    again = run(gpu, net, claim, *xs)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, again, strict=True))
    given = [rounded(x, precision) for x in xs] if exact else xs
    truth, naive = (gradients(layer, weight, *given, dtype)[0] for dtype in (np.float64, np.float32))
    ulp = max(DTYPE_ULP.get(dtype, ULP["fp32"]) for dtype in dtypes[1:])
    allowed = FACTOR * scaled_error(naive, truth) + ULPS * max(ulp, 0.0 if exact else ULP[precision])
    assert scaled_error(found[0], truth) <= allowed
    if len(found) > 1:
        truth, naive = (gradients(layer, weight, *xs, dtype)[1] for dtype in (np.float64, np.float32))
        assert scaled_error(found[1], truth) <= FACTOR * scaled_error(naive, truth) + ULPS * ulp
    return claim


@needs_gxx
@pytest.mark.parametrize(("B", "with_bias"), [(1, True), (7, False), (2 * MIN_SPLIT + 9, True)])
@pytest.mark.parametrize(("case", "precision", "dtype", "weight_dtype"), RUNS)
def test_weight_gradient(monkeypatch, case, precision, dtype, weight_dtype, B, with_bias):
    with_bias = with_bias and "transposed" not in case  # its bias is a sum of its own
    check(emulated_gpu(monkeypatch), case, precision, B, with_bias, (dtype, weight_dtype), exact=True)


def test_it_computes_in_low_precision_alone():
    net = network(*CASES["conv"], False)
    assert claims_of(net, "fp32", 512) == []
    for precision, multiplied in MULTIPLIED.items():
        (claim,) = claims_of(net, precision, 512)
        (simt,) = claims_of(net, precision, 512, WeightGradKernel)
        assert claim.cost.precision == multiplied
        assert claim.cost.estimate_us(H200, precision, 512) < simt.cost.estimate_us(H200, precision, 512)
    (refusal,) = claims_of(network(*CASES["conv"], False, "float64", "float64"), "bf16", 512)
    assert isinstance(refusal, Refusal)


@pytest.mark.parametrize(("M", "BM"), [(1, 16), (17, 32), (64, 64), (65, 128), (192, 128), (256, 128)])
def test_tiles_along_m_are_few_and_small(M, BM):
    (claim,) = claims_of(network(Linear(), (70,), (M, 70), False), "bf16", 512)
    assert claim.facts.tile.BM == BM


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "precision", "dtype", "weight_dtype"), RUNS)
def test_on_a_gpu(case, precision, dtype, weight_dtype):
    for B in (1, 7, 1001):
        check(Gpu.get(0), case, precision, B, "transposed" not in case, (dtype, weight_dtype), exact=False)
