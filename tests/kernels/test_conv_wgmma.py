"""conv_wgmma: convolutions at the tensor cores. On the host, then on a GPU."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.conv_wgmma import ConvWgmma, spread_taps
from onchip.kernels.cuda.mlp_packing import PRECISIONS, round_tf32
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.engine import compile
from onchip.spec.build import sequential
from onchip.spec.layers import Conv1d, Conv2d, GlobalMean, ReLU, Tanh
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType, numpy_dtype


def conv_inside(layer, row, weight, bias=True, activation=None, dtype="float32"):
    """A convolution between layers that keep channels last, of values of a dtype."""
    weights = {"c.weight": weight.astype(numpy_dtype(dtype))}
    if bias:
        weights["c.bias"] = rows(1, weight.shape[0], seed=3)[0].astype(numpy_dtype(dtype))
    roles = {name.removeprefix("c."): name for name in weights}
    nodes = [Node("before", Tanh(), ("x",)), Node("c", layer, ("before",), roles)]
    if activation is not None:
        nodes.append(Node("a", activation, ("c",)))
    nodes.append(Node("behind", Tanh(), (nodes[-1].name,)))
    return Network({"x": TensorType(("B", *row), dtype)}, tuple(nodes), ("behind",), weights)


def weight(N, C, *taps):
    return rows(N, C * int(np.prod(taps)), seed=2).reshape(N, C, *taps) / np.float32(np.sqrt(C * np.prod(taps)))


def claim_of(net, precision):
    found = list(ConvWgmma().claims(net, 1, H200, Job(precision)))
    return found[0] if found else None


def rounded(array, precision):
    if precision == "tf32":
        return round_tf32(np.ascontiguousarray(array, np.float32))
    return array.astype(numpy_dtype(PRECISIONS[precision].dtype)).astype(np.float32)


CASES = {
    "same": (Conv2d(pads=(1, 1, 1, 1)), (16, 9, 7), (20, 16, 3, 3)),
    "no pads, stride": (Conv2d((2, 3)), (24, 12, 11), (33, 24, 3, 2)),
    "odd pads, dilation": (Conv2d((1, 2), (2, 0, 1, 3), (2, 1)), (40, 8, 9), (16, 40, 2, 3)),
    "one tap": (Conv2d(), (72, 5, 4), (48, 72, 1, 1)),
    "many channels": (Conv2d(pads=(1, 1, 1, 1)), (136, 4, 4), (70, 136, 3, 3)),
    "a signal": (Conv1d(pads=(2, 1)), (32, 21), (17, 32, 4)),
    "a signal, stride": (Conv1d((3,), (1, 1)), (16, 20), (64, 16, 5)),
}


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "float32")])
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtype):
    layer, row, shape = CASES[name]
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim = claim_of(net, precision)
    assert isinstance(claim, Claim), claim
    assert claim.nodes == ("c", "a")
    x = rows(5, int(np.prod(row))).reshape(5, *row)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, x.astype(numpy_dtype(dtype)))
    weights = {"c.weight": rounded(net.weights["c.weight"].astype(np.float32), precision)}
    weights["c.bias"] = net.weights["c.bias"].astype(np.float32)
    layers = [("c", layer), ("a", ReLU())]
    exact = reference.forward(sequential(TensorType(("B", *row)), layers, weights), rounded(x, precision))
    eps = 2e-6 if dtype == "float32" else 1e-3
    assert np.abs(got.astype(float) - exact).max() <= eps * np.abs(exact).max()


def test_what_it_takes():
    net = conv_inside(*CASES["same"][:2], weight(*CASES["same"][2]))
    claim = claim_of(net, "fp16")
    assert (claim.reads["before"].layout, claim.gives["c"]) == (CHANNELS_LAST, CHANNELS_LAST)
    assert claim.label == "conv_wgmma<16,20,3x3>"
    for layer, row, shape, word in (
        (Conv2d(groups=2), (32, 8, 8), (32, 16, 3, 3), "groups"),
        (Conv2d((9, 9)), (16, 30, 30), (16, 16, 3, 3), "strides up to 8"),
        (Conv2d(dilation=(130, 1)), (16, 300, 9), (16, 16, 3, 3), "reach"),
        (Conv2d(), (18, 8, 8), (16, 18, 3, 3), "16 B"),
    ):
        refused = claim_of(conv_inside(layer, row, weight(*shape)), "fp32")
        assert isinstance(refused, Refusal), (layer, refused)
        assert word in refused.why
    assert claim_of(conv_inside(Conv2d(), (3, 8, 8), weight(16, 3, 3, 3)), "fp32") is None


def test_taps_are_filled_up():
    w = rows(6, 2 * 3).reshape(2, 3, 6).reshape(2, 3, 2, 3)
    made = spread_taps(w, 4).reshape(2, 6, 4)
    assert np.array_equal(made[..., :3], w.reshape(2, 3, 6).swapaxes(1, 2))
    assert not made[..., 3].any()


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("tf32", "float32"), ("fp16", "float16"), ("bf16", "float32")]
)
def test_on_a_gpu(name, precision, dtype):
    layer, row, shape = CASES[name]
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    engine = compile(net, "cuda", precision, batch_hint=100_000)
    x = rows(700, int(np.prod(row))).reshape(700, *row).astype(numpy_dtype(dtype))
    exact = reference.forward(net, x)
    got = engine(x)
    eps = {"fp32": 4e-6, "tf32": 2e-3, "fp16": 4e-3, "bf16": 2e-2}[precision]
    assert np.abs(got.astype(float) - exact).max() <= eps * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 300)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
def test_a_network_of_convolutions_on_a_gpu():
    C = 64
    layers = [(f"c{i}", Conv2d(pads=(1, 1, 1, 1))) for i in range(3)]
    pairs = [pair for layer in layers for pair in (layer, (f"r{layer[0]}", ReLU()))]
    weights = {f"c{i}.weight": weight(C, C if i else 16, 3, 3) for i in range(3)}
    net = sequential(TensorType(("B", 16, 16, 16)), [*pairs, ("mean", GlobalMean((2, 3)))], weights)
    plan = make_plan(net, H200, KERNELS, Job("fp32", 4096))
    assert [group.claim.kernel for group in plan.groups].count("conv_wgmma") >= 2
    engine = compile(net, "cuda", batch_hint=4096)
    x = rows(300, 16**3).reshape(300, 16, 16, 16)
    naive = reference.forward(net, x, "float32")
    assert_error_within(engine(x), reference.forward(net, x), yardstick=naive)
