"""A training step, or an evaluation, over a data set that stays on the device: the host has nothing to do between
steps.

`over_rows` turns a step (step.py, evaluation.py) into one whose inputs are state: the rows of the data, their order,
the optimiser's values of every step, and the counters. Only `share` (B,) remains an input. State that only the caller
writes:

    x.data, target.data  (N, ...): the rows of the data set, of every input of the network, and their targets
    step.order           (M,) int64: which rows the steps read, one step's after the other's
    step.table           (S, 5): the optimiser's values of every step, of a training step
    step.weights         (N,): the weight of every row, if rows have weights
    step.scales          (S,): what a step multiplies them by, for shares of the loss; `share` only says the batch size

and what each step replaces:

    step.position        (2,) int64: the number of the step, and the position in the order of its first row
    step.log             (S,): the loss of every step
    step.correct_log     (S,): the correct predictions of every step, if the step counts them
    step.log.1, ...      (S,): of a step with several losses, each of them, with its weight
    step.draw            (2,) int64, of a step with dropouts: the seed, and the number of their next draw

Write `begin_steps` before the first step, again to begin another epoch. The rows of step s begin in the order where
those of the step before end, so steps may have different batch sizes: the last one of an epoch is a run of fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import Counted, DataRows, Logged, Mul, RowIds, StepRow
from onchip.network.layers.optimiser import STEP_VALUES
from onchip.network.recipe import Array, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import SHARE, VALUES
from onchip.plan.gradient.training_form import DRAW

ORDER, TABLE, POSITION, LOG = "step.order", "step.table", "step.position", "step.log"  # weights
CORRECT_LOG, ROW_WEIGHTS, SCALES = "step.correct_log", "step.weights", "step.scales"
IDS, ROW, WEIGHTS, SCALE, SHARES = "step.ids", "step.row", "step.weight", "step.scale", "step.share"  # values


def log_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """The logs of a step's outputs: of its loss, then of its correct predictions or of several losses."""
    return (LOG, CORRECT_LOG)[: len(outputs)] if len(outputs) <= 2 else (LOG, *part_logs(len(outputs) - 1))


def part_logs(count: int) -> tuple[str, ...]:
    """The logs of several losses."""
    return tuple(f"{LOG}.{i + 1}" for i in range(count))


def is_log(state: str) -> bool:
    return state in (LOG, CORRECT_LOG) or state.startswith(f"{LOG}.")


def over_rows(step: Network, N: int, S: int, M: int = 0, *, is_weighted: bool = False) -> Network:
    """The same step over a data set.

    step         as of training_step or evaluation_step
    N, S         rows of the data set, and steps until the order is written again
    M            row ids in the order; 0: N, so that an epoch reads every row once
    is_weighted  rows have weights
    """
    _check(step, rows=N, steps=S, **{"row ids": M or N})
    arrays = _counters(step, S) | _data_set(step, N, S, M or N, is_weighted)
    build, renamed = _builder(step, arrays, (SHARE,)), {}
    ids = build.add(IDS, RowIds(), (SHARE,), {"order": ORDER, "position": POSITION})
    for name in step.inputs:
        if name != SHARE:
            build.add_node(Node(name, DataRows(), (ids,), {"data": data_name(name)}))
    if is_weighted:
        weight = build.add(WEIGHTS, DataRows(), (ids,), {"data": ROW_WEIGHTS})
        scale = build.as_weight(build.add(SCALE, StepRow(), (SHARE,), {"table": SCALES, "position": POSITION}))
    _add_values(build, step)
    if is_weighted:  # after all that one kernel reads
        renamed = {SHARE: build.add(SHARES, Mul(), (weight,), {"constant": scale})}
    for node in step.nodes:
        build.add_node(replace(node, inputs=tuple(renamed.get(name, name) for name in node.inputs)))
    return _finished(build, step, arrays, (SHARE,), f"{step.name} over {N:,} rows")


def counted_steps(step: Network, S: int) -> Network:
    """The same step with a table of the optimiser's values of S steps and a log of their losses; rows remain inputs."""
    _check(step, steps=S)
    arrays, inputs = _counters(step, S), tuple(step.inputs)
    build = _builder(step, arrays, inputs)
    _add_values(build, step)
    for node in step.nodes:
        build.add_node(node)
    return _finished(build, step, arrays, inputs, f"{step.name}, counted")


def _check(step: Network, **sizes: int) -> None:
    for what, size in sizes.items():
        if size < 1:
            raise InputError(f"no {what}", got=str(size), expected="at least 1")
    if SHARE not in step.inputs or not step.state or POSITION in step.state:
        expected = "what training_step or evaluation_step returns"
        raise InputError("not a step", got=f"network '{step.name}'", expected=expected)


def _builder(step: Network, arrays: Mapping[str, Array], inputs: Iterable[str]) -> StepBuilder:
    added = (IDS, ROW, WEIGHTS, SCALE, SHARES, *arrays)
    if taken := next((name for name in added if name in step.types or name in step.weights), ""):
        raise InputError(f"a value of the network is called '{taken}'", got=taken, expected="another name")
    weights = {name: weight for name, weight in step.weights.items() if name != VALUES}
    return StepBuilder([], {**weights, **arrays}, {name: step.inputs[name] for name in inputs})


def _add_values(build: StepBuilder, step: Network) -> None:
    """The optimiser's values of the step, from the table."""
    if VALUES in step.state:
        values = build.add(ROW, StepRow(), (SHARE,), {"table": TABLE, "position": POSITION})
        build.weights[VALUES] = build.weights.pop(build.as_weight(values))


def _finished(build: StepBuilder, step: Network, arrays: Iterable[str], inputs: Iterable[str], name: str) -> Network:
    """The network, with the counters and the logs at its end."""
    state = {name: value for name, value in step.state.items() if name != VALUES} | dict.fromkeys(arrays, "")
    state[POSITION] = build.add(f"{POSITION}.new", Counted((1, 0), (0, 1)), (SHARE,), {"counters": POSITION})
    if DRAW in state:
        state[DRAW] = build.add(f"{DRAW}.new", Counted((0, 1), (0, 0)), (SHARE,), {"counters": DRAW})
    for output, log in zip(step.outputs, log_names(step.outputs), strict=True):
        state[log] = build.add(f"{log}.new", Logged(), (output,), {"log": log, "position": POSITION})
    kept = {name: step.inputs[name] for name in inputs}
    return Network(kept, tuple(build.nodes), step.outputs, build.weights, name, state=state)


def data_name(name: str) -> str:
    """The state with the data set's rows of an input."""
    return f"{name}.data"


def _counters(step: Network, S: int) -> dict[str, Array]:
    """The state of S steps without the host between them."""
    arrays: dict[str, Array] = {POSITION: np.zeros(2, np.int64)}
    for output, log in zip(step.outputs, log_names(step.outputs), strict=True):
        arrays[log] = np.zeros(S, numpy_dtype(step.types[output].dtype))
    if VALUES in step.state:
        arrays[TABLE] = np.zeros((S, len(STEP_VALUES)), np.float32)
    return arrays


def _data_set(step: Network, N: int, S: int, M: int, is_weighted: bool) -> dict[str, Array]:
    """The state that a data set adds."""
    arrays: dict[str, Array] = {ORDER: np.zeros(M, np.int64)}
    if is_weighted:
        dtype = numpy_dtype(step.inputs[SHARE].dtype)
        arrays |= {ROW_WEIGHTS: np.zeros(N, dtype), SCALES: np.zeros(S, dtype)}
    for name, kind in step.inputs.items():
        if name != SHARE:
            arrays[data_name(name)] = np.zeros((N, *kind.row_shape), numpy_dtype(kind.dtype))
    return arrays


def begin_steps(
    step: Network, order: Array, table: Array | None = None, scales: Array | None = None
) -> dict[str, Array]:
    """The state with which the first of these steps begins, to write: the order, the table, the position and the logs.

    InputError for ids that are not rows of the data set: a step would read another row in their place.

    order   (at most M,) row ids; none without a data set
    table   (at most S, 5): the optimiser's values of every step, in the order of STEP_VALUES
    scales  (at most S,): of weighted rows
    """
    data = (node.weights["data"] for node in step.nodes if isinstance(node.layer, DataRows))
    N = min((step.weights[name].shape[0] for name in data), default=0)
    if len(order) and not 0 <= order.min() <= order.max() < N:
        got = f"{order.min()} to {order.max()}"
        raise InputError("the order has an id that is not a row of the data set", got=got, expected=f"0 to {N - 1}")
    written = {ORDER: order, POSITION: np.zeros(0), **dict.fromkeys(filter(is_log, step.state), np.zeros(0))}
    written |= {TABLE: table} if table is not None else {}
    written |= {SCALES: scales} if scales is not None else {}
    state = {name: np.zeros_like(materialise(name, step.weights)) for name in written if name in step.state}
    for name in state:
        if len(written[name]) > len(state[name]):
            got, expected = str(len(written[name])), f"at most {len(state[name])}"
            raise InputError(f"{name} is too long", got=got, expected=expected)
        state[name][: len(written[name])] = written[name]
    return state
