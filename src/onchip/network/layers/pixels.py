"""ToPixels: values between -1 and 1 as bytes."""

from __future__ import annotations

import numpy as np

from onchip.network.layers.base import Arrays, Layer, Types, Weights, WeightTypes, need_float
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class ToPixels(Layer):
    """uint8((x + 1) / 2 * 255), clipped to 0..255 and truncated; NaN becomes 0."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        need_float(inputs[0])
        return TensorType(inputs[0].shape, "uint8")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 3 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        scaled = np.clip((xs[0] + 1) / 2 * 255, 0, 255)
        return np.where(np.isnan(scaled), 0, scaled).astype(np.uint8)
