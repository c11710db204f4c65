"""Integer division: errors that say where a divisor is 0."""

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
    """The error for a division of ints by 0, by the layer of this name."""
    where = f"row {row}" + (f", position {', '.join(map(str, position))}" if position else "")
    return InputError(
        f"{where}: an int is divided by 0", got=f"0 as a divisor of '{name}'", expected="any other int",
        hint="floats, whose quotient is an infinity or NaN",
    )  # fmt: skip
