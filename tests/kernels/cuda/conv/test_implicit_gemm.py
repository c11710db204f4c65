"""conv_implicit_gemm: convolutions on the tensor cores of every chip. On the host, then on a GPU."""

import numpy as np
import pytest

from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.conv.implicit_gemm import ConvImplicitGemmKernel
from onchip.kernels.cuda.mma import mma_tile as mma_tiles
from onchip.kernels.cuda.mma.mma_tile import tiles_of
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Cast,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    GlobalMean,
    ReLU,
    Softmax,
    Tanh,
    TransposedConvolution,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200, RTX_4060_LAPTOP
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import compile

VERIFIED = 130  # last rows of a GPU run: the reference is far slower than the kernel
# layer, a row of x, the weight
CASES = {
    "same": (Conv2d(pads=(1, 1, 1, 1)), (16, 9, 7), (20, 16, 3, 3)),
    "100 channels": (Conv2d(pads=(1, 1, 1, 1)), (100, 5, 4), (40, 100, 3, 3)),
    "channels of 4 bytes": (Conv2d((2, 3)), (22, 12, 11), (33, 22, 3, 2)),
    "odd channels": (Conv2d((1, 2), (2, 0, 1, 3), (2, 1)), (7, 8, 9), (13, 7, 2, 3)),
    "one channel": (Conv2d(), (1, 8, 8), (8, 1, 5, 5)),
    "one tap": (Conv2d(), (72, 5, 4), (130, 72, 1, 1)),
    "wide strides": (Conv2d((11, 9), (200, 3, 0, 3)), (8, 30, 31), (16, 8, 3, 3)),
    "a signal": (Conv1d(pads=(2, 1)), (32, 21), (17, 32, 4)),
    "a long signal": (Conv1d((3,), (1, 1), (70,)), (12, 400), (64, 12, 5)),
    "groups": (Conv2d(pads=(1, 1, 1, 1), groups=3), (48, 6, 5), (24, 16, 3, 3)),
    "odd groups": (Conv2d(pads=(1, 1, 1, 1), groups=5), (15, 6, 5), (45, 3, 3, 3)),
    "twice as large": (ConvTranspose2d((2, 2), (1, 1, 1, 1)), (16, 5, 4), (16, 20, 4, 4)),
    "phases of several taps": (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (40, 5, 6), (40, 16, 3, 3)),
    "phases without a tap": (ConvTranspose2d((3, 3)), (10, 3, 4), (10, 16, 2, 2)),
    "strides that differ": (ConvTranspose2d((3, 1), (0, 2, 1, 0), (2, 0)), (24, 4, 6), (24, 17, 5, 3)),
    "more cut off than taps": (ConvTranspose2d((2, 2), (5, 4, 3, 5)), (16, 9, 8), (16, 16, 4, 3)),
    "from one pixel": (ConvTranspose2d(), (100, 1, 1), (100, 24, 4, 4)),
    "a signal, three times": (ConvTranspose1d((3,), (1, 0), (1,)), (18, 13), (18, 32, 5)),
    "groups, transposed": (ConvTranspose2d((2, 2), groups=2), (16, 4, 3), (16, 9, 3, 2)),
}


def network(name, dtype="float32", activation=None, inside=True):
    """A convolution and its activation; with `inside`, between layers that it does not fuse."""
    layer, row, shape = CASES[name]
    fan = np.float32(np.sqrt(np.prod(shape[1:])))
    weights = {"weight": (rows(shape[0], int(np.prod(shape[1:])), seed=2) / fan).reshape(shape)}
    N = shape[1] * layer.groups if isinstance(layer, TransposedConvolution) else shape[0]
    weights["bias"] = rows(1, N, seed=3)[0]
    weights = {role: weight.astype(numpy_dtype(dtype)) for role, weight in weights.items()}
    nodes = [Node("before", Tanh(), ("x",))] if inside else []
    nodes.append(Node("c", layer, ("before" if inside else "x",), {role: role for role in weights}))
    if activation is not None:
        nodes.append(Node("a", activation, ("c",)))
    if inside:
        nodes.append(Node("last", Softmax(1), (nodes[-1].name,)))
    return Network({"x": TensorType(("B", *row), dtype)}, tuple(nodes), (nodes[-1].name,), weights)


def images(net, B, dtype="float32"):
    row = net.inputs["x"].row_shape
    return rows(B, int(np.prod(row))).reshape(B, *row).astype(numpy_dtype(dtype))


def claims_in(net, precision="fp32", start=1, device=H200):
    return list(ConvImplicitGemmKernel().claims(net, start, device, Job(precision)))


def rounded(array, precision):
    if precision == "tf32":
        return round_tf32(np.ascontiguousarray(array, np.float32))
    return array.astype(numpy_dtype(PRECISIONS[precision].dtype)).astype(np.float32)


def exact(net, x, precision):
    """The convolution and its ReLU in float64, of what the tensor cores multiply."""
    weights = {"c.weight": rounded(net.weights["weight"].astype(np.float32), precision)}
    weights["c.bias"] = net.weights["bias"].astype(np.float32)
    layers = [("c", net.by_name["c"].layer), ("a", ReLU())]
    bare = sequential(TensorType(net.inputs["x"].shape), layers, weights)
    return reference.forward(bare, rounded(x.astype(np.float32), precision))


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", "float32"), ("fp16", "float16"), ("bf16", "float32"), ("tf32", "float16"), ("bf16", "float16")],
)
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtype):
    net = network(name, dtype, ReLU())
    claim = claims_in(net, precision)[0]
    assert isinstance(claim, Claim), claim
    assert claim.nodes == ("c", "a")
    x = images(net, 5, dtype)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, x)
    want = exact(net, x, precision)
    eps = 4e-6 if dtype == "float32" else 1e-3
    assert np.abs(got.astype(float) - want).max() <= eps * np.abs(want).max()


@needs_gxx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_makes_the_same_bits(monkeypatch, precision):
    net = network("strides that differ", PRECISIONS[precision].dtype)
    claim, gpu = claims_in(net, precision)[0], emulated_gpu(monkeypatch)
    x, made = images(net, 7, PRECISIONS[precision].dtype), []
    for tile in tiles_of(precision):
        monkeypatch.setattr(mma_tiles, "TILES", (tile,))
        made.append(run_claim(gpu, net, claim, x))
        assert np.array_equal(run_claim(gpu, net, claim, x[4:5]), made[-1][4:5])
    assert all(np.array_equal(each, made[0]) for each in made)


@needs_gxx
@pytest.mark.parametrize("name", ["odd channels", "groups", "phases of several taps"])
def test_what_is_no_number_stays_where_windows_are(monkeypatch, name):
    """Pixels out of bounds and padding channels are zeros: adjacent data is not multiplied."""
    net = network(name)
    gpu, claim = emulated_gpu(monkeypatch), claims_in(net)[0]
    x = images(net, 3)
    x[1, 2, 3, 2] = np.nan
    want = np.isnan(reference.forward(network(name, inside=False), x))
    assert np.array_equal(np.isnan(run_claim(gpu, net, claim, x)), want)


def residual(dtype, N, of_x=False):
    """ReLU(convolution(b) + other), then a layer that it does not fuse."""
    w = rows(N, 10 * 9, seed=2).reshape(N, 10, 3, 3) / np.float32(9)
    nodes = (
        Node("b", Tanh(), ("x",)), Node("o", Tanh(), ("z",)),
        Node("c", Conv2d(pads=(1, 1, 1, 1)), ("b",), {"weight": "w", "bias": "bias"}),
        Node("s", Add(), ("b" if of_x else "o", "c")), Node("a", ReLU(), ("s",)), Node("y", Softmax(1), ("a",)),
        Node("p", Tanh(), ("o",)),
    )  # fmt: skip
    inputs = {"x": TensorType(("B", 10, 6, 5), dtype), "z": TensorType(("B", N, 6, 5), dtype)}
    weights = {"w": w, "bias": rows(1, N, seed=3)[0]}
    weights = {name: weight.astype(numpy_dtype(dtype)) for name, weight in weights.items()}
    return Network(inputs, nodes, ("y", "p"), weights)


@needs_gxx
@pytest.mark.parametrize("way", ["plain", "odd", "of x"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_a_sum_behind_it(monkeypatch, precision, dtype, way):
    N = {"plain": 40, "odd": 17, "of x": 10}[way]
    net = residual(dtype, N, of_x=way == "of x")
    found = claims_in(net, precision, start=2)
    assert [claim.nodes for claim in found] == [("c", "s", "a"), ("c", "s"), ("c",)]
    b = rows(5, 300).reshape(5, 10, 6, 5).astype(numpy_dtype(dtype))
    o = b if way == "of x" else rows(5, N * 30, seed=4).reshape(5, N, 6, 5).astype(numpy_dtype(dtype))
    got = run_claim(emulated_gpu(monkeypatch), net, found[0], *([b] if way == "of x" else [b, o]))
    weights = {"c.weight": net.weights["w"].astype(np.float32), "c.bias": net.weights["bias"].astype(np.float32)}
    bare = sequential(TensorType(("B", 10, 6, 5)), [("c", net.by_name["c"].layer)], weights)
    want = np.maximum(reference.forward(bare, b.astype(np.float32)) + o.astype(float), 0)
    assert np.abs(got.astype(float) - want).max() <= (4e-6 if precision == "fp32" else 1e-3) * np.abs(want).max()


@needs_gxx
def test_casts_around_it(monkeypatch):
    nodes = (
        Node("b", Tanh(), ("x",)), Node("half", Cast("float16"), ("b",)),
        Node("c", Conv2d(), ("half",), {"weight": "w"}), Node("a", ReLU(), ("c",)), Node("y", Cast("float32"), ("a",)),
    )  # fmt: skip
    w = (rows(16, 9 * 10, seed=2) / np.float32(9)).reshape(16, 10, 3, 3).astype(np.float16)
    net = Network({"x": TensorType(("B", 10, 5, 6))}, nodes, ("y",), {"w": w})
    claim = claims_in(net, "fp16")[0]
    assert claim.nodes == ("half", "c", "a", "y")
    assert claim.facts.dtypes == ("float32", "float32")
    b = rows(3, 300).reshape(3, 10, 5, 6)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, b)
    bare = sequential(TensorType(("B", 10, 5, 6)), [("c", Conv2d()), ("a", ReLU())], {"c.weight": w.astype(np.float32)})
    want = reference.forward(bare, rounded(b, "fp16"))
    assert np.abs(got - want).max() <= 4e-6 * np.abs(want).max()


def test_what_it_takes_and_refuses():
    claim = claims_in(network("same", activation=ReLU()), "fp16")[0]
    assert claim.label == "conv_implicit_gemm<16,20,3x3,ReLU>"
    assert (claim.reads["before"].layout, claim.writes["a"]) == (CHANNELS_LAST, CHANNELS_LAST)
    assert claim.recipes["weight"].shape == (20, 9 * 16)
    odd = claims_in(network("odd channels"), "fp16")[0]
    assert odd.recipes["weight"].shape == (13, 6 * 8)  # 7 channels are filled up to a unit
    groups = claims_in(network("groups"), "fp32")[0]
    assert groups.recipes["weight"].shape == (2, 24, 9 * 16), "a group's own channels"
    many = {"w": np.zeros((16, 16, 12, 12), np.float32)}
    for layer, word in ((ConvTranspose2d((9, 9)), "8 phases"), (ConvTranspose2d((2, 2), dilation=(2, 2)), "dilation")):
        nodes = (Node("c", layer, ("x",), {"weight": "w"}), Node("y", Tanh(), ("c",)))
        (refusal,) = claims_in(Network({"x": TensorType(("B", 16, 6, 6))}, nodes, ("y",), many), start=0)
        assert isinstance(refusal, Refusal)
        assert word in refusal.why
    few = Network({"x": TensorType(("B", 16, 6, 6))}, (Node("c", Conv2d(), ("x",), {"weight": "w"}),), ("c",),
                  {"w": np.zeros((4, 16, 3, 3), np.float32)})  # fmt: skip
    assert claims_in(few, start=0) == []


def test_sizes_cost_no_compilation():
    programs = {
        claims_in(network(name))[0].facts.at(4096).launches[0].program for name in ("100 channels", "same", "groups")
    }
    assert len(programs) < 3
    assert claims_in(network("same"))[0].facts.at(0).launches == ()


@pytest.mark.parametrize("device", [A100, RTX_4060_LAPTOP], ids=lambda device: device.arch)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_chips_other_than_hopper_convolve_at_the_tensor_cores(device, precision):
    weights = {"a": np.zeros((64, 64, 3, 3), np.float32), "b": np.zeros((64, 32, 4, 4), np.float32)}
    nodes = (
        Node("c", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "a"}), Node("r", ReLU(), ("c",)),
        Node("d", ConvTranspose2d((2, 2), (1, 1, 1, 1)), ("r",), {"weight": "b"}), Node("s", ReLU(), ("d",)),
        Node("m", GlobalMean((2, 3)), ("s",)),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 64, 16, 16))}, nodes, ("m",), weights)
    kernels = [group.claim.kernel for group in make_plan(net, device, KERNELS, Job(precision, 256)).groups]
    assert kernels.count("conv_implicit_gemm") == 2


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_a_hopper_takes_it_where_its_accelerator_cannot_move_channels(precision, dtype):
    """100 elements of 16 bits are not a multiple of 16 bytes."""
    net = network("100 channels", dtype)
    kernels = [group.claim.kernel for group in make_plan(net, H200, KERNELS, Job(precision)).groups]
    assert "conv_implicit_gemm" in kernels
    assert "conv_sm90" not in kernels


# -- on a GPU --------------------------------------------------------------------------------------------------


def only_windows():
    others = ("conv_direct", "depthwise", "conv_sm90", "conv_first_layer", "conv_last_layer", "conv_last_layer_sm90")
    return tuple(kernel for kernel in KERNELS if kernel.name not in others)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_right_with_the_same_bits_in_every_batch(monkeypatch, name, precision):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", only_windows())
    net = network(name, activation=ReLU())
    x = images(net, 4097)
    engine = compile(net, "cuda", precision, without=("phases", "windows"))
    assert "conv_implicit_gemm" in [group.claim.kernel for group in engine.plan.groups]
    got, verified = engine(x), x[-VERIFIED:]
    truth = reference.forward(net, verified)
    naive = scaled_error(reference.forward(net, verified, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got[-VERIFIED:], truth) <= FACTOR * naive + ULPS * ULP[precision]
    for first, count in ((0, 1), (65, 7), (43, 1000)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert np.array_equal(engine(x), got)
    assert engine(x[:0]).shape == (0, *got.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_dtype_on_a_gpu(monkeypatch, precision, dtype):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", only_windows())
    for name in CASES:
        net = network(name, dtype, Tanh())
        x = images(net, 130, dtype)
        engine = compile(net, "cuda", precision, without=("phases", "windows"))
        truth = reference.forward(net, x)
        naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
        assert scaled_error(engine(x), truth) <= FACTOR * naive + ULPS * max(ULP[precision], DTYPE_ULP[dtype]), name
