"""Chains of pointwise layers on a GPU: claims, and the kernel itself, emulated on the host and on a GPU."""

from dataclasses import replace

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda.common.arguments import Input
from onchip.kernels.cuda.common.fast_divide import magic_of
from onchip.kernels.cuda.elementwise.pointwise import MAX_ELEMENTS, STRUCTS, PointwiseKernel, rows_per_launch
from onchip.kernels.cuda.elementwise.steps import MAX_OUTPUTS, MAX_SLOTS, MAX_STEPS, Access, Opcode, broadcast
from onchip.network.build import sequential
from onchip.network.io import with_io
from onchip.network.layers import (
    GELU,
    Add,
    Cast,
    Linear,
    ReLU,
    Reshape,
    Softmax,
    Tanh,
)
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from pointwise_networks import (
    NETWORKS,
    PRECISIONS,
    as_tuple,
    assert_right,
    claims,
    emulated,
    inputs_of,
    network,
    pair,
    planned,
    tree,
)
from python_calls import python_calls

FEW = "onchip.kernels.cuda.elementwise.pointwise.BLOCKS_PER_SM"  # 0: all runs are long ones


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


# -- what is claimed -------------------------------------------------------------------------------------------


def test_a_whole_run_is_one_launch():
    plan = planned(tree())
    (group,) = plan.groups
    assert group.claim.label == "pointwise<Tanh,Sigmoid,Mul,Reshape,LeakyReLU,Add,ReLU>"
    assert set(group.inputs) == {"x", "z", "u"}
    assert group.claim.cost.row_bytes == 4 * (35 + 35 + 7 + 4 * 35)
    few, many = (group.claim.facts.at(B).launches for B in (1000, 100_000))
    assert [launch.config.grid[0] for launch in (*few, *many)] == [-(-35 * 1000 // 1024), -(-35 * 100_000 // 4096)]
    assert many[0].config.shared_bytes == group.claim.facts.run.slots * 16384 == group.claim.fast_bytes


def test_values_that_are_needed_later_are_kept():
    (claim,) = claims(NETWORKS["four values at the same time"])
    assert claim.facts.run.slots == MAX_SLOTS
    assert claim.facts.at(1).launches[0].config.shared_bytes == MAX_SLOTS * 4096
    assert claim.facts.at(1 << 20).launches[0].config.shared_bytes == MAX_SLOTS * 16384


def test_a_chain_keeps_nothing_and_loads_once():
    (claim,) = claims(sequential(TensorType(("B", 6)), [("a", Tanh()), ("b", ReLU()), ("c", GELU())], {}))
    run = claim.facts.run
    assert [step.opcode for step in run.steps] == [Opcode.LOAD, *[Opcode.APPLY] * 3, Opcode.STORE]
    assert run.slots == 0


def test_parts_that_another_kernel_may_take_along_are_left():
    layers = [("a", Tanh()), ("r", Reshape((6,))), ("c", Cast("float16")), ("l", Linear())]
    net = sequential(TensorType(("B", 2, 3)), layers, {"l.weight": rows(4, 6).astype(np.float16)})
    assert [claim.nodes for claim in claims(net)] == [("a", "r", "c"), ("a",)]
    plan = planned(net, precision="fp16")
    assert [group.claim.kernel for group in plan.groups] == ["pointwise", "mlp_tensor_core"]


def test_a_residual_connection_of_an_mlp():
    nodes = [
        ("a", Linear(), ("x",), {"weight": "u"}),
        ("r", ReLU(), ("a",)),
        ("s", Add(), ("r", "x")),
        ("b", Linear(), ("s",), {"weight": "u"}),
    ]
    plan = planned(network({"x": (9,)}, nodes, ("b",), {"u": rows(9, 9, seed=3)}))
    kernels = [group.claim.kernel for group in plan.groups]
    assert kernels in (["mlp_tensor_core", "pointwise", "mlp_tensor_core"], ["mlp_fused", "pointwise", "mlp_fused"])
    assert plan.groups[1].claim.nodes == ("s",)


def test_limits_cut_a_run():
    many = sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(2 * MAX_STEPS)], {})
    assert len(claims(many)[0].nodes) == MAX_STEPS - 2
    nodes = [(f"r{i}", ReLU(), ("x",)) for i in range(MAX_OUTPUTS + 3)]
    wide = network({"x": (4,)}, nodes, tuple(name for name, *_ in nodes))
    assert len(claims(wide)[0].nodes) == MAX_OUTPUTS
    nodes += [("s", Add(), tuple(name for name, *_ in nodes))]
    kept = network({"x": (4,)}, nodes, ("s",))
    assert claims(kept)[0].facts.run.slots <= MAX_SLOTS
    assert sum(len(group.claim.nodes) for group in planned(kept).groups) == len(nodes)


def test_what_it_does_not_take():
    def why(layer, dtype):
        (refusal,) = claims(sequential(TensorType(("B", 3), dtype), [("y", layer)], {}))
        assert isinstance(refusal, Refusal)
        return refusal.why

    assert "not float8_e5m2" in why(ReLU(), "float8_e5m2")
    assert "2^31" in claims(sequential(TensorType(("B", 2**31 + 1)), [("y", ReLU())], {}))[0].why
    assert claims(sequential(TensorType(("B", 3)), [("y", Softmax())], {})) == []
    old = list(PointwiseKernel().claims(tree(), 0, replace(H200, arch="sm_70"), Job()))
    assert "on sm_70" in old[0].why


def test_a_hidden_value_that_is_an_output_is_cast_by_itself():
    nodes = [("a", Linear(), ("x",), {"weight": "u"}), ("b", Linear(), ("a",), {"weight": "v"})]
    weights = {"u": rows(9, 6, seed=3) / np.float32(3), "v": rows(4, 9, seed=4) / np.float32(3)}
    plan = planned(with_io(network({"x": (6,)}, nodes, ("a", "b"), weights), "float16"), precision="tf32")
    assert [group.claim.kernel for group in plan.groups] == ["mlp_tensor_core", "pointwise", "mlp_tensor_core"]
    assert plan.groups[1].claim.cost.row_bytes == 9 * (4 + 2)


def test_planning_2_000_layers_is_four_times_the_work_of_500():
    def chain(count):
        layers = [(f"r{i}", (Tanh(), Cast("float32"))[i % 2]) for i in range(count)]
        return sequential(TensorType(("B", 4)), layers, {})

    few, net = chain(500), chain(2_000)
    plan = planned(net, kernels=(PointwiseKernel(),))
    assert python_calls(lambda: planned(net, kernels=(PointwiseKernel(),))) < 5 * python_calls(
        lambda: planned(few, kernels=(PointwiseKernel(),))
    )
    assert sum(len(group.claim.nodes) for group in plan.groups) == len(plan.network.nodes)


# -- access ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 49, 64, 127, 128, 1000, 2**20 + 7, 2**30, 2**31 - 1])
def test_division_by_multiplication(size):
    magic, shift = magic_of(size)
    assert magic < 2**32
    edges = [k * size + d for k in (0, 1, 2, 3, (2**31 - 1) // size) for d in (-1, 0, 1)]
    for n in (*edges, *np.random.default_rng(0).integers(0, 2**31, 1000).tolist()):
        if 0 <= n < 2**31:
            assert n * magic >> 32 >> shift == n // size


@pytest.mark.parametrize(
    ("row", "to", "batch", "access", "levels", "outer"),
    [
        ((3, 4), (3, 4), 12, Access.CONTIGUOUS, (), 1),
        ((1,), (1,), 1, Access.CONTIGUOUS, (), 1),
        ((4, 1), (4, 8), 4, Access.BROADCAST, ((8, 0),), 1),
        ((4, 1), (4, 7), 4, Access.STRIDED, ((7, 0),), 1),
        ((1, 8), (4, 8), 8, Access.VECTOR4, ((8, 1), (4, 0)), 8),
        ((8,), (4, 8), 0, Access.VECTOR4, ((8, 1),), 0),
        ((1,), (4, 8), 0, Access.BROADCAST, (), 0),
        ((3, 1, 1), (3, 2, 2), 0, Access.BROADCAST, ((4, 0), (3, 1)), 0),
    ],
)
def test_places_of_what_is_stretched(row, to, batch, access, levels, outer):
    operand = broadcast(Input(0), "float32", row, to, batch)
    assert (operand.access, operand.levels, operand.outer) == (access, levels, outer)


def test_more_numbers_than_32_bits_count_go_in_several_launches():
    net = sequential(TensorType(("B", 3 << 20)), [("y", ReLU())], {})
    (claim,) = claims(net)
    most = rows_per_launch(3 << 20)
    assert most % 16 == 0
    assert most * (3 << 20) <= MAX_ELEMENTS
    launches = claim.facts.at(2 * most + 5).launches
    _, struct = STRUCTS["float"]
    runs = [struct.from_buffer_copy(launch.arguments[0].data) for launch in launches]
    assert [run.first for run in runs] == [0, most * (3 << 20), 2 * most * (3 << 20)]
    assert sum(run.count for run in runs) == (2 * most + 5) * (3 << 20)
    assert rows_per_launch(2**31 - 16) == 1
    assert rows_per_launch(2**31 - 1) == 0


def test_nothing_is_launched_for_empty_rows():
    (claim,) = claims(sequential(TensorType(("B", 3, 0)), [("y", ReLU())], {}))
    assert claim.facts.at(5).launches == ()
    (claim,) = claims(sequential(TensorType(("B", 3)), [("y", ReLU())], {}))
    assert claim.facts.at(0).launches == ()


# -- the kernel on the host --------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("name", NETWORKS)
def test_right_on_the_host(gpu, monkeypatch, name):
    net = NETWORKS[name]
    engine = emulated(gpu, net)
    for B in (1, 3):
        assert_right(net, engine, inputs_of(net, B, B))
    monkeypatch.setattr(FEW, 0)
    for B in (2, 130):
        assert_right(net, engine, inputs_of(net, B, B))


@needs_gxx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_in_every_precision(gpu, precision):
    x = inputs_of(tree(), 7)
    for got, expected in zip(emulated(gpu, tree(), precision)(*x), emulated(gpu, tree())(*x), strict=True):
        assert got.tobytes() == expected.tobytes()


@needs_gxx
def test_rows_of_several_launches(gpu, monkeypatch):
    """More elements than one launch can index, broadcast values among them."""
    monkeypatch.setattr("onchip.kernels.cuda.elementwise.pointwise.MAX_ELEMENTS", 1000)
    for name in ("a tree", "batch norm (C, H, W)", "constant (8,) on (3, 8)", "Add (3, 4) (3, 1)"):
        net = NETWORKS[name]
        engine, x = emulated(gpu, net), inputs_of(net, 150)
        before = len(gpu.driver.launches)
        assert_right(net, engine, x)
        assert len(gpu.driver.launches) - before > 1


@needs_gxx
def test_the_bits_of_a_row_depend_on_nothing_else(gpu, monkeypatch):
    for name in ("a tree", "Mul (2, 3, 4) (2, 1, 4)", "batch norm (C, L)", "batch norm (C)"):
        net = NETWORKS[name]
        engine, x = emulated(gpu, net), inputs_of(net, 257)
        with monkeypatch.context() as many:
            many.setattr(FEW, 0)
            whole = as_tuple(engine(*x))
        for first, last in ((0, 1), (3, 10), (250, 257)):
            for some, all_of_it in zip(as_tuple(engine(*(v[first:last] for v in x))), whole, strict=True):
                assert some.tobytes() == all_of_it[first:last].tobytes()


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_right_on_a_gpu(name, precision):
    net = NETWORKS[name]
    engine = onchip.compile(net, "cuda", precision)
    assert {group.claim.kernel for group in engine.plan.groups} <= {"pointwise", "view"}
    for B in (0, 1, 7, 4097):
        assert_right(net, engine, inputs_of(net, B, B))
    x = inputs_of(net, 300)
    for some, whole in zip(as_tuple(engine(*(v[123:130] for v in x))), as_tuple(engine(*x)), strict=True):
        assert some.tobytes() == whole[123:130].tobytes()


@pytest.mark.gpu
def test_a_large_array_of_torch():
    torch = pytest.importorskip("torch")
    net = pair(Add(), (1000, 129), (1, 129))
    engine = onchip.compile(net, "cuda")
    x, z = (torch.randn(2000, *row, device="cuda") for row in ((1000, 129), (1, 129)))
    assert torch.equal(engine(x, z), x + z)


@pytest.mark.gpu
def test_a_network_with_a_hidden_output_in_half_precision():
    nodes = [("a", Linear(), ("x",), {"weight": "u"}), ("b", Linear(), ("a",), {"weight": "v"})]
    weights = {"u": rows(9, 6, seed=3) / np.float32(3), "v": rows(4, 9, seed=4) / np.float32(3)}
    plain = network({"x": (6,)}, nodes, ("a", "b"), weights)
    x = rows(77, 6).astype(np.float16)
    made = onchip.compile(with_io(plain, "float16"), "cuda", "fp16")(x)
    for got, expected in zip(made, onchip.compile(plain, "cpu")(x.astype(np.float32)), strict=True):
        assert got.dtype == np.float16
        assert np.abs(got.astype(np.float32) - expected).max() < 0.01 * np.abs(expected).max()
