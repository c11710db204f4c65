"""Activations by the names of their structs, and by their codes at run time (common/epilogue.cuh)."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cuda.common.layers import struct_of
from onchip.kernels.pointwise import CODES, operation_of
from onchip.network.layers import Elementwise


def cpp_name(layer: Elementwise | None) -> str:
    """The C++ struct, with the bits of its parameters as template arguments."""
    if layer is None:
        return "Identity"
    row = operation_of(layer)
    assert row is not None
    bits = [f"{int(value.view(np.uint32)):#010x}u" for value in row.float32_parameters(layer)]
    return f"Fixed<{', '.join([struct_of(row), *bits])}>" if bits else struct_of(row)


def act_name(layer: Elementwise | None) -> str:
    """The epilogue's activation type: long functions, and those without a code, are template arguments; short ones are
    selected at launch."""
    is_short = layer is None or (layer.flop_each <= 4 and operation_of(layer) in CODES)
    return "Activation" if is_short else f"Always<{cpp_name(layer)}>"


def activation_words(layer: Elementwise | None) -> tuple[int, int, int]:
    """The activation code and the bits of two float parameters, as kernel arguments; zeros without a code."""
    row = None if layer is None else operation_of(layer)
    if layer is None or row not in CODES:
        return 0, 0, 0
    first, second, *_ = (*(int(value.view(np.uint32)) for value in row.float32_parameters(layer)), 0, 0)
    return CODES[row], first, second
