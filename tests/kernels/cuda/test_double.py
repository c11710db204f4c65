"""Products in float64 on a GPU: convolutions, and Linear as one. Emulated here, and on a GPU where there is one."""

import math

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.conv.direct import DIRECT, TILES, ConvDirectLowering
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Conv1d, Conv2d, ConvTranspose2d, Linear, ReLU
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan

ULPS = 4 * 2.0**-29  # of float32, which assert_error_within counts in: four of float64


def network(layer, row_shape, weight_shape, bias=True):
    weights = {"weight": rows(*weight_shape, seed=3).astype(np.float64) / math.sqrt(math.prod(weight_shape[1:]))}
    if bias:
        groups = getattr(layer, "groups", 1)
        N = weight_shape[1] * groups if isinstance(layer, ConvTranspose2d) else weight_shape[0]
        weights["bias"] = np.random.default_rng(4).standard_normal(N)
    return one_layer(layer, TensorType(("B", *row_shape), "float64"), weights=weights)


def numbers(B, net):
    return np.random.default_rng(B).standard_normal((B, *net.input.row_shape))


def assert_right(net, x, got):
    """Two reduction orders in float64 agree with the reference to its precision; nothing narrower does."""
    assert got.dtype == np.float64
    truth = reference.forward(net, x)
    assert_error_within(got, truth, truth, ulps=16 * ULPS)


CASES = {
    "3x3": ("conv_direct", Conv2d(pads=(1, 1, 1, 1)), (5, 6, 6), (8, 5, 3, 3)),
    "odd": ("conv_direct", Conv2d((2, 1), (0, 2, 1, 0), (1, 2)), (7, 5, 9), (35, 7, 3, 2)),
    "groups": ("conv_direct", Conv2d(groups=2), (6, 7, 5), (4, 3, 2, 2)),
    "signal": ("conv_direct", Conv1d((3,), (4, 2)), (3, 50), (17, 3, 5)),
    "long sums": ("conv_direct", Conv2d(), (300, 3, 3), (5, 300, 2, 2)),
    "transposed": ("conv_direct", ConvTranspose2d((2, 2), (1, 1, 2, 2)), (6, 4, 5), (6, 5, 5, 5)),
    "Linear": ("conv_direct", Linear(), (33,), (20, 33)),
    "one number": ("conv_direct", Linear(), (1,), (1, 1)),
    "Linear over vectors": ("conv_direct", Linear(), (3, 5, 600), (70, 600)),
}


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_right(monkeypatch, case):
    gpu = emulated_gpu(monkeypatch)
    kernel, *given = CASES[case]
    for bias in (True, False):
        net = network(*given, bias=bias)
        (claim,) = claims_of(net, kernel, "bf16")
        x = numbers(7, net)
        got = run_claim(gpu, net, claim, x)
        assert_right(net, x, got)
        assert np.array_equal(run_claim(gpu, net, claim, x[3:4]), got[3:4])
        assert claim.facts.at(0).launches == ()


@needs_gxx
def test_tiles_have_the_same_bits(monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    net = network(*CASES["3x3"][1:])
    (claim,) = claims_of(net, "conv_direct")
    x, found = numbers(3, net), []
    for tile in (TILES[1], DIRECT):
        monkeypatch.setattr(ConvDirectLowering, "tile", lambda self, B, tile=tile: tile)
        found.append(run_claim(gpu, net, claim, x))
    assert np.array_equal(*found)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_product_in_float64_has_a_plan(precision):
    for kernel, *given in CASES.values():
        plan = make_plan(network(*given), H200, KERNELS, Job(precision))
        assert [group.claim.kernel for group in plan.groups] == [kernel]


def test_float64_beside_a_product_in_float32_leaves_it_a_kernel():
    """A Cast after it is another group, and a float64 weight is rounded by its recipe."""
    double = {name: rows(4, 4, seed=i).astype(np.float64) for i, name in enumerate(("a", "b"))}
    net = Network(
        {"x": TensorType(("B", 4))},
        (
            Node("a", Linear(), ("x",), {"weight": "a"}),
            Node("r", ReLU(), ("a",)),
            Node("b", Linear(), ("r",), {"weight": "b"}),
            Node("c", Cast("float64"), ("b",)),
        ),
        ("c",), double,
    )  # fmt: skip
    for weights in (double, {name: w.astype(np.float32) for name, w in double.items()}):
        narrow = net.replace(weights=weights)
        for start, nodes in ((0, ("a", "r")), (2, ("b",))):
            found = [
                c.nodes for kernel in ("gemm_simt", "mlp_tensor_core") for c in claims_of(narrow, kernel, start=start)
            ]
            assert nodes in found
        assert all(recipe.dtype == "float32" for c in claims_of(narrow, "gemm_simt") for recipe in c.recipes.values())


def test_what_is_too_large_is_refused():
    net = network(Linear(), (1 << 26, 4), (4, 4))
    (refusal,) = (answer for k in KERNELS if k.name == "conv_direct" for answer in k.claims(net, 0, H200, Job()))
    assert isinstance(refusal, Refusal)
    assert "elements" in refusal.why


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_right_on_a_gpu(case):
    net = network(*CASES[case][1:])
    engine = onchip.compile(net, "cuda")
    x = numbers(1000, net)
    got = engine(x)
    assert_right(net, x, got)
    for first, count in ((0, 1), (65, 7), (43, 700)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
