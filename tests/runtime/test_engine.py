"""Engines with several inputs and outputs, and their errors before any work."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from gpu_networks import two_towers
from onchip.errors import InputError, ShapeError
from onchip.formats.load import WRITERS
from onchip.kernels import reference
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, BatchSum, Concat, Conv1d, Embedding, GlobalMax, Linear, Permute, ReLU
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import training_step
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.engine import Engine, compile, id_limits
from onchip.runtime.io.host_rows import check_rows
from onchip.runtime.placement import plan
from onchip.train.loop import fit


def inputs(B: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(B).integers(0, 9, (B, 1)), rows(B, 6)


@pytest.mark.parametrize("B", [0, 1, 7])
def test_several_inputs_and_outputs(B):
    net, given = two_towers(), inputs(B)
    got = compile(net, device="cpu")(*given)
    truth, naive = reference.forward(net, given), reference.forward(net, given, "float32")
    assert len(got) == 2
    for mine, exact, baseline in zip(got, truth, naive, strict=True):
        assert_error_within(mine, exact, baseline)


def test_out_is_a_tuple_for_several_outputs():
    net, given = two_towers(), inputs(5)
    engine = compile(net, device="cpu")
    out = (np.empty((5, 4), np.float32), np.empty((5, 4), np.float32))
    got = engine(*given, out=out)
    assert got[0] is out[0]
    assert all(np.array_equal(a, b) for a, b in zip(out, engine(*given), strict=True))
    with pytest.raises(ShapeError, match="wrong number of outputs"):
        engine(*given, out=out[0])


def test_an_input_that_is_an_output_and_an_output_asked_for_twice():
    net = Network({"x": TensorType(("B", 3))}, (Node("r", ReLU(), ("x",)),), ("x", "r", "r"), {})
    x = rows(4, 3)
    same, first, second = compile(net, device="cpu")(x)
    assert np.array_equal(same, x)
    assert same is not x
    assert np.array_equal(first, np.maximum(x, 0))
    assert np.array_equal(first, second)


def test_what_is_refused_before_any_work():
    engine = compile(two_towers(), device="cpu")
    ids, x = inputs(5)
    with pytest.raises(InputError, match="wrong number of inputs"):
        engine(x)
    with pytest.raises(ShapeError, match="different numbers of rows"):
        engine(ids, x[:4])
    with pytest.raises(InputError, match="row 3, position 0: id 9"):
        engine(np.where(np.arange(5)[:, None] == 3, 9, ids), x)
    with pytest.raises(ShapeError, match="wrong dtype"):
        engine(ids.astype(np.float32), x)


STEPS = {
    "a step": (training_step(mlp(3, 2), TrainingStep("mse")), r"layer 'losses' \(SquaredError\)"),
    "a step layer": (
        Network({"x": TensorType(("B", 3))}, (Node("s", BatchSum(), ("x",)),), ("s",), {}),
        r"layer 's' \(BatchSum\)",
    ),
    "state": (
        Network(
            {"x": TensorType(("B", 3))}, (Node("y", Linear(), ("x",), {"weight": "w"}),), ("y",),
            {"w": np.ones((2, 3), np.float32)}, state={"w": ""},
        ),
        "the state 'w'",
    ),
}  # fmt: skip
TAKERS = {
    "compile": lambda net, folder: compile(net, device="cpu"),
    "engine": lambda net, folder: Engine(plan(net, "cpu"), CpuBackend(1), "cpu"),
    "fit": lambda net, folder: fit(net, rows(4, 3), rows(4, 2), loss="mse"),
    "step of a step": lambda net, folder: training_step(net, TrainingStep("mse")),
    **{suffix: lambda net, folder, suffix=suffix: WRITERS[suffix](net, folder / f"net{suffix}") for suffix in WRITERS},
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", STEPS)
def test_only_a_plan_takes_a_step(kind, taker, tmp_path):
    net, got = STEPS[kind]
    with pytest.raises(InputError, match=rf"is a training step\n  got:      .*{got}"):
        TAKERS[taker](net, tmp_path)
    assert not list(tmp_path.iterdir())


def test_limits_of_ids_are_those_of_the_smallest_table_they_reach():
    tables = {"a": np.ones((7, 2), np.float32), "b": np.ones((5, 2), np.float32)}
    types = {"p": TensorType(("B", 2), "int64"), "q": TensorType(("B", 2), "int64"), "x": TensorType(("B", 2))}
    nodes = (
        Node("pq", Concat(1), ("p", "q")), Node("a", Embedding(), ("pq",), {"weight": "a"}),
        Node("b", Embedding(), ("q",), {"weight": "b"}), Node("r", ReLU(), ("x",)),
    )  # fmt: skip
    assert id_limits(Network(types, nodes, ("a", "b", "r"), tables)) == {"p": 7, "q": 5}


def test_ids_that_are_computed_are_checked_too():
    weights = {"table": np.ones((5, 3), np.float32), "w": np.ones((2, 3, 2), np.float32), "one": np.array([1])}
    nodes = (
        Node("shifted", Add(), ("ids",), {"constant": "one"}),
        Node("emb", Embedding(), ("shifted",), {"weight": "table"}),
        Node("turn", Permute((0, 2, 1)), ("emb",)), Node("conv", Conv1d(), ("turn",), {"weight": "w"}),
        Node("max", GlobalMax((-1,)), ("conv",)),
    )  # fmt: skip
    net = Network({"ids": TensorType(("B", 4), "int64")}, nodes, ("max",), weights)
    for without in ((), ("fold",)):
        engine = compile(net, device="cpu", batch_hint=10**9, without=without)
        assert engine(np.full((2, 4), 3)).shape == (2, 2)
        with pytest.raises(InputError, match="id 5"):
            engine(np.full((2, 4), 4))


def test_many_paths_to_the_same_ids_cost_nothing():
    nodes = [Node("v0", Concat(1), ("ids", "ids"))]
    nodes += [Node(f"v{i}", Concat(1), (f"v{i - 1}", f"v{i - 1}")) for i in range(1, 12)]
    nodes.append(Node("e", Embedding(), ("v11",), {"weight": "t"}))
    net = Network({"ids": TensorType(("B", 1), "int64")}, tuple(nodes), ("e",), {"t": np.ones((3, 1), np.float32)})
    assert id_limits(net) == {"ids": 3}


def test_arrays_that_overlap_are_refused():
    engine = compile(two_towers(), device="cpu")
    ids, x = inputs(5)
    out = np.empty((5, 4), np.float32)
    with pytest.raises(ShapeError, match="overlaps"):
        engine(ids, x, out=(out, out))
    with pytest.raises(ShapeError, match="overlaps"):
        compile(Network({"x": TensorType(("B", 3))}, (Node("r", ReLU(), ("x",)),), ("r",), {}), device="cpu")(
            data := rows(4, 3), out=data
        )


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((9, 2, 3, 1), "x.reshape(len(x), 6)"),  # the same elements in every row
        ((6,), "x[None]: a single row is a batch of one"),
        ((12, 3), ""),  # as many elements, but rows would be scrambled
        ((), ""),
    ],
)
def test_a_shape_hint_scrambles_no_rows(shape, hint):
    with pytest.raises(ShapeError) as caught:
        check_rows(np.zeros(shape, np.float32), TensorType(("B", 6)))
    assert caught.value.hint == hint
