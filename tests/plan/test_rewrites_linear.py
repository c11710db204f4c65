"""merge_linears, absorb_permutes, merge_parallel_linears: gemms and moves done once, in the weights; node order."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import assert_error_within, rows
from networks import YES_NO, Grow, add_moves, assert_rewrites, assert_same_meaning, drawn, seeded, share_that_fires
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, MatMul, Permute, ReLU, Reshape, Softmax
from onchip.network.recipe import Recipe
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.rewrites import absorb_permutes, merge_linears, merge_parallel_linears, sink_moves
from onchip.plan.rewrites.linear import MAX_TERMS
from onchip.runtime.engine import compile


def is_less_work(D_in: int, D_mid: int, D_out: int) -> bool:
    return D_out * D_in < D_mid * (D_in + D_out)


def linears(pick):
    """Linear after Linear, over one vector or several, sometimes with a ReLU or another reader in between."""
    D_in = pick(range(1, 7))
    grow = Grow(pick, *pick(((), (2,))), D_in)
    value, outputs, fires = "x", [], False
    before = None  # the widths of the Linear that `value` comes from, if only the next layer reads it
    for _ in range(pick(range(2, 5))):
        value = grow.linear(value)
        D_out = grow.row(value)[-1]
        fires |= before is not None and is_less_work(*before, D_out)
        before = (D_in, D_out)
        D_in = D_out
        match pick(("next", "next", "next", "relu", "shared", "output")):
            case "relu":
                value, before = grow.add(ReLU(), value), None
            case "shared":
                outputs.append(grow.add(ReLU(), value))
                before = None
            case "output":
                outputs.append(value)
                before = None
    return grow.network(value, *outputs), fires


def moves_behind_linear(pick):
    """Linear -> moves; sometimes one of them has another reader, and later moves stay."""
    grow = Grow(pick, *pick(((),) * 6 + ((2,),)), pick(range(1, 5)))
    linear = grow.linear("x", pick((6, 8, 12)))
    moves = add_moves(grow, linear)
    outputs, last = [grow.add(ReLU(), moves[-1]) if pick(YES_NO) else moves[-1]], len(moves)
    if pick((False,) * 5 + (True,)):
        last = pick(range(1 + len(moves)))
        outputs.append(grow.add(ReLU(), [linear, *moves][last]))
    fires = len(grow.row("x")) == 1 and bool(permutes(grow.nodes) & set(moves[:last]))
    return grow.network(*outputs), fires


def moves_before_linear(pick):
    """moves -> Linear over one vector; sometimes one of them has another reader, and earlier moves stay."""
    grow = Grow(pick, *pick(((12,), (3, 4), (2, 3, 2))))
    moves = add_moves(grow, grow.add(ReLU(), "x") if pick(YES_NO) else "x")
    if len(grow.row(moves[-1])) > 1:
        moves.append(grow.add(Reshape((-1,)), moves[-1]))
    outputs, first = [grow.linear(moves[-1])], 0
    if pick((False, False, True)):
        first = pick(range(len(moves)))
        outputs.append(moves[first] if pick(YES_NO) else grow.add(ReLU(), moves[first]))
        first += 1
    return grow.network(*outputs), bool(permutes(grow.nodes) & set(moves[first:]))


def permutes(nodes):
    return {node.name for node in nodes if isinstance(node.layer, Permute)}


def products(net):
    """The number of gemms per vector."""
    return sum(math.prod(net.weights[node.weights["weight"]].shape) for node in net.nodes if node.weights)


FAMILIES = [(merge_linears, linears), (absorb_permutes, moves_behind_linear), (absorb_permutes, moves_before_linear)]


@pytest.mark.parametrize(("step", "family"), FAMILIES)
@settings(max_examples=120)
@given(data=st.data())
def test_it_happens_where_it_should_and_keeps_the_meaning(step, family, data):
    before, after = assert_rewrites(step, family, drawn(data))
    if after is before:
        return
    if step is merge_linears:
        assert products(after) < products(before)
    else:
        assert len(permutes(after.nodes)) < len(permutes(before.nodes))


@pytest.mark.parametrize(("step", "family"), FAMILIES)
def test_the_property_is_not_an_empty_one(step, family):
    assert 0.5 < share_that_fires(family) < 0.9


def test_merge_happens_where_it_is_less_work_and_only_there():
    weights = {"a.weight": rows(8, 2), "b.weight": rows(3, 8), "b.bias": rows(1, 3)[0]}
    wide, told = merge_linears(sequential(TensorType(("B", 2)), [("a", Linear()), ("b", Linear())], weights))
    assert [node.name for node in wide.nodes] == ["b"]
    assert told == ["merged a into b: 2-8-3 becomes 2-3"]
    assert isinstance(wide.weights["a+b.weight"], Recipe)
    bottleneck = {"a.weight": rows(1, 8), "b.weight": rows(8, 1)}
    kept, told = merge_linears(sequential(TensorType(("B", 8)), [("a", Linear()), ("b", Linear())], bottleneck))
    assert len(kept.nodes) == 2
    assert not told


def test_sums_that_would_be_too_long_stay_apart():
    """Many sums of positive terms, added up, are more exact than one: their rounding errors average out."""
    rng = np.random.default_rng(0)
    for D_in, names in ((MAX_TERMS, ["b"]), (8 * MAX_TERMS, ["a", "b"])):
        shapes = {"a.weight": (128, D_in), "a.bias": (128,), "b.weight": (8, 128), "b.bias": (8,)}
        weights = {
            name: np.abs(rng.standard_normal(shape, np.float32)) / math.prod(shape[1:])
            for name, shape in shapes.items()
        }
        net = sequential(TensorType(("B", D_in)), [("a", Linear()), ("b", Linear())], weights)
        assert [node.name for node in merge_linears(net)[0].nodes] == names
        x = rng.standard_normal((150, D_in), np.float32)
        got, naive = compile(net, "cpu", batch_hint=10**6)(x), reference.forward(net, x, "float32")
        assert_error_within(got, reference.forward(net, x), baseline=naive)


@pytest.mark.parametrize("widths", [(2, 9, 3, 9, 2), (8, 1, 8, 1, 8), (4, 2, 9, 9, 1), (1,) * 9])
def test_a_run_of_linears_ends_with_no_pair_that_could_merge(widths):
    weights = {f"l{i}.weight": rows(b, a, seed=i).astype(float) for i, (a, b) in enumerate(pairwise(widths))}
    layers = [(f"l{i}", Linear()) for i in range(len(weights))]
    net = sequential(TensorType(("B", widths[0]), "float64"), layers, weights)
    merged, told = merge_linears(net)
    shapes = [merged.weights[node.weights["weight"]].shape for node in merged.nodes]
    assert len(shapes) == len(layers) - len(told) < len(layers)
    assert not any(is_less_work(D_in, D_mid, D_out) for (D_mid, D_in), (D_out, _) in pairwise(shapes))
    assert_same_meaning(net, merged)


def test_a_linear_that_others_read_stays():
    weights = {"w1": rows(8, 2), "w2": rows(3, 8)}
    nodes = (Node("a", Linear(), ("x",), {"weight": "w1"}), Node("b", Linear(), ("a",), {"weight": "w2"}))
    net = Network({"x": TensorType(("B", 2))}, nodes, ("b", "a"), weights)
    assert merge_linears(net)[0] is net


def test_one_weight_used_twice_in_a_row():
    weights = {"w": rows(3, 3).astype(float), "b": rows(1, 3)[0].astype(float)}
    nodes = [Node(f"l{i}", Linear(), (f"l{i - 1}" if i else "x",), {"weight": "w", "bias": "b"}) for i in range(5)]
    net = Network({"x": TensorType(("B", 3), "float64")}, nodes, ("l4",), weights)
    merged, told = merge_linears(net)
    assert len(told) == 4
    assert_same_meaning(net, merged)


def test_float32_is_rounded_once():
    weights = {"a.weight": rows(90, 7), "a.bias": rows(1, 90)[0], "b.weight": rows(5, 90), "b.bias": rows(1, 5)[0]}
    net = sequential(TensorType(("B", 7)), [("a", Linear()), ("b", Linear())], weights)
    assert_same_meaning(net, merge_linears(net)[0], tolerance=1e-6)


def test_what_absorb_says_and_leaves():
    grow = Grow(seeded(5), 2)
    grid = grow.add(Reshape((2, 3, 4)), grow.linear("x", 24))
    turned = grow.add(Permute((0, 3, 1, 2)), grid)
    net = grow.network(grow.add(Reshape((6, 4)), grow.add(Permute((0, 1, 3, 2)), turned)))
    after, told = absorb_permutes(net)
    assert told == ["absorbed permute2, permute3 into linear0: permuted its weights"]
    assert [str(node.layer) for node in after.nodes] == ["Linear", "Reshape(row_shape=(6, 4))"]
    assert [node.name for node in after.nodes] == ["linear0", "reshape4"]
    assert_same_meaning(net, after)


def test_moves_between_two_linears_are_absorbed_once():
    grow = Grow(seeded(6), 3)
    turned = grow.add(Permute((0, 2, 1)), grow.add(Reshape((2, 3)), grow.linear("x", 6)))
    net = grow.network(grow.linear(grow.add(Reshape((6,)), turned), 2))
    after, told = absorb_permutes(net)
    assert len(told) == 1
    assert_same_meaning(net, after)


def test_moves_from_a_network_input_are_absorbed():
    """An NHWC image, flattened as if it were NCHW."""
    grow = Grow(seeded(7), 3, 4, 2)
    net = grow.network(grow.linear(grow.add(Reshape((-1,)), grow.add(Permute((0, 3, 1, 2)), "x"))))
    after, told = absorb_permutes(net)
    assert told == ["absorbed permute0 into linear2: permuted its weights"]
    assert_same_meaning(net, after)


# -- merge_parallel_linears --------------------------------------------------------------------------------------------


def test_linears_of_one_value_become_one():
    grow = Grow(seeded(3), 4, 6)
    a, b, c = (grow.linear("x", width) for width in (3, 5, 2))
    net = grow.network(a, grow.linear(b, 4), c)
    merged, told = merge_parallel_linears(net)
    assert len(told) == 1
    assert [type(node.layer).__name__ for node in merged.nodes].count("Linear") == 2
    assert_same_meaning(net, merged)
    assert merge_parallel_linears(merged)[0] is merged


def test_linears_beside_each_other_are_merged_where_that_is_less_work():
    """The attention kernel fuses the slices of heads; two outputs would cost a launch each."""
    grow = Grow(seeded(3), 4, 6, dtype="float32")
    grow.weight_dtype = "float32"
    q, k, v = (grow.linear("x", 16) for _ in range(3))
    scores = grow.add(Softmax(), grow.add(MatMul(), q, grow.add(Permute((0, 2, 1)), k)))
    net = grow.network(grow.add(MatMul(), scores, v))
    plan = make_plan(net, H200, KERNELS, Job())
    assert [group.claim.kernel for group in plan.groups][1:] == ["attention"]
    apart = grow.network(q, k)
    assert len(make_plan(apart, H200, KERNELS, Job()).groups) == 2


def test_moves_stand_before_their_readers():
    grow = Grow(seeded(3), 4, 6)
    a = grow.add(Permute((0, 2, 1)), "x")
    b = grow.linear("x", 5)
    c = grow.add(Reshape((24,)), a)
    net = grow.network(b, grow.add(ReLU(), c))
    late, _ = sink_moves(net)
    assert [node.name for node in late.nodes] == [b, a, c, net.nodes[-1].name]
    assert_same_meaning(net, late)
    assert sink_moves(late)[0] is late
