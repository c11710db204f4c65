"""Where the first number that is not finite appears: a step at a time, and the naive run for the layer's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from onchip.errors import KernelError
from onchip.kernels import reference
from onchip.spec.network import Network
from onchip.spec.recipe import Array

if TYPE_CHECKING:
    from onchip.kernels.cpu.mlp_train import Trainer


def check_step(
    net: Network, trainer: Trainer, advance: Callable[[int], Array], where: Callable[[], tuple[int, int, Array]]
) -> None:
    """Take one step; KernelError if its loss or a weight behind it is not finite.

    advance  takes steps and returns their losses
    where    the epoch, the step and the rows of the next step
    """
    epoch, step, rows = where()
    before = trainer.weights()
    (loss,) = advance(1)
    after = trainer.weights()
    broken = next((name for name, w in after.items() if not np.isfinite(w).all()), None)
    if np.isfinite(loss) and broken is None:
        return
    got = _first_value(net.replace(weights={**net.weights, **before}), trainer.x[rows], rows)
    if not got:
        got = f"the update made {_bad(after[broken])} of weight '{broken}'" if broken else f"loss {loss}"
    raise KernelError(
        f"a number is not finite in epoch {epoch}, step {step}", got=got, expected="finite numbers",
        hint="a smaller --lr, or rows without NaN and infinity",
    )  # fmt: skip


def _first_value(net: Network, x: Array, rows: Array) -> str:
    """The first value of a forward run that is not finite, "" if all are."""
    values = reference.forward_all(net, x.reshape(len(x), *net.input.row_shape), "float32")
    for name, value in values.items():
        bad = np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(axis=1))
        if bad.size:
            what = "the input has" if name in net.inputs else f"layer '{name}' gives"
            return f"{what} {_bad(value[bad[0]])} in row {rows[bad[0]]}"
    return ""


def _bad(array: Array) -> str:
    flat = array.reshape(-1)
    return str(flat[np.argmin(np.isfinite(flat))])
