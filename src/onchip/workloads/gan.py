"""A generator of pictures and its discriminator, as networks to train (Goodfellow et al. 2014; DCGAN, Radford et al.
2016): the networks of both steps, with random shifts, cutouts and brightness as layers (DiffAugment, Zhao et al. 2020).

The generator is the network of workloads/faces.py for pictures of any size start 2^n, and the discriminator its mirror:
convolutions 5x5 of stride 2 with LeakyReLU, then one logit, for a real picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, BatchNorm2d, Concat, Conv2d, LeakyReLU, Linear, MatMul, Mul, Permute, Reshape
from onchip.network.recipe import Array, Weight, materialise
from onchip.network.types import BATCH, TensorType
from onchip.workloads import faces

SLOPE = 0.2  # of LeakyReLU
LAST_SCALE = 0.25  # of the generator's last initial weights: its first pictures are far from the ends of tanh
_PADS = (2, 2, 1, 1)  # of a convolution: the mirror of faces.PADS, halves the size
MAX_SHIFT, CUTOUT, BRIGHTNESS = 1 / 8, 1 / 2, 0.5  # of a side; of a side; of half the range of values
_STARTS = (4, 5, 6, 7)  # sides of the generator's first grid
_LINEAR = np.array([0.25, 0.75, 0.75, 0.25, 0], np.float32)  # where each element adds to twice as many


@dataclass(frozen=True)
class PictureSize:
    side: int
    colours: int  # 1 or 3

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.side, self.side, self.colours


def channels_of(size: PictureSize, width: int) -> tuple[int, tuple[int, ...]]:
    """The side of the first grid, and the channels of the projection and of each transposed convolution.

    width  channels before the last one; each layer before that has twice as many
    """
    for start in _STARTS:
        doublings = int(math.log2(size.side / start)) if size.side >= 2 * start else 0
        if doublings and start << doublings == size.side:
            return start, (*(width << i for i in reversed(range(doublings))), size.colours)
    raise InputError(
        "no generator for pictures of this size", got=f"{size.side} x {size.side}",
        expected="a side of 4, 5, 6 or 7 times a power of two, at least 8", hint="28, 32, 48, 64, 96 or 128 pixels",
    )  # fmt: skip


def generator(size: PictureSize, width: int, latent: int, seed: int) -> Network:
    """(B, latent) normal values -> (B, side, side, colours) in [-1, 1], with the initial weights of a seed."""
    start, channels = channels_of(size, width)
    net = faces.network(seed=seed, latent=latent, channels=channels, start=start)
    weights = {name: materialise(name, net.weights) for node in net.nodes for name in node.weights.values()}
    weights |= {name: _smooth(w) for name, w in weights.items() if w.ndim == 4}
    weights[f"tconv{len(channels) - 1}.weight"] *= np.float32(LAST_SCALE)
    weights |= {name: np.zeros_like(w) for name, w in weights.items() if name.endswith((".bias", ".mean"))}
    weights |= {name: np.ones_like(w) for name, w in weights.items() if name.endswith(".var")}
    return net.replace(weights=weights)


def _smooth(weight: Array) -> Array:
    """Initial weights (C_in, C_out, 5, 5) of a transposed convolution without a checkerboard pattern: one random value
    per pair of channels, times the kernel that interpolates linearly.
    """
    smooth: Array = weight[:, :, 2:3, 2:3] * np.float32(faces.KERNEL / 2) * np.outer(_LINEAR, _LINEAR)
    return smooth


def discriminator_weights(size: PictureSize, width: int, seed: int) -> dict[str, Array]:
    """The initial ones; all names begin with "d.". Batch norms, except after the first convolution."""
    start, channels = channels_of(size, width)
    rng, weights = np.random.default_rng([seed, 1]), dict[str, Array]()
    for i, (C_in, C_out) in enumerate(pairwise(reversed(channels)), start=1):
        weights[f"d.conv{i}.weight"] = _he(rng, (C_out, C_in, faces.KERNEL, faces.KERNEL))
        weights[f"d.conv{i}.bias"] = np.zeros(C_out, np.float32)
        if i > 1:
            values = {"weight": 1, "bias": 0, "mean": 0, "var": 1}
            weights |= {f"d.bn{i}.{role}": np.full(C_out, value, np.float32) for role, value in values.items()}
    D_in = channels[0] * start * start
    weights["d.logit.weight"] = _he(rng, (1, D_in))
    weights["d.logit.bias"] = np.zeros(1, np.float32)
    return weights


def _he(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal, of deviation sqrt(2 / fan-in)."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(math.sqrt(2 / math.prod(shape[1:])))


# -- the networks of the steps -------------------------------------------------------------------------------------


def generator_through(net: Network, weights: Mapping[str, Weight], size: PictureSize, augmented: bool) -> Network:
    """z -> the discriminator's logit (B, 1) of a generated picture."""
    kinds, more, picture = _augment(size, "fake", net.outputs[0]) if augmented else ({}, [], net.outputs[0])
    judge, logit = _discriminate(size, weights, "fake", picture)
    return Network({**net.inputs, **kinds}, (*net.nodes, *more, *judge), (logit,), {**net.weights, **weights}, "g_step")


def discriminator_alone(weights: Mapping[str, Weight], size: PictureSize) -> Network:
    nodes, logit = _discriminate(size, weights, "real", "x")
    return Network({"x": TensorType((BATCH, *size.shape))}, tuple(nodes), (logit,), dict(weights), "d")


def discriminator_on_both(net: Network, weights: Mapping[str, Weight], size: PictureSize, augmented: bool) -> Network:
    """A real picture x and z -> the logits (B, 2) of the real picture and of the generated one."""
    inputs, nodes, logits = {"x": TensorType((BATCH, *size.shape)), **net.inputs}, [*net.nodes], []
    for of, picture in (("real", "x"), ("fake", net.outputs[0])):
        kinds, more, picture = _augment(size, of, picture) if augmented else ({}, [], picture)
        judge, logit = _discriminate(size, weights, of, picture)
        inputs |= kinds
        nodes += [*more, *judge]
        logits.append(logit)
    nodes.append(Node("logits", Concat(1), tuple(logits)))
    return Network(inputs, tuple(nodes), ("logits",), {**net.weights, **weights}, "d_step")


def _discriminate(size: PictureSize, weights: Mapping[str, Weight], of: str, picture: str) -> tuple[list[Node], str]:
    """The discriminator's nodes for a picture (B, side, side, colours); and its logit (B, 1)."""
    nodes = [Node(f"d.{of}.nchw", Permute((0, 3, 1, 2)), (picture,))]
    for i in range(1, sum(name.startswith("d.conv") for name in weights) // 2 + 1):
        roles = {role: f"d.conv{i}.{role}" for role in ("weight", "bias")}
        nodes.append(Node(f"d.{of}.conv{i}", Conv2d((2, 2), _PADS), (nodes[-1].name,), roles))
        if f"d.bn{i}.mean" in weights:
            roles = {role: f"d.bn{i}.{role}" for role in ("weight", "bias", "mean", "var")}
            nodes.append(Node(f"d.{of}.bn{i}", BatchNorm2d(eps=1e-5), (nodes[-1].name,), roles))
        nodes.append(Node(f"d.{of}.relu{i}", LeakyReLU(SLOPE), (nodes[-1].name,)))
    nodes.append(Node(f"d.{of}.flat", Reshape((-1,)), (nodes[-1].name,)))
    roles = {role: f"d.logit.{role}" for role in ("weight", "bias")}
    nodes.append(Node(f"d.{of}.logit", Linear(), (nodes[-1].name,), roles))
    return nodes, nodes[-1].name


# -- random changes of pictures, with gradients through them -------------------------------------------------------


def _augment(size: PictureSize, of: str, picture: str) -> tuple[dict[str, TensorType], list[Node], str]:
    """Inputs and layers that shift pictures, cut a square out and change the brightness, each by its own row's values
    (see draw_changes); and the changed pictures.
    """
    (H, W, C), p = size.shape, f"{of}."
    inputs = {
        f"{p}rows": TensorType((BATCH, H, H)), f"{p}columns": TensorType((BATCH, W, W)),
        f"{p}kept": TensorType((BATCH, H, W, 1)), f"{p}brightness": TensorType((BATCH, 1, 1, 1)),
    }  # fmt: skip
    nodes = [
        Node(f"{p}lines", Reshape((H, W * C)), (picture,)),
        Node(f"{p}down", MatMul(), (f"{p}rows", f"{p}lines")),
        Node(f"{p}pixels", Reshape((H, W, C)), (f"{p}down",)),
        Node(f"{p}planes", Permute((0, 3, 1, 2)), (f"{p}pixels",)),
        Node(f"{p}plane_lines", Reshape((C * H, W)), (f"{p}planes",)),
        Node(f"{p}right", MatMul(), (f"{p}plane_lines", f"{p}columns")),
        Node(f"{p}shifted_planes", Reshape((C, H, W)), (f"{p}right",)),
        Node(f"{p}shifted", Permute((0, 2, 3, 1)), (f"{p}shifted_planes",)),
        Node(f"{p}brighter", Add(), (f"{p}shifted", f"{p}brightness")),
        Node(f"{p}augmented", Mul(), (f"{p}brighter", f"{p}kept")),
    ]
    return inputs, nodes, nodes[-1].name


def draw_changes(size: PictureSize, B: int, rng: np.random.Generator) -> tuple[Array, ...]:
    """What the layers of _augment read, float32: rows (B, H, H), columns (B, W, W), kept (B, H, W, 1), brightness
    (B, 1, 1, 1).
    """
    side = size.side
    most = round(side * MAX_SHIFT)
    shift, at = rng.integers(-most, most + 1, (2, B, 1, 1)), np.arange(side)
    rows = at[:, np.newaxis] == at + shift[0]  # row i of the result is row i - shift
    columns = at[:, np.newaxis] + shift[1] == at
    half, corner = round(side * CUTOUT / 2), rng.integers(0, side + 1, (2, B, 1))
    is_cut = np.abs(at + 0.5 - corner) < half
    kept = ~(is_cut[0][:, :, np.newaxis] & is_cut[1][:, np.newaxis])[..., np.newaxis]
    brightness = rng.uniform(-BRIGHTNESS, BRIGHTNESS, (B, 1, 1, 1))
    return tuple(each.astype(np.float32) for each in (rows, columns, kept, brightness))


def picture_values(images: Array) -> Array:
    """Bytes as the generator's values: x / 127.5 - 1."""
    return images.astype(np.float32) / np.float32(127.5) - np.float32(1)


def size_of(images: Sequence[Array] | Array) -> PictureSize:
    H, W, C = images[0].shape
    assert H == W
    return PictureSize(H, C)
