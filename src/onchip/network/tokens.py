"""Token ids: errors that locate an unknown id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array


def check_token_ids(x: Array, limit: int, first_row: int = 0, name: str = "ids") -> None:
    """InputError for the first id of x (B, ...) that is not in 0 .. limit - 1.

    first_row  the row index of x[0] in the message: x may be a chunk of a file
    """
    if x.size == 0 or (x.min() >= 0 and x.max() < limit):
        return
    row, *position = (int(i) for i in np.argwhere((x < 0) | (x >= limit))[0])
    raise bad_id(first_row + row, position, int(x[(row, *position)]), limit, name)


def bad_id(row: int, position: Sequence[int], got: int, limit: int, name: str) -> InputError:
    """The error for an id that is not in 0 .. limit - 1."""
    where = f"row {row}" + (f", position {', '.join(map(str, position))}" if position else "")
    return InputError(
        f"{where}: id {got}, expected 0 to {limit - 1}", got=f"{got} in '{name}'",
        expected=f"ids of this network's {limit:,} tokens", hint="ids and weights of the same vocabulary",
    )  # fmt: skip
