"""Integer division: errors that locate a divisor of 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array


def check_divisors(divisors: Array, name: str) -> None:
    """InputError for the first 0 of divisors (B, ...)."""
    if not divisors.all():
        row, *position = (int(i) for i in np.argwhere(divisors == 0)[0])
        raise zero_divisor(row, position, name)


def zero_divisor(row: int, position: Sequence[int], name: str) -> InputError:
    """The error for an integer division by 0 in the layer of this name."""
    where = f"row {row}" + (f", position {', '.join(map(str, position))}" if position else "")
    return InputError(
        f"{where}: integer division by 0", got=f"a divisor of 0 in '{name}'", expected="other ints",
        hint="floats, which divide by 0 to infinity or NaN",
    )  # fmt: skip
