"""Networks over images and signals that tests put through engines: right, at every size, on every device."""

from __future__ import annotations

import numpy as np

from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (  # fmt: skip
    GELU,
    Add,
    AvgPool1d,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    GlobalMax,
    GlobalMean,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Sin,
    Softmax,
    Tanh,
)
from onchip.network.types import TensorType

SAME = Conv2d(pads=(1, 1, 1, 1))


def weight(*shape, seed=0):
    fan = np.prod(shape[1:]) if len(shape) > 1 else 4
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(fan))


def chain(row_shape, *layers, name="net") -> Network:
    """A chain of layers; a pair (layer, weight shapes by role) gets random weights."""
    named, weights = [], {}
    for i, entry in enumerate(layers):
        layer, shapes = entry if isinstance(entry, tuple) else (entry, {})
        named.append((f"n{i}", layer))
        for role, shape in shapes.items():
            weights[f"n{i}.{role}"] = weight(*shape, seed=i) ** 2 + 0.5 if role == "var" else weight(*shape, seed=i)
    return sequential(TensorType(("B", *row_shape)), named, weights, name=name)


def conv(N, C, *kernel, bias=True):
    return {"weight": (N, C, *kernel)} | ({"bias": (N,)} if bias else {})


def tconv(C, N, *kernel):
    return {"weight": (C, N, *kernel), "bias": (N,)}


def norm(C):
    return {"mean": (C,), "var": (C,), "weight": (C,), "bias": (C,)}


def graph(row_shape, weights, outputs, *nodes) -> Network:
    return Network({"x": TensorType(("B", *row_shape))}, tuple(Node(*node) for node in nodes), outputs, weights)


def residual(C=20) -> Network:
    weights = {"a": weight(C, 3, 3, 3), "b": weight(C, C, 3, 3), "fc": weight(5, C)}
    return graph(
        (3, 9, 11), weights, ("out",), ("a", SAME, ("x",), {"weight": "a"}), ("ra", ReLU(), ("a",)),
        ("b", SAME, ("ra",), {"weight": "b"}), ("sum", Add(), ("ra", "b")), ("rs", ReLU(), ("sum",)),
        ("mean", GlobalMean((2, 3)), ("rs",)), ("out", Linear(), ("mean",), {"weight": "fc"}),
    )  # fmt: skip


def inception() -> Network:
    weights = {"a": weight(7, 5, 1, 1), "b": weight(18, 5, 3, 3), "g": weight(25, 25)}
    return graph(
        (5, 8, 6), weights, ("y",), ("a", Conv2d(), ("x",), {"weight": "a"}),
        ("b", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "b"}), ("sa", SiLU(), ("a",)),
        ("cat", Concat(1), ("sa", "b")),
        ("pooled", GlobalMean((2, 3)), ("cat",)), ("gate", Linear(), ("pooled",), {"weight": "g"}),
        ("open", Sigmoid(), ("gate",)), ("spread", Reshape((25, 1, 1)), ("open",)), ("y", Mul(), ("cat", "spread")),
    )  # fmt: skip


def sines() -> Network:
    """Convolutions with a Sin between them, which no product takes along on the CPU."""
    nodes = [Node("c0", SAME, ("x",), {"weight": "w0"}), Node("k0", Sin(), ("c0",))]
    nodes += [Node("c1", Conv2d(stride=(2, 1)), ("k0",), {"weight": "w1"}), Node("k1", Sin(), ("c1",))]
    nodes += [Node("c2", SAME, ("k1",), {"weight": "w2"})]
    weights = {"w0": weight(7, 3, 3, 3), "w1": weight(9, 7, 3, 2), "w2": weight(5, 9, 3, 3)}
    return Network({"x": TensorType(("B", 3, 11, 8))}, nodes, ("c2",), weights)


def branched() -> Network:
    """A value with channels last that three read: a sum, a convolution, and one that only takes rows."""
    nodes = [Node("c0", SAME, ("x",), {"weight": "w0"}), Node("k", Sin(), ("c0",))]
    nodes += [Node("c1", SAME, ("k",), {"weight": "w1"}), Node("s", Sigmoid(), ("c1",)), Node("sum", Add(), ("s", "k"))]
    nodes += [
        Node("soft", Softmax(1), ("k",)),
        Node("all", Mul(), ("sum", "soft")),
        Node("pool", MaxPool2d((2, 2)), ("all",)),
    ]
    weights = {"w0": weight(6, 4, 3, 3), "w1": weight(6, 6, 3, 3)}
    return Network({"x": TensorType(("B", 4, 6, 5))}, nodes, ("pool", "sum"), weights)


def signal() -> Network:
    nodes = [Node("c0", Conv1d(), ("x",), {"weight": "w0"}), Node("k", Sin(), ("c0",))]
    nodes += [Node("c1", Conv1d(), ("k",), {"weight": "w1"}), Node("mean", GlobalMean((2,)), ("c1",))]
    return Network({"x": TensorType(("B", 5, 20))}, nodes, ("mean",), {"w0": weight(8, 5, 3), "w1": weight(70, 8, 4)})


NETWORKS = {
    "lenet": chain((1, 28, 28), (Conv2d(pads=(2, 2, 2, 2)), conv(6, 1, 5, 5)), ReLU(), MaxPool2d((2, 2)),
                   (Conv2d(), conv(16, 6, 5, 5)), Tanh(), AvgPool2d((2, 2)), Reshape(), (Linear(), conv(120, 400)),
                   ReLU(), (Linear(), conv(10, 120)), Softmax()),
    "generator": chain((20,), (Linear(), conv(70 * 16, 20)), Reshape((70, 4, 4)), (BatchNorm2d(), norm(70)), ReLU(),
                       (ConvTranspose2d((2, 2), (1, 1, 2, 2)), tconv(70, 40, 5, 5)), ReLU(),
                       (ConvTranspose2d((2, 2), (1, 1, 1, 1)), tconv(40, 33, 4, 4)), (BatchNorm2d(), norm(33)),
                       LeakyReLU(0.2), (ConvTranspose2d((2, 2), (1, 1, 2, 2)), tconv(33, 3, 5, 5)), Tanh(),
                       Permute((0, 2, 3, 1))),
    "wide channels": chain((130, 5, 7), (Conv2d((2, 1), (0, 2, 1, 0)), conv(70, 130, 3, 2)), GELU(),
                           (Conv2d(), conv(65, 70, 1, 1)), SiLU()),
    "narrow end": chain((64, 9, 6), (Conv2d(pads=(1, 1, 1, 1)), conv(48, 64, 3, 3)), ReLU(),
                        (Conv2d(pads=(2, 0, 1, 1)), conv(2, 48, 4, 3)), Sigmoid()),
    "one dimension": chain((3, 40), (Conv1d((2,), (1, 2)), conv(11, 3, 4)), ReLU(), MaxPool1d((3,), (2,), (1, 0)),
                           (ConvTranspose1d((3,), (1, 0), (1,)), tconv(11, 66, 5)), LeakyReLU(),
                           (Conv1d(), conv(9, 66, 3)), AvgPool1d((2,)), GlobalMax((-1,)), LogSoftmax()),
    "dilated": chain((4, 15, 13), (Conv2d((1, 2), (2, 0, 0, 1), (3, 2)), conv(70, 4, 3, 3, bias=False)),
                     (Conv2d(dilation=(2, 1)), conv(5, 70, 2, 3))),
    "as large as the image": chain((6, 5, 4), (Conv2d(), conv(17, 6, 5, 4)), ReLU()),
    "one pixel": chain((1, 1, 1), (Conv2d(pads=(1, 1, 1, 1)), conv(1, 1, 3, 3))),
    "norm in front of pads": chain((8, 6, 6), (BatchNorm2d(), norm(8)), ReLU(),
                                   (Conv2d(pads=(1, 1, 1, 1)), conv(8, 8, 3, 3))),
    "pools": chain((5, 11, 10), (Conv2d(), conv(5, 5, 1, 1)), AvgPool2d((3, 2), (2, 2), (1, 0, 1, 1), ceil=True),
                   AvgPool2d((2, 2), (1, 1), (1, 1, 0, 1), count_pads=True),
                   MaxPool2d((2, 2), (1, 1), dilation=(2, 1))),
    "windows on pads alone": chain((3, 2, 5), (Conv2d(pads=(2, 3, 1, 2)), conv(4, 3, 1, 1)), ReLU(),
                                   (Conv2d(pads=(2, 2, 2, 2)), conv(5, 4, 2, 1))),
    "separable": chain((3, 13, 11), (Conv2d((2, 1), (1, 1, 1, 1)), conv(8, 3, 3, 3)), ReLU(),
                       (Conv2d(pads=(1, 1, 1, 1), groups=8), conv(8, 1, 3, 3)), ReLU(), (Conv2d(), conv(20, 8, 1, 1)),
                       SiLU(), (Conv2d((2, 2), (0, 0, 1, 1), groups=20), conv(20, 1, 3, 3)),
                       (Conv2d(groups=2), conv(12, 10, 1, 1)), Sigmoid(), GlobalMean((2, 3)), (Linear(), conv(5, 12))),
    "one input pixel": chain((100, 1, 1), (ConvTranspose2d(), tconv(100, 36, 4, 4)), ReLU(),
                             (ConvTranspose2d((2, 2), (1, 1, 1, 1)), tconv(36, 3, 4, 4)), Tanh()),
    "residual": residual(),
    "inception": inception(),
}  # fmt: skip
