"""The precisions that kernels compute in, and values rounded to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


@dataclass(frozen=True)
class Precision:
    """What a network is computed in, as the kernel's template knows it."""

    name: str
    dtype: str  # of the weights in shared memory
    per_word: int  # numbers in 32 bits of a fragment
    parts: int = 1  # the matrices that stand for one

    @property
    def step(self) -> int:
        """Columns of k that meet in one instruction."""
        return 8 * self.per_word


PRECISIONS = {
    "fp32": Precision("Fp32", "float32", 1, parts=2),
    "tf32": Precision("Tf32", "float32", 1),
    "bf16": Precision("Bf16", "bfloat16", 2),
    "fp16": Precision("Fp16", "float16", 2),
}


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def narrowed(weight: Array, dtype: str) -> Array:
    """In 16 bits; InputError where a number is too large for them."""
    with np.errstate(over="ignore"):
        narrow: Array = weight.astype(numpy_dtype(dtype))
    if not np.array_equal(np.isfinite(narrow), np.isfinite(weight)):
        got = f"{np.abs(weight[np.isfinite(weight)]).max():.4g}"
        raise InputError(f"a weight is too large for {dtype}", got=got, hint="precision 'bf16', 'tf32' or 'fp32'")
    return narrow


def round_tf32(values: Array) -> Array:
    """To 10 bits behind the point, halves away from zero: what cvt.rna.tf32 does. NaNs and infinities stay."""
    rounded = ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)
