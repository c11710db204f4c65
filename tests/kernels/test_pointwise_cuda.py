"""Runs of pointwise layers on a GPU: what is claimed, and the kernel itself, run on the host and on a GPU."""

import time
from dataclasses import replace

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.divide import magic_of
from onchip.kernels.cuda.pointwise import MOST_NUMBERS, Pointwise, rows_a_launch
from onchip.kernels.cuda.pointwise_run import MOST_KEPT, MOST_OUTPUTS, MOST_STEPS, What, Where, stretch
from onchip.kernels.cuda.program import Input
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine
from onchip.spec.build import sequential
from onchip.spec.io import IO_DTYPES, with_io
from onchip.spec.layers import (
    GELU,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Clip,
    Identity,
    LeakyReLU,
    Linear,
    Mul,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    ToPixels,
)
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType, numpy_dtype

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def network(inputs, nodes, outputs, weights=None):
    """inputs: name -> row shape or TensorType; nodes: (name, layer, reads, weights by role)."""
    types = {name: t if isinstance(t, TensorType) else TensorType(("B", *t)) for name, t in inputs.items()}
    made = tuple(Node(name, layer, reads, *given) for name, layer, reads, *given in nodes)
    return Network(types, made, outputs, weights or {})


def norm(C, seed=0, bias=True):
    """A batch norm far from 0: what is taken from what matters."""
    rng = np.random.default_rng(seed)
    made = {"n.mean": 100 + rng.standard_normal(C), "n.var": rng.random(C) + 0.1, "n.weight": rng.standard_normal(C)}
    made |= {"n.bias": rng.standard_normal(C)} if bias else {}
    return {name.partition(".")[2]: name for name in made}, {n: w.astype(np.float32) for n, w in made.items()}


def batch_norm(layer, *row, dtype="float32", bias=True):
    roles, weights = norm(row[0], bias=bias)
    return network({"x": TensorType(("B", *row), dtype)}, [("n", layer, ("x",), roles)], ("n",), weights)


def constant(layer, shape, *row, dtype="float32"):
    weights = {"c": np.random.default_rng(5).standard_normal(shape).astype(numpy_dtype(dtype))}
    given = {"x": TensorType(("B", *row), dtype)}
    return network(given, [("y", layer, ("x",), {"constant": "c"})], ("y",), weights)


def pair(layer, one, two, dtype="float32"):
    given = {"x": TensorType(("B", *one), dtype), "z": TensorType(("B", *two), dtype)}
    return network(given, [("y", layer, ("x", "z"))], ("y",))


def tree():
    """Values that are read twice, an output in the middle, a sum of three whose last is made first."""
    return network(
        {"x": (5, 7), "z": (5, 7), "u": (1, 7)},
        [
            ("a", Tanh(), ("x",)),
            ("b", Sigmoid(), ("z",)),
            ("c", Mul(), ("b", "a")),
            ("flat", Reshape(), ("c",)),
            ("d", LeakyReLU(0.2), ("flat",)),
            ("again", Reshape((5, 7)), ("d",)),
            ("e", Add(), ("x", "z", "a")),
            ("f", Add(), ("u", "e", "again", "e")),
            ("g", Identity(), ("f",)),
            ("h", ReLU(), ("g",)),
        ],
        ("c", "h", "again", "g"),
    )


NETWORKS = {
    **{
        str(layer): sequential(TensorType(("B", 5, 7)), [("y", layer)], {})
        for layer in (ReLU(), LeakyReLU(0.2), LeakyReLU(-0.5), Clip(-0.5, 0.7), Clip(high=0.25), Clip(0.5, -0.5),
                      Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"), ToPixels(), Identity(), Reshape((7, 5)))
    },
    "a chain": sequential(
        TensorType(("B", 6)), [("a", Tanh()), ("b", Clip(-0.5, 0.5)), ("r", Reshape((2, 3))), ("c", GELU())], {}
    ),
    "rows of a chain that is rounded": sequential(
        TensorType(("B", 3)), [("a", Tanh()), ("b", Cast("float16")), ("c", SiLU()), ("d", Cast("bfloat16"))], {}
    ),
    "bytes": sequential(TensorType(("B", 3, 5)), [("a", Tanh()), ("p", ToPixels()), ("r", Reshape())], {}),
    "bytes as floats": sequential(TensorType(("B", 3)), [("p", ToPixels()), ("c", Cast("float16"))], {}),
    "a tree": tree(),
    "four values at the same time": network(
        {"x": (9,)},
        [
            *((f"r{i}", layer, ("x",)) for i, layer in enumerate((Tanh(), Sigmoid(), GELU(), SiLU()))),
            ("s", Add(), ("x", "r0", "r1", "r2", "r3")),
            ("p", Mul(), ("s", "x")),
        ],
        ("p",),
    ),
    "twice": network({"x": (9,)}, [("a", ReLU(), ("x",)), ("y", Mul(), ("a", "a"))], ("y",)),
    "an input twice": network({"x": (9,)}, [("y", Mul(), ("x", "x", "x"))], ("y",)),
    "in two shapes": network(
        {"x": (4, 3), "z": (12,)},
        [("r", Reshape((12,)), ("x",)), ("y", Add(), ("r", "z")), ("w", Mul(), ("y", "r"))],
        ("r", "w"),
    ),
    "stretched after another shape": network(
        {"x": (12,), "z": (3, 1)}, [("r", Reshape((3, 4)), ("x",)), ("y", Mul(), ("z", "r"))], ("y",)
    ),
    "batch norm (C)": batch_norm(BatchNorm1d(), 8),
    "batch norm (C, L)": batch_norm(BatchNorm1d(eps=0.1), 3, 5, bias=False),
    "batch norm (C, H, W)": batch_norm(BatchNorm2d(), 3, 4, 4),
    "batch norm in half precision": batch_norm(BatchNorm2d(), 3, 2, 3, dtype="float16"),
    **{
        f"{layer.kind} {one} {two}": pair(layer, one, two)
        for layer, one, two in (
            (Add(), (8,), (8,)), (Mul(), (8,), (1,)), (Add(), (3, 4), (3, 1)), (Add(), (1, 4), (3, 4)),
            (Mul(), (3, 5), (1, 5)), (Mul(), (2, 3, 4), (2, 1, 4)), (Add(), (2, 1, 5), (1, 3, 1)), (Mul(), (), ()),
            (Add(), (2, 1, 3, 1, 2, 1), (2, 2, 3, 2, 2, 2)),
        )
    },
    **{
        f"constant {shape} on {row}": constant(Add(), shape, *row)
        for shape, row in (
            ((), (3,)), ((1,), (5,)), ((8,), (3, 8)), ((3, 1), (3, 8)), ((3, 1, 1), (3, 3, 3)), ((7,), (7,)),
        )
    },
    "constant in half precision": constant(Mul(), (5,), 3, 5, dtype="bfloat16"),
    "one number": constant(Mul(), (1,), 1),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


def inputs_of(net, B, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for given in net.inputs.values():
        x = (
            100 + rng.standard_normal((B, *given.row_shape))
            if "n.mean" in net.weights
            else 2 * rng.standard_normal((B, *given.row_shape))
        )
        made.append(x.astype(numpy_dtype(given.dtype)))
    return tuple(made)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_right(net, engine, x, precision="fp32"):
    """At most twice the error of the naive run in the narrowest type there is, and a few units in the last place."""
    narrowest = max((t.dtype for t in net.types.values()), key=lambda dtype: DTYPE_ULP.get(dtype, 0.0))
    narrowest = narrowest if narrowest in DTYPE_ULP else "float32"
    for name, got, exact, naive in zip(
        net.outputs, as_tuple(engine(*x)), as_tuple(reference.forward(net, x)),
        as_tuple(reference.forward(net, x, narrowest)), strict=True,
    ):  # fmt: skip
        assert got.dtype == numpy_dtype(net.types[name].dtype)
        assert got.shape == exact.shape
        ulp = max(ULP["fp32"], DTYPE_ULP.get(narrowest, 0.0))
        step = 1 / 250 if any(isinstance(node.layer, ToPixels) for node in net.nodes) else 0.0
        allowed = FACTOR * scaled_error(naive, exact) + ULPS * ulp + step
        assert scaled_error(got, exact) <= allowed, name


def planned(net, device=H200, precision="fp32", kernels=KERNELS):
    return make_plan(net, device, kernels, Job(precision))


# -- what is claimed -------------------------------------------------------------------------------------------


def claims(net, start=0):
    return list(Pointwise().claims(net, start, H200, Job()))


def test_a_whole_run_is_one_launch():
    plan = planned(tree())
    (group,) = plan.groups
    assert group.claim.label == "pointwise<Tanh,Sigmoid,Mul,Reshape,LeakyReLU,Add,ReLU>"
    assert set(group.inputs) == {"x", "z", "u"}
    assert group.claim.price.row_bytes == 4 * (35 + 35 + 7 + 4 * 35)
    (launch,) = group.claim.facts.at(1000).launches
    assert launch.config.grid == (-(-35 * 1000 // 4096), 1, 1)
    assert launch.config.shared_bytes == group.claim.facts.run.kept * 16384 == group.claim.fast_bytes


def test_values_that_are_needed_later_are_kept():
    (claim,) = claims(NETWORKS["four values at the same time"])
    assert claim.facts.run.kept == MOST_KEPT
    assert claim.facts.at(1).launches[0].config.shared_bytes == MOST_KEPT * 16384


def test_a_chain_keeps_nothing_and_loads_once():
    (claim,) = claims(sequential(TensorType(("B", 6)), [("a", Tanh()), ("b", ReLU()), ("c", GELU())], {}))
    run = claim.facts.run
    assert [step.what for step in run.steps] == [What.LOAD, *[What.APPLY] * 3, What.GIVE]
    assert run.kept == 0


def test_parts_that_another_kernel_may_take_along_are_left():
    layers = [("a", Tanh()), ("r", Reshape((6,))), ("c", Cast("float16")), ("l", Linear())]
    net = sequential(TensorType(("B", 2, 3)), layers, {"l.weight": rows(4, 6).astype(np.float16)})
    assert [claim.nodes for claim in claims(net)] == [("a", "r", "c"), ("a",)]
    plan = planned(net, precision="fp16")
    assert [group.claim.kernel for group in plan.groups] == ["pointwise", "mlp_tensor"]


def test_a_residual_connection_of_an_mlp():
    nodes = [
        ("a", Linear(), ("x",), {"weight": "u"}),
        ("r", ReLU(), ("a",)),
        ("s", Add(), ("r", "x")),
        ("b", Linear(), ("s",), {"weight": "u"}),
    ]
    plan = planned(network({"x": (9,)}, nodes, ("b",), {"u": rows(9, 9, seed=3)}))
    kernels = [group.claim.kernel for group in plan.groups]
    assert kernels in (["mlp_tensor", "pointwise", "mlp_tensor"], ["mlp_fused", "pointwise", "mlp_fused"])
    assert plan.groups[1].claim.nodes == ("s",)


def test_limits_cut_a_run():
    many = sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(2 * MOST_STEPS)], {})
    assert len(claims(many)[0].nodes) == MOST_STEPS - 2
    nodes = [(f"r{i}", ReLU(), ("x",)) for i in range(MOST_OUTPUTS + 3)]
    wide = network({"x": (4,)}, nodes, tuple(name for name, *_ in nodes))
    assert len(claims(wide)[0].nodes) == MOST_OUTPUTS
    nodes += [("s", Add(), tuple(name for name, *_ in nodes))]
    kept = network({"x": (4,)}, nodes, ("s",))
    assert claims(kept)[0].facts.run.kept <= MOST_KEPT
    assert sum(len(group.claim.nodes) for group in planned(kept).groups) == len(nodes)


def test_what_it_does_not_take():
    def why(layer, dtype):
        (refusal,) = claims(sequential(TensorType(("B", 3), dtype), [("y", layer)], {}))
        assert isinstance(refusal, Refusal)
        return refusal.why

    assert why(ReLU(), "float8_e5m2").endswith("not float8_e5m2")
    assert "31 bits" in claims(sequential(TensorType(("B", 2**31 + 1)), [("y", ReLU())], {}))[0].why
    assert claims(sequential(TensorType(("B", 3)), [("y", Softmax())], {})) == []
    assert list(Pointwise().claims(tree(), 0, H200, Job(loss="mse"))) == []
    old = list(Pointwise().claims(tree(), 0, replace(H200, arch="sm_70"), Job()))
    assert "not sm_70" in old[0].why


def test_a_hidden_value_that_is_an_output_is_cast_by_itself():
    nodes = [("a", Linear(), ("x",), {"weight": "u"}), ("b", Linear(), ("a",), {"weight": "v"})]
    weights = {"u": rows(9, 6, seed=3) / np.float32(3), "v": rows(4, 9, seed=4) / np.float32(3)}
    plan = planned(with_io(network({"x": (6,)}, nodes, ("a", "b"), weights), "float16"), precision="tf32")
    assert [group.claim.kernel for group in plan.groups] == ["mlp_tensor", "pointwise", "mlp_tensor"]
    assert plan.groups[1].claim.price.row_bytes == 9 * (4 + 2)


def test_ten_thousand_layers_are_planned_in_a_second():
    net = sequential(TensorType(("B", 4)), [(f"r{i}", (Tanh(), Cast("float32"))[i % 2]) for i in range(10_000)], {})
    start = time.perf_counter()
    plan = planned(net, kernels=(Pointwise(),))
    assert time.perf_counter() - start < 5  # a second on a machine that does nothing else
    assert sum(len(group.claim.nodes) for group in plan.groups) == len(plan.network.nodes)


# -- places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 49, 64, 127, 128, 1000, 2**20 + 7, 2**30, 2**31 - 1])
def test_division_by_multiplication(size):
    magic, shift = magic_of(size)
    assert magic < 2**32
    edges = [k * size + d for k in (0, 1, 2, 3, (2**31 - 1) // size) for d in (-1, 0, 1)]
    for n in (*edges, *np.random.default_rng(0).integers(0, 2**31, 1000).tolist()):
        if 0 <= n < 2**31:
            assert n * magic >> 32 >> shift == n // size


@pytest.mark.parametrize(
    ("row", "to", "batch", "where", "levels", "outer"),
    [
        ((3, 4), (3, 4), 12, Where.WHOLE, (), 1),
        ((1,), (1,), 1, Where.WHOLE, (), 1),
        ((4, 1), (4, 8), 4, Where.ALIKE, ((8, 0),), 1),
        ((4, 1), (4, 7), 4, Where.APART, ((7, 0),), 1),
        ((1, 8), (4, 8), 8, Where.NEIGHBOURS, ((8, 1), (4, 0)), 8),
        ((8,), (4, 8), 0, Where.NEIGHBOURS, ((8, 1),), 0),
        ((1,), (4, 8), 0, Where.ALIKE, (), 0),
        ((3, 1, 1), (3, 2, 2), 0, Where.ALIKE, ((4, 0), (3, 1)), 0),
    ],
)
def test_places_of_what_is_stretched(row, to, batch, where, levels, outer):
    operand = stretch(Input(0), "float32", row, to, batch)
    assert (operand.where, operand.levels, operand.outer) == (where, levels, outer)


def test_more_numbers_than_32_bits_count_go_in_several_launches():
    net = sequential(TensorType(("B", 3 << 20)), [("y", ReLU())], {})
    (claim,) = claims(net)
    most = rows_a_launch(3 << 20)
    assert most % 16 == 0
    assert most * (3 << 20) <= MOST_NUMBERS
    launches = claim.facts.at(2 * most + 5).launches
    begins = [int.from_bytes(launch.arguments[0].data[:8], "little") for launch in launches]
    counts = [int.from_bytes(launch.arguments[0].data[8:12], "little") for launch in launches]
    assert begins == [0, most * (3 << 20), 2 * most * (3 << 20)]
    assert sum(counts) == (2 * most + 5) * (3 << 20)
    assert rows_a_launch(2**31 - 16) == 1
    assert rows_a_launch(2**31 - 1) == 0


def test_nothing_is_launched_for_empty_rows():
    (claim,) = claims(sequential(TensorType(("B", 3, 0)), [("y", ReLU())], {}))
    assert claim.facts.at(5).launches == ()
    (claim,) = claims(sequential(TensorType(("B", 3)), [("y", ReLU())], {}))
    assert claim.facts.at(0).launches == ()


# -- the kernel on the host --------------------------------------------------------------------------------------


def emulated(gpu, net, precision="fp32"):
    plan = planned(net, gpu.device, precision)
    assert {group.claim.kernel for group in plan.groups} <= {"pointwise", "view"}
    return Engine(plan, CudaBackend(), "cuda:0")


@needs_gxx
@pytest.mark.parametrize("name", NETWORKS)
def test_right_on_the_host(gpu, name):
    net = NETWORKS[name]
    engine = emulated(gpu, net)
    for B in (1, 3, 130):
        assert_right(net, engine, inputs_of(net, B, B))


@needs_gxx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_in_every_precision(gpu, precision):
    x = inputs_of(tree(), 7)
    for got, expected in zip(emulated(gpu, tree(), precision)(*x), emulated(gpu, tree())(*x), strict=True):
        assert got.tobytes() == expected.tobytes()


@needs_gxx
def test_rows_of_several_launches(gpu, monkeypatch):
    """Numbers beyond what one launch counts, broadcast values among them."""
    monkeypatch.setattr("onchip.kernels.cuda.pointwise.MOST_NUMBERS", 1000)
    for name in ("a tree", "batch norm (C, H, W)", "constant (8,) on (3, 8)", "Add (3, 4) (3, 1)"):
        net = NETWORKS[name]
        engine, x = emulated(gpu, net), inputs_of(net, 150)
        before = len(gpu.driver.launches)
        assert_right(net, engine, x)
        assert len(gpu.driver.launches) - before > 1


INTS = ("int64", "int32", "int16", "int8", "uint8")
FLOATS = ("float64", *IO_DTYPES)
CASTS = [(given, to) for given in (*FLOATS, *INTS, "bool") for to in FLOATS if given != to]


def cast_case(given, to, B):
    """Numbers of all sizes, halfway between others and next to that; the network, and what NumPy makes of them."""
    rng = np.random.default_rng(3)
    dtype = numpy_dtype(given)
    if "float" in given:
        x = 30 * rng.standard_normal((B, 3)) * 10.0 ** rng.integers(-9, 9, (B, 3))
        x[B // 2] = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-9 + 2.0**-40
        x[-1] = np.inf, -np.inf, 1e-7
    else:
        low, high = (0, 1) if given == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        x = rng.integers(low, high, (B, 3), "int64", endpoint=True) >> rng.integers(0, 62, (B, 3))
        x[-1] = low, high, 1
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
        return sequential(TensorType(("B", 3), given), [("c", Cast(to))], {}), x, x.astype(numpy_dtype(to))


@needs_gxx
@pytest.mark.parametrize(("given", "to"), CASTS)
def test_rounded_as_numpy_rounds_on_the_host(gpu, given, to):
    net, x, expected = cast_case(given, to, 1001)
    assert emulated(gpu, net)(x).tobytes() == expected.tobytes()


def in_dtype(net, dtype):
    """The network with float32 replaced, in rows and weights."""
    inputs = {name: TensorType(t.shape, dtype) for name, t in net.inputs.items()}
    return Network(inputs, net.nodes, net.outputs, {n: w.astype(dtype) for n, w in net.weights.items()})


DOUBLE = {
    name: in_dtype(net, "float64")
    for name, net in NETWORKS.items()
    if {*net.inputs} and all(t.dtype == "float32" for t in net.inputs.values())
} | {
    "there and back": sequential(
        TensorType(("B", 7), "float64"),
        [
            ("a", Tanh()),
            ("b", Cast("float32")),
            ("c", GELU()),
            ("d", Cast("float64")),
            ("e", LeakyReLU(0.1)),
            ("f", Cast("float16")),
            ("g", Cast("float64")),
            ("h", SiLU()),
        ],
        {},
    ),
    "a bound that no float32 is": sequential(TensorType(("B", 9), "float64"), [("y", Clip(-1e300, 0.1))], {}),
}


def assert_right_in_float64(net, engine, x):
    """Within a few units in the last place of float64, or of the narrowest type on the way."""
    ulp = max(DTYPE_ULP.get(t.dtype, 2.0**-52) for t in net.types.values())
    for name, got, exact in zip(net.outputs, as_tuple(engine(*x)), as_tuple(reference.forward(net, x)), strict=True):
        assert got.dtype == numpy_dtype(net.types[name].dtype)
        assert got.shape == exact.shape
        if got.dtype == np.uint8:
            np.testing.assert_array_equal(got, exact)
        assert scaled_error(got, exact) <= 8 * ulp, name


@needs_gxx
@pytest.mark.parametrize("name", DOUBLE)
def test_right_in_float64_on_the_host(gpu, name):
    net = DOUBLE[name]
    engine = emulated(gpu, net)
    for B in (1, 130):
        assert_right_in_float64(net, engine, inputs_of(net, B, B))


@needs_gxx
@pytest.mark.parametrize("layer", [Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"), ReLU(), Clip(-1, 1)], ids=str)
def test_odd_numbers_in_float64(gpu, layer):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-320, 800, -800, 20, -20], np.float64)[:, None]
    net = sequential(TensorType(("B", 1), "float64"), [("y", layer)], {})
    with np.errstate(all="ignore"):
        expected = reference.forward(net, x)
    np.testing.assert_allclose(emulated(gpu, net)(x), expected, rtol=1e-13, atol=1e-14)


def of_ints(dtype):
    """Sums and products, of rows, of what is stretched and of constants; a value in the middle, and one as floats."""
    rng = np.random.default_rng(8)
    limits = np.iinfo(dtype)
    weights = {"c": rng.integers(limits.min, limits.max, (5, 1), dtype, endpoint=True)}
    return network(
        {"x": TensorType(("B", 5, 7), dtype), "z": TensorType(("B", 1, 7), dtype)},
        [
            ("a", Add(), ("x", "z")),
            ("b", Mul(), ("a", "x", "a"), {"constant": "c"}),
            ("r", Reshape(), ("b",)),
            ("d", Add(), ("r", "r")),
            ("f", Cast("float64"), ("d",)),
            ("g", Cast("float32"), ("a",)),
        ],
        ("b", "d", "f", "g"),
        weights,
    )


def assert_ints_wrap(dtype, engine, B):
    rng, limits = np.random.default_rng(B), np.iinfo(dtype)
    x, z = (rng.integers(limits.min, limits.max, (B, *row), dtype, endpoint=True) for row in ((5, 7), (1, 7)))
    c = of_ints(dtype).weights["c"]
    with np.errstate(all="ignore"):
        a = x + z
        b = a * x * a * c
        d = (b + b).reshape(B, 35)
    for got, expected in zip(engine(x, z), (b, d, d.astype("float64"), a.astype("float32")), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@needs_gxx
@pytest.mark.parametrize("dtype", INTS)
def test_ints_wrap_on_the_host(gpu, dtype):
    engine = emulated(gpu, of_ints(dtype))
    for B in (1, 3, 130):
        assert_ints_wrap(dtype, engine, B)


def test_a_run_has_one_number_type():
    def numbers_of(net):
        return [group.claim.facts.run.number for group in planned(net).groups]

    assert numbers_of(DOUBLE["there and back"]) == ["double", "float", "double"]
    assert numbers_of(of_ints("int64")) == ["long long", "double", "float"]
    assert numbers_of(of_ints("int16")) == ["long long", "float"]  # which has all of their numbers
    for given, to in (("float64", "float32"), ("float32", "float64")):
        layers = [("a", Cast(to)), ("b", Tanh())]
        net = sequential(TensorType(("B", 3), given), layers, {})
        assert numbers_of(net) == ["float" if to == "float32" else "double"]
    net = sequential(TensorType(("B", 3)), [("a", Tanh()), ("c", Cast("float64"))], {})
    assert numbers_of(net) == ["float"]


@needs_gxx
@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "bool", "float64", "float16", "uint8"])
@pytest.mark.parametrize("row", [(2, 3), (3, 5)])
def test_numbers_of_any_dtype_change_their_shape(gpu, dtype, row):
    """Where no rewrite drops it, as two outputs need it in two shapes."""
    nodes = [("r", Reshape(), ("x",)), ("i", Reshape(row[::-1]), ("r",))]
    net = network({"x": TensorType(("B", *row), dtype)}, nodes, ("r", "i"))
    x = np.random.default_rng(1).integers(0, 2, (77, *row)).astype(dtype)
    if dtype.startswith("int"):
        x = np.random.default_rng(1).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (77, *row), dtype)
    flat, turned = emulated(gpu, net)(x)
    assert flat.tobytes() == turned.tobytes() == x.tobytes()
    assert turned.shape == (77, *row[::-1])


NARROW = [
    (layer, dtype)
    for layer in (ReLU(), LeakyReLU(0.1), Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"))
    for dtype in ("float16", "bfloat16")
]


def assert_rounded_once(layer, dtype, compiled):
    """Of every number in 16 bits: the float64 result, rounded, but for a relative error of 2^-15 before that."""
    x = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(-1, 32)
    net = sequential(TensorType(("B", 32), dtype), [("y", layer)], {})
    made = compiled(net)(x)
    with np.errstate(all="ignore"):
        got, wide = made.astype(np.float64), x.astype(np.float64)
        truth = reference.forward(net, x, "float64")
        most = float(np.finfo(np.float16).max) if dtype == "float16" else 3.38e38
        finite = np.abs(truth) <= most
        assert np.array_equal(got[~finite], truth.astype(made.dtype).astype(np.float64)[~finite], equal_nan=True)
        digits, least = (11, -24) if dtype == "float16" else (8, -126)
        half = 2.0 ** np.maximum(np.floor(np.log2(np.abs(truth) + 1e-300)) - digits, least - 1)
        # Far below 0 the reference itself loses digits: of 1 + tanh(x) those below 2^-52 are gone.
        allowed = half * 1.01 + 2.0**-15 * np.abs(truth) + 2.0**-52 * np.abs(wide) + 2.0**-120
        far = finite & (np.abs(got - truth) > allowed)
    assert not far.any(), (wide[far][:5], got[far][:5], truth[far][:5])


@needs_gxx
@pytest.mark.parametrize(("layer", "dtype"), NARROW, ids=str)
def test_every_number_in_16_bits_on_the_host(gpu, layer, dtype):
    assert_rounded_once(layer, dtype, lambda net: emulated(gpu, net))


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype"), NARROW, ids=str)
def test_every_number_in_16_bits_on_a_gpu(layer, dtype):
    assert_rounded_once(layer, dtype, lambda net: onchip.compile(net, "cuda"))


def narrow_tree(dtype):
    """Values of other shapes, a kept one and a batch norm, all of them in 16 bits."""
    nodes = (
        ("t", Tanh(), ("x",)), ("s", Sigmoid(), ("x",)), ("m", Mul(), ("t", "s")), ("a", Add(), ("m", "z")),
        ("y", GELU(), ("a",)), ("u", Add(), ("y", "t")),
    )  # fmt: skip
    inputs = {"x": TensorType(("B", 3, 5), dtype), "z": TensorType(("B", 3, 1), dtype)}
    return network(inputs, nodes, ("y", "u"))


def test_layers_of_16_bits_have_eight_neighbours():
    def neighbours(net):
        return claims(net)[0].facts.run.neighbours

    assert neighbours(narrow_tree("float16")) == neighbours(narrow_tree("bfloat16")) == 8
    assert neighbours(tree()) == 4
    assert neighbours(sequential(TensorType(("B", 3), "float16"), [("c", Cast("float32"))], {})) == 4


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tree_in_16_bits_on_the_host(gpu, dtype):
    net = narrow_tree(dtype)
    engine = emulated(gpu, net)
    for B in (1, 7, 300):
        assert_right(net, engine, inputs_of(net, B, B))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tree_in_16_bits_on_a_gpu(dtype):
    """Also of so many rows that blocks fetch ahead."""
    net = narrow_tree(dtype)
    engine = onchip.compile(net, "cuda")
    x, z = inputs_of(net, 1000)
    assert_right(net, engine, (x, z))
    many = engine(np.tile(x, (300, 1, 1)), np.tile(z, (300, 1, 1)))
    for got, expected in zip(many, engine(x, z), strict=True):
        assert got.tobytes() == np.tile(expected, (300, 1, 1)).tobytes()


@needs_gxx
def test_the_bits_of_a_row_depend_on_nothing_else(gpu):
    for name in ("a tree", "Mul (2, 3, 4) (2, 1, 4)", "batch norm (C, L)"):
        net = NETWORKS[name]
        engine, x = emulated(gpu, net), inputs_of(net, 257)
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
@pytest.mark.parametrize(("given", "to"), CASTS)
@pytest.mark.parametrize("B", [3, 7, 1000, 100_001])
def test_rounded_as_numpy_rounds(given, to, B):
    net, x, expected = cast_case(given, to, B)
    assert onchip.compile(net, "cuda")(x).tobytes() == expected.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DOUBLE)
def test_right_in_float64_on_a_gpu(name):
    net = DOUBLE[name]
    engine = onchip.compile(net, "cuda")
    for B in (0, 1, 7, 4097):
        assert_right_in_float64(net, engine, inputs_of(net, B, B))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTS)
def test_ints_wrap_on_a_gpu(dtype):
    engine = onchip.compile(of_ints(dtype), "cuda")
    for B in (0, 1, 7, 4097):
        assert_ints_wrap(dtype, engine, B)


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
