"""Several look-ups in one launch, side by side or apart; the kernel runs on the host."""

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Embedding, Reshape, Slice
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine


def network(tables, ids="int64", dtype="float32", extra=3, outputs=("y",)):
    """A column of ids per table (V, E); y is their concatenated rows, then `extra` elements."""
    rng = np.random.default_rng(0)
    weights, nodes = {}, []
    for i, shape in enumerate(tables):
        weights[f"t{i}"] = rng.standard_normal(shape).astype(numpy_dtype(dtype))
        nodes.append(Node(f"s{i}", Slice((i,), (1,), (1,)), ("ids",)))
        nodes.append(Node(f"e{i}", Embedding(), (f"s{i}",), {"weight": f"t{i}"}))
        nodes.append(Node(f"r{i}", Reshape(shape[1:]), (f"e{i}",)))
    given = {"ids": TensorType(("B", len(tables)), ids), "x": TensorType(("B", extra), dtype)}
    nodes.append(Node("y", Concat(1), (*(f"r{i}" for i in range(len(tables))), "x")))
    return Network(given, nodes, outputs, weights)


def inputs(net, tables, B):
    rng = np.random.default_rng(B)
    ids = np.stack([rng.integers(0, V, B) for V, _ in tables], 1).astype(net.inputs["ids"].dtype)
    x = net.inputs["x"]
    return ids, rng.standard_normal((B, *x.row_shape)).astype(numpy_dtype(x.dtype))


def assert_same(net, got, want):
    for each, expected in zip(*((got, want) if len(net.outputs) > 1 else ((got,), (want,))), strict=True):
        np.testing.assert_array_equal(each, expected)


CASES = {
    "alike": ([(7, 4)] * 3, {}),
    "odd": ([(7, 3), (5, 1), (9, 6)], {"ids": "int32", "extra": 1}),
    "halves": ([(7, 3), (5, 2)], {"dtype": "float16"}),
    "many": ([(5 + i, 2) for i in range(19)], {}),  # more tables than a launch knows
    "read by others": ([(7, 4), (5, 2)], {"outputs": ("y", "s1", "e0", "r1")}),
}


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_rows_are_where_they_belong(monkeypatch, case):
    tables, given = CASES[case]
    net = network(tables, **given)
    plan = make_plan(net, H200, KERNELS, Job())
    assert [group.claim.kernel for group in plan.groups if not group.claim.is_view] == ["lookups"]
    emulated_gpu(monkeypatch)
    engine = Engine(plan, CudaBackend(), "cuda:0")
    for B in (1, 9, 0):
        xs = inputs(net, tables, B)
        truth = reference.forward(net, xs, net.inputs["x"].dtype)
        for got, want in zip(
            *((each if len(net.outputs) > 1 else (each,)) for each in (engine(*xs), truth)), strict=True
        ):
            np.testing.assert_array_equal(got, want)


@needs_gxx
def test_an_id_that_is_in_no_table_is_told(monkeypatch):
    tables = [(7, 4), (5, 2)]
    net = network(tables)
    emulated_gpu(monkeypatch)
    engine = Engine(make_plan(net, H200, KERNELS, Job()), CudaBackend(), "cuda:0")
    ids, x = inputs(net, tables, 4)
    ids[2, 1] = 6  # a row of the first table, not of the second
    with pytest.raises(InputError) as caught:
        engine(ids, x)
    assert "6" in str(caught.value)
    assert "ids" in str(caught.value)


def test_one_look_up_is_none_of_its_business():
    net = network([(7, 4)], outputs=("e0",))
    plan = make_plan(net, H200, KERNELS, Job())
    assert "lookups" not in [group.claim.kernel for group in plan.groups]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    tables, given = CASES[case]
    net = network(tables, **given)
    engine = onchip.compile(net, "cuda")
    for B in (1, 4097):
        xs = inputs(net, tables, B)
        truth = reference.forward(net, xs, net.inputs["x"].dtype)
        for got, want in zip(
            *((each if len(net.outputs) > 1 else (each,)) for each in (engine(*xs), truth)), strict=True
        ):
            np.testing.assert_array_equal(got, want)
