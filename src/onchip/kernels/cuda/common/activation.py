"""Activations as common/activation.cuh names them."""

from __future__ import annotations

import numpy as np

from onchip.kernels.pointwise import ACTIVATIONS, OPERATIONS, operation_of
from onchip.network.layers import Elementwise

# As common/epilogue.cuh counts them, from 1 on.
ACTIVATION_ROWS = tuple(row for row in OPERATIONS if row.layer in ACTIVATIONS)


def cpp_name(layer: Elementwise | None) -> str:
    """The struct, with the bits of its parameters as template arguments."""
    if layer is None:
        return "Identity"
    row = operation_of(layer)
    assert row is not None
    bits = [f"{int(value.view(np.uint32)):#010x}u" for value in row.told(layer)]
    return f"Fixed<{', '.join([row.cuda, *bits])}>" if bits else row.cuda


def act_name(layer: Elementwise | None) -> str:
    """How common/epilogue.cuh applies it: a longer one is a template argument, others are chosen at launch."""
    is_short = layer is None or layer.flop_each <= 4
    return "Activation" if is_short else f"Always<{cpp_name(layer)}>"


def activation_words(layer: Elementwise | None) -> tuple[int, int, int]:
    """A code and the bits of two floats."""
    if layer is None:
        return 0, 0, 0
    row = operation_of(layer)
    assert row is not None
    first, second, *_ = (*(int(value.view(np.uint32)) for value in row.told(layer)), 0, 0)
    return 1 + ACTIVATION_ROWS.index(row), first, second
