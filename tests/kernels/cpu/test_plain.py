"""The CPU's general path: every layer, every dtype, the reference's meaning, and the same bits for a row anywhere."""

import numpy as np
import pytest
import threadpoolctl

from checks import assert_error_within
from layer_cases import CASES, WIDE, Case, network, random_inputs
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cpu.plain import PlainKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    LAYERS,
    Add,
    Cast,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    CumSum,
    Embedding,
    GlobalMax,
    Linear,
    MaxPool1d,
    ReLU,
    Softmax,
    TokenConv,
)  # fmt: skip
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import Device, Peak
from onchip.plan.kernel import Claim, Cost, Job
from takers import stored

PEAK = Peak({"fp32": 2e11}, 2e10, 4e11, 0.0)
CPU = Device("a CPU", "cpu", "", 2, {"fp32": 1e11}, 1e10, 3.0, 1 << 20, 1 << 33, "made up", PEAK, 1 << 25)


def claim_of(net, job=None) -> Claim:
    (claim,) = PlainKernel().claims(net, 0, CPU, job or Job())
    return claim


def runner(net, threads=1):
    """A network of one node as a function of its inputs, through the kernel's claim and launch."""
    claim = claim_of(net)
    weights = {role: materialise(recipe, net.weights) for role, recipe in claim.recipes.items()}
    launch = PlainKernel().bind(claim, weights)
    made = net.types["y"]

    def run(*xs):
        y = np.empty((len(xs[0]), *made.row_shape), numpy_dtype(made.dtype))
        launch(xs, [y], threads)
        return y

    return run


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def test_the_cases_are_every_layer():
    assert {type(case.layer) for case in CASES} == set(LAYERS.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_a_row_depend_on_nothing_else(case, dtype):
    """Not on the batch, not on the place in it, not on the threads. With zeros of both signs, an Inf and a NaN."""
    run, one, two = (runner(network(case, dtype), threads) for threads in (2, 1, 2))
    xs = random_inputs(case, 33, dtype)
    for i, x in enumerate(xs):
        if not case.takes_ints(i):
            flat = x.reshape(33, -1)
            flat[:, ::3] = np.where(flat[:, ::3] > 0, 0.0, -0.0)
            flat[5, 0], flat[9, 0] = np.nan, np.inf
    whole = run(*xs)
    np.testing.assert_array_equal(bits(one(*xs)), bits(whole))
    for B in (1, 2, 7):
        for first in (0, 3, 8, 33 - B):
            got = two(*(np.array(x[first : first + B]) for x in xs))
            np.testing.assert_array_equal(bits(got), bits(whole[first : first + B]))
    turned = run(*(np.array(x[::-1]) for x in xs))
    np.testing.assert_array_equal(bits(turned), bits(whole[::-1]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_bits_of_wide_layers(case, dtype):
    """As wide as the blocks of a BLAS, whose order changes there; and with as many BLAS threads as the user likes."""
    run, xs = runner(network(case, dtype)), random_inputs(case, 33, dtype)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        whole = run(*xs)
    for B, first in ((1, 0), (1, 17), (2, 31), (7, 5)):
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            got = run(*(np.array(x[first : first + B]) for x in xs))
        np.testing.assert_array_equal(bits(got), bits(whole[first : first + B]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_within_the_naive_runs(case):
    net, xs = network(case), random_inputs(case, 6)
    assert_error_within(runner(net)(*xs), reference.forward(net, xs), baseline=reference.forward(net, xs, "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_narrow_types_are_rounded_once(case, dtype):
    net, xs = network(case, dtype), random_inputs(case, 4, dtype)
    got, naive = runner(net)(*xs), reference.forward(net, xs, dtype)
    assert got.dtype == numpy_dtype(net.types["y"].dtype)
    # One layer of the reference is one rounding too; sums in float32 may differ in order before it.
    allowed = 2 * float(np.abs(naive).max()) * {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), naive.astype(np.float64), atol=allowed, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if not isinstance(case.layer, Cast)], ids=str)
def test_float64_stays_float64(case):
    net, xs = network(case, "float64"), random_inputs(case, 4, "float64")
    got, truth = runner(net)(*xs), reference.forward(net, xs)
    assert got.dtype == truth.dtype
    np.testing.assert_allclose(got, truth, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("to", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("given", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_cast(given, to):
    """Once rounded, to the nearest; an infinity past the largest number; a NaN stays one; the sign of a zero too."""
    x = np.random.default_rng(0).standard_normal((17, 3)) * 100
    x[:8, 0] = (0.0, -0.0, 1e6, -1e6, 2049, 1 + 2**-11, 1 + 2**-8, 257)
    x[8:11, 1] = (np.nan, np.inf, -np.inf) if "float" in given else 0
    with np.errstate(over="ignore"):
        x = (x if "float" in given else np.abs(x) % 256).astype(numpy_dtype(given))
        expected = x.astype(numpy_dtype(to))
    net = Network({"x": TensorType(("B", 3), given)}, (Node("y", Cast(to), ("x",)),), ("y",), {})
    np.testing.assert_array_equal(bits(runner(net)(x)), bits(expected))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rows(case):
    assert len(runner(network(case))(*random_inputs(case, 0))) == 0


def test_blocks_of_a_large_batch_are_seamless():
    """Rows of 40,000 numbers: a block is a few rows, and the last one is shorter."""
    x = np.random.default_rng(0).standard_normal((23, 40_000), dtype=np.float32)
    net = Network({"x": TensorType(("B", 40_000))}, (Node("y", ReLU(), ("x",)),), ("y",), {})
    np.testing.assert_array_equal(runner(net)(x), np.maximum(x, 0))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_wrap(dtype):
    given = TensorType(("B", 300), dtype)
    x = np.random.default_rng(0).integers(0, 127, (3, 300)).astype(dtype)
    double = runner(Network({"x": given}, (Node("y", Add(), ("x", "x")),), ("y",), {}))
    np.testing.assert_array_equal(double(x), x + x)
    total = runner(Network({"x": given}, (Node("y", CumSum(), ("x",)),), ("y",), {}))
    np.testing.assert_array_equal(
        total(x), (np.cumsum(x.astype(object), axis=1) % (1 << 64)).astype("uint64").astype(dtype)
    )


def test_nan_wins_a_maximum():
    x = np.array([[[1.0, np.nan, 3.0, -np.inf]]], np.float32)
    for layer, expected in ((GlobalMax(), [[np.nan]]), (MaxPool1d((2,)), [[[np.nan, 3.0]]])):
        net = Network({"x": TensorType(("B", 1, 4))}, (Node("y", layer, ("x",)),), ("y",), {})
        np.testing.assert_array_equal(runner(net)(x), np.float32(expected))


def test_an_id_that_is_in_no_table():
    net = Network({"x": TensorType(("B", 2), "int64")}, (Node("y", Embedding(), ("x",), {"weight": "w"}),), ("y",),
                  {"w": np.zeros((5, 3), np.float32)})  # fmt: skip
    for bad in (-1, 5):
        with pytest.raises(InputError, match=f"id {bad}, expected 0 to 4"):
            runner(net)(np.array([[0, bad]]))


def test_claim_tells_its_price_and_computes_no_weight():
    recipe = stored(7, 13, flop=10)
    net = Network({"x": TensorType(("B", 13))}, (Node("y", Linear(), ("x",), {"weight": "w"}),), ("y",), {"w": recipe})
    claim = claim_of(net)
    assert (claim.label, claim.nodes) == ("plain<Linear>", ("y",))
    assert (claim.cost.row_flop, claim.cost.row_bytes, claim.cost.fixed_bytes) == (2 * 7 * 13, 4 * 20, 4 * 91)
    assert claim.cost.launches > 10


@pytest.mark.parametrize(
    ("layer", "table", "row_bytes"),
    # A tap of a token convolution is looked up, and three arrays on the way are written and read.
    [(Embedding(), (1000, 6), 12 + 2 * 3 * 24), (TokenConv(), (1000, 2, 6), 12 + 48 + 7 * 2 * 48)],
)
def test_a_table_is_not_read_as_a_whole(layer, table, row_bytes):
    net = Network({"x": TensorType(("B", 3), "int32")}, (Node("y", layer, ("x",), {"weight": "w"}),), ("y",),
                  {"w": np.zeros(table, np.float32)})  # fmt: skip
    cost = claim_of(net).cost
    assert (cost.row_bytes, cost.fixed_bytes) == (row_bytes, 0)


def test_a_convolution_moves_its_windows():
    case = Case(Conv2d((2, 2), (1, 1, 1, 1), groups=2), ((4, 6, 7),), {"weight": (6, 2, 3, 3)})
    places = 3 * 4
    assert claim_of(network(case)).cost.row_bytes == 4 * (4 * 6 * 7 + 6 * places) + 2 * 4 * (4 * 9 * places)


@pytest.mark.parametrize(("layer", "slower"), [(ReLU(), 4), (Softmax(), 20), (GlobalMax((-1,)), 20)])
def test_numpy_is_slower_than_the_chip(layer, slower):
    """Estimates are those of one thread; the floor, and what is moved and computed, are the chip's."""
    net = Network({"x": TensorType(("B", 4, 5))}, (Node("y", layer, ("x",)),), ("y",), {})
    cost = claim_of(net).cost
    assert cost.row_bytes == 4 * (20 + net.types["y"].row_size)
    chip = Cost(cost.row_flop, cost.row_bytes)
    launches = cost.launches * CPU.launch_us
    assert cost.estimate_us(CPU, "fp32", 10**6) - launches == pytest.approx(
        slower * (chip.estimate_us(CPU, "fp32", 10**6) - CPU.launch_us)
    )
    assert cost.floor_us(CPU, "fp32", 10**6) == chip.floor_us(CPU, "fp32", 10**6)


@pytest.mark.parametrize("kind", [Linear, Conv1d, Conv2d, ConvTranspose2d])
def test_products_have_one_blas_thread_and_leave_the_rest_as_it_was(kind, monkeypatch):
    def blas_threads():
        return [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]

    def spy(layer, xs, w, forward=kind.forward):
        seen.append(blas_threads())
        return forward(layer, xs, w)

    seen = []
    monkeypatch.setattr(kind, "forward", spy)
    case = next(case for case in CASES if isinstance(case.layer, kind))
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        runner(network(case))(*random_inputs(case, 3))
        assert blas_threads() == before
    assert seen
    assert all(set(threads) == {1} for threads in seen)
