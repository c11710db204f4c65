"""Activations as activation.cuh names them."""

from __future__ import annotations

import math

import numpy as np

from onchip.spec.layers import GELU, Clip, Elementwise, LeakyReLU, ReLU, Sigmoid, SiLU, Tanh

ACTIVATIONS: tuple[type[Elementwise], ...] = (ReLU, LeakyReLU, Clip, Sigmoid, Tanh, SiLU, GELU)


def cpp_name(layer: Elementwise | None) -> str:
    """The struct, with the bits of its parameters as template arguments."""
    if layer is None:
        return "Identity"
    if isinstance(layer, LeakyReLU):
        return f"LeakyReLU<{_bits(layer.slope)}>"
    if isinstance(layer, Clip):
        low = -math.inf if layer.low is None else layer.low
        high = math.inf if layer.high is None else layer.high
        return f"Clip<{_bits(low)}, {_bits(high)}>"
    if isinstance(layer, GELU) and layer.approximate == "tanh":
        return "TanhGELU"
    return layer.kind


def _bits(value: float) -> str:
    return f"{int(np.float32(value).view(np.uint32)):#010x}u"
