"""Activations by their names in common/activation.cuh and codes in common/epilogue.cuh."""

from __future__ import annotations

import numpy as np

from onchip.kernels.pointwise import ACTIVATIONS, OPERATIONS, operation_of
from onchip.network.layers import Elementwise

# In the order of the codes of Activation in common/epilogue.cuh, which start at 1.
ACTIVATION_ROWS = tuple(row for row in OPERATIONS if row.layer in ACTIVATIONS)


def cpp_name(layer: Elementwise | None) -> str:
    """The C++ struct, with the bits of its parameters as template arguments."""
    if layer is None:
        return "Identity"
    row = operation_of(layer)
    assert row is not None
    bits = [f"{int(value.view(np.uint32)):#010x}u" for value in row.float32_parameters(layer)]
    return f"Fixed<{', '.join([row.cuda, *bits])}>" if bits else row.cuda


def act_name(layer: Elementwise | None) -> str:
    """The epilogue's activation type: long functions are template arguments, short ones are selected at launch."""
    is_short = layer is None or layer.flop_each <= 4
    return "Activation" if is_short else f"Always<{cpp_name(layer)}>"


def activation_words(layer: Elementwise | None) -> tuple[int, int, int]:
    """The activation code and the bits of two float parameters, as kernel arguments."""
    if layer is None:
        return 0, 0, 0
    row = operation_of(layer)
    assert row is not None
    first, second, *_ = (*(int(value.view(np.uint32)) for value in row.float32_parameters(layer)), 0, 0)
    return 1 + ACTIVATION_ROWS.index(row), first, second
