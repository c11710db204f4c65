"""Standardised columns and targets: their statistics, and folded networks for raw rows."""

import numpy as np
import pytest

import onchip
from checks import rows
from onchip.errors import InputError
from onchip.network.build import sequential
from onchip.network.graph import Node
from onchip.network.layers import Add, LayerNorm, Linear, ReLU, Reshape
from onchip.network.types import TensorType
from onchip.train import standardise
from onchip.train.standardise import (
    Columns,
    Standard,
    columns_of,
    why_rows_not_foldable,
    why_targets_not_foldable,
)
from row_steps import sentences


def exact(net, x):
    """An MLP of ReLUs in float64."""
    weights = [net.weights[f"fc{i}.{role}"].astype(np.float64) for i in (1, 2) for role in ("weight", "bias")]
    return np.maximum(x @ weights[0].T + weights[1], 0) @ weights[2].T + weights[3]


def trained(*widths, seed=1):
    """A network with biases, as a trained one has."""
    net, rng = onchip.mlp(*widths, seed=seed), np.random.default_rng(seed)
    biases = {name: rng.standard_normal(w.shape, np.float32) for name, w in net.weights.items() if "bias" in name}
    return net.replace(weights={**net.weights, **biases})


@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
def test_statistics_are_those_of_float64(monkeypatch, chunk):
    monkeypatch.setattr(standardise, "CHUNK", chunk)
    x = rows(101, 4) * np.float32([1, 1e-20, 1e20, 3]) + np.float32([0, 0, 0, 1e6])
    found, wide = columns_of(x), x.astype(np.float64)
    np.testing.assert_allclose(found.mean, wide.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.deviation, wide.std(axis=0), rtol=1e-13)
    made = found.standardise(x)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(made.std(axis=0), 1, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e8, 1e-38, 1e30])
def test_a_constant_column_is_zero_and_its_weights_are_too(value):
    x = rows(1000, 3)
    x[:, 1] = value
    found = columns_of(x)
    assert found.deviation[1] == 0
    assert not found.standardise(x)[:, 1].any()
    net = Standard(found).fold(trained(3, 5, 2))
    assert not net.weights["fc1.weight"][:, 1].any()
    x[:, 1] = 7  # the value of a constant column has no effect
    assert np.isfinite(onchip.compile(net, "cpu")(x)).all()


@pytest.mark.parametrize(("value", "told"), [(np.nan, "nan"), (np.inf, "inf"), (-2e30, "-2e+30")])
def test_values_that_have_no_scale_are_refused(value, told):
    x = rows(20, 3)
    x[7, 2] = value
    with pytest.raises(InputError, match=rf"column 'age' cannot(.|\n)*{told.replace('+', '.')} in row 7"):
        columns_of(x, ("a", "b", "age"))


# -- folding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("far", "has_add"), [(0, False), (220, False), (1e5, True), (1e6, True)])
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e9])
def test_a_folded_network_computes_what_was_trained(far, has_add, unit):
    """Also of years, and of ids that are a millionth apart: the Add is exact where float32 would round."""
    x = (np.round(rows(500, 6) * 8) + np.float32(8 * far)) * np.float32(unit)
    x[:, 3:] = rows(500, 3)
    y = rows(500, 2, seed=3) * 1000 + 50
    net, standard = trained(6, 32, 2), Standard(columns_of(x), columns_of(y))
    truth = exact(net, (x - standard.rows.mean) / standard.rows.deviation)
    truth = truth * standard.targets.deviation + standard.targets.mean
    folded = standard.fold(net)
    assert isinstance(folded.nodes[0].layer, Add) == has_add
    error = np.abs(onchip.compile(folded, "cpu")(x) - truth).max() / truth.std()
    naive = np.abs(onchip.compile(net, "cpu")(standard.rows.standardise(x)) - exact(net, standard.rows.standardise(x)))
    allowed = 1e-4 if far == 220 else 4 * naive.max() / exact(net, standard.rows.standardise(x)).std() + 1e-6
    assert error < allowed


def test_a_linear_model_is_folded_at_both_ends():
    x, y = rows(300, 4) * 100 + 5, rows(300, 1, seed=2) * 1e6
    standard, net = Standard(columns_of(x), columns_of(y)), trained(4, 1)
    wide = {name: w.astype(np.float64) for name, w in net.weights.items()}
    scaled = (x - standard.rows.mean) / standard.rows.deviation
    truth = (scaled @ wide["fc1.weight"].T + wide["fc1.bias"]) * standard.targets.deviation + standard.targets.mean
    got = onchip.compile(standard.fold(net), "cpu")(x)
    np.testing.assert_allclose(got, truth, atol=1e-5 * truth.std())


def test_a_folded_network_is_an_onnx_file_like_any_other(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = rows(50, 3) + np.float32([0, 5000, 0])
    net = Standard(columns_of(x)).fold(trained(3, 8, 2))
    onchip.save(net, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    truth = onchip.compile(net, "cpu")(x)
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x})[0], truth, atol=1e-5)
    assert np.array_equal(onchip.compile(onchip.load(tmp_path / "net.onnx"), "cpu")(x), truth)


@pytest.mark.parametrize("far", [0, 1e5])
def test_a_network_for_raw_rows_is_unfolded_and_folded_again(tmp_path, far):
    """Before it is trained further: the same function, also of a column that is constant in the new rows."""
    first, other = (rows(200, 5, seed=seed) * 3 + np.float32(3 * far) for seed in (1, 2))
    other[:, 1] = first[0, 1]
    raw = Standard(columns_of(first), Columns(np.full(2, 9.0), np.full(2, 40.0))).fold(trained(5, 16, 2))
    truth = onchip.compile(raw, "cpu")(first)
    onchip.save(raw, tmp_path / "raw.onnx")
    raw = onchip.load(tmp_path / "raw.onnx")
    further = Standard(columns_of(other), columns_of(truth), raw)
    inner = further.unfold()
    assert [type(node.layer) for node in inner.nodes[:1]] == [Linear]
    again = further.fold(inner)
    np.testing.assert_allclose(onchip.compile(again, "cpu")(first), truth, atol=2e-4 * truth.std())


def test_a_value_of_the_same_name_is_left_alone():
    net = trained(3, 4, 2)
    fc1, relu, fc2 = net.nodes
    net = net.replace(
        nodes=[fc1, Node("centre", relu.layer, relu.inputs), Node("fc2", fc2.layer, ("centre",), fc2.weights)]
    )
    x = rows(50, 3) + 1e5
    names = [node.name for node in Standard(columns_of(x)).fold(net).nodes]
    assert names == ["centre_", "fc1", "centre", "fc2"]


def chain(row_shape, *layers, weights=None):
    """A chain of layers named a, b, ...; the Linears have 5 outputs and biases."""
    names, made, width = "abcdef", {}, 5
    for name, layer in zip(names, layers, strict=False):
        if isinstance(layer, Linear):
            D_in = row_shape[-1] if not made else width
            made |= {f"{name}.weight": rows(width, D_in, seed=ord(name)), f"{name}.bias": rows(1, width)[0]}
    return sequential(TensorType(("B", *row_shape)), list(zip(names, layers, strict=False)), made | (weights or {}))


def test_which_networks_can_be_trained_further():
    raw = Standard(columns_of(rows(20, 4) + 1e5)).fold(trained(4, 5, 2))
    normed = chain(
        (4,), Linear(), LayerNorm(), Linear(), weights={"b.weight": np.ones(5, "f4"), "b.bias": rows(1, 5)[0]}
    )
    for net in (raw, onchip.mlp(4, 5, 2), normed):
        assert (why_rows_not_foldable(net), why_targets_not_foldable(net)) == ("", "")
    bare, sigmoid = onchip.mlp(4, 5, 2, bias=False), onchip.mlp(4, 5, 2, output="Sigmoid")
    assert why_rows_not_foldable(bare) == "layer 'fc1' has no bias"
    assert why_targets_not_foldable(bare) == "layer 'fc2' has no bias"
    assert why_rows_not_foldable(sigmoid) == ""
    assert why_targets_not_foldable(sigmoid) == "the last layer is 'sigmoid2' (Sigmoid)"
    assert why_rows_not_foldable(chain((4,), ReLU(), Linear())) == "the first layer is 'a' (ReLU)"
    assert why_rows_not_foldable(chain((3, 4), Linear())) == "layer 'a' computes several vectors per row"
    assert why_targets_not_foldable(chain((3, 4), Linear())) == "layer 'a' computes several vectors per row"
    assert why_rows_not_foldable(sentences()) == "the rows are int64"
    first, relu, last = onchip.mlp(4, 4, 4).nodes
    tied = onchip.mlp(4, 4, 4).replace(nodes=[first, relu, Node(last.name, last.layer, last.inputs, first.weights)])
    assert why_rows_not_foldable(tied) == why_targets_not_foldable(tied) == "another layer shares 'fc1.weight'"
    skip = onchip.mlp(4, 4).replace(nodes=[first, Node("y", Add(), ("fc1", "x"))], outputs=["y"])
    assert why_rows_not_foldable(skip) == "several layers read the rows"


@pytest.mark.parametrize("far", [0, 1e5])
def test_rows_of_several_axes_are_scaled_by_column(far):
    """A Reshape comes before the first Linear and after the last."""
    x, y = rows(300, 6) * 3 + np.float32(far), rows(300, 5) * 40 + 9
    net = sequential(
        TensorType(("B", 2, 3)), [("flat", Reshape((6,))), ("a", Linear()), ("end", Reshape((5, 1)))],
        {"a.weight": rows(5, 6), "a.bias": rows(1, 5)[0]},
    )  # fmt: skip
    assert (why_rows_not_foldable(net), why_targets_not_foldable(net)) == ("", "")
    standard = Standard(columns_of(x), columns_of(y))
    truth = onchip.compile(net, "cpu")(standard.rows.standardise(x).reshape(-1, 2, 3))
    truth = truth[..., 0] * standard.targets.deviation + standard.targets.mean
    folded = standard.fold(net)
    got = onchip.compile(folded, "cpu")(x.reshape(-1, 2, 3))[..., 0]
    np.testing.assert_allclose(got, truth, atol=2e-4 * truth.std())
    inner = Standard(standard.rows, standard.targets, folded).unfold()
    assert [type(node.layer) for node in inner.nodes] == [Reshape, Linear, Reshape]
    np.testing.assert_allclose(inner.weights["a.weight"], net.weights["a.weight"], rtol=1e-4, atol=1e-5)
