"""Each rewrite keeps the network's meaning, on random networks, and says what it did."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import rows
from onchip.kernels import reference
from onchip.plan.rewrites import drop_idle_reshapes, drop_unread, merge_linears, rewrite
from onchip.spec.build import sequential
from onchip.spec.layers import Linear, ReLU, Reshape, Sigmoid
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Recipe
from onchip.spec.types import TensorType


@st.composite
def networks(draw):
    """Chains of Linear (with or without bias), activations and reshapes that do something or nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = start = draw(st.integers(1, 9))
    layers, weights = [], {}
    for i in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["linear", "linear", "linear", "relu", "sigmoid", "idle", "flatten"]))
        if kind == "linear":
            D_out = draw(st.integers(1, 9))
            weights[f"n{i}.weight"] = rng.standard_normal((D_out, width), dtype=np.float32)
            if draw(st.booleans()):
                weights[f"n{i}.bias"] = rng.standard_normal(D_out, dtype=np.float32)
            layers.append((f"n{i}", Linear()))
            width = D_out
        else:
            layer = {"relu": ReLU(), "sigmoid": Sigmoid(), "idle": Reshape((width,)), "flatten": Reshape((-1,))}[kind]
            layers.append((f"n{i}", layer))
    return sequential(TensorType(("B", start)), layers, weights)


@settings(max_examples=60, deadline=None)
@given(networks())
def test_rewrites_keep_the_meaning(net):
    x = rows(5, net.input.row_size).astype(np.float64)
    truth = reference.forward(net, x)
    for step in (drop_unread, drop_idle_reshapes, merge_linears, rewrite):
        changed, _ = step(net)
        # Merged weights are rounded to float32 once: the tolerance is that rounding, not float64's.
        np.testing.assert_allclose(
            reference.forward(changed, x), truth, rtol=2e-5, atol=2e-5 * max(1, np.abs(truth).max())
        )


def test_merge_happens_where_it_is_less_work_and_only_there():
    weights = {"a.weight": rows(8, 2), "b.weight": rows(3, 8), "b.bias": rows(1, 3)[0]}
    wide, told = merge_linears(sequential(TensorType(("B", 2)), [("a", Linear()), ("b", Linear())], weights))
    assert [node.name for node in wide.nodes] == ["b"]
    assert told == ["merged a into b: 2-8-3 is one 2-3"]
    assert isinstance(wide.weights["a+b.weight"], Recipe)
    bottleneck = {"a.weight": rows(1, 8), "b.weight": rows(8, 1)}
    kept, told = merge_linears(sequential(TensorType(("B", 8)), [("a", Linear()), ("b", Linear())], bottleneck))
    assert len(kept.nodes) == 2
    assert not told


def test_a_run_of_linears_becomes_one_in_any_order_of_merging():
    widths = (2, 9, 3, 9, 2)  # 3-9-2 merges before 2-9-3 can
    weights = {f"l{i}.weight": rows(b, a, seed=i) for i, (a, b) in enumerate(pairwise(widths))}
    net = sequential(TensorType(("B", 2)), [(f"l{i}", Linear()) for i in range(4)], weights)
    merged, _ = merge_linears(net)
    assert len(merged.nodes) == 1
    x = rows(4, 2).astype(np.float64)
    np.testing.assert_allclose(reference.forward(merged, x), reference.forward(net, x), rtol=1e-5, atol=1e-4)


def test_a_linear_that_others_read_stays():
    weights = {"w1": rows(8, 2), "w2": rows(3, 8)}
    nodes = (Node("a", Linear(), ("x",), {"weight": "w1"}), Node("b", Linear(), ("a",), {"weight": "w2"}))
    net = Network({"x": TensorType(("B", 2))}, nodes, ("b", "a"), weights)
    assert merge_linears(net)[0] is net


def test_what_nobody_reads_goes():
    nodes = (Node("a", ReLU(), ("x",)), Node("dead", Sigmoid(), ("a",)), Node("deader", ReLU(), ("dead",)))
    net, told = drop_unread(Network({"x": TensorType(("B", 2))}, nodes, ("a",), {}))
    assert [node.name for node in net.nodes] == ["a"]
    assert len(told) == 2
