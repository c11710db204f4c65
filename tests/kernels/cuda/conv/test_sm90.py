"""conv_sm90: convolutions and transposed ones at the tensor cores. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import emulate_device, run_claim
from onchip.kernels import cuda, reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.common.weights import spread_taps
from onchip.kernels.cuda.conv.sm90 import ConvSm90Kernel, ConvSm90Lowering, taps_in_order
from onchip.kernels.cuda.conv.windows import Windows
from onchip.kernels.cuda.mma import wgmma_tile
from onchip.kernels.cuda.mma.wgmma_tile import TILES, WgmmaGemm
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
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.engine import compile


def conv_inside(layer, row, weight, bias=True, activation=None, dtype="float32"):
    """A convolution between layers that it does not fuse, of values of a dtype."""
    weights = {"c.weight": weight.astype(numpy_dtype(dtype))}
    if bias:
        N = weight.shape[1] * layer.groups if isinstance(layer, TransposedConvolution) else len(weight)
        weights["c.bias"] = rows(1, N, seed=3)[0].astype(numpy_dtype(dtype))
    roles = {name.removeprefix("c."): name for name in weights}
    nodes = [Node("before", Tanh(), ("x",)), Node("c", layer, ("before",), roles)]
    if activation is not None:
        nodes.append(Node("a", activation, ("c",)))
    nodes.append(Node("last", Tanh() if activation else Softmax(1), (nodes[-1].name,)))
    return Network({"x": TensorType(("B", *row), dtype)}, tuple(nodes), ("last",), weights)


def weight(N, C, *taps):
    return rows(N, C * int(np.prod(taps)), seed=2).reshape(N, C, *taps) / np.float32(np.sqrt(C * np.prod(taps)))


def claim_of(net, precision):
    found = list(ConvSm90Kernel().claims(net, 1, H200, Job(precision, 1 << 20)))
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
    "twice as large": (ConvTranspose2d((2, 2), (1, 1, 1, 1)), (16, 5, 4), (16, 20, 4, 4)),
    "phases of several taps": (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (40, 5, 6), (40, 16, 3, 3)),
    "phases of one tap": (ConvTranspose2d((2, 2)), (16, 3, 5), (16, 33, 2, 2)),
    "strides that differ": (ConvTranspose2d((3, 1), (0, 2, 1, 0), (2, 0)), (24, 4, 6), (24, 17, 5, 3)),
    "no stride": (ConvTranspose2d((1, 1), (1, 1, 1, 1)), (16, 6, 5), (16, 16, 3, 3)),
    "more cut off than taps": (ConvTranspose2d((2, 2), (5, 4, 3, 5)), (16, 9, 8), (16, 16, 4, 3)),
    "from one pixel": (ConvTranspose2d(), (100, 1, 1), (100, 24, 4, 4)),
    "from one pixel, cut": (ConvTranspose2d((2, 2), (1, 0, 0, 1), (1, 1)), (16, 1, 1), (16, 16, 4, 3)),
    "to one pixel": (Conv2d(), (16, 3, 3), (24, 16, 3, 3)),
    "a signal, three times": (ConvTranspose1d((3,), (1, 0), (1,)), (16, 13), (16, 32, 5)),
    "groups": (Conv2d(pads=(1, 1, 1, 1), groups=3), (48, 6, 5), (24, 16, 3, 3)),
    "groups, transposed": (ConvTranspose2d((2, 2), groups=2), (16, 4, 3), (16, 9, 3, 2)),
    "a signal, twice": (ConvTranspose1d((2,)), (32, 7), (32, 16, 2)),
    "many taps": (Conv2d(pads=(2, 2, 2, 2)), (32, 6, 5), (24, 32, 5, 5)),
}
# What would not go through registers in 16 bits: channels that begin at other bytes.
ONLY_FLOAT32 = {"from one pixel"}


def exact_of(net, precision, x):
    """The convolution and its ReLU in float64, of what the tensor cores multiply."""
    weights = {"c.weight": rounded(net.weights["c.weight"].astype(np.float32), precision)}
    weights["c.bias"] = net.weights["c.bias"].astype(np.float32)
    layers = [("c", net.by_name["c"].layer), ("a", ReLU())]
    row = net.types["x"].row_shape
    return reference.forward(sequential(TensorType(("B", *row)), layers, weights), rounded(x, precision))


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "float32")])
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtype):
    layer, row, shape = CASES[name]
    dtype = "float32" if name in ONLY_FLOAT32 else dtype
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim = claim_of(net, precision)
    assert isinstance(claim, Claim), claim
    assert claim.nodes == ("c", "a")
    x = rows(5, int(np.prod(row))).reshape(5, *row)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, x.astype(numpy_dtype(dtype)))
    exact = exact_of(net, precision, x)
    eps = 2e-6 if dtype == "float32" else 1e-3
    assert np.abs(got.astype(float) - exact).max() <= eps * np.abs(exact).max()


@needs_gxx
@pytest.mark.parametrize("name", ["one tap", "no pads, stride", "twice as large", "a signal, twice"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_turned_tiles(monkeypatch, name, precision, dtype):
    """Few channels: rows and columns of a tile are swapped, and the bits do not change."""
    layer, row, shape = CASES[name]
    shape = (shape[0], 24, *shape[2:]) if isinstance(layer, TransposedConvolution) else (72, *shape[1:])
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim = claim_of(net, precision)
    x = rows(5, int(np.prod(row))).reshape(5, *row).astype(numpy_dtype(dtype))
    gpu, found = emulated_gpu(monkeypatch), []
    for is_transposed in (False, True):
        monkeypatch.setattr(wgmma_tile, "TILES", [t for t in TILES if t.is_transposed == is_transposed and t.BN == 64])
        found.append(run_claim(gpu, net, claim, x))
        assert is_transposed == (", 128, 64, 2," in claim.facts.at(5).launches[0].program.name_expression)
    assert np.array_equal(*found)
    exact = exact_of(net, precision, x)
    assert np.abs(found[0].astype(float) - exact).max() <= (1e-3 if precision == "fp16" else 8e-3) * np.abs(exact).max()


FEW_CHANNELS = {
    "16 in fours": (Conv2d(pads=(1, 1, 1, 1)), (16, 9, 7), (24, 16, 3, 3)),
    "32 in pairs": (Conv2d((2, 1), (1, 1, 1, 1)), (32, 8, 7), (80, 32, 3, 3)),
    "24, fewer taps than a slice": (Conv2d(), (24, 6, 5), (17, 24, 1, 1)),
    "16, two taps": (Conv1d(), (16, 21), (16, 16, 2)),
    "16, phases of 1 to 4 taps": (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (16, 5, 6), (16, 24, 3, 3)),
    "32, phases of 6 and 9 taps": (ConvTranspose2d((1, 2), (1, 1, 1, 1)), (32, 4, 5), (32, 40, 3, 5)),
    "16, phases of 9 taps": (ConvTranspose2d((2, 2)), (16, 4, 4), (16, 16, 6, 6)),
}


def take_only(monkeypatch, is_taken):
    """Some tiles, without split-K, which needs others."""
    monkeypatch.setattr(wgmma_tile, "TILES", [tile for tile in TILES if is_taken(tile)])
    monkeypatch.setattr(WgmmaGemm, "best_split_k", lambda *_: 1)


def with_infinite_images(x, every):
    wild = x.copy()
    wild[::every] = np.inf
    return wild, np.arange(len(x)) % every > 0


@needs_gxx
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", FEW_CHANNELS)
def test_few_channels_share_slices(monkeypatch, name, is_transposed):
    """The same bits as with one tap per slice, and no data of another tile, however often a stage was reused."""
    layer, row, shape = FEW_CHANNELS[name]
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype="float16")
    claim = claim_of(net, "fp16")
    claim = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=1))
    taps = 2 if row[0] > 16 else 4
    assert claim.facts.at(40).launches[0].program.name_expression.endswith(f", {taps}>")
    assert claim.recipes["weight"].shape[1] == int(np.prod(shape[2:])) * 64 // taps
    can_transpose = is_transposed and claim.facts.gemm(1).can_transpose
    take_only(monkeypatch, lambda t: t.is_transposed == can_transpose and t.BN == 64)
    x = rows(40, int(np.prod(row))).reshape(40, *row).astype(np.float16)
    gpu = emulated_gpu(monkeypatch)
    got, exact = run_claim(gpu, net, claim, x), exact_of(net, "fp16", x)
    assert np.abs(got.astype(float) - exact).max() <= 1e-3 * np.abs(exact).max()
    wild, is_tame = with_infinite_images(x, 3)
    assert np.array_equal(run_claim(gpu, net, claim, wild)[is_tame], got[is_tame])
    monkeypatch.setattr(ConvSm90Lowering, "slice_taps", 1)
    other = dataclasses.replace(claim_of(net, "fp16"), facts=claim.facts)
    assert np.array_equal(run_claim(gpu, net, other, x), got)


def test_taps_of_a_slice():
    for C, precision, dtype, taps in (
        (16, "fp16", "float16", 4), (24, "bf16", "bfloat16", 2), (32, "fp16", "float16", 2), (40, "fp16", "float16", 1),
        (16, "fp16", "float32", 1), (16, "tf32", "float32", 1), (16, "fp32", "float32", 1),
    ):  # fmt: skip
        net = conv_inside(Conv2d(pads=(1, 1, 1, 1)), (C, 8, 8), weight(16, C, 3, 3), dtype=dtype)
        facts = claim_of(net, precision).facts
        pixels = facts.at(100).launches[0].arguments[0]
        assert facts.slice_taps == taps
        assert facts.slices == [-(-9 // taps)]
        assert pixels.swizzle_bytes == pixels.channels * DTYPE_BYTES[dtype] == 128 // taps


def as_single_block(claim, parts):
    """A claim with split-K in one block: there are too few SMs for a cluster."""
    return dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, split_k=parts, units=1))


@needs_gxx
@pytest.mark.parametrize("name", ["many channels", "twice as large", "phases of several taps", "many taps"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_sums_in_parts(monkeypatch, name, precision, dtype):
    layer, row, shape = CASES[name]
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim = as_single_block(claim_of(net, precision), 2)
    assert "SEQUENTIAL" in claim.facts.at(5).launches[0].program.name_expression
    x = rows(5, int(np.prod(row))).reshape(5, *row)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, x.astype(numpy_dtype(dtype)))
    exact = exact_of(net, precision, x)
    assert np.abs(got.astype(float) - exact).max() <= (2e-6 if precision == "fp32" else 1e-3) * np.abs(exact).max()


def residual(dtype="float32", N=40, C=40, twice=False, of_x=False):
    """ReLU(convolution(b) + other), then a layer that it does not fuse."""
    layer = ConvTranspose2d((2, 2), (1, 1, 1, 1)) if twice else Conv2d(pads=(1, 1, 1, 1))
    w = weight(C, N, 4, 4) if twice else weight(N, C, 3, 3)
    row, side = (C, 6, 5), 2 if twice else 1
    b = Node("b", Tanh(), ("x",))
    nodes = [b, Node("o", Tanh(), ("z",))]
    other = "b" if of_x else "o"
    nodes += [
        Node("c", layer, ("b",), {"weight": "w", "bias": "bias"}),
        Node("s", Add(), (other, "c")),
        Node("a", ReLU(), ("s",)),
    ]
    nodes += [Node("y", Tanh(), ("a",))]
    inputs = {"x": TensorType(("B", *row), dtype), "z": TensorType(("B", N, side * 6, side * 5), dtype)}
    weights = {"w": w, "bias": rows(1, N, seed=3)[0]}
    return Network(inputs, tuple(nodes), ("y",), {k: v.astype(numpy_dtype(dtype)) for k, v in weights.items()})


@needs_gxx
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
@pytest.mark.parametrize("way", ["plain", "odd", "twice", "of x", "turned", "few channels"])
def test_a_sum_behind_it(monkeypatch, precision, dtype, way):
    if way == "turned":
        take_only(monkeypatch, lambda t: t.is_transposed == (dtype == "float16"))
    C, N = 16 if way == "few channels" else 40, 40 if way == "of x" else 17 if way == "odd" else 24
    net = residual(dtype, N, C, twice=way == "twice", of_x=way == "of x")
    found = list(ConvSm90Kernel().claims(net, 2, H200, Job(precision)))
    assert [claim.nodes for claim in found] == [("c", "s", "a"), ("c", "s"), ("c",)]
    assert found[0].reads["o" if way != "of x" else "b"].layout == CHANNELS_LAST
    b = rows(5, C * 30).reshape(5, C, 6, 5).astype(numpy_dtype(dtype))
    o = rows(5, net.types["o"].row_size, seed=4).reshape(5, *net.types["o"].row_shape).astype(numpy_dtype(dtype))
    got = run_claim(emulated_gpu(monkeypatch), net, found[0], *([b] if way == "of x" else [b, o]))
    layer = [("c", net.by_name["c"].layer)]
    w = rounded(net.weights["w"].astype(np.float32), precision)
    weights = {"c.weight": w, "c.bias": net.weights["bias"].astype(np.float32)}
    bare = sequential(TensorType(("B", C, 6, 5)), layer, weights)
    exact = np.maximum(reference.forward(bare, rounded(b, precision)) + (b if way == "of x" else o).astype(float), 0)
    assert np.abs(got.astype(float) - exact).max() <= (2e-6 if precision == "fp32" else 1e-3) * np.abs(exact).max()


def test_other_sums_stay():
    net = residual()
    for change in (Add(), ReLU()):  # of a value with itself; no sum at all
        nodes = [dataclasses.replace(n, layer=change, inputs=("c",) * (2 if n.name == "s" and change != ReLU() else 1))
                 if n.name == "s" else n for n in net.nodes]  # fmt: skip
        other = Network(net.inputs, tuple(nodes), net.outputs, net.weights)
        longest = next(iter(ConvSm90Kernel().claims(other, 2, H200, Job("fp32"))))
        assert longest.nodes == (("c",) if change == Add() else ("c", "s"))


@needs_gxx
def test_casts_around_it(monkeypatch):
    nodes = (
        Node("b", Tanh(), ("x",)), Node("half", Cast("float16"), ("b",)),
        Node("c", Conv2d(), ("half",), {"weight": "w"}), Node("a", ReLU(), ("c",)), Node("y", Cast("float32"), ("a",)),
    )  # fmt: skip
    w = weight(16, 20, 3, 3)
    net = Network({"x": TensorType(("B", 20, 5, 6))}, nodes, ("y",), {"w": w.astype(np.float16)})
    claim = next(iter(ConvSm90Kernel().claims(net, 1, H200, Job("fp16"))))
    assert claim.nodes == ("half", "c", "a", "y")
    assert claim.facts.dtypes == ("float32", "float32")
    b = rows(3, 600).reshape(3, 20, 5, 6)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, b)
    bare = sequential(TensorType(("B", 20, 5, 6)), [("c", Conv2d()), ("a", ReLU())], {"c.weight": rounded(w, "fp16")})
    exact = reference.forward(bare, rounded(b, "fp16"))
    assert got.dtype == np.float32
    assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()


@needs_gxx
def test_a_network_of_one_convolution(monkeypatch):
    """The network's input and output are NCHW: layouts are converted before and after it."""
    w = weight(16, 16, 3, 3)
    net = sequential(TensorType(("B", 16, 5, 6)), [("c", Conv2d())], {"c.weight": w})
    emulate_device(monkeypatch)
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in KERNELS if k.name in ("conv_sm90", "permute")))
    engine = compile(net, "cuda", batch_hint=1 << 20)
    assert [group.claim.kernel for group in engine.plan.groups] == ["permute", "conv_sm90", "permute"]
    x = rows(7, 480).reshape(7, 16, 5, 6)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


def test_few_places_are_split_as_far_as_every_phase_goes():
    net = conv_inside(ConvTranspose2d((2, 2), (1, 1, 1, 1)), (512, 4, 4), weight(512, 256, 4, 4))
    (claim,) = ConvSm90Kernel().claims(net, 1, H200, Job("fp16", 1))
    assert claim.facts.split_k == 4  # 32 slices of k, four phases of eight tiles
    launch = claim.facts.at(1).launches[0]
    assert "CLUSTER" in launch.program.name_expression
    assert launch.config.grid[0] == 4 * 4 * 8
    assert launch.config.cluster == 4
    assert "SEQUENTIAL" in claim.facts.at(1000).launches[0].program.name_expression
    (claim,) = ConvSm90Kernel().claims(net, 1, H200, Job("fp16", 1000))
    assert claim.facts.split_k == 1
    short = conv_inside(ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (64, 4, 4), weight(64, 64, 3, 3))
    (claim,) = ConvSm90Kernel().claims(short, 1, H200, Job("fp16", 1))
    assert claim.facts.split_k == 1  # a phase has one tap


def test_every_tap_is_in_one_phase():
    for layer, row, shape in CASES.values():
        net = conv_inside(layer, row, weight(*shape))
        windows = claim_of(net, "tf32").facts.windows
        assert isinstance(windows, Windows)
        assert sorted(windows.tap_order()) == list(range(int(np.prod(shape[2:]))))
        assert sum(windows.taps()) == len(windows.tap_order())


def test_what_it_takes():
    net = conv_inside(*CASES["same"][:2], weight(*CASES["same"][2]))
    claim = claim_of(net, "fp16")
    assert (claim.reads["before"].layout, claim.writes["c"]) == (CHANNELS_LAST, CHANNELS_LAST)
    assert claim.label == "conv_sm90<16,20,3x3>"
    for layer, row, shape, word in (
        (Conv2d((9, 9)), (16, 30, 30), (16, 16, 3, 3), "strides up to 8"),
        (Conv2d(dilation=(130, 1)), (16, 300, 9), (16, 16, 3, 3), "reach"),
        (Conv2d(), (18, 8, 8), (16, 18, 3, 3), "16 B"),
        (ConvTranspose2d((3, 3)), (16, 8, 8), (16, 16, 2, 2), "each with a tap"),
        (ConvTranspose2d(dilation=(2, 1)), (16, 8, 8), (16, 16, 2, 2), "with dilation"),
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
    assert np.array_equal(taps_in_order(w, (5, 0)), w.reshape(2, 3, 6)[..., [5, 0]].swapaxes(0, 1))


# -- on a GPU --------------------------------------------------------------------------------------------------

EPS = {"fp32": 4e-6, "tf32": 2e-3, "fp16": 4e-3, "bf16": 2e-2}


def compile_alone(monkeypatch, net, precision, batch_hint):
    """The network with this kernel alone, and moves and Casts of its ends."""
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in KERNELS if k.name in ("conv_sm90", "permute", "pointwise")))
    engine = compile(net, "cuda", precision, batch_hint=batch_hint, without=("windows", "phases"))
    assert [group.claim.kernel for group in engine.plan.groups].count("conv_sm90") == 1
    return engine


def conv_alone(layer, row, weight, dtype):
    """ReLU(convolution(x))"""
    net = conv_inside(layer, row, weight, activation=ReLU(), dtype=dtype)
    nodes = (dataclasses.replace(net.by_name["c"], inputs=("x",)), net.by_name["a"])
    return Network(net.inputs, nodes, ("a",), net.weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("tf32", "float32"), ("fp16", "float16"), ("bf16", "float32")]
)
def test_on_a_gpu(monkeypatch, name, precision, dtype):
    layer, row, shape = CASES[name]
    dtype = "float32" if name in ONLY_FLOAT32 else dtype
    net = conv_alone(layer, row, weight(*shape), dtype)
    engine = compile_alone(monkeypatch, net, precision, 100_000)
    x = rows(700, int(np.prod(row))).reshape(700, *row).astype(numpy_dtype(dtype))
    got, exact = engine(x), reference.forward(net, x)
    assert np.abs(got.astype(float) - exact).max() <= EPS[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 300)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
@pytest.mark.parametrize("name", FEW_CHANNELS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_few_channels_on_a_gpu(monkeypatch, precision, dtype, name, is_transposed):
    """Blocks compute many tiles each: what one leaves in shared memory, infinite here, does not reach the next."""
    layer, row, shape = FEW_CHANNELS[name]
    net = conv_alone(layer, row, weight(*shape), dtype)
    can_transpose = is_transposed and net.types["c"].row_shape[0] % 8 == 0
    monkeypatch.setattr(wgmma_tile, "TILES", [t for t in TILES if t.is_transposed == can_transpose])
    engine = compile_alone(monkeypatch, net, precision, 4097)
    (facts,) = (group.claim.facts for group in engine.plan.groups if group.claim.kernel == "conv_sm90")
    assert facts.slice_taps == (2 if row[0] > 16 else 4)
    assert facts.gemm(4097).choose_tile(facts.units)[0].is_transposed == can_transpose
    x = rows(4097, int(np.prod(row))).reshape(4097, *row).astype(numpy_dtype(dtype))
    got, exact = engine(x), reference.forward(net, x)
    assert np.abs(got.astype(float) - exact).max() <= EPS[precision] * np.abs(exact).max()
    wild, is_tame = with_infinite_images(x, 3)
    assert np.array_equal(engine(wild)[is_tame], got[is_tame])
    for first, count in ((0, 1), (17, 7), (500, 64), (4096, 1)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "float32")])
@pytest.mark.parametrize(
    ("layer", "row", "shape"),
    [
        (ConvTranspose2d((2, 2), (1, 1, 1, 1)), (512, 4, 4), (512, 256, 4, 4)),
        (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (520, 3, 5), (520, 33, 3, 3)),
        (Conv2d(pads=(1, 1, 1, 1)), (256, 4, 4), (72, 256, 3, 3)),
        (Conv1d(), (128, 20), (100, 128, 5)),
        CASES["many taps"],
        (Conv2d(pads=(3, 3, 3, 3)), (16, 8, 7), (40, 16, 7, 7)),
    ],
)
def test_sums_in_parts_on_a_gpu(monkeypatch, precision, dtype, layer, row, shape):
    """Planned for one row, a cluster shares the sums; with many rows a block computes all chunks: the same bits."""
    monkeypatch.setattr(wgmma_tile, "SPLIT_K_SHARE", 9.0)  # also where no split would be faster
    net = conv_alone(layer, row, weight(*shape), dtype)
    engine = compile_alone(monkeypatch, net, precision, 1)
    (facts,) = (group.claim.facts for group in engine.plan.groups if group.claim.kernel == "conv_sm90")
    assert facts.split_k > 1
    assert "CLUSTER" in facts.at(1).launches[0].program.name_expression
    assert "SEQUENTIAL" in facts.at(800).launches[0].program.name_expression
    x = rows(800, int(np.prod(row))).reshape(800, *row).astype(numpy_dtype(dtype))
    got, exact = engine(x), reference.forward(net, x)
    assert np.abs(got.astype(float) - exact).max() <= EPS[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (100, 64), (799, 1)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "float32")])
@pytest.mark.parametrize("way", ["plain", "odd", "twice", "of x", "few channels"])
@pytest.mark.parametrize("batch_hint", [1, 100_000])
def test_a_sum_behind_it_on_a_gpu(monkeypatch, precision, dtype, way, batch_hint):
    N = {"plain": 136, "odd": 17, "twice": 24, "of x": 136, "few channels": 32}[way]
    inside = residual(dtype, N, 16 if way == "few channels" else 136, twice=way == "twice", of_x=way == "of x")
    ends = {"b": "x", "o": "z"}
    nodes = [inside.by_name[name] for name in ("c", "s", "a")]
    nodes = [dataclasses.replace(n, inputs=tuple(ends.get(value, value) for value in n.inputs)) for n in nodes]
    inputs = {name: inside.inputs[name] for name in ("x", "z") if name == "x" or way != "of x"}
    net = Network(inputs, tuple(nodes), ("a",), inside.weights)
    engine = compile_alone(monkeypatch, net, precision, batch_hint)
    given = [
        rows(500, each.row_size, seed=seed).reshape(500, *each.row_shape).astype(numpy_dtype(dtype))
        for seed, each in enumerate(net.inputs.values())
    ]
    got, exact = engine(*given), reference.forward(net, given[0] if len(given) == 1 else tuple(given))
    assert np.abs(got.astype(float) - exact).max() <= EPS[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (300, 64)):
        assert np.array_equal(engine(*(x[first : first + count] for x in given)), got[first : first + count])


@pytest.mark.gpu
def test_a_network_of_convolutions_on_a_gpu():
    C = 64
    layers = [(f"c{i}", Conv2d(pads=(1, 1, 1, 1))) for i in range(3)]
    pairs = [pair for layer in layers for pair in (layer, (f"r{layer[0]}", ReLU()))]
    weights = {f"c{i}.weight": weight(C, C if i else 16, 3, 3) for i in range(3)}
    net = sequential(TensorType(("B", 16, 16, 16)), [*pairs, ("mean", GlobalMean((2, 3)))], weights)
    plan = make_plan(net, H200, KERNELS, Job("fp32", 4096))
    assert [group.claim.kernel for group in plan.groups].count("conv_sm90") >= 2
    engine = compile(net, "cuda", batch_hint=4096)
    x = rows(300, 16**3).reshape(300, 16, 16, 16)
    naive = reference.forward(net, x, "float32")
    assert_error_within(engine(x), reference.forward(net, x), baseline=naive)
