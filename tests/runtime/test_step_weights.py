"""Weights of a step: derived ones follow the state and the values that they are derived from."""

import numpy as np
import pytest

from onchip.kernels.batch_norm import negated
from onchip.kernels.chain import find_chain
from onchip.kernels.cpu.elementwise.pointwise import for_a_block
from onchip.kernels.cpu.embedding.lookup import with_bias
from onchip.kernels.cpu.microkernels.packed_layers import packed_recipes
from onchip.kernels.cpu.threading.launches import CompiledLaunch
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchSum, Mul
from onchip.network.recipe import Recipe, as_is, materialise, transposed, value_weight
from onchip.network.types import TensorType
from onchip.plan.rewrites.convs import concatenated
from onchip.runtime.cpu.step_weights import StepWeights

SHAPES = {"fc1.weight": (200, 137), "fc1.bias": (200,), "c": (61, 7), "t": (130, 70, 2), "number": (1,)}
VALUE = value_weight("v", (5, 7))
PACKED = packed_recipes(mlp(137, 200), find_chain(mlp(137, 200), 0), 4)
COPIES = {
    "transposed": Recipe.of(transposed, ("fc1.weight",), (137, 200), axes=(1, 0)),
    "transposed twice": Recipe.of(
        transposed, (Recipe.of(transposed, ("t",), (2, 130, 70), axes=(2, 0, 1)),), (70, 130, 2), axes=(2, 1, 0)
    ),
    "packed": PACKED["w"],
    "padded": PACKED["bias"],
    "the same twice": Recipe.of(concatenated, ("c", "c"), (122, 7)),
    "with a fixed one": Recipe.of(concatenated, ("c", "fixed"), (66, 7)),
    "a value first": Recipe.of(concatenated, (VALUE, "c"), (66, 7)),
    "repeated": Recipe.of(for_a_block, ("number",), (350,), own=(1,), row=(5, 7), rows=10),
}
EVALUATED = {
    "with another sign": Recipe.of(negated, ("c",), (61, 7)),
    "added": Recipe.of(with_bias, ("fc1.weight", "of_columns"), (200, 137)),
    "in another dtype": Recipe.of(as_is, ("c",), (61, 7), "float16"),
    "of a value": Recipe.of(negated, (VALUE,), (5, 7)),
}
SAME = {
    "state": Recipe.of(as_is, ("c",), (61, 7)),
    "a reshaped state": Recipe.of(with_bias, ("t",), (130, 140)),
    "a value": Recipe.of(as_is, ("of_value",), (5, 7)),
}


def network() -> Network:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    fixed = {"fixed": np.full((5, 7), 3, np.float32), "of_columns": np.arange(137, dtype=np.float32), "of_value": VALUE}
    nodes = Node("v", BatchSum(), ("x",)), Node("y", Mul(), ("x",), {"constant": "of_value"})
    return Network({"x": TensorType(("B", 5, 7))}, nodes, ("y",), weights | fixed, state=dict.fromkeys(SHAPES, ""))


def derived(recipe: Recipe):
    """The array of a weight, after the state and the value changed, and what computed it."""
    net, rng = network(), np.random.default_rng(1)
    state = {name: np.array(net.weights[name]) for name in net.state}
    values = {"v": np.zeros((1, 5, 7), np.float32)}
    weights = StepWeights(net, state, values)
    array, launches = weights.array(recipe), [each for found in weights.updates().values() for each in found]
    assert weights.array(recipe) is array
    for each in (*state.values(), *values.values()):
        each[...] = rng.standard_normal(each.shape)
    for launch in launches:
        launch([values["v"]], [], 2)
    expected = materialise(recipe, net.weights, {**state, VALUE: values["v"][0], "of_value": values["v"][0]})
    np.testing.assert_array_equal(array, expected)
    return array, launches, (*state.values(), *values.values())


@pytest.mark.parametrize("name", COPIES)
def test_copied(name):
    _, launches, _ = derived(COPIES[name])
    assert [type(launch) for launch in launches] == [CompiledLaunch]


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluated(name):
    _, launches, _ = derived(EVALUATED[name])
    assert len(launches) == 1
    assert not isinstance(launches[0], CompiledLaunch)


@pytest.mark.parametrize("name", SAME)
def test_no_copy(name):
    array, launches, arrays = derived(SAME[name])
    assert not launches
    assert any(np.shares_memory(array, each) for each in arrays)


def test_what_does_not_change_is_computed_once():
    net = network()
    weights = StepWeights(net, {name: np.array(net.weights[name]) for name in net.state}, {})
    assert np.array_equal(weights.array(Recipe.of(negated, ("fixed",), (5, 7))), np.full((5, 7), -3))
    assert not weights.updates()


def test_after_which_values():
    net = network()
    state, values = {name: np.array(net.weights[name]) for name in net.state}, {"v": np.zeros((1, 5, 7), np.float32)}
    weights = StepWeights(net, state, values)
    for name in ("transposed", "a value first"):
        weights.array(COPIES[name])
    weights.array(EVALUATED["of a value"])
    assert {values: len(launches) for values, launches in weights.updates().items()} == {(): 1, ("v",): 2}


def test_a_state_is_its_array_whatever_its_dtype():
    ids = np.arange(5)
    net = Network(
        {"x": TensorType(("B", 2))}, (Node("y", BatchSum(), ("x",)),), ("y",), {"ids": ids}, state={"ids": ""}
    )
    array = StepWeights(net, {"ids": ids}, {}).array(Recipe.of(as_is, ("ids",), (5,), "int64"))
    assert np.shares_memory(array, ids)
