"""Steps over a data set against the same steps one by one, with rows from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchNorm2d,
    BatchSum,
    Conv2d,
    Counted,
    DataRows,
    Dropout,
    Embedding,
    GlobalMean,
    Linear,
    Logged,
    MaxPool2d,
    ReLU,
    Reshape,
    RowIds,
    StepRow,
)
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.gradient.over_rows import begin_steps, over_rows
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.gradient.training_form import DRAW
from onchip.runtime.cpu.step import CpuStep
from training_steps import by_layers

Arrays = dict[str, np.ndarray]


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32) / np.float32(shape[-1])


def images() -> Network:
    """A convolution, a norm of the batch, a pool and two dropouts."""
    layers = [
        ("c", Conv2d((1, 1))), ("n", BatchNorm2d()), ("r", ReLU()), ("p", MaxPool2d((2, 2), (2, 2))),
        ("d", Dropout(0.25)), ("flat", Reshape()), ("a", Linear()), ("e", Dropout(0.5)), ("b", Linear()),
    ]  # fmt: skip
    weights = {"c.weight": weight(4, 3, 3, 3), "c.bias": weight(4), "a.weight": weight(9, 36), "b.weight": weight(3, 9)}
    weights |= {f"n.{role}": np.abs(weight(4)) + 0.5 for role in ("mean", "var", "weight", "bias")}
    return sequential(TensorType(("B", 3, 8, 8)), layers, weights)


def sentences() -> Network:
    """Rows of ids, and numbers that are added."""
    nodes = (
        Node("rows", Embedding(), ("x",), {"weight": "table"}), Node("mean", GlobalMean((1,)), ("rows",)),
        Node("y", Linear(), ("mean",), {"weight": "w"}),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 5), "int64")}, nodes, ("y",), {"table": weight(11, 6), "w": weight(3, 6)})


CASES = {
    "mlp": (lambda: mlp(7, 20, 3), TrainingStep("cross_entropy", "adamw", 0.1, clip_norm=0.5)),
    "squares": (lambda: mlp(5, 9, 3), TrainingStep("mse", "nesterov", ema=0.9)),
    "images": (images, TrainingStep("cross_entropy", "momentum")),
    "sentences": (sentences, TrainingStep("cross_entropy", "sgd")),
}
# Rows of the data set and batch sizes of the steps: the last one is shorter, of one row, or of the same.
BATCHES = [(37, (16, 16, 5)), (9, (4, 4, 1)), (6, (3, 3)), (1, (1, 1))]


def data_of(step: Network, N: int) -> Arrays:
    """A data set for a step: N rows of every input but the share."""
    rng, data = np.random.default_rng(N), Arrays()
    for name, kind in step.inputs.items():
        if name == "share":
            continue
        if "int" in kind.dtype:
            data[name] = rng.integers(0, 3, (N, *kind.row_shape)).astype(numpy_dtype(kind.dtype))
        else:
            data[name] = rng.standard_normal((N, *kind.row_shape)).astype(numpy_dtype(kind.dtype))
    return data


def table_of(S: int) -> np.ndarray:
    steps = range(1, S + 1)
    return np.array([[0.05 / s, 0.01, 0.9, 1 - 0.9**s, 1 - 0.999**s] for s in steps], np.float32)


def share(B: int) -> np.ndarray:
    return np.full(B, 1 / B, np.float32)


def first_state(step: Network) -> Arrays:
    """The state before the first step, besides rows, values and counters of a data set."""
    state = {name: np.asarray(step.weights[name]) for name in step.state}
    return state | ({DRAW: np.array([7, 3])} if DRAW in state else {})


def write(bound, state: Arrays) -> None:
    if not isinstance(bound, CpuStep):
        bound.write_state(state)
        return
    for name, array in state.items():
        bound.state[name][...] = array


def read(bound) -> Arrays:
    state = bound.state if isinstance(bound, CpuStep) else bound.read_state()
    return {name: array.copy() for name, array in state.items()}


def one_by_one(step: Network, bind: Callable, batches: Sequence[int], data: Arrays, order: np.ndarray) -> Arrays:
    """The state after steps with rows from the host, and the loss of each as "losses"."""
    bound, losses, begin = bind(step), [], 0
    write(bound, first_state(step))
    for number, B in enumerate(batches):
        ids = order[begin : begin + B]
        now = {VALUES: table_of(len(batches))[number]}
        if DRAW in step.state:
            now[DRAW] = np.array([7, 3 + number])
        write(bound, now)
        rows = {name: array[ids] for name, array in data.items()} | {"share": share(B)}
        losses.append(bound.run(rows, B)["loss"][0])
        begin += B
    return {name: array for name, array in read(bound).items() if name not in (VALUES, DRAW)} | {
        "losses": np.array(losses)
    }


def order_of(N: int, batches: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(N).permutation(np.arange(sum(batches)) % N)


def made(case: str, N: int, batches: Sequence[int]) -> tuple[Network, Network, Arrays]:
    """A step, the same over a data set, and the state that this one begins with."""
    network, training = CASES[case]
    step = by_layers(training_step(network(), training, decays=True))
    whole = over_rows(step, N, len(batches), sum(batches))
    data = {f"{name}.data": array for name, array in data_of(step, N).items()}
    begun = begin_steps(whole, order_of(N, batches), table_of(len(batches)))
    return step, whole, first_state(whole) | data | begun


# -- single launches -----------------------------------------------------------------------------------------------


def rows_of_any_kind(dtype: str, row: tuple[int, ...], kept: Sequence[str] = ("ids", "rows", "row")) -> Network:
    """What begins a step, with ids outside the data, and positions outside order and table."""
    N = 40
    data = np.random.default_rng(0).integers(0, 2, (N, *row)).astype(numpy_dtype(dtype))
    weights = {"data": data, "order": np.arange(-3, 5000) % 43 - 1, "position": np.array([9, 2500])}
    weights["table"] = np.arange(20, dtype=np.float64).reshape(4, 5)
    nodes = (
        Node("ids", RowIds(), ("x",), {"order": "order", "position": "position"}),
        Node("rows", DataRows(), ("ids",), {"data": "data"}),
        Node("row", StepRow(), ("x",), {"table": "table", "position": "position"}),
    )
    return Network({"x": TensorType(("B", 2))}, nodes, tuple(kept), weights, state=dict.fromkeys(weights, ""))


def logged() -> Network:
    """What ends a step. The log and the position are outputs, too, and so are not replaced in place."""
    weights = {"log": np.zeros(3, np.float32), "position": np.array([0, 0]), "draw": np.array([5, 0])}
    nodes = (
        Node("sum", BatchSum(), ("x",)),
        Node("next", Counted((1, 0), (0, 1)), ("x",), {"counters": "position"}),
        Node("logged", Logged(), ("sum",), {"log": "log", "position": "position"}),
        Node("drawn", Counted((0, 2), (3, 0)), ("x",), {"counters": "draw"}),
    )
    state = {"log": "logged", "position": "next", "draw": "drawn"}
    return Network({"x": TensorType(("B",))}, nodes, ("logged", "next"), weights, state=state)


class DlpackArray:
    """An array of another library, of the host."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape = array, array.shape

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()
