"""A training step over a data set that stays on the device: the host has nothing to do between steps.

`over_rows` turns a step (step.py) into one whose inputs are state: the rows of the data, their order, the optimiser's
values of every step, and the counters. Only `share` (B,) remains an input. State that only the caller writes:

    x.data, target.data  (N, ...): the rows of the data set, of every input of the network, and their targets
    step.order           (M,) int64: which rows the steps read, one step's after the other's
    step.table           (S, 5): the optimiser's values of every step

and what each step replaces:

    step.position        (2,) int64: the number of the step, and the position in the order of its first row
    step.log             (S,): the loss of every step
    step.draw            (2,) int64, of a step with dropouts: the seed, and the number of their next draw

Write `begin_steps` before the first step, again to begin another epoch. The rows of step s begin in the order where
those of the step before end, so steps may have different batch sizes: the last one of an epoch is a run of fewer rows.
"""

from __future__ import annotations

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import Counted, DataRows, Logged, RowIds, StepRow
from onchip.network.layers.optimiser import STEP_VALUES
from onchip.network.recipe import Array, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import SHARE, VALUES
from onchip.plan.gradient.training_form import DRAW

ORDER, TABLE, POSITION, LOG = "step.order", "step.table", "step.position", "step.log"  # weights
IDS, ROW = "step.ids", "step.row"  # values


def over_rows(step: Network, N: int, S: int, M: int = 0) -> Network:
    """The same step over a data set.

    step  as of training_step
    N, S  rows of the data set, and steps until the table of the optimiser's values is written again
    M     row ids in the order; 0: N, so that an epoch reads every row once
    """
    for what, size in (("rows", N), ("steps", S), ("row ids", M or N)):
        if size < 1:
            raise InputError(f"no {what}", got=str(size), expected="at least 1")
    if SHARE not in step.inputs or VALUES not in step.state:
        raise InputError("not a training step", got=f"network '{step.name}'", expected="what training_step returns")
    arrays = _arrays(step, N, S, M or N)
    weights = {name: weight for name, weight in step.weights.items() if name != VALUES}
    build = StepBuilder([], {**weights, **arrays}, {SHARE: step.inputs[SHARE]})
    at, (loss,) = {"position": POSITION}, step.outputs
    ids = build.add(IDS, RowIds(), (SHARE,), at | {"order": ORDER})
    for name in step.inputs:
        if name != SHARE:
            build.add_node(Node(name, DataRows(), (ids,), {"data": _data(name)}))
    values = build.add(ROW, StepRow(), (SHARE,), at | {"table": TABLE})
    build.weights[VALUES] = build.weights.pop(build.as_weight(values))
    for node in step.nodes:
        build.add_node(node)
    state = {name: value for name, value in step.state.items() if name != VALUES} | dict.fromkeys(arrays, "")
    state[POSITION] = build.add(f"{POSITION}.new", Counted((1, 0), (0, 1)), (SHARE,), {"counters": POSITION})
    if DRAW in state:
        state[DRAW] = build.add(f"{DRAW}.new", Counted((0, 1), (0, 0)), (SHARE,), {"counters": DRAW})
    state[LOG] = build.add(f"{LOG}.new", Logged(), (loss,), at | {"log": LOG})
    name = f"{step.name} over {N:,} rows"
    return Network({SHARE: step.inputs[SHARE]}, tuple(build.nodes), step.outputs, build.weights, name, state=state)


def _data(name: str) -> str:
    """The state with the data set's rows of an input."""
    return f"{name}.data"


def _arrays(step: Network, N: int, S: int, M: int) -> dict[str, Array]:
    """The state that a data set adds."""
    (loss,) = step.outputs
    arrays: dict[str, Array] = {
        ORDER: np.zeros(M, np.int64), TABLE: np.zeros((S, len(STEP_VALUES)), np.float32),
        POSITION: np.zeros(2, np.int64), LOG: np.zeros(S, numpy_dtype(step.types[loss].dtype)),
    }  # fmt: skip
    for name, kind in step.inputs.items():
        if name != SHARE:
            arrays[_data(name)] = np.zeros((N, *kind.row_shape), numpy_dtype(kind.dtype))
    if taken := next((name for name in (IDS, ROW, *arrays) if name in step.types or name in step.weights), ""):
        raise InputError(f"a value of the network is called '{taken}'", got=taken, expected="another name")
    return arrays


def begin_steps(step: Network, order: Array, table: Array) -> dict[str, Array]:
    """The state with which the first of these steps begins, to write: the order, the table, the position and the log.

    InputError for ids that are not rows of the data set: a step would read another row in their place.

    order  (at most M,) row ids
    table  (at most S, 5): the optimiser's values of every step, in the order of STEP_VALUES
    """
    data = (node.weights["data"] for node in step.nodes if isinstance(node.layer, DataRows))
    N = min(step.weights[name].shape[0] for name in data)
    if len(order) and not 0 <= order.min() <= order.max() < N:
        got = f"{order.min()} to {order.max()}"
        raise InputError("the order has an id that is not a row of the data set", got=got, expected=f"0 to {N - 1}")
    state = {name: np.zeros_like(materialise(name, step.weights)) for name in (ORDER, TABLE, POSITION, LOG)}
    for name, array in ((ORDER, order), (TABLE, table)):
        if len(array) > len(state[name]):
            raise InputError(f"{name} is too long", got=str(len(array)), expected=f"at most {len(state[name])}")
        state[name][: len(array)] = array
    return state
