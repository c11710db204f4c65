"""ToPixels: values between -1 and 1 as bytes."""

from __future__ import annotations

from onchip.network.layers.base import Layer, Types, WeightTypes, need_float
from onchip.network.types import TensorType


class ToPixels(Layer):
    """uint8((x + 1) / 2 * 255), clipped to 0..255 and truncated; NaN becomes 0."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        need_float(inputs[0])
        return TensorType(inputs[0].shape, "uint8")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 3 * inputs[0].row_size
