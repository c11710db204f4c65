"""Fused convolutional networks on the CPU: accuracy, the same bits for any batch and thread count, and limits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import assert_error_within, rows
from image_networks import NETWORKS, chain, conv, graph, tconv, weight
from onchip.kernels import cpu, reference
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Add,
    AvgPool2d,
    BatchNorm1d,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    GlobalMax,
    GlobalMean,
    Interleave,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    Tanh,
    ToPixels,
)  # fmt: skip
from onchip.network.types import TensorType
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.engine import compile

SRC = Path(__file__).parents[4] / "src"


def fused(net: Network, **options):
    without = (*options.pop("without", ()), "windows")  # the rewrite turns a convolution of one window into a Linear
    engine = compile(net, device="cpu", without=without, **options)
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"], str(engine.plan)
    return engine


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("B", [1, 5, 37])  # one image, below and past a tile of images
def test_forward_is_right(name, B):
    net = NETWORKS[name]
    x = rows(B, *net.input.row_shape)
    got = fused(net)(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_for_any_batch_and_threads(name):
    net = NETWORKS[name]
    x = rows(37, *net.input.row_shape)
    whole = fused(net, threads=1)(x)
    engine = fused(net, threads=core_count())
    for B in (1, 2, 7, 20, 37):
        assert np.array_equal(engine(x[:B]), whole[:B])
    assert np.array_equal(engine(x[30:31]), whole[30:31])  # at any position in the batch


@pytest.mark.skipif(core_count() < 2, reason="needs two cores")
@pytest.mark.parametrize("name", NETWORKS)
def test_threads_share_a_single_image(name, monkeypatch):
    monkeypatch.setattr("onchip.kernels.cpu.conv.fused.SHARED_FLOP", -1)  # however small the image is
    net = NETWORKS[name]
    x = rows(3, *net.input.row_shape)
    whole = fused(net, threads=1)(x)
    engine = fused(net, threads=2)
    for i in range(3):
        assert np.array_equal(engine(x[i : i + 1]), whole[i : i + 1])


def test_calls_do_not_disturb_each_other():
    """Calls reuse the scratch: a zero border stays zero, and nothing of an earlier image shows."""
    net = NETWORKS["narrow end"]
    engine, x = fused(net), rows(6, *net.input.row_shape)
    first = engine(x)
    engine(np.full_like(x, np.nan))
    assert np.array_equal(engine(x), first)


def test_uint8_output():
    net = NETWORKS["generator"]
    last = net.nodes[-1].name
    pixels = net.replace(nodes=[*net.nodes, Node("bytes", ToPixels(), (last,))], outputs=("bytes",))
    x = rows(9, *net.input.row_shape)
    got, floats = fused(pixels)(x), fused(net)(x)
    assert got.dtype == np.uint8
    assert np.array_equal(got, ((floats + np.float32(1)) / np.float32(2) * np.float32(255)).astype(np.uint8))


def test_text_network_without_the_fold():
    weights = {
        "e": weight(50, 24),
        "c3": weight(20, 24, 3),
        "b3": weight(20),
        "c5": weight(9, 24, 5),
        "fc": weight(4, 29),
    }
    nodes = (
        Node("emb", Embedding(), ("ids",), {"weight": "e"}), Node("turn", Permute((0, 2, 1)), ("emb",)),
        Node("c3", Conv1d(), ("turn",), {"weight": "c3", "bias": "b3"}), Node("r3", ReLU(), ("c3",)),
        Node("m3", GlobalMax((-1,)), ("r3",)), Node("c5", Conv1d(pads=(2, 2)), ("turn",), {"weight": "c5"}),
        Node("m5", GlobalMax((-1,)), ("c5",)), Node("cat", Concat(1), ("m3", "m5")),
        Node("fc", Linear(), ("cat",), {"weight": "fc"}),
    )  # fmt: skip
    net = Network({"ids": TensorType(("B", 12), "int32")}, nodes, ("fc",), weights)
    ids = np.random.default_rng(0).integers(0, 50, (23, 12)).astype(np.int32)
    engine = fused(net, without=("fold",))
    got = engine(ids)
    assert_error_within(got, reference.forward(net, ids), baseline=reference.forward(net, ids, "float32"))
    assert np.array_equal(engine(ids[7:9]), got[7:9])


def test_a_dilated_pool_may_cover_only_pads():
    net = chain((3, 2, 5), (Conv2d(), conv(4, 3, 1, 1)), MaxPool2d((2, 2), (1, 1), (1, 0, 1, 0), (3, 1)))
    engine = fused(net)
    for _ in range(2):  # the second call finds the first one's values in its scratch
        assert np.isneginf(engine(rows(3, 3, 2, 5))).all()


def test_unsupported_layers_are_refused_with_a_reason():
    w = {"n0.weight": weight(4, 6, 3, 3).astype(np.float64)}
    double = sequential(TensorType(("B", 6, 5, 5), "float64"), [("n0", Conv2d()), ("n1", ReLU())], w)
    plan = compile(double, device="cpu").plan
    assert [group.claim.kernel for group in plan.groups] == ["plain", "plain"]
    assert re.search(r"refused: conv_fused at n0: .*n0\.weight is float64", str(plan))


def test_a_value_with_outside_readers_ends_the_subgraph():
    net = NETWORKS["lenet"]
    two = net.replace(outputs=("n2", net.outputs[0]))
    x = rows(4, 1, 28, 28)
    engine = compile(two, device="cpu")
    for got, alone in zip(engine(x), (net.replace(outputs=("n2",)), net), strict=True):
        assert_error_within(got, reference.forward(alone, x), baseline=reference.forward(alone, x, "float32"))


@st.composite
def stacks(draw):
    """Chains of convolutions, transposed ones, pools and activations of any small geometry."""
    C, H, W = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row_shape, layers = (C, H, W), []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "conv", "tconv", "max", "mean", "act"]))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        pads = tuple(draw(st.integers(0, 2)) for _ in range(4))
        N = draw(st.sampled_from([1, 2, 3, 5, 16, 17, 65]))
        if kind == "act":
            layers.append(draw(st.sampled_from([ReLU(), Tanh(), LeakyReLU(0.3), GELU("tanh")])))
            continue
        tall, wide = H + pads[0] + pads[2], W + pads[1] + pads[3]
        if kind == "tconv":
            span = [
                (n - 1) * s + k - a - b
                for n, s, k, a, b in zip((H, W), stride, kernel, pads[:2], pads[2:], strict=True)
            ]
            if min(span) < 1 or max(span) > 30:
                continue
            layers.append((ConvTranspose2d(stride, pads), tconv(C, N, *kernel)))
            C, H, W = N, *span
            continue
        if kernel[0] > tall or kernel[1] > wide:
            continue
        if kind == "conv":
            layers.append((Conv2d(stride, pads), conv(N, C, *kernel, bias=draw(st.booleans()))))
            C = N
        else:
            if any(pad >= size for pad, size in zip(pads, kernel * 2, strict=True)):
                continue
            layers.append((MaxPool2d if kind == "max" else AvgPool2d)(kernel, stride, pads))
        H, W = (tall - kernel[0]) // stride[0] + 1, (wide - kernel[1]) // stride[1] + 1
    return chain(row_shape, *layers)


@settings(max_examples=60)
@given(stacks(), st.integers(1, 6))
def test_any_geometry(net, B):
    x = rows(B, *net.input.row_shape)
    engine = compile(net, device="cpu")
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[-1:]), got[-1:])


def test_an_activation_after_a_reshape_does_not_change_what_others_read():
    weights = {"c": weight(4, 2, 3, 3), "a": weight(5, 4 * 4 * 3), "b": weight(5, 4)}
    net = graph(
        (2, 6, 5), weights, ("y",), ("h", Conv2d(), ("x",), {"weight": "c"}), ("flat", Reshape(), ("h",)),
        ("r", ReLU(), ("flat",)), ("a", Linear(), ("r",), {"weight": "a"}), ("m", GlobalMean((2, 3)), ("h",)),
        ("b", Linear(), ("m",), {"weight": "b"}), ("y", Concat(1), ("a", "b")),
    )  # fmt: skip
    x = rows(5, 2, 6, 5)
    got = compile(net, device="cpu")(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize("inputs", [("c", "c"), ("c", "seen"), ("c", "x"), ("x", "c")])
def test_phases_that_are_not_distinct_convolutions(inputs):
    nodes = [("c", Conv1d((1,), (1, 1)), ("x",), {"weight": "c"}), ("seen", Reshape((3, 8)), ("d",))]
    nodes.insert(1, ("d", Conv1d((1,), (1, 1)), ("x",), {"weight": "d"}))
    net = graph(
        (3, 8), {"c": weight(3, 3, 3), "d": weight(3, 3, 3, seed=1)}, ("y",), *nodes, ("y", Interleave((2,)), inputs)
    )
    x = rows(4, 3, 8)
    got = compile(net, device="cpu")(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


def test_more_threads_than_images_and_more_images_than_a_tile():
    """A simulated machine with four threads: three images, in tiles of fewer."""
    code = (
        "import numpy as np, onchip, sys; sys.path.insert(0, 'tests')\n"
        "from onchip.network.build import sequential; from onchip.network.layers import Conv2d; "
        "from onchip.network.types import TensorType; from onchip.runtime.cpu import backend as cpu\n"
        "cpu.core_count = lambda: 4\n"
        "w = np.random.default_rng(0).standard_normal((64, 64, 3, 3), dtype=np.float32)\n"
        "w = {'a.weight': w, 'b.weight': w}\n"
        "net = sequential(TensorType(('B', 64, 48, 48)), [('a', Conv2d()), ('b', Conv2d())], w)\n"
        "x = np.random.default_rng(1).standard_normal((3, 64, 48, 48), dtype=np.float32)\n"
        "one, four = onchip.compile(net, 'cpu', threads=1), onchip.compile(net, 'cpu', threads=4)\n"
        "assert four.plan.groups[0].claim.facts.images < 3\n"
        "print(all(np.array_equal(four(x[:B]), one(x[:B])) for B in (1, 2, 3)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True", done.stderr


def test_an_infinity_stays_where_it_is():
    """Channels are padded to whole vectors; the padding must not reach the result."""
    net = chain(
        (1, 6, 6),
        (Conv2d(), conv(3, 1, 1, 1)),
        ReLU(),
        (Conv2d(), conv(5, 3, 2, 2)),
        ReLU(),
        Reshape(),
        (Linear(), conv(2, 125)),
    )
    weights = {name: -np.abs(w) if name == "n0.weight" else w for name, w in net.weights.items()}
    net, x = net.replace(weights=weights), rows(3, 1, 6, 6)
    x[1, 0, 2, 2] = np.inf
    got, naive = fused(net)(x), reference.forward(net, x, "float32")
    assert np.isfinite(naive).all()  # the first layer outputs -inf there, and its ReLU 0
    assert_error_within(got, reference.forward(net, x), baseline=naive)


@pytest.mark.skipif(core_count() < 2, reason="needs two cores")
def test_an_infinity_stays_where_it_is_when_threads_share_an_image(monkeypatch):
    """Threads also split the columns of a Linear; its padding columns must be zero. ReLU turns the others into 0."""
    monkeypatch.setattr("onchip.kernels.cpu.conv.fused.SHARED_FLOP", -1)
    layers = ((Conv2d(), conv(2, 1, 1, 1)), Reshape(), (Linear(), conv(33, 32)), ReLU(), (Linear(), conv(5, 33)))
    net, x = chain((1, 4, 4), *layers), rows(1, 1, 4, 4)
    net = net.replace(weights={name: -np.abs(w) if name == "n2.weight" else w for name, w in net.weights.items()})
    net = net.replace(weights={name: np.abs(w) if name == "n0.weight" else w for name, w in net.weights.items()})
    x[0, 0, 1, 1] = np.inf
    got, naive = fused(net, threads=2)(x), reference.forward(net, x, "float32")
    assert np.isfinite(naive).all()
    assert np.array_equal(got, fused(net, threads=1)(x))
    assert_error_within(got, reference.forward(net, x), baseline=naive)


@pytest.mark.parametrize("N", [1, 2])
def test_sums_that_cancel_keep_their_digits(N):
    """A Linear with few outputs after a convolution."""
    net = chain((4, 8, 8), (Conv2d(), conv(4, 4, 1, 1, bias=False)), Reshape(), (Linear(), conv(N, 256, bias=False)))
    rng = np.random.default_rng(N)
    in_order = np.linspace(-1, 1, 256).reshape(8, 8, 4).transpose(2, 0, 1).reshape(-1)  # NHWC order
    w = (in_order + 1e-3 * rng.standard_normal((N, 256))).astype(np.float32)
    net = net.replace(weights={"n0.weight": np.eye(4, dtype=np.float32)[:, :, None, None], "n2.weight": w})
    x = (1 + 0.01 * rng.standard_normal((100, 4, 8, 8))).astype(np.float32)
    got, naive = fused(net)(x), reference.forward(net, x, "float32")
    assert_error_within(got, reference.forward(net, x), baseline=naive, ulps=0.5)


@pytest.mark.parametrize(("N", "C", "taps"), [(1, 1, 256), (8, 1, 784), (8, 4, 200), (20, 9, 300)])
def test_long_windows_use_partial_sums(N, C, taps):
    """A long sum in one chain loses digits, which a following logarithm may need."""
    net = chain((C, taps + 60), (Conv1d(), conv(N, C, taps, bias=False)))
    x, (w,) = rows(5, C, taps + 60), net.weights.values()
    windows = np.lib.stride_tricks.sliding_window_view(x, taps, axis=2).transpose(0, 2, 3, 1).reshape(5, 61, -1)
    in_order = np.zeros((5, 61, N), np.float32)
    for j, column in enumerate(w.transpose(2, 1, 0).reshape(-1, N)):
        in_order += windows[:, :, j, None] * column
    truth = reference.forward(net, x)
    error, in_one_chain = (np.sqrt(np.mean((y - truth) ** 2)) for y in (fused(net)(x), in_order.swapaxes(1, 2)))
    assert error < in_one_chain / 2


@pytest.mark.parametrize(("N", "C", "D"), [(8, 1, 784), (8, 4, 784), (20, 9, 300)])
def test_a_convolution_with_long_windows_after_a_linear(N, C, D):
    layers = (Linear(), {"weight": (D, 16)}), Reshape((C, D)), (Conv1d(pads=(1, 1)), conv(N, C, D))
    net, x = chain((C, 16), *layers), np.random.default_rng(0).uniform(0, 1, (60, C, 16)).astype(np.float32)
    got, naive = compile(net, "cpu")(x), reference.forward(net, x, "float32")
    assert_error_within(got, reference.forward(net, x), baseline=naive)


@pytest.mark.parametrize(("C", "taps"), [(1, 256), (1, 784), (9, 784)])
def test_long_windows_and_a_large_bias(C, taps):
    """Each partial sum is rounded to the size of the bias: there must not be too many."""
    net = chain((C, taps), (Conv1d(pads=(1, 1)), conv(20, C, taps)))
    net = net.replace(weights={name: 1 + w if "bias" in name else w / 3 for name, w in net.weights.items()})
    x = rows(300, C, taps)
    assert_error_within(fused(net)(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize("N", range(1, 10))
@pytest.mark.parametrize(
    ("C", "size", "kernel", "stride", "pads"),
    [
        (1, (9, 28), (5, 5), (1, 1), (2, 2, 2, 2)),
        (2, (7, 13), (3, 4), (2, 1), (0, 1, 1, 0)),
        (5, (6, 23), (2, 7), (1, 3), (1, 4, 0, 5)),  # K > 128: partial sums
        (3, (8, 11), (9, 3), (1, 2), (4, 1, 4, 1)),
        (1, (4, 5), (3, 3), (1, 1), (0, 0, 0, 0)),
        (1, (1, 220), (1, 150), (1, 2), (0, 3, 0, 2)),  # a line with K > 128
    ],
)
def test_several_outputs_per_vector(N, C, size, kernel, stride, pads):
    """Few channels: any number of them, widths that are no multiple of the outputs per vector, and a zero border."""
    first = (Conv2d(stride, pads), conv(N, C, *kernel))
    net = chain((C, *size), first, Tanh(), (Conv2d(pads=(0, 1, 0, 1)), conv(3, N, 1, 3)))
    x = rows(37, C, *size)
    whole = fused(net, threads=1)(x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    engine = fused(net, threads=core_count())
    for B in (1, 2, 7, 37):
        assert np.array_equal(engine(x[:B]), whole[:B])


@pytest.mark.skipif(core_count() < 2, reason="needs two cores")
@pytest.mark.parametrize("N", [1, 3, 6])
def test_threads_share_vectors_of_several_outputs(N, monkeypatch):
    monkeypatch.setattr("onchip.kernels.cpu.conv.fused.SHARED_FLOP", -1)
    layers = ((Conv2d(pads=(1, 1, 1, 1)), conv(N, 2, 3, 3)), ReLU(), MaxPool2d((3, 2), (2, 1), (1, 1, 1, 0)))
    net, x = chain((2, 9, 11), *layers), rows(1, 2, 9, 11)
    assert np.array_equal(fused(net, threads=2)(x), fused(net, threads=1)(x))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize(
    ("C", "size", "kernel", "stride", "pads", "activation"),
    [
        (1, (5, 40), (3, 3), (1, 1), (0, 0, 0, 0), None),
        (2, (7, 13), (3, 4), (2, 1), (0, 1, 1, 0), ReLU()),
        (5, (6, 23), (2, 7), (1, 3), (1, 4, 0, 5), Tanh()),  # K > 128: partial sums
        (3, (1, 31), (1, 5), (1, 2), (0, 2, 0, 2), ReLU()),
        (1, (2, 183), (2, 150), (1, 1), (0, 3, 0, 2), ReLU()),  # a line with K > 128
    ],
)
def test_a_non_finite_element_stays_in_its_window(bad, N, C, size, kernel, stride, pads, activation):
    """Outputs of other windows keep their bits; outputs of its windows are inf or NaN where naive arithmetic's are."""
    layer = (Conv2d(stride, pads), conv(N, C, *kernel))
    net, window = chain((C, *size), layer, *([activation] if activation else [])), chain((C, *size), layer)
    window = window.replace(weights={name: np.full_like(w, "weight" in name) for name, w in window.weights.items()})
    engine, x = fused(net), rows(2, C, *size)
    clean = engine(x)
    for where in ((0, 0), (size[0] - 1, size[1] // 2), (size[0] // 2, size[1] - 1)):
        dirty = x.copy()
        dirty[1, C - 1, where[0], where[1]] = bad
        with np.errstate(invalid="ignore"):
            naive = reference.forward(net, dirty, "float32")
        seen = reference.forward(window, (dirty != x).astype(np.float32)) > 0
        got = engine(dirty)
        assert np.array_equal(got[~seen], clean[~seen])
        assert np.array_equal(np.isnan(got), np.isnan(naive))
        assert np.array_equal(np.isinf(got), np.isinf(naive))


@pytest.mark.parametrize("C", [1, 2, 3, 5, 6, 8, 9, 15, 17, 33])
@pytest.mark.parametrize(
    "pool",
    [
        MaxPool2d((2, 2)),
        MaxPool2d((3, 3), (1, 2), (1, 1, 1, 1), (1, 2)),
        MaxPool2d((2, 5), (2, 1), (0, 2, 1, 2)),
        AvgPool2d((2, 3), (2, 2)),
        AvgPool2d((3, 2), (1, 1), (1, 1, 2, 0), count_pads=True),
        AvgPool2d((4, 4), (3, 3), (1, 0, 0, 1), ceil=True),
    ],
    ids=str,
)
def test_pools_of_any_number_of_channels(C, pool):
    net = chain((2, 9, 10), (Conv2d(), conv(C, 2, 1, 1)), pool, (Conv2d(), conv(2, C, 2, 1)))
    x = rows(7, 2, 9, 10)
    engine = fused(net)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[3:4]), got[3:4])


@pytest.mark.parametrize("C", [1, 6, 17])
def test_a_nan_wins_a_max_pool_at_any_position(C):
    net = chain((C, 4, 6), MaxPool2d((2, 2)), (Conv2d(), conv(C, C, 1, 1)))
    weights = {"n1.weight": np.eye(C, dtype=np.float32)[:, :, None, None], "n1.bias": np.zeros(C, np.float32)}
    net = net.replace(weights=weights)
    for tap in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x = rows(2, C, 4, 6)
        x[1, C - 1, 2 + tap[0], 2 + tap[1]] = np.nan
        got = fused(net)(x)
        assert np.isnan(got[1, C - 1, 1, 1])
        assert np.isnan(got).sum() == C  # all channels of that pixel, and nothing else


@pytest.mark.parametrize("C", [1, 2, 3, 4, 8, 33, 112])  # several windows per vector; 4, 2 and 1 vectors
@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "dilation"),
    [
        ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        ((9, 8), (1, 2), (4, 0, 0, 4), (1, 1)),  # more than 64 taps: partial sums
        ((2, 3), (2, 1), (5, 5, 5, 5), (2, 3)),  # windows of pads only
    ],
)
def test_depthwise(C, kernel, stride, pads, dilation, monkeypatch):
    monkeypatch.setattr("onchip.kernels.cpu.conv.fused.SHARED_FLOP", -1)
    layers = (
        (Conv2d(stride, pads, dilation, groups=C), conv(C, 1, *kernel)),
        ReLU(),
        (Conv2d(), conv(6, C, 1, 1)),
        Tanh(),
    )
    net, x = chain((C, 9, 11), *layers), rows(7, C, 9, 11)
    whole = fused(net, threads=1)(x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    engine = fused(net, threads=core_count())
    assert np.array_equal(engine(x), whole)
    assert np.array_equal(engine(x[3:4]), whole[3:4])


@pytest.mark.parametrize(("groups", "C", "N"), [(2, 3, 2), (3, 1, 6), (2, 5, 16), (4, 2, 1)])
def test_groups_of_channels(groups, C, N):
    layers = (Conv2d((2, 1), (1, 0, 1, 1), groups=groups), conv(groups * N, C, 3, 2)), LeakyReLU(0.1)
    net = chain((groups * C, 7, 6), *layers, (Conv2d(groups=groups), conv(groups, N, 1, 1, bias=False)))
    x = rows(5, groups * C, 7, 6)
    engine = fused(net)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[2:3]), got[2:3])


@pytest.mark.parametrize("C", [3, 8])
def test_an_infinity_stays_in_its_channel_and_its_window(C):
    net, x = chain((C, 5, 6), (Conv2d(pads=(1, 1, 1, 1), groups=C), conv(C, 1, 3, 3))), rows(2, C, 5, 6)
    engine, clean = fused(net), fused(net)(x)
    x[1, C - 1, 2, 0] = np.inf
    got = engine(x)
    seen = np.zeros_like(clean, bool)
    seen[1, C - 1, 1:4, :2] = True
    assert np.array_equal(got[~seen], clean[~seen])
    assert np.isinf(got[seen]).all()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1), (5, 1), (6,), (3, 5, 6)], ids=str)
@pytest.mark.parametrize("layer", [Add(), Mul()], ids=["Add", "Mul"])
def test_constants_before_a_convolution(layer, shape):
    """Such as (x - mean) / std; any shape that broadcasts."""
    nodes = ("s", layer, ("x",), {"constant": "k"}), ("c", Conv2d(pads=(1, 1, 1, 1)), ("s",), {"weight": "c"})
    net = graph((3, 5, 6), {"k": np.float32(weight(*shape)), "c": weight(4, 3, 3, 3)}, ("c",), *nodes)
    x = rows(5, 3, 5, 6)
    engine = fused(net)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[2:3]), got[2:3])


def test_vectors_with_several_readers(monkeypatch):
    """Linear layers with a sum of three values, a constant and a batch norm between them: neither chain nor image."""
    weights = {"a": weight(19, 9), "b": weight(19, 19, seed=1), "c": weight(19, 19, seed=2), "k": weight(19)}
    weights |= {role: weight(19, seed=i) ** 2 + 0.5 for i, role in enumerate(("mean", "var"))} | {"d": weight(2, 19)}
    net = graph(
        (9,), weights, ("y",), ("a", Linear(), ("x",), {"weight": "a"}), ("b", Linear(), ("a",), {"weight": "b"}),
        ("n", BatchNorm1d(), ("b",), {"mean": "mean", "var": "var"}), ("r", ReLU(), ("n",)),
        ("c", Linear(), ("r",), {"weight": "c"}), ("s", Add(), ("a", "r", "c"), {"constant": "k"}),
        ("t", Tanh(), ("s",)), ("y", Linear(), ("t",), {"weight": "d"}),
    )  # fmt: skip
    monkeypatch.setattr(cpu, "KERNELS", tuple(k for k in cpu.KERNELS if k.name not in ("mlp_fused", "pointwise")))
    x = rows(131, 9)
    whole = fused(net, threads=1)(x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    engine = fused(net, threads=core_count())
    for B in (1, 7, 131):
        assert np.array_equal(engine(x[:B]), whole[:B])


def test_depthwise_1d():
    """Causal and dilated, as in networks over sequences."""
    layers = (Conv1d((1,), (8, 0), (4,), groups=6), conv(6, 1, 3)), Tanh(), (Conv1d(), conv(3, 6, 1))
    net, x = chain((6, 23), *layers), rows(4, 6, 23)
    engine = fused(net)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[1:2]), got[1:2])
