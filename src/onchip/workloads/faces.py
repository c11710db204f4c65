"""faces: 64x64 images from 100 random values, by a projection and four transposed convolutions.

`network` is the one of the report, with weights from a file or random ones; `shipped` a narrower one that comes with
onchip, trained on portraits (docs/models/faces.md).

z (B, 100) -> Linear 4x4x512 -> batch norm, ReLU -> transposed convolutions 5x5, stride 2, to 256, 128, 64 channels with
batch norm and ReLU -> to 3 channels, tanh -> (B, 64, 64, 3), values in [-1, 1] or, with `pixels`, bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from onchip.errors import InputError
from onchip.formats.weights.flat_file import FlatTensor, draw_flat, read_flat
from onchip.formats.weights.safetensors_file import read_safetensors
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm2d, ConvTranspose2d, Linear, Permute, ReLU, Reshape, Tanh, ToPixels
from onchip.network.recipe import Recipe, Weight, transposed
from onchip.network.types import BATCH, TensorType

LATENT, CHANNELS, START = 100, (512, 256, 128, 64, 3), 4
KERNEL = 5
SHIPPED = Path(__file__).with_name("faces.safetensors")
PADS = (1, 1, 2, 2)  # y[2i - 1 + r] += x[i] * w[r]: doubles the size


def network(
    weights: str | os.PathLike[str] | None = None,
    seed: int = 0,
    *,
    pixels: bool = False,
    latent: int = LATENT,
    channels: Sequence[int] = CHANNELS,
    start: int = START,
) -> Network:
    """The network with weights from a file (network.bin, in the order of `layout`), or seeded ones (draw_flat).

    channels  of the projection and of each transposed convolution
    start     height and width of the projection; each transposed convolution doubles them
    """
    if len(channels) < 2:
        raise InputError("bad channels", got=str(tuple(channels)), expected="two or more", hint="512, 256, 128, 64, 3")
    stored = layout(latent, channels, start)
    found: dict[str, Weight] = {**(draw_flat(stored, seed) if weights is None else read_flat(weights, stored))}
    found["proj.weight"] = _permuted(found["proj.weight"], (1, 0))
    last = len(channels) - 1
    nodes = [
        Node("proj", Linear(), ("z",), {"weight": "proj.weight", "bias": "proj.bias"}),
        Node("grid", Reshape((start, start, channels[0])), ("proj",)),
        Node("channels_first", Permute((0, 3, 1, 2)), ("grid",)),
        *_norm_relu(0, "channels_first"),
    ]
    for i in range(1, last + 1):
        name = f"tconv{i}"
        found[f"{name}.weight"] = _permuted(found[f"{name}.weight"], (3, 2, 0, 1))
        layer, roles = ConvTranspose2d((2, 2), PADS), {"weight": f"{name}.weight", "bias": f"{name}.bias"}
        nodes.append(Node(name, layer, (nodes[-1].name,), roles))
        nodes += _norm_relu(i, name) if i < last else [Node("tanh", Tanh(), (name,))]
    nodes.append(Node("image", Permute((0, 2, 3, 1)), ("tanh",)))
    net = Network({"z": TensorType((BATCH, latent))}, tuple(nodes), (nodes[-1].name,), found, "faces")
    return _with_pixels(net) if pixels else net


def shipped(*, pixels: bool = False) -> Network:
    """The trained generator that comes with onchip: z (B, 100) -> (B, 64, 64, 3), synthetic portraits."""
    net = read_safetensors(SHIPPED)
    return _with_pixels(net) if pixels else net


def _with_pixels(net: Network) -> Network:
    nodes = (*net.nodes, Node("pixels", ToPixels(), net.outputs))
    return Network(net.inputs, nodes, ("pixels",), net.weights, net.name)


def layout(latent: int, channels: Sequence[int], start: int) -> list[FlatTensor]:
    """Layout of network.bin: the projection (latent, start * start * C), its bias, batch norm; then each transposed
    convolution (5, 5, C_out, C_in), its bias and, except for the last, batch norm (beta, gamma, mean, var).

    Seeded weights have standard deviation sqrt(2 / fan-in), which keeps the scale of activations from layer to layer.
    """
    width = start * start * channels[0]
    tensors = [
        FlatTensor("proj.weight", (latent, width), math.sqrt(2 / max(1, latent))),
        FlatTensor("proj.bias", (width,), 0.1),
        *_norm(0, channels[0]),
    ]
    for i, (C_in, C_out) in enumerate(pairwise(channels), start=1):
        terms = max(1, C_in) * KERNEL * KERNEL / 4  # every second row and column of the kernel contributes to an output
        tensors.append(FlatTensor(f"tconv{i}.weight", (KERNEL, KERNEL, C_out, C_in), math.sqrt(2 / terms)))
        tensors.append(FlatTensor(f"tconv{i}.bias", (C_out,), 0.1))
        if i < len(channels) - 1:
            tensors += _norm(i, C_out)
    return tensors


def _norm(i: int, C: int) -> list[FlatTensor]:
    centers = {"bias": 0.0, "weight": 1.0, "mean": 0.0, "var": 1.0}  # beta, gamma, mean, variance
    return [FlatTensor(f"bn{i}.{role}", (C,), 0.1, center) for role, center in centers.items()]


def _norm_relu(i: int, value: str) -> list[Node]:
    roles = {role: f"bn{i}.{role}" for role in ("weight", "bias", "mean", "var")}
    return [Node(f"bn{i}", BatchNorm2d(eps=1e-5), (value,), roles), Node(f"relu{i}", ReLU(), (f"bn{i}",))]


def _permuted(weight: Weight, axes: tuple[int, ...]) -> Weight:
    """A stored weight with its axes permuted for its layer: a copy, or a recipe for it."""
    if isinstance(weight, Recipe):
        shape = tuple(weight.shape[axis] for axis in axes)
        return Recipe.of(transposed, (weight,), shape, weight.dtype, axes=axes)
    return transposed(weight, axes)
