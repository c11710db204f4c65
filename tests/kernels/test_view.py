"""Views: layers that only reinterpret memory copy nothing, on the CPU and on a GPU."""

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cpu import KERNELS
from onchip.kernels.cuda import KERNELS as CUDA_KERNELS
from onchip.network.graph import Network, Node
from onchip.network.layers import Identity, Permute, ReLU, Reshape, Softmax
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from takers import CPU


def net_of(outputs, *nodes, row_shape=(4, 6)):
    return Network({"x": TensorType(("B", *row_shape))}, [Node(*node) for node in nodes], outputs, {})


# The network, and its result for x.
SOFT = ("s", Softmax(1), ("x",))
CASES = {
    "between": (net_of(("t",), SOFT, ("r", Reshape((3, 8)), ("s",)), ("t", Softmax(1), ("r",))),
                lambda x: [soft(soft(x).reshape(-1, 3, 8))]),
    "of an input": (net_of(("t",), ("r", Reshape((3, 8)), ("x",)), ("t", Softmax(1), ("r",))),
                    lambda x: [soft(x.reshape(-1, 3, 8))]),
    "an output": (net_of(("r",), SOFT, ("r", Reshape((24,)), ("s",))), lambda x: [soft(x).reshape(-1, 24)]),
    "the only layer": (net_of(("r",), ("r", Reshape((24,)), ("x",))), lambda x: [x.reshape(-1, 24)]),
    "two outputs of one value": (
        net_of(("r", "q"), SOFT, ("r", Reshape((24,)), ("s",)), ("q", Reshape((12, 2)), ("s",))),
        lambda x: [soft(x).reshape(-1, 24), soft(x).reshape(-1, 12, 2)]),
    "an output of an output": (net_of(("s", "r"), SOFT, ("r", Reshape((24,)), ("s",))),
                               lambda x: [soft(x), soft(x).reshape(-1, 24)]),
    "a chain of views": (
        net_of(("t",), SOFT, ("r", Reshape((24,)), ("s",)), ("q", Reshape((2, 12)), ("r",)), ("t", Softmax(1), ("q",))),
        lambda x: [soft(soft(x).reshape(-1, 2, 12))]),
    "with other readers": (
        net_of(("t", "u"), SOFT, ("r", Reshape((24,)), ("s",)), ("t", Softmax(1), ("r",)), ("u", Softmax(2), ("s",))),
        lambda x: [soft(soft(x).reshape(-1, 24)), soft(soft(x), 2)]),
    "an identity": (net_of(("i",), ("i", Identity(), ("x",))), lambda x: [x]),
}  # fmt: skip


def soft(x, axis=1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def assert_all_close(got, wanted):
    for y, expected in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name):
    net, truth = CASES[name]
    engine = onchip.compile(net, "cpu")
    for B in (0, 1, 7):
        x = rows(B, 4, 6)
        assert_all_close(engine(x), truth(x) if B else [y[:0] for y in truth(rows(1, 4, 6))])


@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_on_an_emulated_gpu(monkeypatch, name):
    net, truth = CASES[name]
    emulated_gpu(monkeypatch)
    bound = CudaBackend(0).bind(make_plan(net, H200, CUDA_KERNELS))
    x = rows(7, 4, 6)
    outputs = {value: np.empty((7, *net.types[value].row_shape), np.float32) for value in net.outputs}
    for _ in range(3):  # launches, then a graph
        bound.run({"x": x}, outputs, 7)
        assert_all_close(tuple(outputs.values()), truth(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    net, truth = CASES[name]
    engine = onchip.compile(net, "cuda")
    for B in (1, 7, 4097):
        x = rows(B, 4, 6)
        assert_all_close(engine(x), truth(x))


def test_a_view_costs_nothing_and_shares_memory():
    net, _ = CASES["between"]
    plan = make_plan(net, CPU, KERNELS)
    assert [group.claim.label for group in plan.groups] == ["rowwise<Softmax>", "view<Reshape>", "rowwise<Softmax>"]
    assert plan.groups[1].claim.cost.estimate_us(CPU, "fp32", 10**6) == 0
    assert plan.stored_in == {"x": "x", "s": "s", "r": "s", "t": "t"}
    assert plan.between == ("s",)


def test_the_source_of_an_output_view_is_written_to_the_output():
    net, _ = CASES["an output"]
    plan = make_plan(net, CPU, KERNELS)
    assert plan.stored_in == {"x": "x", "s": "r", "r": "r"}
    assert plan.between == ()


def test_permutes_between_nchw_and_nhwc_are_views():
    """After a convolution with an NHWC output, a Permute to NHWC copies nothing."""
    net = net_of(
        ("b",), ("a", ReLU(), ("x",)), ("p", Permute((0, 2, 3, 1)), ("a",)), ("b", ReLU(), ("p",)), row_shape=(4, 3, 5)
    )
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "view")
    (claim,) = kernel.claims(net, 1, H200, Job())
    assert (claim.layout_read("a"), dict(claim.writes)) == ("channels_last", {})
    back = net_of(
        ("b",), ("a", ReLU(), ("x",)), ("p", Permute((0, 3, 1, 2)), ("a",)), ("b", ReLU(), ("p",)), row_shape=(4, 3, 5)
    )
    (claim,) = kernel.claims(back, 1, H200, Job())
    assert (claim.layout_read("a"), dict(claim.writes)) == ("rows", {"p": "channels_last"})
