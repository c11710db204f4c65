"""Slices, PReLU slopes and combined values inside conv_fused: views without a copy, for every kind of reader."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import SAME, graph, weight
from onchip.kernels import cpu, reference
from onchip.kernels.cpu.conv import fused as conv_fused
from onchip.network.layers import (
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Div,
    GlobalMax,
    GlobalMean,
    Linear,
    Max,
    MaxPool2d,
    Min,
    Mul,
    PReLU,
    ReLU,
    Reshape,
    Sigmoid,
    Slice,
    Sub,
    Tanh,
)
from onchip.runtime.engine import compile

C, H, W = 20, 9, 11
CUTS = {
    "channels": Slice((3, 0, 0), (12, H, W), (1, 1, 1)),
    "last channels": Slice((8, 0, 0), (12, H, W), (1, 1, 1)),
    "pixels": Slice((0, 2, 1), (C, 6, 9), (1, 1, 1)),
    "every other pixel": Slice((0, 1, 0), (C, 4, 6), (1, 2, 2)),
    "both": Slice((5, 1, 3), (12, 7, 4), (1, 1, 2)),
}


def check(net, x, monkeypatch, without=("pointwise", "select", "rowwise", "mlp_fused")):
    monkeypatch.setattr(cpu, "KERNELS", tuple(k for k in cpu.KERNELS if k.name not in without))
    engine = compile(net, device="cpu", threads=1, without=("fold", "merge", "windows"))
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"], str(engine.plan)
    truth = reference.forward(net, x)
    got = engine(x)
    assert_error_within(got, truth, baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(np.concatenate([engine(x[i : i + 1]) for i in range(len(x))]), got)
    monkeypatch.setattr(conv_fused, "SHARED_FLOP", -1)
    shared = compile(net, device="cpu", threads=2, without=("fold", "merge", "windows"))
    assert np.array_equal(shared(x[:1]), got[:1])
    return got


def readers(D):
    """Possible readers of a value of D channels, by name: nodes from "cut" to "z", and their weights."""
    convs = {
        "one tap": (Conv2d(), (16, D, 1, 1)), "window": (Conv2d(), (18, D, 3, 3)),
        "padded window": (SAME, (7, D, 3, 3)),
        "strided": (Conv2d(stride=(2, 2), pads=(1, 0, 1, 0)), (16, D, 3, 2)), "few outputs": (SAME, (2, D, 3, 3)),
        "dilated": (Conv2d(dilation=(1, 2), pads=(1, 2, 1, 2)), (16, D, 3, 3)),
        "depthwise": (Conv2d(pads=(1, 1, 1, 1), groups=D), (D, 1, 3, 3)),
        "groups": (Conv2d(pads=(1, 1, 1, 1), groups=2), (6, D // 2, 3, 3)),
    }  # fmt: skip
    for name, (layer, shape) in convs.items():
        yield name, [("z", layer, ("cut",), {"weight": "w"})], {"w": weight(*shape)}
    yield "transposed", [("z", ConvTranspose2d(stride=(2, 2)), ("cut",), {"weight": "w"})], {"w": weight(D, 5, 2, 3)}
    for layer in (MaxPool2d((2, 2)), AvgPool2d((3, 3), pads=(1, 1, 1, 1)), ReLU(), Tanh()):
        yield str(layer), [("z", layer, ("cut",))], {}
    for layer in (Add(), Mul(), Max(), Min(), Sub(), Div()):
        yield f"{layer} of two", [("s", Sigmoid(), ("cut",)), ("z", layer, ("cut", "s"))], {}
        pooled = [("g", GlobalMean((2, 3)), ("cut",)), ("o", Reshape((D, 1, 1)), ("g",)), ("e", Sigmoid(), ("o",))]
        yield f"{layer} of channels", [*pooled, ("z", layer, ("cut", "e"))], {}
    for layer in (Add(), Mul(), Sub()):
        yield f"{layer} of a constant", [("z", layer, ("cut",), {"constant": "k"})], {"k": weight(D, 1, 1)}
    yield "a constant minus a value", [("z", Sub(), ("cut",), {"first": "k"})], {"k": weight(D, 1, 1)}
    yield "slopes", [("z", PReLU(), ("cut",), {"constant": "k"})], {"k": weight(D, 1, 1)}
    norm = {"mean": weight(D), "var": weight(D) ** 2 + 1, "weight": weight(D), "bias": weight(D, seed=1)}
    yield "norm", [("z", BatchNorm2d(), ("cut",), {role: role for role in norm})], norm
    yield "concatenation", [("s", Tanh(), ("cut",)), ("z", Concat(1), ("s", "cut", "cut"))], {}
    again = Slice((2, 1, 1), (D - 4, 2, 3), (1, 1, 1))
    yield "a slice", [("t", again, ("cut",)), ("z", SAME, ("t",), {"weight": "w"})], {"w": weight(6, D - 4, 3, 3)}


CASES = [(cut, reader) for cut in CUTS for reader, *_ in readers(12)]


@pytest.mark.parametrize(("cut", "reader"), CASES)
def test_every_reader_of_a_slice(cut, reader, monkeypatch):
    """A second reader of the whole value, with padding, still finds it unchanged."""
    layer = CUTS[cut]
    nodes, weights = next((nodes, weights) for name, nodes, weights in readers(layer.sizes[0]) if name == reader)
    net = graph(
        (4, H, W), {"v": weight(C, 4, 3, 3), "u": weight(3, C, 3, 3)} | weights, ("y",),
        ("v", SAME, ("x",), {"weight": "v"}), ("cut", layer, ("v",)), *nodes, ("m", GlobalMean((2, 3)), ("z",)),
        ("u", SAME, ("v",), {"weight": "u"}), ("n", GlobalMax((2, 3)), ("u",)), ("y", Concat(1), ("m", "n")),
    )  # fmt: skip
    check(net, rows(5, 4, H, W), monkeypatch)


@pytest.mark.parametrize("cut", CUTS)
def test_a_flattened_slice(cut, monkeypatch):
    layer = CUTS[cut]
    weights = {"v": weight(C, 4, 1, 1), "w": weight(33, int(np.prod(layer.sizes)))}
    net = graph(
        (4, H, W), weights, ("y",), ("v", Conv2d(), ("x",), {"weight": "v"}), ("cut", layer, ("v",)),
        ("f", Reshape((int(np.prod(layer.sizes)),)), ("cut",)), ("y", Linear(), ("f",), {"weight": "w"}),
    )  # fmt: skip
    check(net, rows(5, 4, H, W), monkeypatch)


@pytest.mark.parametrize("kernel", [1, 3])
def test_an_infinity_outside_a_slice_does_not_reach_its_readers(kernel, monkeypatch):
    weights = {"one": np.ones((1, 1, 1), np.float32), "w": weight(18, 12, kernel, kernel)}
    layer = CUTS["channels"]
    net = graph(
        (C, H, W), weights, ("y",), ("v", Mul(), ("x",), {"constant": "one"}), ("cut", layer, ("v",)),
        ("y", Conv2d(), ("cut",), {"weight": "w"}),
    )  # fmt: skip
    x = rows(5, C, H, W)
    x[:, :3], x[:, 15:] = np.inf, np.nan
    assert np.isfinite(check(net, x, monkeypatch)).all()


def test_a_gated_signal_without_pads(monkeypatch):
    """Two layers of dilated windows: halves of their outputs are multiplied, and a slice of their input is added."""
    weights = {"i": weight(6, 1, 1), "s": weight(6, 1)}
    nodes, length, last = [("v0", Conv1d(), ("x",), {"weight": "i"})], 40, "v0"
    for i, dilation in enumerate((1, 4)):
        weights |= {f"w{i}": weight(12, 6, 2, seed=i), f"r{i}": weight(6, 6, 1, seed=i)}
        length -= dilation
        half = Slice((0, 0), (6, length), (1, 1)), Slice((6, 0), (6, length), (1, 1))
        nodes += [
            (f"a{i}", Conv1d(dilation=(dilation,)), (last,), {"weight": f"w{i}"}), (f"b{i}", half[0], (f"a{i}",)),
            (f"t{i}", Tanh(), (f"b{i}",)), (f"c{i}", half[1], (f"a{i}",)), (f"g{i}", Sigmoid(), (f"c{i}",)),
            (f"z{i}", Mul(), (f"t{i}", f"g{i}")), (f"r{i}", Conv1d(), (f"z{i}",), {"weight": f"r{i}"}),
            (f"k{i}", Slice((0, dilation), (6, length), (1, 1)), (last,)), (f"v{i + 1}", Add(), (f"r{i}", f"k{i}")),
        ]  # fmt: skip
        last = f"v{i + 1}"
    nodes += [("p", PReLU(), (last,), {"constant": "s"}), ("y", ReLU(), ("p",))]
    check(graph((1, 40), weights, ("y",), *nodes), rows(7, 1, 40), monkeypatch)


@pytest.mark.parametrize("slopes", [(20, 1, 1), (9, 11), (20, 9, 11), (1, 9, 1)], ids=str)
@pytest.mark.parametrize("is_read_twice", [False, True])
def test_slopes(slopes, is_read_twice, monkeypatch):
    weights = {"a": weight(C, 4, 3, 3), "k": weight(*slopes), "b": weight(5, C, 3, 3)}
    more = [("t", Add(), ("p", "a"))] if is_read_twice else [("t", Tanh(), ("p",))]
    net = graph(
        (4, H, W), weights, ("y",), ("a", SAME, ("x",), {"weight": "a"}), ("p", PReLU(), ("a",), {"constant": "k"}),
        *more, ("y", SAME, ("t",), {"weight": "b"}),
    )  # fmt: skip
    check(net, rows(5, 4, H, W), monkeypatch)


def test_a_small_slice_of_the_input_is_left_to_another_kernel():
    net = graph(
        (C, H, W), {"w": weight(5, 4, 1, 1)}, ("y",), ("cut", Slice((0, 0, 0), (4, H, W), (1, 1, 1)), ("x",)),
        ("y", Conv2d(), ("cut",), {"weight": "w"}),
    )  # fmt: skip
    assert [group.claim.kernel for group in compile(net, "cpu").plan.groups] == ["select", "conv_fused"]
