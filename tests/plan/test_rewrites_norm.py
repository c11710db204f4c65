"""fold_batchnorm: into the previous or next gemm where that is exact, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import YES_NO, Grow, add_moves, assert_rewrites, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
    Permute,
    ReLU,
    Reshape,
)
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Recipe, as_is, materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.rewrites import fold_batchnorm


def norm_behind_product(pick):
    """gemm -> moves -> norm; sometimes the norm's input has another reader."""
    kind = pick(("linear", "moved", "conv1d", "conv2d", "tconv1d", "tconv2d"))
    groups = pick((1, 1, 2))
    if kind in ("linear", "moved"):
        grow = Grow(pick, pick(range(1, 5)))
        made = [grow.linear("x", pick((1, 6, 12)))]
        made += add_moves(grow, made[0]) if kind == "moved" else []
    elif kind.endswith("1d"):
        grow = Grow(pick, 4, pick(range(3, 7)))
        pads, stride = (pick(range(2)), pick(range(3))), (pick((1, 2)),)
        if kind == "conv1d":
            made = [grow.conv("x", Conv1d(stride, pads, groups=groups), pick(range(1, 4)), pick((1, 3)))]
        else:
            made = [grow.transposed("x", ConvTranspose1d(stride, pads, groups=groups), pick(range(1, 4)), 3)]
    else:
        grow = Grow(pick, 2, 4, pick(range(2, 5)))
        pads, stride = tuple(pick(range(2)) for _ in range(4)), (pick((1, 2)), 1)
        if kind == "conv2d":
            made = [grow.conv("x", Conv2d(stride, pads, groups=groups), pick(range(1, 4)), 3, 2)]
        else:
            made = [grow.transposed("x", ConvTranspose2d(stride, pads, groups=groups), pick(range(1, 4)), 3, 2)]
    norm = grow.norm(made[-1])
    outputs = [norm if pick(YES_NO) else grow.add(ReLU(), norm)]
    shared = pick((False, False, True))
    if shared:
        other = pick(made)
        outputs.append(other if pick(YES_NO) else grow.add(ReLU(), other))
    return grow.network(*outputs), not shared


def norm_before_product(pick):
    """norm -> moves -> gemm: not for transposed convolutions, pads, or Linear over more axes."""
    kind = pick(("linear",) * 4 + ("conv1d",) * 3 + ("conv2d",) * 3 + ("many vectors", "tconv1d"))
    pads = pick((0, 0, 0, 1))
    grow = Grow(pick, *{"linear": pick(((6,), (2, 3), (3, 1, 4))), "conv2d": (4, 3, 4)}.get(kind, (4, 5)))
    norm = grow.norm(grow.add(ReLU(), "x") if pick(YES_NO) else "x")
    fires, made = True, [norm]
    if kind == "linear":
        made += add_moves(grow, norm) if pick(YES_NO) else []
        if len(grow.row(made[-1])) > 1:
            made.append(grow.add(Reshape((-1,)), made[-1]))
        last = grow.linear(made[-1])
    elif kind == "many vectors":
        last, fires = grow.linear(norm), False
    elif kind == "tconv1d":
        last, fires = grow.transposed(norm, ConvTranspose1d(), 2, 3), False
    elif kind == "conv1d":
        layer = Conv1d((pick((1, 2)),), (0, pads), (pick((1, 2)),), pick((1, 2, 4)))
        last, fires = grow.conv(norm, layer, pick(range(1, 4)), pick((1, 2, 3))), not pads
    else:
        layer = Conv2d((1, pick((1, 2))), (pads, 0, 0, 0), groups=pick((1, 2)))
        last, fires = grow.conv(norm, layer, pick(range(1, 4)), 2, pick((1, 2))), not pads
    outputs = [last]
    if pick((False, False, False, True)):
        other, fires = pick(made), False
        outputs.append(other if pick(YES_NO) else grow.add(ReLU(), other))
    return grow.network(*outputs), fires


FAMILIES = (norm_behind_product, norm_before_product)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150)
@given(data=st.data())
def test_a_norm_next_to_a_product_goes_into_its_weights(family, data):
    before, after = assert_rewrites(fold_batchnorm, family, drawn(data))
    norms = [n.name for n in after.nodes if isinstance(n.layer, BatchNorm1d | BatchNorm2d)]
    assert len(norms) == (before is after)
    assert len(after.nodes) == len(before.nodes) - 1 + len(norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_property_is_not_an_empty_one(family):
    assert 0.5 < share_that_fires(family) < 0.9


def stack(*layers: str, outputs: tuple[str, ...] = ()) -> Network:
    """x (B, 3) through "linear", "norm" and "relu" by name."""
    grow, value = Grow(seeded(3), 3), "x"
    for kind in layers:
        value = grow.add(ReLU(), value) if kind == "relu" else getattr(grow, kind)(value)
    return grow.network(*outputs or (value,))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_norm_of_a_row_of_them(count):
    net = stack("linear", *["norm"] * count, "relu")
    after, told = fold_batchnorm(net)
    assert [node.layer.kind for node in after.nodes] == ["Linear", "ReLU"]
    assert told == [f"folded {node.name} into linear0" for node in net.nodes[1 : count + 1]]
    assert_same_meaning(net, after)


def test_a_norm_between_two_products_goes_into_the_first():
    net = stack("linear", "norm", "linear")
    after, told = fold_batchnorm(net)
    assert told == ["folded batchnorm1d1 into linear0"]
    assert [node.name for node in after.nodes] == ["linear0", "linear2"]
    assert_same_meaning(net, after)


@pytest.mark.parametrize("axes", [(0, 3, 1, 2), (0, 2, 3, 1)])
def test_channels_are_followed_through_a_turn(axes):
    """As in faces: a projection in NHWC, permuted to NCHW; and back."""
    grow = Grow(seeded(4), 5)
    turned = grow.add(Permute(axes), grow.add(Reshape((2, 3, 4)), grow.linear("x", 24)))
    relu = grow.add(ReLU(), grow.norm(turned))
    back = grow.add(Permute(axes), grow.norm(relu))
    net = grow.network(grow.linear(grow.add(Reshape((-1,)), back)))
    after, told = fold_batchnorm(net)
    assert told == ["folded batchnorm2d3 into linear0", "folded batchnorm2d5 into linear8"]
    assert_same_meaning(net, after)


def test_norms_on_both_sides():
    net = stack("norm", "norm", "linear", "norm")
    after, told = fold_batchnorm(net)
    assert [node.layer.kind for node in after.nodes] == ["Linear"]
    assert after.outputs == net.outputs == ("batchnorm1d3",)
    assert len(told) == 3
    assert_same_meaning(net, after)


def test_of_two_norms_that_are_outputs_one_stays():
    net = stack("linear", "norm", "norm", outputs=("batchnorm1d1", "batchnorm1d2", "batchnorm1d1"))
    after, told = fold_batchnorm(net)
    assert len(told) == 1
    assert [node.name for node in after.nodes] == ["batchnorm1d1", "batchnorm1d2"]
    assert_same_meaning(net, after)


def test_a_weight_that_two_products_share_is_left_alone_for_the_other():
    grow = Grow(seeded(0), 3)
    first = grow.linear("x", 3)
    norm = grow.norm(first)
    twin = Node("twin", Linear(), (grow.add(ReLU(), norm),), grow.nodes[0].weights)
    net = Network(grow.inputs, (*grow.nodes, twin), ("twin",), grow.weights)
    after, _ = fold_batchnorm(net)
    assert after.nodes[-1].weights == twin.weights
    assert_same_meaning(net, after)


def test_names_that_are_taken_are_not_used_again():
    grow = Grow(seeded(1), 3)
    grow.norm(grow.linear("x"))
    grow.weights["linear0+batchnorm1d1.weight"] = np.ones(2)
    net = grow.network("batchnorm1d1")
    after, _ = fold_batchnorm(net)
    np.testing.assert_array_equal(after.weights["linear0+batchnorm1d1.weight"], np.ones(2))
    assert_same_meaning(net, after)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_new_weights_are_rounded_once_and_to_float32_at_least(dtype):
    net = stack("linear", "norm")
    narrow = net.replace(weights={name: np.asarray(w).astype(numpy_dtype(dtype)) for name, w in net.weights.items()})
    after, _ = fold_batchnorm(narrow)
    assert {after.weight_type(name).dtype for name in after.nodes[0].weights.values()} == {"float32"}
    assert_same_meaning(narrow, after, tolerance=1e-6)


def test_a_variance_that_is_computed_is_looked_at_when_it_is_there():
    weights = {"a.weight": np.ones((3, 2)), "n.mean": np.ones(3), "v": np.array([1.0, -2.0, 1.0])}
    weights["n.var"] = Recipe.of(as_is, ("v",), (3,), "float64")
    net = sequential(TensorType(("B", 2), "float64"), [("a", Linear()), ("n", BatchNorm1d())], weights)
    folded, told = fold_batchnorm(net)
    assert told
    with pytest.raises(InputError, match="bad variance") as caught:
        materialise(folded.nodes[0].weights["weight"], folded.weights)
    assert caught.value.got == "-2 in channel 1, eps 1e-05"


@pytest.mark.parametrize("roles", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_factor_and_shift_are_the_norm(roles):
    rng = np.random.default_rng(0)
    weights = {role: rng.standard_normal(5, dtype=np.float32) for role in ("mean", *roles)}
    weights["var"] = rng.uniform(0.1, 2, 5).astype(np.float32)
    net = sequential(TensorType(("B", 5)), [("n", BatchNorm1d(1e-3))], {f"n.{role}": w for role, w in weights.items()})
    s, t = factor_and_shift(weights, 1e-3)
    x = rng.standard_normal((7, 5), dtype=np.float32)
    assert (s.dtype, t.dtype) == (np.float64, np.float64)
    np.testing.assert_allclose(x * s + t, reference.forward(net, x), rtol=1e-12, atol=1e-12)
