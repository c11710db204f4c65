"""Image generators of other sizes than faces: channels, kernels, strides, bases and output types."""

import numpy as np
import pytest

from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchNorm2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
    Permute,
    ReLU,
    Reshape,
    Tanh,
    ToPixels,
)
from onchip.network.types import TensorType
from onchip.runtime.check import FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.engine import compile
from random_networks import faults

LATENT = 20

# The base (channels and sides), then of each transposed convolution: channels of y, taps, stride, pads, output padding.
GENERATORS = {
    "4x4": ((96, 4, 4), [(48, 4, 2, 1, 0), (3, 4, 2, 1, 0)]),
    "5x5 from 7x7, one channel": ((48, 7, 7), [(64, 5, 2, 2, 1), (1, 5, 2, 2, 1)]),
    "3x3 from 3x5": ((100, 3, 5), [(48, 3, 2, 1, 1), (96, 3, 1, 1, 0), (3, 3, 2, 1, 1)]),
    "from one pixel": ((100, 1, 1), [(96, 4, 1, 0, 0), (48, 4, 2, 1, 0), (1, 3, 1, 1, 0)]),
    "to 128 and 64": ((128, 4, 3), [(128, 5, 2, 2, 1), (64, 5, 2, 2, 1), (3, 5, 2, 2, 1)]),
    "signal": ((64, 9), [(96, 5, 2, 2, 1), (48, 4, 2, 1, 0), (1, 5, 2, 2, 1)]),
    "signal of three": ((48, 16), [(100, 3, 1, 1, 0), (3, 5, 2, 2, 1)]),
}


def generator(name, ends="rows"):
    """z -> Linear -> the base -> transposed convolutions with ReLU, the first with batch norm -> Tanh.

    ends  "rows"; "last": NHWC; "bytes": NHWC as pixels
    """
    (C, *sides), steps = GENERATORS[name]
    size = C * int(np.prod(sides))
    weights = {"p.w": rows(size, LATENT, seed=1) / 4, "p.b": rows(1, size, seed=2)[0]}
    nodes = [Node("p", Linear(), ("z",), {"weight": "p.w", "bias": "p.b"}), Node("base", Reshape((C, *sides)), ("p",))]
    for i, (N, taps, stride, pad, more) in enumerate(steps):
        axes = len(sides)
        kind = ConvTranspose1d if axes == 1 else ConvTranspose2d
        layer = kind((stride,) * axes, (pad,) * (2 * axes), (more,) * axes)
        terms = C * taps**axes / stride**axes
        weights[f"{i}.w"] = rows(C, N * taps**axes, seed=3 + i).reshape(C, N, *(taps,) * axes) / np.float32(terms**0.5)
        weights[f"{i}.b"] = rows(1, N, seed=13 + i)[0]
        nodes.append(Node(f"c{i}", layer, (nodes[-1].name,), {"weight": f"{i}.w", "bias": f"{i}.b"}))
        if i == 0 and axes == 2:
            weights |= {f"n.{role}": np.abs(rows(1, N, seed=30 + j)[0]) for j, role in enumerate(NORM)}
            nodes.append(Node("n", BatchNorm2d(), (nodes[-1].name,), {role: f"n.{role}" for role in NORM}))
        nodes.append(Node(f"a{i}", Tanh() if i == len(steps) - 1 else ReLU(), (nodes[-1].name,)))
        C = N
    if ends != "rows":
        nodes.append(Node("last", Permute((0, *range(2, len(sides) + 2), 1)), (nodes[-1].name,)))
    if ends == "bytes":
        nodes.append(Node("bytes", ToPixels(), (nodes[-1].name,)))
    return Network({"z": TensorType(("B", LATENT))}, tuple(nodes), (nodes[-1].name,), weights)


NORM = ("weight", "bias", "mean", "var")


@needs_gxx
@pytest.mark.parametrize("name", ["signal of three", "4x4", "5x5 from 7x7, one channel"])
def test_on_an_emulated_gpu(monkeypatch, name):
    emulate_device(monkeypatch)
    net, z = generator(name, "last"), rows(2, LATENT, seed=5)
    engine = compile(net, "cuda", "fp16")
    y, truth = engine(z), reference.forward(net, z)
    naive = scaled_error(reference.forward(net, z, "float16"), truth)
    assert scaled_error(y, truth) <= FACTOR * naive + ULPS * ULP["fp16"]
    assert np.array_equal(engine(z[1:]), y[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("batch_hint", [1, 4096])
def test_on_a_gpu(name, precision, batch_hint):
    net = generator(name, "rows" if batch_hint == 1 else "last")
    engine = compile(net, "cuda", precision, batch_hint=batch_hint)
    assert faults(net, engine, 0, (1, 7, 100)) == []
    z = rows(4097, LATENT, seed=5)
    y = engine(z)
    assert np.array_equal(engine(z[4090:]), y[4090:])
    assert engine(z[:0]).shape == (0, *y.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GENERATORS)
def test_bytes_on_a_gpu(name):
    """Float outputs rounded to integers, except those near a rounding boundary."""
    z = rows(300, LATENT, seed=5)
    made = compile(generator(name, "bytes"), "cuda", "fp16")(z).astype(int)
    wide = compile(generator(name, "last"), "cuda", "fp16")(z)
    want = ((wide + 1) / 2 * 255).astype(int)
    assert np.abs(made - want).max() <= 1
    assert (made == want).mean() > 0.9
