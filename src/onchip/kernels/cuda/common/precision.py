"""Compute precisions: their cost and reduction order on the tensor cores, and rounding to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.plan.kernel import Cost


@dataclass(frozen=True)
class Precision:
    """A compute precision, as kernel templates name it (common/dtype.cuh)."""

    name: str
    dtype: str  # of the weights in shared memory
    per_word: int  # elements per 32-bit word of a fragment
    splits: int = 1  # 2: float32 weights are split into two tf32 matrices (3xTF32)

    @property
    def step(self) -> int:
        """Elements of k per mma instruction."""
        return 8 * self.per_word


PRECISIONS = {
    "fp32": Precision("Fp32", "float32", 1, splits=2),
    "tf32": Precision("Tf32", "float32", 1),
    "bf16": Precision("Bf16", "bfloat16", 2),
    "fp16": Precision("Fp16", "float16", 2),
}


def tensor_core_cost(precision: str, flop: int, row_bytes: int, fixed_bytes: int, **fields: Any) -> Cost:
    """The cost of gemms with `flop` per row; 3xTF32 computes three gemms for one in fp32."""
    is_split = PRECISIONS[precision].splits > 1
    computed = "tf32" if is_split else ""
    return Cost(flop * (3 if is_split else 1), row_bytes, fixed_bytes, precision=computed, **fields)


def order_of(precision: str, instruction: str, part: int, k: str = "k") -> str:
    """The reduction order. part: K elements per partial sum of 3xTF32."""
    operand = PRECISIONS[precision]
    partial_sums = f", partial sums of {part}" if operand.splits > 1 else ""
    return f"{k} in steps of {operand.step} by {instruction}{partial_sums}"


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def narrowed(weight: Array, dtype: str) -> Array:
    """The weight in a 16-bit dtype; InputError where a value overflows."""
    with np.errstate(over="ignore"):
        narrow: Array = weight.astype(numpy_dtype(dtype))
    if not np.array_equal(np.isfinite(narrow), np.isfinite(weight)):
        got = f"{np.abs(weight[np.isfinite(weight)]).max():.4g}"
        raise InputError(f"a weight is too large for {dtype}", got=got, hint="precision 'bf16', 'tf32' or 'fp32'")
    return narrow


def round_tf32(values: Array) -> Array:
    """Round to a 10-bit mantissa, ties away from zero, as cvt.rna.tf32 does. NaNs and infinities stay."""
    rounded = ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)
