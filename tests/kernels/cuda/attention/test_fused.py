"""Attention over short sequences in one launch: found among moves, any sizes, the bits of a row. The kernel runs on the
host."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, MatMul, Mul, Permute, ReLU, Reshape, Slice, Softmax
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan

# heads, sequence, elements per head
SIZES = {"whole": (4, 32, 16), "odd": (3, 19, 7), "one": (1, 1, 1), "wide": (2, 17, 40), "long": (2, 100, 20)}


def network(heads, S, D, dtype="float32", has_shift=False, is_scaled_early=False):
    """x (S, 3 heads D) as q, k and v of all heads, as exporters write it; y (S, heads D)."""
    rng = np.random.default_rng(0)
    d = heads * D
    weights = {"scale": np.array(1 / np.sqrt(D)), "shift": rng.standard_normal((heads if S % 2 else 1, S, S))}
    nodes = [
        *(Node(f"{name}0", Slice((0, i * d), (S, d), (1, 1)), ("x",)) for i, name in enumerate("qkv")),
        *(Node(f"{name}1", Reshape((S, heads, D)), (f"{name}0",)) for name in "qkv"),
        Node("q2", Permute((0, 2, 1, 3)), ("q1",)), Node("k2", Permute((0, 2, 3, 1)), ("k1",)),
        *([Node("q3", Mul(), ("q2",), {"constant": "scale"})] if is_scaled_early else []),
        Node("s", MatMul(), ("q3" if is_scaled_early else "q2", "k2")),
        *([] if is_scaled_early else [Node("s1", Mul(), ("s",), {"constant": "scale"})]),
        *([Node("s2", Add(), ("s" if is_scaled_early else "s1",), {"constant": "shift"})] if has_shift else []),
        Node("p", Softmax(), ("s2" if has_shift else "s" if is_scaled_early else "s1",)),
        Node("v2", Permute((0, 2, 1, 3)), ("v1",)),
        Node("h", MatMul(), ("p", "v2")),
        Node("m", Permute((0, 2, 1, 3)), ("h",)), Node("y", Reshape((S, d)), ("m",)),
    ]  # fmt: skip
    used = {name for node in nodes for name in node.weights.values()}
    weights = {name: array.astype(numpy_dtype(dtype)) for name, array in weights.items() if name in used}
    return Network({"x": TensorType(("B", S, 3 * d), dtype)}, nodes, ("y",), weights)


def rows(net, B):
    given = net.input
    return np.random.default_rng(B).standard_normal((B, *given.row_shape)).astype(numpy_dtype(given.dtype))


def verify(net, x, got, dtype=None):
    truth, naive = (reference.forward(net, x, kind) for kind in ("float64", dtype or net.output.dtype))
    assert_error_within(got, truth, naive)


@needs_gxx
@pytest.mark.parametrize(
    ("name", "dtype", "precision", "has_shift"),
    [
        ("whole", "float32", "fp32", False), ("odd", "float32", "fp32", True), ("one", "float32", "fp32", False),
        ("wide", "bfloat16", "bf16", False), ("long", "float32", "fp32", False), ("odd", "float16", "fp16", True),
        ("whole", "float16", "fp16", True), ("wide", "float32", "fp32", True), ("whole", "bfloat16", "bf16", False),
    ],
)  # fmt: skip
def test_emulated(monkeypatch, name, dtype, precision, has_shift):
    gpu = emulated_gpu(monkeypatch)
    net = network(*SIZES[name], dtype, has_shift, is_scaled_early=has_shift)
    (claim,) = claims_of(net, "attention", precision)
    x = rows(net, 3)
    got = run_claim(gpu, net, claim, x).reshape(3, *net.output.row_shape)
    verify(net, x, got)
    assert np.array_equal(run_claim(gpu, net, claim, x[1:2]).reshape(got[1:2].shape), got[1:2])
    assert claim.facts.at(0).launches == ()


@needs_gxx
def test_values_of_their_own(monkeypatch):
    """Queries of another length than keys, two axes of heads, of which one is stretched, and nothing moved."""
    shapes = {"q": (2, 3, 5, 8), "k": (1, 3, 8, 21), "v": (2, 1, 21, 4)}
    nodes = (Node("s", MatMul(), ("q", "k")), Node("p", Softmax(), ("s",)), Node("y", MatMul(), ("p", "v")))

    def of(shapes):
        return Network({name: TensorType(("B", *shape)) for name, shape in shapes.items()}, nodes, ("y",), {})

    assert claims_of(of(shapes), "attention") == []  # no stride leads from head to head of k
    shapes |= {"k": (1, 1, 8, 21), "v": (2, 3, 21, 4)}
    net, rng = of(shapes), np.random.default_rng(0)
    xs = tuple(rng.standard_normal((2, *shape), np.float32) for shape in shapes.values())
    (claim,) = claims_of(net, "attention")
    verify(net, xs, run_claim(emulated_gpu(monkeypatch), net, claim, *xs))


def test_an_encoder_layer_is_one_launch_between_products():
    plan = make_plan(network(4, 32, 16), H200, KERNELS, Job())
    assert [group.claim.kernel for group in plan.groups if not group.claim.is_view] == ["attention"]


def test_what_others_read_is_made():
    """Scores that are an output, and a slice that somebody else reads."""
    net = network(2, 8, 16)
    scores = net.replace(outputs=("y", "p"))
    assert not any(claims_of(scores, "attention", start=i) for i in range(len(scores.nodes)))
    read = Network(net.inputs, (*net.nodes, Node("r", ReLU(), ("k0",))), ("y", "r"), net.weights)
    starts = [i for i in range(len(read.nodes)) if claims_of(read, "attention", start=i)]
    assert read.nodes[starts[0]].name == "v0"  # after k0


def test_long_sequences_are_refused():
    net = network(2, 129, 16)
    (answer,) = next(k for k in KERNELS if k.name == "attention").claims(net, 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "up to 128 keys" in answer.why


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("name", [*SIZES, "largest"])
def test_on_a_gpu(name, precision):
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")
    heads, S, D = SIZES.get(name, (2, 128, 64))
    net = network(heads, S, D, dtype, has_shift=name != "whole")
    engine = onchip.compile(net, "cuda", precision)
    assert [group.claim.kernel for group in engine.plan.groups if not group.claim.is_view] == ["attention"]
    x = rows(net, 257)
    got = engine(x)
    if precision == "tf32":
        np.testing.assert_allclose(got, reference.forward(net, x), rtol=0.02, atol=0.02)
    else:
        verify(net, x, got)
    for B in (0, 1, 7):
        assert np.array_equal(engine(x[:B]), got[:B])
