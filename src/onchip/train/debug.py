"""debug=True: checks every step, and finds the layer of the first non-finite value with the reference kernels."""

from __future__ import annotations

import numpy as np

from onchip.errors import KernelError
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.train.rows import Rows, by_name
from onchip.train.together import ConcurrentRuns


def take_checked_step(together: ConcurrentRuns, x: Rows) -> None:
    """Take one step of a single run on rows x; raise KernelError if its loss or an updated weight is not finite."""
    (run,) = together.runs
    assert run is not None
    where, rows = f"epoch {run.epoch + 1}, step {run.step + 1}", run.next_rows()
    before = run.trainer.weights()
    together.advance(1)
    loss = run.losses[-1][-1]
    after = run.trainer.weights()
    bad_name = next((name for name, w in after.items() if not np.isfinite(w).all()), None)
    if np.isfinite(loss) and bad_name is None:
        return
    net = run.net.replace(weights={**run.net.weights, **before})
    got = _first_value(net, x, rows)
    if not got:
        got = f"weight {show(bad_name)} is {_bad(after[bad_name])} after the update" if bad_name else f"loss {loss}"
    raise KernelError(
        f"a value is not finite in {where}", got=got, expected="finite values",
        hint="a smaller --lr (lr=)",
    )  # fmt: skip


def _first_value(net: Network, x: Rows, rows: Array) -> str:
    """Describe the first non-finite value of a forward pass over these rows of x; "" if all are finite."""
    inputs = by_name(x, tuple(net.inputs), "input").items()
    read = tuple(array[rows].reshape(len(rows), *net.inputs[name].row_shape) for name, array in inputs)
    values = reference.forward_all(net, read, "float32")
    for name, value in values.items():
        bad = np.flatnonzero(~np.isfinite(value.reshape(len(value), -1)).all(axis=1))
        if bad.size:
            return f"layer {show(name)} returns {_bad(value[bad[0]])} in row {rows[bad[0]]} of the training rows"
    return ""


def _bad(array: Array) -> str:
    flat = array.reshape(-1)
    return str(flat[np.argmin(np.isfinite(flat))])
