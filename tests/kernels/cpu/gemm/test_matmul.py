"""Batched gemms of values on the CPU: every shape, operands through every kind of move, attention as one launch."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from onchip.kernels import reference
from onchip.kernels.cpu.gemm.matmul import MatMulKernel
from onchip.kernels.cpu.gemm.strided import find_run
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Div, Gather, Identity, MatMul, Mul, Permute, ReLU, Reshape, Slice, Softmax
from onchip.network.types import TensorType
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from takers import CPU


def check(net, expected, sizes=(1, 3)):
    """Check the plan's kernels, the error, and that a row's bits do not depend on the batch."""
    engine = onchip.compile(net, "cpu")
    labels = {group.claim.label.partition("<")[0] for group in engine.plan.groups}
    assert labels - {"move", "view", "select"} == set(expected)
    given = list(net.inputs.values())
    xs = [rows(max(sizes), *each.row_shape, seed=i) for i, each in enumerate(given)]
    whole = engine(*xs)
    assert_error_within(whole, reference.forward(net, tuple(xs)), reference.forward(net, tuple(xs), "float32"))
    for B in sizes:
        np.testing.assert_array_equal(engine(*(x[-B:] for x in xs)), whole[-B:])
    one = onchip.compile(net, "cpu", threads=1)
    np.testing.assert_array_equal(one(*xs), whole)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, 1), (1, 1)),
        ((5, 7), (7, 3)),
        ((70, 130), (130, 66)),
        ((2, 1, 4, 5), (1, 3, 5, 6)),
        ((4, 8, 16), (4, 16, 8)),
    ],
    ids=str,
)
def test_gemms_of_every_shape(a, b):
    net = Network(
        {"a": TensorType(("B", *a)), "b": TensorType(("B", *b))}, (Node("y", MatMul(), ("a", "b")),), ("y",), {}
    )
    check(net, ["matmul"], (1, 7))


def test_weights_on_either_side():
    weights = {"w": rows(3, 6, 5, seed=1), "v": rows(4, 2, seed=2), "s": np.float32([3.0])}
    nodes = (
        Node("h", MatMul(), ("x",), {"constant": "w"}), Node("r", ReLU(), ("h",)),
        Node("m", MatMul(), ("r",), {"first": "v"}), Node("y", Div(), ("m",), {"constant": "s"}),
    )  # fmt: skip
    check(Network({"x": TensorType(("B", 3, 2, 6))}, nodes, ("y",), weights), ["matmul", "rowwise", "matmul"])


def attention(S=9, T=None, heads=3, D=5, *, mask=False, where="after", output="y", read_again=False):
    """Attention with one projection for q, k and v; with T, k and v come from a second input."""
    E = heads * D
    inputs = {"x": TensorType(("B", S, 3 * E))} | ({"z": TensorType(("B", T, 3 * E))} if T else {})
    weights = {"s": np.float32([D**-0.5]), "mask": np.triu(np.full((S, T or S), -1e4, np.float32), 1)}
    source, L = ("z", T) if T else ("x", S)
    nodes = []
    for i, name in enumerate("qkv"):
        value, n = ("x", S) if name == "q" else (source, L)
        cut = Slice((0, i * E), (n, E), (1, 1)) if i != 1 else Gather(2, tuple(range(E, 2 * E)))
        order = (0, 2, 3, 1) if name == "k" else (0, 2, 1, 3)
        nodes += [
            Node(f"{name}0", cut, (value,)), Node(f"{name}1", Reshape((n, heads, D)), (f"{name}0",)),
            Node(name, Permute(order), (f"{name}1",)),
        ]  # fmt: skip
    q = "q"
    if where == "before":
        nodes.append(Node("qs", Mul(), ("q",), {"constant": "s"}))
        q = "qs"
    nodes.append(Node("scores", MatMul(), (q, "k")))
    last = "scores"
    if where == "after":
        nodes.append(Node("scaled", Mul(), (last,), {"constant": "s"}))
        last = "scaled"
    if mask:
        nodes.append(Node("masked", Add(), (last,), {"constant": "mask"}))
        last = "masked"
    nodes += [
        Node("p", Softmax(-1), (last,)), Node("i", Identity(), ("p",)), Node("o", MatMul(), ("i", "v")),
        Node("t", Permute((0, 2, 1, 3)), ("o",)), Node("y", Reshape((S, E)), ("t",)),
    ]  # fmt: skip
    if read_again:
        nodes.append(Node("again", MatMul(), ("p", "p")))
    return Network(inputs, tuple(nodes), (output,), weights)


@pytest.mark.parametrize(
    "net",
    [attention(), attention(65, 34, 1, 8, mask=False), attention(70, heads=2, D=16, mask=True),
     attention(7, where="before", mask=True)],
    ids=["small", "other", "masked", "before"],
)  # fmt: skip
def test_attention_is_one_launch(net):
    check(net, ["attention"], (1, 7))


def test_values_with_outside_readers_are_not_fused():
    net = attention(read_again=True)
    assert find_run(net, 0) is None or "p" not in [node.name for node in find_run(net, 0).nodes]
    net = attention()
    both = net.replace(outputs=("y", "p"))
    run = find_run(both, 0)
    assert run is None or [node.name for node in run.nodes][-1] in ("scores", "scaled")
    engine, x = onchip.compile(both, "cpu"), rows(3, 9, 45)
    for got, truth, naive in zip(
        engine(x), reference.forward(both, x), reference.forward(both, x, "float32"), strict=True
    ):
        assert_error_within(got, truth, naive)


def test_a_softmax_as_right_operand():
    nodes = (
        Node("s", MatMul(), ("x", "x")), Node("p", Softmax(2), ("s",)),
        Node("y", MatMul(), ("p",), {"first": "w"}),
    )  # fmt: skip
    check(Network({"x": TensorType(("B", 4, 4))}, nodes, ("y",), {"w": rows(3, 4)}), ["matmul", "rowwise"])


def test_moves_that_strides_cannot_express_are_not_fused():
    """A Reshape of a Permute, and a Gather of unevenly spaced indices."""
    nodes = (
        Node("t", Permute((0, 2, 1)), ("x",)), Node("r", Reshape((3, 8)), ("t",)),
        Node("g", Gather(2, (0, 3, 1, 2)), ("r",)), Node("y", MatMul(), ("g", "z")),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 6, 4)), "z": TensorType(("B", 4, 3))}, nodes, ("y",), {})
    assert [find_run(net, start) is None for start in range(4)] == [True, True, True, False]
    check(net, ["matmul"])


# Measured on two cores with the device's rates and 512-bit vectors: small and large matrices, one row and many.
@pytest.mark.parametrize(
    ("a", "N", "B", "measured_us"),
    [
        ((5, 3), 7, 1, 2.9),
        ((5, 3), 7, 1024, 263),
        ((2, 4, 5, 3), 6, 1024, 2000),
        ((17, 17), 65, 1024, 1300),
        ((4, 32, 16), 32, 1024, 4800),
        ((64, 64), 64, 1, 10),
        ((64, 64), 64, 64, 246),
        ((64, 64), 64, 1024, 6150),
        ((12, 32, 32), 32, 64, 715),
        ((200, 200), 64, 1, 38),
        ((1, 64), 64, 1024, 840),
        ((64, 64), 1, 1024, 2650),
        ((34, 34), 16, 1024, 746),
    ],
    ids=str,
)
def test_estimates_are_close_to_measurements(a, N, B, measured_us):
    *front, _, K = a
    inputs = {"a": TensorType(("B", *a)), "b": TensorType(("B", *front, K, N))}
    net = Network(inputs, (Node("y", MatMul(), ("a", "b")),), ("y",), {})
    plan = make_plan(net, CPU, [MatMulKernel()], Job(batch=B))
    assert 1 / 2 < plan.estimate_us / measured_us < 2
    assert plan.floor_us < plan.estimate_us
