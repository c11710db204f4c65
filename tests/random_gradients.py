"""Random training steps from a seed, and the check that compares their runs with the float64 reference.

`python tests/random_gradients.py FIRST LAST [--device cpu|cuda|emulated] [--precision fp32]` prints those that are
wrong, of the seeds from FIRST to before LAST. No GPU runs all of them: those refused are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any
from unittest import mock

import numpy as np
import pytest

from emulated_engine import emulate_device
from onchip.errors import InputError, PlanError
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Cast,
    Ceil,
    Comparison,
    CrossEntropy,
    Descent,
    Div,
    Dropout,
    Floor,
    Identity,
    Linear,
    Log,
    Mul,
    Pow,
    Reciprocal,
    Reshape,
    Round,
    Sign,
    Sqrt,
)  # fmt: skip
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.gradient.step import SHARE, TARGET, VALUES, training_step
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import TRAINING_PRECISIONS, Job
from onchip.plan.plan import Plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan
from random_networks import random_inputs, random_network
from training_steps import by_layers, run_step

MAX_ROWS = 33
# Of the errors of naive runs with weights a rounding apart, where a single one is exceeded. Adam divides a gradient by
# its size: where it cancels, rounding decides how far a weight moves.
FACTORS = {"sgd": 3, "momentum": 3, "nesterov": 3, "adam": 16, "adamw": 16}
NUDGED_RUNS, DRAWS = 8, 3
TOLERANCE = 1e-4  # of a slope
DIFFERENCES = (1e-5, 1e-6, 1e-7)  # of weights: a kink between two points is far from most of them
NEEDS_NO_ZERO = (Div, Pow, Log, Sqrt, Reciprocal)
JUMPS = (Round, Floor, Ceil, Sign, Comparison)  # whose gradients are 0, and differences are not
State = Mapping[str, np.ndarray]
Rows = tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """A step of training, its rows and its state; a second step has other numbers of rows."""

    net: Network
    by_descent: Network  # the same with plain SGD
    how: TrainingStep
    batches: tuple[int, int]
    planned: int  # the batch that the plan is for
    seed: int
    lr: float

    def __str__(self) -> str:
        return f"{self.how}, batches {self.batches}, planned for {self.planned}, lr {self.lr:g}\n{self.net}"


# -- steps -----------------------------------------------------------------------------------------------------


def random_step(seed: int) -> Step:
    """A step that trains some of a random network's weights; the same on every machine."""
    rng = np.random.default_rng((seed, 43))

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    loss = pick(("cross_entropy", "mse", "mse", "half_sse"))
    if loss == "mse":
        loss = ("mse", "mse", "bce_with_logits", "mae", "huber")[np.random.default_rng((seed, 47)).integers(5)]
    net = _with_one_output(_without_drops_of_ints(random_network(seed)), loss, pick, rng)
    if pick((True, False)):
        net = _with_factors(net, rng)
    net = _with_dropout(_with_shared_weight(net, pick), pick)
    optimiser = pick(("sgd", "momentum", "momentum", "adam", "adamw"))
    smoothing = pick((0.0, 0.1)) if loss == "cross_entropy" else 0.0
    if optimiser == "momentum" and not seed % 2:
        optimiser = "nesterov"
    how = TrainingStep(loss, optimiser, smoothing, pick((0.0, 0.0, 0.5)), ema=0.0 if seed % 5 else 0.9)
    frozen = _before_no_gradient(net)
    some = frozen | {name for name in net.weights if pick((True, False, False, False))}
    decays, plain = pick((True, False, False)), TrainingStep(loss, "sgd", smoothing)
    if decays and seed % 3:
        factors = np.random.default_rng((seed, 47))
        decays = {name: float(factors.choice((0.0, 0.5, 2.0))) for name in net.weights}
    try:
        by_descent = training_step(net, plain, trainable=lambda name: name not in some)
    except InputError:  # nothing is left to train, or only weights that no gradient reaches
        some, net = frozen, _with_factor_of_output(net)
        by_descent = training_step(net, plain, trainable=lambda name: name not in some)
    step = by_layers(training_step(net, how, decays=decays, trainable=lambda name: name not in some))
    by_descent = by_layers(by_descent)
    batches = pick(range(1, MAX_ROWS + 1)), pick(range(1, MAX_ROWS + 1))
    return Step(step, by_descent, how, batches, pick((*batches, 1, 1024)), seed, pick((1e-3, 0.1, 1.0)))


def _without_drops_of_ints(net: Network) -> Network:
    return net.replace(nodes=[
        Node(node.name, Identity(), node.inputs)
        if isinstance(node.layer, Dropout) and "float" not in net.types[node.name].dtype else node
        for node in net.nodes
    ])  # fmt: skip


def _with_one_output(net: Network, loss: str, pick: Any, rng: np.random.Generator) -> Network:
    """The network that ends in a row of floats: one of its values times a factor, or a sum of Linears of several."""
    floats = [name for name in net.types if "float" in net.types[name].dtype and net.types[name].row_size]
    ends = [name for name in dict.fromkeys(net.outputs) if name in floats] or floats[-1:]
    nodes, weights = list(net.nodes), dict(net.weights)
    inputs = dict(net.inputs)
    if not ends:  # ints alone
        inputs["more"] = TensorType(("B", 4))
        ends = ["more"]
    kinds = {**net.types, **inputs}
    if loss != "cross_entropy" and pick((True, False, False)):
        kind = kinds[ends[-1]]
        weights["end.factor"] = rng.uniform(0.5, 1.5, kind.row_size).astype(numpy_dtype(kind.dtype))
        nodes += [Node("flat", Reshape(), (ends[-1],)), Node("end", Mul(), ("flat",), {"constant": "end.factor"})]
        return Network(inputs, tuple(nodes), ("end",), weights, net.name)
    C, parts = pick((1, 2, 3, 5, 10)), []
    for i, end in enumerate(ends):
        dtype, D = pick(("float32", kinds[ends[0]].dtype)), kinds[end].row_size
        weights[f"end.head{i}.weight"] = (rng.standard_normal((C, D)) / np.sqrt(D)).astype(numpy_dtype(dtype))
        nodes.append(Node(f"end.flat{i}", Reshape(), (end,)))
        nodes.append(Node(f"end.cast{i}", Cast(kinds[ends[0]].dtype), (f"end.flat{i}",)))
        nodes.append(Node(f"end.head{i}", Linear(), (f"end.cast{i}",), {"weight": f"end.head{i}.weight"}))
        parts.append(f"end.head{i}")
    if len(parts) > 1:
        nodes.append(Node("end", Add(), tuple(parts)))
    return Network(inputs, tuple(nodes), (nodes[-1].name,), weights, net.name)


def _before_no_gradient(net: Network) -> set[str]:
    """The weights that a layer without gradient depends on."""
    stops, frozen = set[str](), set[str]()
    for node in reversed(net.nodes):
        if node.name in stops or not node.layer.is_differentiable:
            stops.update(node.inputs)
            frozen.update(node.weights.values())
    return frozen


def _with_factors(net: Network, rng: np.random.Generator) -> Network:
    """The network with a trainable factor on every float input: every layer gets a gradient."""
    nodes, weights, names = list[Node](), dict(net.weights), dict[str, str]()
    for name, kind in net.inputs.items():
        if "float" in kind.dtype:
            names[name] = f"{name}.scaled"
            weights[f"{name}.factor"] = rng.uniform(0.5, 1.5, kind.row_shape).astype(numpy_dtype(kind.dtype))
            nodes.append(Node(names[name], Mul(), (name,), {"constant": f"{name}.factor"}))
    nodes += [
        Node(node.name, node.layer, tuple(names.get(value, value) for value in node.inputs), node.weights)
        for node in net.nodes
    ]
    return Network(net.inputs, tuple(nodes), net.outputs, weights, net.name)


def _with_factor_of_output(net: Network) -> Network:
    """The network whose output is multiplied by a trainable factor."""
    (output,), kind = net.outputs, net.output
    weights = {**net.weights, "output.factor": np.ones(kind.row_shape, numpy_dtype(kind.dtype))}
    node = Node("output.scaled", Mul(), (output,), {"constant": "output.factor"})
    return Network(net.inputs, (*net.nodes, node), (node.name,), weights, net.name)


def _with_shared_weight(net: Network, pick: Any) -> Network:
    """The network, where two of its layers have weights of one role and type often with one weight."""
    uses = [(node, role) for node in net.nodes for role in node.weights]
    alike = [
        (first, second, role)
        for i, (first, role) in enumerate(uses)
        for second, other in uses[i + 1 :]
        if role == other and net.weight_type(first.weights[role]) == net.weight_type(second.weights[role])
        and role not in ("mean", "var", *first.layer.constants)
    ]  # fmt: skip
    if not alike or not pick((True, False)):
        return net
    first, second, role = pick(alike)
    shared = Node(second.name, second.layer, second.inputs, {**second.weights, role: first.weights[role]})
    return net.replace(nodes=[shared if node is second else node for node in net.nodes])


def _with_dropout(net: Network, pick: Any) -> Network:
    """The network, often with a dropout after one of its layers."""
    floats = [
        node for node in net.nodes
        if "float" in net.types[node.name].dtype and net.readers(node.name)
        and not any(isinstance(reader.layer, NEEDS_NO_ZERO) for reader in net.readers(node.name))
    ]  # fmt: skip
    if not floats or not pick((True, False, False)):
        return net
    before, nodes = pick(floats), list[Node]()
    for node in net.nodes:
        inputs = tuple("dropped" if value == before.name else value for value in node.inputs)
        nodes.append(Node(node.name, node.layer, inputs, node.weights))
        if node is before:
            nodes.append(Node("dropped", Dropout(pick((0.1, 0.5))), (node.name,)))
    return net.replace(nodes=nodes)


def random_rows(step: Step, B: int, draw: int = 0) -> Rows:
    """B rows for every input of a step, targets and shares included."""
    net, rng = step.net, np.random.default_rng((step.seed, 44, draw, B))
    rows = {name: x[:B] for name, x in zip(net.inputs, random_inputs(net, step.seed, draw=draw), strict=True)}
    for name, kind in net.inputs.items():
        if "float" in kind.dtype:  # without NaNs and infinities
            rows[name] = rng.standard_normal((B, *kind.row_shape)).astype(numpy_dtype(kind.dtype))
    if step.how.loss == "cross_entropy":
        (losses,) = (node for node in net.nodes if isinstance(node.layer, CrossEntropy))
        rows[TARGET] = rng.integers(0, net.types[losses.inputs[0]].row_size, B)
    if step.how.loss == "bce_with_logits":
        rows[TARGET] = rng.random(rows[TARGET].shape).astype(rows[TARGET].dtype)
    shares = rng.uniform(0.1, 1.0, B) if rng.integers(2) else np.ones(B)
    kind = numpy_dtype(net.inputs[SHARE].dtype)
    rows[SHARE] = (shares if step.how.loss == "half_sse" else shares / shares.sum()).astype(kind)
    return tuple(rows[name] for name in net.inputs)


def random_state(step: Step) -> dict[str, np.ndarray]:
    """The weights of the network, with the optimiser in the middle of a run or, as often, at its beginning."""
    net, rng = step.net, np.random.default_rng((step.seed, 45))
    state = {name: np.asarray(net.weights[name]) for name in net.state}
    begins = bool(rng.integers(2))
    for name, array in state.items():
        if name.endswith((".velocity", ".first", ".second")) and not begins:
            drawn = rng.standard_normal(array.shape) / 8
            state[name] = (np.abs(drawn) if name.endswith(".second") else drawn).astype(array.dtype)
    count = 1 if begins else 7
    state[VALUES] = np.array([step.lr, 0.01, 0.9, 1 - 0.9**count, 1 - 0.999**count], np.float32)
    if DRAW in state:
        state[DRAW] = rng.integers(0, 1 << 62, 2)
    return state


# -- the check -------------------------------------------------------------------------------------------------


REFUSED = "refused: "


def verify(seed: int, device: str = "cpu", precision: str = "fp32") -> str:
    """What is wrong with a random step, and how to see it again; "" if nothing is.

    REFUSED and why on a GPU without a kernel for a layer.
    """
    step = random_step(seed)
    with pytest.MonkeyPatch.context() as patch:
        if device == "emulated":
            emulate_device(patch)
        try:
            planned = plan(step.net, "cpu" if device == "cpu" else "cuda", Job(precision, step.planned))
        except PlanError as refused:
            if device == "cpu":
                raise
            return f"{REFUSED}{refused.what}"
        wrong = faults(step, planned, precision)
    if not wrong:
        return ""
    again = f"python tests/random_gradients.py {seed} {seed + 1} --device {device} --precision {precision}"
    return "\n".join([f"random step {seed} is wrong; to see it again: {again}", str(step), *wrong])


def bind(planned: Plan, threads: int = 2) -> Any:
    """The step on the plan's device."""
    return CpuStep(planned, threads) if planned.device.kind == "cpu" else CudaStep(Gpu.get(0), planned)


def faults(step: Step, planned: Plan, precision: str = "fp32") -> list[str]:
    net, optimiser, is_on_cpu = step.net, step.how.optimiser, planned.device.kind == "cpu"
    wrong = _wrong_slope(step) if is_on_cpu else []
    bound = bind(planned)
    others = {"with one thread": bind(planned, 1)} if is_on_cpu else {"of another engine": bind(planned)}
    with _filled_memory():
        filled = bind(planned) if is_on_cpu else bound
    state = random_state(step)
    for B in step.batches:
        rows = random_rows(step, B)
        after = run_step(bound, rows, state)
        if wrong_now := errors(net, optimiser, after, rows, state, precision):
            draws = [random_rows(step, B, draw) for draw in range(1, DRAWS)]
            if all(errors(net, optimiser, run_step(bound, drawn, state), drawn, state, precision) for drawn in draws):
                wrong += wrong_now
        for how, other in others.items():
            wrong += _unequal_bits(after, run_step(other, rows, state), how)
        with _filled_memory():  # on a GPU: a graph, from the second run on
            wrong += _unequal_bits(after, run_step(filled, rows, state), "in memory full of NaNs, or in a graph")
        state = {name: after[name] for name in state}
    return wrong


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """np.empty returns memory of NaNs, and of ints of -1."""
    empty = np.empty

    def filled(*shape: Any, **options: Any) -> np.ndarray:
        array = empty(*shape, **options)
        if array.size and not array.dtype.hasobject and array.flags.c_contiguous:
            array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    with mock.patch.object(np, "empty", filled):
        yield


def _unequal_bits(one: State, other: State, how: str) -> list[str]:
    names = [name for name, array in one.items() if _bits(array) != _bits(other[name])]
    return [f"{name}: other bits {how}" for name in names]


def _bits(array: np.ndarray) -> bytes:
    """All NaNs count as one."""
    is_float = "float" in array.dtype.name
    return (np.where(array == array, array, np.full_like(array, np.nan)) if is_float else array).tobytes()


def errors(net: Network, optimiser: str, got: State, rows: Rows, state: State, precision: str = "fp32") -> list[str]:
    """The arrays of a step's state and loss that are farther from float64 than naive runs are, some times over."""
    dtypes = {kind.dtype for kind in net.types.values()} | {array.dtype.name for array in state.values()}
    dtypes.add("float16" if precision == "tf32" else NAIVE_DTYPE[precision])  # with as long a mantissa
    naive_dtype = max((*(d for d in dtypes if "float" in d), "float32"), key=lambda dtype: DTYPE_ULP.get(dtype, 0.0))
    naive_dtype = "float32" if naive_dtype == "float64" else naive_dtype
    truth, naive = (_reference(net, rows, state, dtype) for dtype in ("float64", naive_dtype))
    ulp = ULPS * max(DTYPE_ULP.get(naive_dtype, 0.0), ULP[precision])
    got = {name: np.atleast_1d(array) for name, array in got.items()}
    off = {name: scaled_error(got[name], exact) for name, exact in truth.items() if _is_finite(exact, naive[name])}
    wrong = [name for name in off if not off[name] <= FACTOR * scaled_error(naive[name], truth[name]) + ulp]
    if not wrong:
        return []
    runs = [
        _reference(net, rows, nudged(state, seed, DTYPE_ULP.get(naive_dtype, ULP["fp32"])), naive_dtype)
        for seed in range(NUDGED_RUNS)
    ]
    found = []
    for name in wrong:
        baseline = max(scaled_error(each[name], truth[name]) for each in (naive, *runs))
        allowed = FACTORS[optimiser] * baseline + ulp
        if not off[name] <= allowed:
            found.append(f"{name}: error {off[name]:.3g}, allowed {allowed:.3g}: naive {naive_dtype} {baseline:.3g}")
    return found


def _reference(net: Network, rows: Rows, state: State, dtype: str) -> dict[str, np.ndarray]:
    loss, after = reference.run_step(net, rows, state, dtype)
    return {name: np.atleast_1d(array) for name, array in {**after, net.outputs[0]: loss}.items()}


def _is_finite(*arrays: np.ndarray) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in arrays)


def nudged(state: State, seed: int, ulp: float = ULP["fp32"]) -> dict[str, np.ndarray]:
    """The state with the floats that are trained up to a rounding away."""
    rng = np.random.default_rng(seed)
    near = {}
    for name, array in state.items():
        is_float = "float" in array.dtype.name and name != VALUES
        nudge = 1 + ulp * rng.integers(-1, 2, array.shape)
        near[name] = array.astype(np.float64) * nudge if is_float else array
    return near


def _wrong_slope(step: Step) -> list[str]:
    """Along a random direction, the loss must change by what a step of SGD with lr = 1 subtracts: in float64."""
    if any(isinstance(node.layer, JUMPS) for node in step.by_descent.nodes):
        return []
    net, rows, given = step.by_descent, random_rows(step, step.batches[0]), random_state(step)
    state = {name: given[name] if name == DRAW else given[name].astype(np.float64) for name in net.state}
    state[VALUES] = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    after, rng = _reference(net, rows, state, "float64"), np.random.default_rng((step.seed, 46))
    trained = [node.weights["weight"] for node in net.nodes if isinstance(node.layer, Descent)]
    way = {name: rng.standard_normal(state[name].shape) for name in trained}
    slope = sum(float(((state[name] - after[name]) * way[name]).sum()) for name in trained)
    here, found = after[net.outputs[0]].item(), []
    for h in DIFFERENCES:
        moved = ({name: state[name] + sign * h * way[name] for name in trained} for sign in (1, -1))
        up, down = (_reference(net, rows, {**state, **at}, "float64")[net.outputs[0]].item() for at in moved)
        left, right = sorted(((here - down) / h, (up - here) / h))  # at a tie of a maximum they differ
        near = TOLERANCE * max(abs(slope), abs(here), 1e-6)
        if left - near <= slope <= right + near or not np.isfinite(slope):
            return []
        found.append(f"{left:.6g} to {right:.6g}")
    return [f"slope {slope:.6g}, by differences {', '.join(found)}"]


def verify_many(seeds: Sequence[int], device: str, precision: str = "fp32") -> list[str]:
    """Verdicts that are not "": in processes, as compiling is most of it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        verdicts = pool.map(verify, seeds, repeat(device), repeat(precision), chunksize=4)
        return [verdict for verdict in verdicts if verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description="Random training steps that are wrong.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "emulated"))
    parser.add_argument("--precision", default="fp32", choices=TRAINING_PRECISIONS)
    args = parser.parse_args()
    verdicts = verify_many(range(args.first, args.last), args.device, args.precision)
    wrong = [verdict for verdict in verdicts if not verdict.startswith(REFUSED)]
    refused = Counter(verdict for verdict in verdicts if verdict.startswith(REFUSED))
    lines = [f"{count} {why}" for why, count in refused.most_common()]
    verified = args.last - args.first - refused.total()
    print("\n\n".join([*wrong, *lines, f"{verified} verified, {refused.total()} refused, {len(wrong)} wrong"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
