"""A Network is validated on construction: each error names its layer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from onchip.errors import InputError, ShapeError
from onchip.network.build import make_layer, mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    LAYERS,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    ConvTranspose2d,
    Embedding,
    Gather,
    Linear,
    LogSoftmax,
    Mul,
    ReLU,
    Reshape,
    Softmax,
    TokenConv,
)
from onchip.network.recipe import Recipe, materialise, recipe_op, transposed
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype
from onchip.plan.rewrites.convs import concatenated
from onchip.plan.rewrites.linear import merged_weight
from takers import doubled

X = TensorType(("B", 4))


def weight(*shape, dtype="float32"):
    return np.ones(shape, numpy_dtype(dtype))


def linear_net(**changes):
    parts = {
        "inputs": {"x": X},
        "nodes": (Node("fc", Linear(), ("x",), {"weight": "w"}),),
        "outputs": ("fc",),
        "weights": {"w": weight(3, 4)},
    }
    return Network(**{**parts, **changes})


def test_types_follow_the_layers():
    net = mlp(4, 8, 3, output="Softmax")
    assert [node.name for node in net.nodes] == ["fc1", "relu1", "fc2", "softmax2"]
    assert net.types["relu1"] == TensorType(("B", 8))
    assert net.input == X
    assert net.output == TensorType(("B", 3))
    assert net.parameters == 4 * 8 + 8 + 8 * 3 + 3
    assert net.weight_bytes == 4 * net.parameters
    assert [node.name for node in net.readers("fc1")] == ["relu1"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"inputs": {}}, ["no input"]),
    ({"inputs": {"x": TensorType((4, 4))}}, ["'x'", "batch"]),
    ({"outputs": ()}, ["no output"]),
    ({"outputs": ("y",)}, ["'y'", "computed by no layer"]),
    ({"weights": {}}, ["layer 'fc' (Linear)", "'w'"]),
    ({"weights": {"w": weight(3, 5)}}, ["layer 'fc' (Linear)", "last axis 5", "float32[B, 4]"]),
    ({"weights": {"w": weight(3)}}, ["layer 'fc' (Linear)", "matrix"]),
    ({"weights": {"w": np.ones((3, 4), np.complex64)}}, ["dtype", "complex64"]),
    ({"inputs": {"x": TensorType(("B", 4), "int32")}}, ["layer 'fc' (Linear)", "floating-point"]),
    ({"nodes": (Node("fc", Linear(), ("y",), {"weight": "w"}),)}, ["layer 'fc' (Linear)", "'y'"]),
    ({"nodes": (Node("fc", Linear(), ("x", "x"), {"weight": "w"}),)}, ["layer 'fc' (Linear)", "number of inputs"]),
    ({"nodes": (Node("fc", Linear(), ("x",), {}),)}, ["layer 'fc' (Linear)", "wrong weights"]),
    ({"nodes": (Node("fc", ReLU(), ("x",), {"weight": "w"}),)}, ["layer 'fc' (ReLU)", "wrong weights"]),
    ({"nodes": (Node("x", ReLU(), ("x",)),)}, ["two values are called 'x'"]),
    ({"nodes": (Node("fc", Softmax(0), ("x",)),)}, ["layer 'fc' (Softmax)", "axis 0 is the batch"]),
    ({"nodes": (Node("fc", Softmax(2), ("x",)),)}, ["layer 'fc' (Softmax)", "axis out of range"]),
    ({"nodes": (Node("fc", Reshape((3,)), ("x",)),)}, ["layer 'fc' (Reshape)", "row sizes differ"]),
    ({"nodes": (Node("fc", Reshape((-1, -1)), ("x",)),)}, ["layer 'fc' (Reshape)", "at most one -1"]),
    ({"nodes": (Node("fc", Reshape((3, -1)), ("x",)),)}, ["layer 'fc' (Reshape)", "do not divide"]),
])  # fmt: skip
def test_an_error_names_its_layer(changes, words):
    with pytest.raises(InputError) as caught:
        linear_net(**changes)
    for word in words:
        assert word in str(caught.value)


def test_bias_must_fit():
    nodes = (Node("fc", Linear(), ("x",), {"weight": "w", "bias": "b"}),)
    with pytest.raises(ShapeError, match=r"layer 'fc' \(Linear\): bias"):
        linear_net(nodes=nodes, weights={"w": weight(3, 4), "b": weight(4)})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPE_BYTES if "float" not in dtype])
@pytest.mark.parametrize(("layer", "row", "weights"), [
    (Linear(), (4,), {"weight": (3, 4), "bias": (3,)}),
    (Conv1d(), (4, 5), {"weight": (3, 4, 2), "bias": (3,)}),
    (ConvTranspose2d(), (4, 5, 5), {"weight": (4, 3, 2, 2), "bias": (3,)}),
    (BatchNorm1d(), (4,), {"mean": (4,), "var": (4,), "weight": (4,), "bias": (4,)}),
    (TokenConv(), (7,), {"weight": (9, 3, 5), "bias": (5,)}),
])  # fmt: skip
def test_weights_other_than_floats_are_refused(layer, row, weights, dtype):
    x = TensorType(("B", *row), "int64" if layer == TokenConv() else "float32")
    for role in weights:
        arrays = {
            f"n.{one}": weight(*shape, dtype=dtype if one == role else "float32") for one, shape in weights.items()
        }
        with pytest.raises(ShapeError, match=rf"layer 'n' \({layer.kind}\): needs (a )?floating-point") as caught:
            sequential(x, [("n", layer)], arrays)
        assert dtype in caught.value.got


@pytest.mark.parametrize("layer", [Add(), Mul()])
def test_bools_are_refused(layer):
    with pytest.raises(ShapeError, match="unsupported dtype"):
        sequential(TensorType(("B", 4), "bool"), [("n", layer)], {"n.constant": weight(4, dtype="bool")})


@pytest.mark.parametrize(("var", "eps"), [(-0.5, 1e-5), (-1.0, 1.0), (0.0, 0.0), (-np.inf, 1e-5)])
@pytest.mark.parametrize("layer", [BatchNorm1d, BatchNorm2d])
def test_a_variance_below_zero_is_refused(layer, var, eps):
    weights = {"mean": weight(3), "var": np.array([1, 2, var], np.float32)}
    row = (3, 2, 2) if layer is BatchNorm2d else (3,)
    node = Node("norm", layer(eps), ("x",), {role: role for role in weights})
    with pytest.raises(InputError, match=rf"layer 'norm' \({layer.__name__}\): bad variance") as caught:
        Network({"x": TensorType(("B", *row))}, (node,), ("norm",), weights)
    assert "in channel 2" in caught.value.got


def test_a_variance_of_nan_or_of_almost_nothing_passes():
    for var in (np.nan, 0.0, -0.9e-5):
        weights = {"n.mean": weight(4), "n.var": np.full(4, var, np.float32)}
        sequential(X, [("n", BatchNorm1d(1e-5))], weights)


def test_row_looked_up():
    ids = TensorType(("B", 7), "int64")
    table, tables = weight(9, 5), weight(9, 3, 5)
    for layer, array, count in ((Embedding(), table, 7 * 5), (TokenConv(2), tables, 3 * 3 * 5)):
        net = sequential(ids, [("t", layer)], {"t.weight": array})
        assert net.row_lookup_elements(net.nodes[0]) == count
    net = linear_net()
    assert net.row_lookup_elements(net.nodes[0]) == 0


def test_linear_runs_over_the_last_axis():
    net = linear_net(inputs={"x": TensorType(("B", 5, 4))})
    assert net.output == TensorType(("B", 5, 3))
    assert net.row_flop(net.nodes[0]) == 5 * 2 * 4 * 3


def test_printing_shows_every_layer():
    net = mlp(4, 8, 3, output="LogSoftmax", name="tiny")
    text = str(net)
    assert text.splitlines()[0].startswith("tiny: 67 parameters")
    for node in net.nodes:
        assert node.name in text
    assert "LogSoftmax(axis=-1)" in text
    assert "float32[B, 3]" in text


def test_repr_shows_layers_shapes_and_parameters_but_no_weights():
    net = mlp(20, 16, 3, name="small")
    head, *lines = repr(net).splitlines()
    assert head.startswith("Network small: 387 parameters, ")
    assert [line.split()[:2] for line in lines[1:]] == [
        ["x", "input"],
        ["fc1", "Linear"],
        ["relu1", "ReLU"],
        ["fc2", "Linear"],
    ]
    assert "[B, 3]" in lines[-1]
    assert len(repr(mlp(2000, 3000, 2000))) < 1000


def test_repr_of_a_long_network_shows_its_ends():
    net = mlp(*[4] * 500)
    lines = repr(net).splitlines()
    assert len(lines) < 30
    assert lines[2].split()[0] == "x"
    assert any("978 more" in line for line in lines)
    assert lines[-1].split()[0] == net.outputs[0]


def test_a_layer_shows_some_of_many_indices():
    layer = Gather(1, tuple(range(5000)))
    for text in (str(layer), repr(layer)):
        assert len(text) < 120
        assert "(0, 1, 2" in text


def test_html_is_escaped():
    net = linear_net(nodes=(Node("<fc>", Linear(), ("x",), {"weight": "w"}),), outputs=("<fc>",), name="a & b")
    page = net._repr_html_()
    assert "&lt;fc&gt;" in page
    assert "a &amp; b" in page
    assert "<fc>" not in page
    assert page.count("<tr>") == 3  # titles, input, layer


def test_networks_are_frozen():
    net = mlp(4, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        net.name = "other"
    with pytest.raises(TypeError):
        net.weights["new"] = weight(1)
    with pytest.raises(TypeError):
        net.nodes[0].weights["bias"] = "other"
    with pytest.raises(ValueError, match="read-only"):
        net.weights["fc1.weight"][0, 0] = 1


@pytest.mark.parametrize("layer", [ReLU(), Softmax(-1)], ids=["no attributes", "one"])
def test_layers_are_frozen(layer):
    for name in ("axis", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layer, name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(layer, name)


def test_layers_are_equal_by_kind_and_attributes():
    made = [ReLU(), Softmax(-1), Softmax(1), LogSoftmax(-1), Reshape((2, 2))]
    again = [ReLU(), Softmax(axis=-1), Softmax(1), LogSoftmax(-1), Reshape([2, 2])]
    assert [[a == b for b in again] for a in made] == np.eye(5, dtype=bool).tolist()
    assert list(map(hash, made)) == list(map(hash, again))
    assert made == pickle.loads(pickle.dumps(again)) == copy.deepcopy(again)
    assert list(map(repr, made[:3])) == ["ReLU()", "Softmax(axis=-1)", "Softmax(axis=1)"]


def test_replace_validates_again():
    net = mlp(4, 8, 3)
    assert net.replace(outputs=["relu1"]).output == TensorType(("B", 8))
    assert net.replace(name="other").name == "other"
    with pytest.raises(ShapeError, match="layer 'fc1'"):
        net.replace(weights={**net.weights, "fc1.weight": weight(8, 5)})


def test_one_input_one_output():
    net = Network({"a": X, "b": X}, (), ("a", "b"), {})
    with pytest.raises(InputError, match="2 inputs"):
        _ = net.input
    with pytest.raises(InputError, match="2 outputs"):
        _ = net.output


# -- building ----------------------------------------------------------------------------------------------


def test_mlp_weights_can_be_repeated():
    net = mlp(5, 7, 2, seed=3)
    rng = np.random.default_rng(3)
    first = rng.standard_normal((7, 5), dtype=np.float32) * np.float32(np.sqrt(2 / 5))
    second = rng.standard_normal((2, 7), dtype=np.float32) * np.float32(np.sqrt(2 / 7))
    np.testing.assert_array_equal(net.weights["fc1.weight"], first)
    np.testing.assert_array_equal(net.weights["fc2.weight"], second)
    assert not net.weights["fc1.bias"].any()


def test_mlp_options():
    net = mlp(5, 7, 2, activation="Tanh", bias=False)
    assert [node.layer.kind for node in net.nodes] == ["Linear", "Tanh", "Linear"]
    assert set(net.weights) == {"fc1.weight", "fc2.weight"}
    with pytest.raises(InputError, match=r"unknown layer\n.*Relu6"):
        mlp(5, 7, 2, activation="Relu6")


@pytest.mark.parametrize("widths", [(), (4,), (4, 0), (4, -1), (4, 2.5), (4, "3")])
def test_mlp_refuses_bad_widths(widths):
    with pytest.raises(InputError, match="bad widths"):
        mlp(*widths)


def test_a_new_network_is_small_and_fits_into_memory(monkeypatch):
    for widths in ((4, 20_000_000, 10), (4, 10**4000, 3), (1, 1, (1 << 18) + 1), (10**5000, 10**5000)):
        with pytest.raises(InputError, match="the network is too large") as caught:
            mlp(*widths)
        assert "at most 262,144" in caught.value.expected
    for widths in ((1 << 14, 1 << 13, 4), (10**30, 1)):
        with pytest.raises(InputError, match="the network is too large") as caught:
            mlp(*widths)
        assert "at most 134,217,728 parameters" in caught.value.expected
    monkeypatch.setattr("onchip.files.free_memory", lambda: 1 << 20)
    assert mlp(100, 100, 100).parameters == 20_200
    with pytest.raises(InputError, match="the network does not fit into memory"):
        mlp(1000, 1000)


def test_sequential_finds_weights_by_role():
    layers = [("flat", Reshape()), ("fc", Linear()), ("out", LogSoftmax())]
    net = sequential(TensorType(("B", 2, 2)), layers, {"fc.weight": weight(3, 4), "fc.bias": weight(3)})
    assert dict(net.nodes[1].weights) == {"weight": "fc.weight", "bias": "fc.bias"}
    assert net.outputs == ("out",)


def test_make_layer():
    assert make_layer("Softmax", axis=1) == Softmax(1)
    with pytest.raises(InputError, match="bad attributes"):
        make_layer("ReLU", slope=0.1)
    assert "Elementwise" not in LAYERS


# -- types and recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtype_sizes(dtype):
    assert numpy_dtype(dtype).itemsize == DTYPE_BYTES[dtype]
    assert numpy_dtype(dtype).name == dtype


@pytest.mark.parametrize("shape", [(4, "B"), ("N", 4), ("B", -1), ("B", 2.0), ("B", True)])
def test_bad_shapes(shape):
    with pytest.raises(ShapeError, match="bad dimension"):
        TensorType(shape)


def test_row_facts():
    given = TensorType(("B", 3, 5), "float16")
    assert (given.row_shape, given.row_size, given.row_bytes) == ((3, 5), 15, 30)
    assert str(given) == "float16[B, 3, 5]"
    with pytest.raises(ShapeError, match="unknown dtype"):
        TensorType(("B",), "float7")


def test_recipes_are_evaluated_once_and_lazily():
    calls = []

    @recipe_op
    def counted_double(w):
        calls.append(1)
        return 2 * w

    recipe = Recipe.of(counted_double, ("w",), (3, 4), flop=12)
    weights = {"w": weight(3, 4), "w2": recipe, "again": dataclasses.replace(recipe)}
    weights["w4"] = dataclasses.replace(recipe, sources=("w2",))
    net = linear_net(nodes=(Node("fc", Linear(), ("x",), {"weight": "w4"}),), weights=weights)
    assert net.parameters == 12
    assert recipe.nbytes == 48
    assert not calls
    made = {}
    assert (materialise("w4", net.weights, made) == 4).all()
    assert materialise("again", net.weights, made) is materialise("w2", net.weights, made)  # equal recipes are one
    assert (materialise("w2", net.weights, made) == 2).all()
    assert len(calls) == 2


def test_a_recipe_is_data():
    inner = Recipe.of(transposed, ("w",), (4, 3), axes=(1, 0))
    recipe = Recipe.of(doubled, (inner,), (4, 3))
    twin = pickle.loads(pickle.dumps(recipe))
    assert twin == recipe
    assert hash(twin) == hash(recipe)
    assert twin is not recipe
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(materialise(twin, {"w": w}), 2 * w.T)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 3), "float32"), ((3, 4), "int32")])
def test_a_recipe_returns_its_declared_type(shape, dtype):
    with pytest.raises(AssertionError, match="declared"):
        materialise(Recipe.of(doubled, ("w",), shape, dtype), {"w": weight(3, 4)})


def test_floats_are_rounded_once_at_the_end():
    w = np.full(3, 1 + 2.0**-20)
    made = materialise(Recipe.of(doubled, ("w",), (3,), "float16"), {"w": w})
    assert made.dtype == np.float16
    assert (made == 2).all()


def test_the_operation_of_a_recipe_is_found_in_a_new_process():
    recipe = Recipe.of(merged_weight, ("b", "a"), (2, 3), flop=1)
    code = (
        "import pickle, sys, numpy as np\n"
        "from onchip.network.recipe import materialise\n"
        "recipe = pickle.loads(sys.stdin.buffer.read())\n"
        "weights = {'a': np.ones((4, 3), 'f4'), 'b': np.ones((2, 4), 'f4')}\n"
        "print(materialise(recipe, weights).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(recipe), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]"


def test_a_weight_after_a_long_chain_of_recipes():
    weights = {"w0": np.zeros(1, np.float32)}
    for i in range(1, 3000):
        weights[f"w{i}"] = Recipe.of(concatenated, (f"w{i - 1}", "w0"), (i + 1,))
    assert materialise("w2999", weights).tolist() == [0] * 3000


def test_a_network_with_derived_weights_can_be_copied_and_pickled():
    from onchip.kernels import reference
    from onchip.plan.rewrites import rewrite

    weights = {"a.weight": np.eye(4, dtype=np.float32), "b.weight": np.full((3, 4), 2, np.float32)}
    net, _ = rewrite(sequential(TensorType(("B", 4)), [("a", Linear()), ("b", Linear())], weights))
    assert any(isinstance(weight, Recipe) for weight in net.weights.values())
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.types == net.types
        assert twin.weights["a+b.weight"] == net.weights["a+b.weight"]  # still a recipe
        assert np.array_equal(reference.forward(twin, x), reference.forward(net, x))


def test_a_network_can_be_copied_and_pickled():
    net = mlp(3, 4, 2)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin is not net
        assert str(twin) == str(net)
        assert twin.types == net.types
        for name, w in net.weights.items():
            assert np.array_equal(twin.weights[name], w)
            assert not twin.weights[name].flags.writeable
