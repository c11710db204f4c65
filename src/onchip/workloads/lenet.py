"""lenet: handwritten digits by LeNet-5 with ReLU and max pools, another network of the digits workload."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onchip.errors import InputError
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import Conv2d, Layer, Linear, MaxPool2d, ReLU, Reshape
from onchip.network.recipe import Weight
from onchip.network.types import BATCH, TensorType
from onchip.train.options import TrainOptions
from onchip.workloads.digits import CLASSES, load_data

__all__ = ["TRAIN", "load_data", "network"]

CHANNELS, HIDDEN, KERNEL = (6, 16), (120, 84), 5
UNPADDED_SIDE = 12  # the second convolution is padded in smaller images, which would leave it no pixel
TRAIN = TrainOptions(loss="cross_entropy", optimiser="adam", lr=0.006, schedule="one_cycle", batch_size=64, epochs=4)


def network(
    pixels: int = 784, channels: Sequence[int] = CHANNELS, hidden: Sequence[int] = HIDDEN, seed: int = 0
) -> Network:
    """(B, 1, side, side) -> (B, 10) logits: two convolutions 5x5, each with a max pool of 2x2, then Linear layers.

    Weights are He-initialised: normal with variance 2 / fan-in from numpy.random.default_rng(seed), first layer to
    last; biases are zero.
    """
    side, quarter = math.isqrt(pixels), math.isqrt(pixels) // 4
    if side**2 != pixels or side % 4 or not side:
        expected, hint = "square images whose side is a multiple of 4", "--network mlp"
        raise InputError("lenet cannot read these rows", got=f"{pixels:,} values per row", expected=expected, hint=hint)
    rng, layers, weights, C = np.random.default_rng(seed), list[tuple[str, Layer]](), dict[str, Weight](), 1

    def add(name: str, layer: Layer, *shape: int) -> None:
        fan_in = math.prod(shape[1:])
        weights[f"{name}.weight"] = rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / fan_in))
        weights[f"{name}.bias"] = np.zeros(shape[0], np.float32)
        layers.append((name, layer))

    pads = (2, 0 if side >= UNPADDED_SIDE else 2)
    for i, (C_out, pad) in enumerate(zip(channels, pads, strict=True), start=1):
        add(f"conv{i}", Conv2d(pads=(pad,) * 4), C_out, C, KERNEL, KERNEL)
        layers += [(f"relu{i}", ReLU()), (f"pool{i}", MaxPool2d((2, 2), (2, 2)))]
        C = C_out
    layers.append(("flat", Reshape()))
    D = C * (quarter if pads[1] else quarter - 2) ** 2
    for i, D_out in enumerate((*hidden, CLASSES), start=1):
        add(f"fc{i}", Linear(), D_out, D)
        layers += [(f"relu{i + 2}", ReLU())] if i <= len(hidden) else []
        D = D_out
    return sequential(TensorType((BATCH, 1, side, side)), layers, weights, name="lenet5")
