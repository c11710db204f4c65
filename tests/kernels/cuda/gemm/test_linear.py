"""A Linear, the residual Add after it and the activation after that as one GEMM, on the host."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.graph import Network, Node
from onchip.network.layers import GELU, Add, Linear, ReLU, Tanh
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job
from onchip.plan.planner import make_plan


def network(D_in, D_out, activation=None, dtype="float32", is_own=False):
    """activation(x w^T + bias + other); `is_own`: the other value is x."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((D_out, D_in)) / np.sqrt(D_in), "b": rng.standard_normal(D_out)}
    given = {"x": TensorType(("B", D_in), dtype), "z": TensorType(("B", D_out), dtype)}
    other = "x" if is_own else "z"
    nodes = [Node("p", Linear(), ("x",), {"weight": "w", "bias": "b"}), Node("y", Add(), (other, "p"))]
    nodes += [Node("a", activation, ("y",))] if activation else []
    inputs = {"x": given["x"]} if is_own else given
    typed = {name: array.astype(numpy_dtype(dtype)) for name, array in weights.items()}
    return Network(inputs, nodes, (nodes[-1].name,), typed)


def rows(net, B):
    rng = np.random.default_rng(B)
    return tuple(rng.standard_normal((B, *t.row_shape)).astype(numpy_dtype(t.dtype)) for t in net.inputs.values())


def verify(net, xs, got):
    dtype = net.output.dtype
    assert_error_within(got, reference.forward(net, xs), reference.forward(net, xs, dtype))


@needs_gxx
@pytest.mark.parametrize(
    ("kernel", "precision", "dtype", "given"),
    [
        ("gemv", "fp32", "float32", (40, 33, ReLU())), ("gemv", "fp16", "float16", (48, 24, None)),
        ("gemv", "fp32", "float32", (36, 36, Tanh(), "own")),
        ("gemm_sm90", "fp16", "float16", (264, 136, ReLU())),
        ("gemm_sm90", "fp32", "float32", (264, 136, GELU())),
    ],
)  # fmt: skip
def test_emulated(monkeypatch, kernel, precision, dtype, given):
    D_in, D_out, activation, *own = given
    net, gpu = network(D_in, D_out, activation, dtype, bool(own)), emulated_gpu(monkeypatch)
    (found,) = (each for each in KERNELS if each.name == kernel)
    claims = [each for each in found.claims(net, 0, H200, Job(precision, 5)) if isinstance(each, Claim)]
    assert [len(claim.nodes) for claim in claims] == list(range(1, len(net.nodes) + 1))
    xs = rows(net, 5)
    got = run_claim(gpu, net, claims[-1], *xs)
    verify(net, xs, got)
    assert np.array_equal(run_claim(gpu, net, claims[-1], *(x[2:3] for x in xs)), got[2:3])


def test_what_others_read_is_not_taken_along():
    net = network(264, 136, ReLU())
    read = net.replace(outputs=("a", "p"))
    (few,) = (each for each in KERNELS if each.name == "gemv")
    assert [claim.nodes for claim in few.claims(read, 0, H200, Job(batch=5))] == [("p",)]


@pytest.mark.parametrize("B", [1, 4096])
def test_a_residual_block_is_two_launches(B):
    rng = np.random.default_rng(0)
    weights = {"v": rng.standard_normal((256, 128)), "w": rng.standard_normal((128, 256))}
    nodes = (
        Node("h", Linear(), ("x",), {"weight": "v"}), Node("r", ReLU(), ("h",)),
        Node("p", Linear(), ("r",), {"weight": "w"}), Node("y", Add(), ("x", "p")),
    )  # fmt: skip
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    net = Network({"x": TensorType(("B", 128))}, nodes, ("y",), weights)
    assert len(make_plan(net, H200, KERNELS, Job(batch=B)).groups) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("hint", [1, 4096])
def test_on_a_gpu(precision, hint):
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")
    for net in (network(520, 512, ReLU(), dtype), network(512, 512, None, dtype, is_own=True)):
        engine, xs = onchip.compile(net, "cuda", precision, batch_hint=hint), rows(net, 1001)
        assert len(engine.plan.groups) == 1
        got = engine(*xs)
        if precision == "tf32":
            np.testing.assert_allclose(got, reference.forward(net, xs), rtol=0.02, atol=0.02)
        else:
            verify(net, xs, got)
        for B in (0, 1, 7):
            assert np.array_equal(engine(*(x[:B] for x in xs)), got[:B])
