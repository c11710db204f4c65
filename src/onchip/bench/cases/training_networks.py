"""Networks whose training steps are measured, with their sizes as parameters; tests train them at small sizes.

Weights are seeded: He for Linears and convolutions; norms begin as the identity, biases and positions as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    LSTM,
    Add,
    BatchNorm2d,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    GlobalMax,
    GlobalMean,
    Layer,
    LayerNorm,
    LeakyReLU,
    Linear,
    MatMul,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    Softmax,
    Tanh,
)
from onchip.network.recipe import Weight
from onchip.network.training import TrainingStep
from onchip.network.types import BATCH, TensorType
from onchip.workloads import lenet


@dataclass(frozen=True)
class TrainedNetwork:
    """A network by its sizes, and how it is trained."""

    build: Callable[..., Network]
    loss: str
    batch: int
    is_trained: Callable[[str], bool] = lambda weight: True  # a weight, by name
    small: Mapping[str, object] = field(default_factory=dict)  # sizes at which it takes milliseconds, for tests

    @property
    def step(self) -> TrainingStep:
        return TrainingStep(self.loss, "adam")


@dataclass
class _Grow:
    """Nodes and seeded weights so far. Each method appends layers and returns the name of their value."""

    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def add(self, name: str, layer: Layer, *values: str, **roles: str) -> str:
        self.nodes.append(Node(name, layer, values, roles))
        return name

    def drawn(self, name: str, *shape: int, fan_in: int) -> str:
        self.weights[name] = self._rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / fan_in))
        return name

    def filled(self, name: str, value: float, *shape: int) -> str:
        self.weights[name] = np.full(shape, value, np.float32)
        return name

    def linear(self, name: str, x: str, D_in: int, D_out: int) -> str:
        weight, bias = self.drawn(f"{name}.weight", D_out, D_in, fan_in=D_in), self.filled(f"{name}.bias", 0, D_out)
        return self.add(name, Linear(), x, weight=weight, bias=bias)

    def conv(
        self, name: str, x: str, C_in: int, C_out: int, kernel: int = 3, stride: int = 1, pad: int = 1,
        bias: bool = True,
    ) -> str:  # fmt: skip
        roles = {"weight": self.drawn(f"{name}.weight", C_out, C_in, kernel, kernel, fan_in=C_in * kernel**2)}
        if bias:
            roles["bias"] = self.filled(f"{name}.bias", 0, C_out)
        return self.add(name, Conv2d((stride,) * 2, (pad,) * 4), x, **roles)

    def normed(self, name: str, x: str, C_in: int, C_out: int, kernel: int = 3, stride: int = 1, pad: int = 1) -> str:
        """A convolution, then a batch norm, which has the bias."""
        return self.batch_norm(f"{name}.norm", self.conv(name, x, C_in, C_out, kernel, stride, pad, bias=False), C_out)

    def doubled(
        self, name: str, x: str, C_in: int, C_out: int, kernel: int = 4, pad: int = 1, extra: int = 0, bias: bool = True
    ) -> str:  # fmt: skip
        """A transposed convolution to twice the size."""
        roles = {"weight": self.drawn(f"{name}.weight", C_in, C_out, kernel, kernel, fan_in=C_in * kernel**2 // 4)}
        if bias:
            roles["bias"] = self.filled(f"{name}.bias", 0, C_out)
        return self.add(name, ConvTranspose2d((2, 2), (pad,) * 4, (extra,) * 2), x, **roles)

    def batch_norm(self, name: str, x: str, C: int) -> str:
        values = {"weight": 1, "bias": 0, "mean": 0, "var": 1}
        roles = {role: self.filled(f"{name}.{role}", value, C) for role, value in values.items()}
        return self.add(name, BatchNorm2d(), x, **roles)

    def layer_norm(self, name: str, x: str, D: int) -> str:
        roles = {role: self.filled(f"{name}.{role}", value, D) for role, value in (("weight", 1), ("bias", 0))}
        return self.add(name, LayerNorm(), x, **roles)

    def network(self, name: str, **inputs: TensorType) -> Network:
        return Network(inputs, tuple(self.nodes), (self.nodes[-1].name,), self.weights, name)


def _floats(*row_shape: int) -> TensorType:
    return TensorType((BATCH, *row_shape))


# -- images ------------------------------------------------------------------------------------------------------


def resnet8(size: int = 32, width: int = 16, classes: int = 10) -> Network:
    """(B, 3, size, size) -> classes: three residual blocks, the second and third at half the size of those before."""
    grow, C = _Grow(), width
    value = grow.add("relu", ReLU(), grow.normed("conv", "x", 3, C))
    for i, C_out in enumerate((width, 2 * width, 4 * width), start=1):
        stride, name = 1 if C_out == C else 2, f"block{i}"
        y = grow.add(f"{name}.relu1", ReLU(), grow.normed(f"{name}.conv1", value, C, C_out, stride=stride))
        y = grow.normed(f"{name}.conv2", y, C_out, C_out)
        skip = value if stride == 1 else grow.normed(f"{name}.skip", value, C, C_out, 1, stride, 0)
        value, C = grow.add(f"{name}.relu2", ReLU(), grow.add(f"{name}.sum", Add(), y, skip)), C_out
    grow.linear("fc", grow.add("mean", GlobalMean((2, 3)), value), C, classes)
    return grow.network("resnet8", x=_floats(3, size, size))


def autoencoder(size: int = 28, channels: tuple[int, int] = (16, 32)) -> Network:
    """(B, 1, size, size) -> the same shape, by a quarter of the size."""
    grow, (first, second) = _Grow(), channels
    value = grow.add("relu1", ReLU(), grow.conv("conv1", "x", 1, first, stride=2))
    value = grow.add("relu2", ReLU(), grow.conv("conv2", value, first, second, stride=2))
    value = grow.add("relu3", ReLU(), grow.doubled("up1", value, second, first, 3, 1, 1))
    grow.add("y", Sigmoid(), grow.doubled("up2", value, first, 1, 3, 1, 1))
    return grow.network("autoencoder", x=_floats(1, size, size))


def u_net(size: int = 64, width: int = 16, levels: int = 3) -> Network:
    """(B, 3, size, size) -> (B, 1, size, size), a mask; size a multiple of 2^(levels - 1)."""
    grow, value, C, skipped = _Grow(), "x", 3, []
    widths = [width << level for level in range(levels)]
    for i, C_out in enumerate(widths):
        value = _two_convs(grow, f"down{i}", value, C, C_out)
        C = C_out
        if i < levels - 1:
            skipped.append(value)
            value = grow.add(f"down{i}.pool", MaxPool2d((2, 2), (2, 2)), value)
    for i, C_out in reversed(list(enumerate(widths[:-1]))):
        up = grow.doubled(f"up{i}.conv", value, C, C_out, 2, 0)
        value = grow.add(f"up{i}.both", Concat(1), skipped.pop(), up)
        value, C = _two_convs(grow, f"up{i}", value, 2 * C_out, C_out), C_out
    grow.add("y", Sigmoid(), grow.conv("mask", value, C, 1, 1, pad=0))
    return grow.network("u_net", x=_floats(3, size, size))


def _two_convs(grow: _Grow, name: str, value: str, C_in: int, C_out: int) -> str:
    for i, C in enumerate((C_in, C_out), start=1):
        value = grow.add(f"{name}.relu{i}", ReLU(), grow.normed(f"{name}.conv{i}", value, C, C_out))
    return value


def dcgan_generator(latent: int = 100, channels: Sequence[int] = (512, 256, 128, 64)) -> Network:
    """(B, latent) -> (B, 1), the discriminator's score of an image of 4 2^n pixels squared, n channels."""
    grow, C = _Grow(), channels[0]
    value = grow.add("g.grid", Reshape((C, 4, 4)), grow.linear("g.proj", "z", latent, C * 16))
    value = grow.add("g.relu", ReLU(), grow.batch_norm("g.norm", value, C))
    for i, (C, C_out) in enumerate(pairwise(channels), start=1):
        value = grow.batch_norm(f"g.norm{i}", grow.doubled(f"g.up{i}", value, C, C_out, bias=False), C_out)
        value = grow.add(f"g.relu{i}", ReLU(), value)
    image = grow.add("g.image", Tanh(), grow.doubled("g.last", value, channels[-1], 3))
    _discriminator(grow, image, channels[::-1])
    return grow.network("dcgan_generator", z=_floats(latent))


def dcgan_discriminator(size: int = 64, channels: Sequence[int] = (64, 128, 256, 512)) -> Network:
    """(B, 3, size, size) -> (B, 1), a score; size 4 2^n, n channels."""
    grow = _Grow()
    _discriminator(grow, "x", channels)
    return grow.network("dcgan_discriminator", x=_floats(3, size, size))


def _discriminator(grow: _Grow, value: str, channels: Sequence[int]) -> None:
    value = grow.add("d.leaky", LeakyReLU(0.2), grow.conv("d.conv", value, 3, channels[0], 4, 2))
    for i, (C, C_out) in enumerate(pairwise(channels), start=1):
        value = grow.add(f"d.leaky{i}", LeakyReLU(0.2), grow.normed(f"d.conv{i}", value, C, C_out, 4, 2))
    grow.linear("d.score", grow.add("d.flat", Reshape(), value), channels[-1] * 16, 1)


# -- text, sequences, tables -------------------------------------------------------------------------------------


def text_cnn(
    vocabulary: int = 18_765, width: int = 300, tokens: int = 56, taps: Sequence[int] = (3, 4, 5), channels: int = 100,
    classes: int = 2,
) -> Network:  # fmt: skip
    """ids (B, tokens) -> classes: convolutions of several lengths, the maximum over time, a dropout."""
    grow = _Grow()
    table = grow.drawn("embedding.weight", vocabulary, width, fan_in=2 * width)
    value = grow.add("permuted", Permute((0, 2, 1)), grow.add("embedding", Embedding(), "ids", weight=table))
    ends = []
    for K in taps:
        weight = grow.drawn(f"conv{K}.weight", channels, width, K, fan_in=width * K)
        conv = grow.add(f"conv{K}", Conv1d(), value, weight=weight, bias=grow.filled(f"conv{K}.bias", 0, channels))
        ends.append(grow.add(f"max{K}", GlobalMax(), grow.add(f"relu{K}", ReLU(), conv)))
    value = grow.add("dropout", Dropout(0.5), grow.add("features", Concat(1), *ends))
    grow.linear("fc", value, channels * len(taps), classes)
    return grow.network("text_cnn", ids=TensorType((BATCH, tokens), "int32"))


def transformer(
    vocabulary: int = 1000, tokens: int = 64, width: int = 64, heads: int = 4, blocks: int = 2, classes: int = 10
) -> Network:
    """ids (B, tokens) -> classes: an encoder with norms before attention and MLP, and the mean over time."""
    grow = _Grow()
    table = grow.drawn("embedding.weight", vocabulary, width, fan_in=2)
    value = grow.add("embedding", Embedding(), "ids", weight=table)
    value = grow.add("embedded", Add(), value, constant=grow.filled("positions", 0, tokens, width))
    for i in range(blocks):
        normed = grow.layer_norm(f"block{i}.norm1", value, width)
        value = grow.add(f"block{i}.sum1", Add(), value, _attention(grow, f"block{i}", normed, tokens, width, heads))
        y = grow.linear(f"block{i}.fc1", grow.layer_norm(f"block{i}.norm2", value, width), width, 4 * width)
        y = grow.linear(f"block{i}.fc2", grow.add(f"block{i}.gelu", GELU(), y), 4 * width, width)
        value = grow.add(f"block{i}.sum2", Add(), value, y)
    grow.linear("fc", grow.add("mean", GlobalMean((1,)), grow.layer_norm("norm", value, width)), width, classes)
    return grow.network("transformer", ids=TensorType((BATCH, tokens), "int32"))


def _attention(grow: _Grow, name: str, x: str, tokens: int, width: int, heads: int) -> str:
    split = {}
    for part, order in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        y = grow.linear(f"{name}.{part}", x, width, width)
        y = grow.add(f"{name}.{part}_heads", Reshape((tokens, heads, width // heads)), y)
        split[part] = grow.add(f"{name}.{part}_split", Permute(order), y)
    scale = grow.filled(f"{name}.scale", (width // heads) ** -0.5, 1)
    scores = grow.add(f"{name}.scores", MatMul(), split["q"], split["k"])
    weights = grow.add(f"{name}.softmax", Softmax(), grow.add(f"{name}.scaled", Mul(), scores, constant=scale))
    y = grow.add(f"{name}.heads", Permute((0, 2, 1, 3)), grow.add(f"{name}.mixed", MatMul(), weights, split["v"]))
    return grow.linear(f"{name}.out", grow.add(f"{name}.joined", Reshape((tokens, width)), y), width, width)


def lstm(steps: int = 64, width: int = 64, hidden: int = 128, classes: int = 10) -> Network:
    """(B, steps, width) -> classes, from the last step."""
    grow = _Grow()
    recurrence = grow.drawn("lstm.recurrence", 1, 4 * hidden, hidden, fan_in=2 * hidden)
    value = grow.add("lstm", LSTM(output="last"), grow.linear("gates", "x", width, 4 * hidden), recurrence=recurrence)
    grow.linear("fc", value, hidden, classes)
    return grow.network("lstm", x=_floats(steps, width))


def tabular_resnet(
    columns: int = 40, width: int = 128, hidden: int = 256, blocks: int = 4, classes: int = 10
) -> Network:
    """(B, columns) -> classes: residual MLPs with norms and dropouts."""
    grow = _Grow()
    value = grow.linear("first", "x", columns, width)
    for i in range(blocks):
        y = grow.linear(f"block{i}.fc1", grow.layer_norm(f"block{i}.norm", value, width), width, hidden)
        y = grow.add(f"block{i}.dropout1", Dropout(0.2), grow.add(f"block{i}.relu", ReLU(), y))
        y = grow.add(f"block{i}.dropout2", Dropout(0.1), grow.linear(f"block{i}.fc2", y, hidden, width))
        value = grow.add(f"block{i}.sum", Add(), value, y)
    value = grow.add("relu", ReLU(), grow.layer_norm("norm", value, width))
    grow.linear("fc", value, width, classes)
    return grow.network("tabular_resnet", x=_floats(columns))


NETWORKS = {
    "lenet5": TrainedNetwork(
        lenet.network, "cross_entropy", 64, small={"pixels": 144, "channels": (3, 5), "hidden": (17, 11)},
    ),
    "resnet8": TrainedNetwork(resnet8, "cross_entropy", 64, small={"size": 8, "width": 4, "classes": 5}),
    "text_cnn": TrainedNetwork(
        text_cnn, "cross_entropy", 50, small={"vocabulary": 50, "width": 12, "tokens": 9, "channels": 7},
    ),
    "transformer": TrainedNetwork(
        transformer, "cross_entropy", 64, lambda weight: not weight.endswith(".scale"),
        {"vocabulary": 30, "tokens": 7, "width": 12, "heads": 3, "classes": 4},
    ),
    "tabular_resnet": TrainedNetwork(
        tabular_resnet, "cross_entropy", 256,
        small={"columns": 9, "width": 10, "hidden": 13, "blocks": 2, "classes": 3},
    ),
    "autoencoder": TrainedNetwork(autoencoder, "mse", 128, small={"size": 8, "channels": (3, 5)}),
    "lstm": TrainedNetwork(lstm, "cross_entropy", 64, small={"steps": 5, "width": 6, "hidden": 7, "classes": 3}),
    # The discriminator normalises by the batch, as it does in its own steps.
    "dcgan_generator": TrainedNetwork(
        dcgan_generator, "mse", 128, lambda weight: weight.startswith("g.") or weight.endswith((".mean", ".var")),
        {"latent": 6, "channels": (8, 5)},
    ),
    "dcgan_discriminator": TrainedNetwork(
        dcgan_discriminator, "mse", 128, small={"size": 16, "channels": (5, 8)},
    ),
    "u_net": TrainedNetwork(u_net, "mse", 16, small={"size": 8, "width": 3, "levels": 3}),
}  # fmt: skip
