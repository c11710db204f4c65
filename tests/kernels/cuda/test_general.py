"""Layers by themselves on a GPU, sizes at run time: pools, maxima and means, softmaxes. Emulated here, and on
a GPU where there is one."""

from dataclasses import replace

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import as_of_many, claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.pool.pool import PoolKernel
from onchip.kernels.cuda.reduction.reduce import ReduceKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    Clip,
    Conv2d,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    ReLU,
    Softmax,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.engine import Engine
from onchip.runtime.placement import find_device

DTYPES = ("float32", "float16", "bfloat16", "float64")
POOLS = [
    ((3, 9), MaxPool1d((2,))),
    ((1, 5), AvgPool1d((3,), (1,), (2, 1), count_pads=True)),
    ((4, 7, 6), MaxPool2d((2, 2))),
    ((4, 7, 6), MaxPool2d((3, 2), (2, 1), (1, 0, 1, 1), (2, 1), ceil=True)),
    ((5, 8, 9), AvgPool2d((3, 3), (2, 2), (1, 1, 1, 1))),
    ((5, 8, 9), AvgPool2d((3, 3), (2, 2), (1, 1, 1, 1), count_pads=True, ceil=True)),
    ((33, 2, 2), AvgPool2d((2, 2))),
    # Windows that are unrolled, over columns of several threads and pads all around; channels in 16 bytes.
    ((8, 13, 11), MaxPool2d((2, 2), (2, 1), (1, 1, 0, 0))),
    ((16, 21, 5), MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1))),
    ((8, 7, 6), AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1))),
    ((8, 4, 6), AvgPool2d((3, 3), (1, 2), (1, 1, 1, 1), count_pads=True)),
    ((8, 9), MaxPool1d((3,), (2,), (1, 1))),
    ((24, 9), AvgPool1d((2,))),
    # Columns in vectors of 2, 4 and 8, which begin at a window or before it.
    ((3, 9, 16), MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1))),
    ((3, 9, 12), AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1))),
    ((2, 6, 32), MaxPool2d((2, 2))),
    ((2, 17, 32), AvgPool2d((3, 3), (2, 2), (1, 1, 1, 1))),
    ((3, 6, 10), AvgPool2d((2, 2), (2, 1), (0, 1, 0, 1), count_pads=True)),
    ((3, 24), MaxPool1d((3,), (1,), (1, 1))),
    # Any window: outputs share rows and columns, only rows, only columns, or none.
    ((8, 13, 12), MaxPool2d((5, 5), (1, 1), (2, 2, 2, 2))),
    ((4, 12, 11), AvgPool2d((7, 7), (1, 1), (3, 3, 3, 3))),
    ((8, 15, 9), MaxPool2d((7, 4), (2, 1), (3, 1, 3, 2))),
    ((3, 16, 13), AvgPool2d((4, 6), (4, 1), (0, 5, 0, 5), count_pads=True)),
    ((6, 14, 15), MaxPool2d((5, 3), (1, 2), (2, 2, 2, 2), (1, 2))),
    ((4, 20, 20), AvgPool2d((9, 9), (3, 3), (4, 4, 4, 4))),
    ((8, 30), MaxPool1d((9,), (1,), (4, 4))),
    ((2, 3, 2), MaxPool2d((5, 5), (1, 1), (2, 2, 2, 2))),
]  # fmt: skip
ALONG = [
    ((10,), Softmax()), ((7, 3), Softmax(1)), ((7, 3), LogSoftmax(-1)), ((2, 40, 5), LogSoftmax(2)), ((1,), Softmax()),
    ((2, 1500), Softmax()), ((3, 9, 33), Softmax(1)), ((1500,), LogSoftmax()),
    ((10,), GlobalMax()), ((7, 3), GlobalMean((1,))), ((4, 5, 6), GlobalMean((2, 3))), ((4, 5, 6), GlobalMax((1, 3))),
    ((4, 5, 6), GlobalMean((-1, 1), keep=True)), ((4, 5, 6), GlobalMax((2,))), ((2, 1500), GlobalMean()),
    ((64,), Softmax()), ((65,), LogSoftmax()), ((1000,), Softmax()), ((3, 2), LogSoftmax()), ((64, 2, 4), Softmax(1)),
    ((65, 4), LogSoftmax(1)), ((257, 3), Softmax(1)), ((257, 8), LogSoftmax(1)), ((64, 49), LogSoftmax(1)),
    ((2, 5, 4), Softmax(1)), ((8, 33), LogSoftmax(1)), ((2, 300), GlobalMean((1,))), ((8, 5), GlobalMax((1,))),
    ((8200,), Softmax()), ((8201,), LogSoftmax()), ((1027,), GlobalMean()), ((68,), GlobalMax()),
    ((196,), GlobalMean()), ((64,), GlobalMax()), ((65,), GlobalMean()), ((33, 4), GlobalMean((1,))),
    ((3, 2), GlobalMax((2,))), ((9, 64), GlobalMax((1,))), ((4, 1, 6), GlobalMax((1, 3))),
    ((2, 3, 40), GlobalMean((1, 2))), ((1, 1), GlobalMean()), ((8, 20, 15), GlobalMean((2, 3))),
    ((6, 300), GlobalMax((2,))), ((300, 8), GlobalMax((1,), keep=True)),
    # Short rows aligned to 2, 4, 8 and 16 bytes, contiguous and with 16 bytes of padding after them.
    ((7,), Softmax()), ((9,), LogSoftmax()), ((12,), Softmax()), ((16,), LogSoftmax()), ((24,), Softmax()),
    ((31,), GlobalMean()), ((32,), Softmax()), ((33,), Softmax()), ((40,), GlobalMean()), ((48,), Softmax()),
    ((7,), GlobalMin()), ((4, 5, 6), GlobalNorm((1, 3))), ((3, 70), GlobalSum()), ((5, 6), GlobalSum((1,))),
    ((16,), GlobalMax()), ((12,), GlobalMean()), ((2,), Softmax()), ((49,), GlobalMean()), ((63,), LogSoftmax()),
]  # fmt: skip
LAYERS = [("pool", *case) for case in POOLS] + [("reduce", *case) for case in ALONG]
NAMES = [f"{layer.kind}{i}" for i, (_, _, layer) in enumerate(LAYERS)]


def numbers(B, row_shape, dtype):
    x = np.random.default_rng(B).standard_normal((B, *row_shape))
    if B > 2:  # each in its own row
        for row, value in zip(x.reshape(B, -1)[:3], (np.nan, np.inf, -np.inf), strict=True):
            row[row.size // 2] = value
    return x.astype(numpy_dtype(dtype))


def assert_right(net, got, *xs):
    with np.errstate(all="ignore"):
        dtype = net.output.dtype
        truth, naive = (reference.forward(net, xs if len(xs) > 1 else xs[0], kind) for kind in ("float64", dtype))
    ulps = {"float32": 4, "float64": 2**-23, "float16": 2**14, "bfloat16": 2**17}[dtype]
    finite = np.isfinite(truth)
    assert np.array_equal(got[~finite].astype(np.float64), truth[~finite], equal_nan=True)
    assert_error_within(got[finite], truth[finite], naive[finite], ulps=ulps)


def with_dtypes(cases):
    """Each case in float32 and in one other dtype in turn: g++ takes a second per program."""
    others = [dtype for dtype in DTYPES if dtype != "float32"]
    return [
        pytest.param(*case, dtype, id=f"{case[-1].kind}{i}-{dtype}")
        for i, case in enumerate(cases)
        for dtype in ("float32", others[i % len(others)])
    ]


@needs_gxx
@pytest.mark.parametrize(("kernel", "row_shape", "layer", "dtype"), with_dtypes(LAYERS))
def test_a_layer_by_itself(monkeypatch, kernel, row_shape, layer, dtype):
    gpu = emulated_gpu(monkeypatch)
    net = one_layer(layer, TensorType(("B", *row_shape), dtype))
    x = numbers(7, row_shape, dtype)
    claims = claims_of(net, kernel, "fp16")  # one per layout of x
    assert claims
    for claim in claims:
        got = run_claim(gpu, net, as_of_many(claim) if kernel == "pool" else claim, x)
        assert_right(net, got, x)
        for rows in (slice(1), slice(3, 7)):  # the same bits in another batch, at another position
            assert np.array_equal(run_claim(gpu, net, claim, x[rows]), got[rows], equal_nan=True)


@needs_gxx
@pytest.mark.parametrize("layer", [Softmax(), GlobalMean()], ids=["softmax", "mean"])
@pytest.mark.parametrize(("N", "dtype"), [(10, "float32"), (64, "float16"), (5, "bfloat16"), (16, "float64")])
def test_short_rows_of_many_warps(monkeypatch, N, dtype, layer):
    """Several chunks of several blocks, the last one partial; then one block that walks over all of them."""
    gpu = emulated_gpu(monkeypatch)
    net = one_layer(layer, TensorType(("B", N), dtype))
    (claim,) = claims_of(net, "reduce")
    x = numbers(2307, (N,), dtype)
    got = run_claim(gpu, net, claim, x)
    assert_right(net, got, x)
    (launch,) = claim.facts.at(len(x)).launches
    assert launch.config.grid[0] > 1
    one_block = replace(launch, config=replace(launch.config, grid=(1, 1, 1)))
    again = np.full_like(got, 77)
    BoundSteps(gpu, Steps((one_block,))).enqueue([x.ctypes.data], [again.ctypes.data], 0, gpu.stream)
    assert np.array_equal(again, got, equal_nan=True)


PIXELS = [
    ((4, 5, 6), GlobalMean((2, 3))), ((5, 3, 3), GlobalMax((2, 3))), ((64, 25, 5), AvgPool2d((25, 5))),
    ((3, 19, 17), GlobalMean((2, 3), keep=True)), ((8, 300), GlobalMean((2,))), ((6, 17), AvgPool1d((17,))),
    ((36, 16, 16), GlobalMax((2, 3))), ((2, 2, 1), AvgPool2d((2, 1))),
]  # fmt: skip


def of_pixels(row_shape, layer, dtype):
    nodes = (Node("x", ReLU(), ("given",)), Node("y", layer, ("x",)))
    return Network({"given": TensorType(("B", *row_shape), dtype)}, nodes, ("y",), {})


@needs_gxx
@pytest.mark.parametrize(("row_shape", "layer", "dtype"), with_dtypes(PIXELS))
def test_all_pixels_of_channels_that_lie_last(monkeypatch, row_shape, layer, dtype):
    gpu = emulated_gpu(monkeypatch)
    net = of_pixels(row_shape, layer, dtype)
    *in_rows, turned = claims_of(net, "reduce", start=1)
    assert len(in_rows) == isinstance(layer, GlobalMax | GlobalMean)  # else the pool's
    assert turned.layout_read("x") == CHANNELS_LAST
    x = np.maximum(numbers(7, row_shape, dtype), 0)
    got = run_claim(gpu, net, turned, x)
    assert_right(net, got, x)
    for rows in (slice(1), slice(3, 7)):
        assert np.array_equal(run_claim(gpu, net, turned, x[rows]), got[rows], equal_nan=True)


def test_only_whole_windows_are_means_of_all_pixels():
    for layer in (AvgPool2d((4, 5)), AvgPool2d((5, 6), pads=(0, 0, 1, 0)), MaxPool2d((5, 6))):
        assert claims_of(of_pixels((4, 5, 6), layer, "float32"), "reduce", start=1) == []
    assert len(claims_of(one_layer(GlobalMean((2, 3)), TensorType(("B", 4, 5, 6))), "reduce")) == 1  # an input is rows


def test_a_mean_behind_a_convolution_needs_no_permute():
    rng = np.random.default_rng(0)
    nodes = (
        Node("c", Conv2d((1, 1), (1, 1, 1, 1)), ("x",), {"weight": "w"}),
        Node("d", Conv2d((1, 1), (1, 1, 1, 1)), ("c",), {"weight": "v"}),
        Node("y", AvgPool2d((32, 32)), ("d",)),
    )
    weights = {name: rng.standard_normal((64, 64, 3, 3)).astype(np.float32) for name in "wv"}
    net = Network({"x": TensorType(("B", 64, 32, 32))}, nodes, ("y",), weights)
    kernels = [group.claim.kernel for group in make_plan(net, H200, KERNELS, Job("fp16", 4096)).groups]
    assert kernels[-3:] == ["conv_sm90", "reduce", "pointwise"]  # the last one to float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_pixels_on_a_gpu(dtype):
    device, backend, chosen = find_device("cuda")
    kernels = [ReduceTurned() if kernel.name == "reduce" else kernel for kernel in KERNELS if kernel.name != "pool"]
    for row_shape, layer in PIXELS:
        net, x = of_pixels(row_shape, layer, dtype), numbers(257, row_shape, dtype)
        engine = Engine(make_plan(net, device, kernels, Job()), backend, chosen)
        got = engine(x)
        assert_right(net, got, x)
        for B in (1, 7):
            assert np.array_equal(engine(x[:B]), got[:B], equal_nan=True), f"{layer} in batches of {B}"


@needs_gxx
@pytest.mark.parametrize(("row_shape", "layer", "dtype"), with_dtypes(POOLS))
def test_a_pool_of_channels_that_lie_last(monkeypatch, row_shape, layer, dtype):
    gpu = emulated_gpu(monkeypatch)
    nodes = (Node("x", ReLU(), ("given",)), Node("y", layer, ("x",)), Node("z", ReLU(), ("y",)))
    net = Network({"given": TensorType(("B", *row_shape), dtype)}, nodes, ("z",), {})
    in_rows, *turned = claims_of(net, "pool", start=1)
    # With one channel, or one pixel left, there is nothing to turn.
    assert len(turned) == (has_channels(net.types["x"]) and has_channels(net.types["y"]))
    x = numbers(5, row_shape, dtype)
    for claim in turned:
        assert np.array_equal(run_claim(gpu, net, claim, x), run_claim(gpu, net, in_rows, x), equal_nan=True)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layer", "writes"), [(GlobalMean((2, 3)), 0), (GlobalMax((2, 3), keep=True), 0), (Softmax(1), 1), (Softmax(2), 1)]
)
def test_a_reduction_of_channels_that_lie_last(monkeypatch, layer, writes, dtype):
    gpu = emulated_gpu(monkeypatch)
    nodes = (Node("x", ReLU(), ("given",)), Node("y", layer, ("x",)), Node("z", ReLU(), ("y",)))
    net = Network({"given": TensorType(("B", 6, 5, 7), dtype)}, nodes, ("z",), {})
    _, last = claims_of(net, "reduce", start=1)
    assert last.layout_read("x") == CHANNELS_LAST
    assert len(last.writes) == writes
    x = numbers(5, (6, 5, 7), dtype)
    assert_right(one_layer(layer, TensorType(("B", 6, 5, 7), dtype)), run_claim(gpu, net, last, x), x)


def test_a_mean_of_channels_reads_them_in_rows():
    nodes = (Node("x", ReLU(), ("given",)), Node("y", GlobalMean((1,)), ("x",)), Node("z", ReLU(), ("y",)))
    net = Network({"given": TensorType(("B", 6, 5, 7))}, nodes, ("z",), {})
    (claim,) = claims_of(net, "reduce", start=1)
    assert claim.layout_read("x") == ROWS


def pool_of(layer, *row_shape, dtype="float32", is_nhwc=False):
    nodes = (Node("x", ReLU(), ("given",)), Node("y", layer, ("x",)), Node("z", ReLU(), ("y",)))
    net = Network({"given": TensorType(("B", *row_shape), dtype)}, nodes, ("z",), {})
    return claims_of(net, "pool", start=1)[is_nhwc].facts


def test_common_windows_are_unrolled():
    def cut(layer, *row_shape):
        windows = pool_of(layer, *row_shape).windows
        return windows.rows(windows.columns(1)), windows.window

    assert cut(MaxPool2d((2, 2)), 4, 8, 8) == (1, (2, 2, 2)), "they share no row"
    assert cut(MaxPool2d((3, 3), (2, 1), (1, 1, 1, 1)), 4, 8, 8) == (4, (3, 3, 2))
    assert cut(MaxPool2d((3, 3), (2, 1), (1, 1, 1, 1)), 4, 3, 8)[0] == 1, "two rows: others of a thread would be none"
    assert cut(MaxPool2d((3, 3), (2, 1), (1, 1, 1, 1)), 4, 12, 8)[0] == 2, "of four, two would be past the end"
    assert cut(MaxPool1d((2,)), 4, 8) == (4, (1, 2, 1)), "the rows of the batch are those of an image"


def test_a_thread_of_few_makes_one_row():
    windows = pool_of(MaxPool2d((3, 3), (1, 1)), 8, 34, 34).windows
    assert [windows.rows_at(B, 1) for B in (1, 16, 17, 4096)] == [1, 1, 4, 4]
    signals = pool_of(MaxPool1d((3,), (1,)), 4, 18).windows
    assert [signals.rows_at(B, 1) for B in (1, 4096)] == [1, 4]


def test_outputs_of_any_window_that_share_rows_are_one_threads():
    def rows(layer, side):
        windows = pool_of(layer, 4, side, 8).windows
        assert not windows.is_unrolled
        return windows.rows(windows.columns(1))

    assert rows(MaxPool2d((7, 7), (1, 1)), 12) == rows(MaxPool2d((5, 5), (3, 3)), 21) == 4
    assert rows(MaxPool2d((4, 4)), 32) == 1, "they share none"
    assert rows(MaxPool2d((3, 3), (1, 1), dilation=(2, 1)), 12) == 1, "nor do neighbours of these"
    assert rows(MaxPool2d((7, 7), (1, 1)), 8) == 1, "there are two"


def test_in_rows_a_thread_makes_several_columns():
    def columns(layer, *row_shape, dtype="float32"):
        return pool_of(layer, *row_shape, dtype=dtype).windows.columns(1)

    assert columns(MaxPool2d((2, 2)), 4, 8, 9) == columns(MaxPool1d((2,)), 4, 8) == 2
    assert columns(MaxPool2d((2, 2)), 4, 8, 3) == 1, "there is one"
    assert columns(MaxPool2d((2, 2), (2, 3)), 4, 8, 9) == 1
    assert columns(MaxPool2d((2, 2)), 4, 8, 32, dtype="float16") == 8
    assert columns(MaxPool2d((2, 2)), 4, 8, 24, dtype="float16") == 4, "eight would leave a rest"
    assert columns(MaxPool2d((5, 5), (1, 1)), 4, 8, 12) == 4
    assert columns(MaxPool2d((5, 5), (2, 2)), 4, 8, 12) == 2
    assert pool_of(MaxPool2d((2, 2)), 4, 8, 9, is_nhwc=True).windows.columns(4) == 1


def test_columns_are_read_in_words_that_divide_a_row():
    def words(layer, *row_shape, dtype="float16"):
        name = pool_of(layer, *row_shape, dtype=dtype).at(1).launches[0].program.name_expression
        *_, P, lead, _, _, _, _ = name.strip(">").split(", ")
        return int(P), int(lead)

    assert words(MaxPool2d((2, 2)), 4, 8, 32) == (8, 0)
    assert words(MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)), 4, 8, 16) == (8, 7), "a word begins seven before a window"
    assert words(MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)), 4, 8, 12) == (4, 3)
    assert words(MaxPool2d((2, 2)), 4, 8, 12, dtype="float32") == (4, 0)
    assert words(MaxPool2d((2, 2)), 4, 8, 11) == words(MaxPool2d((5, 5)), 4, 8, 16) == (1, 0)


def test_channels_that_lie_last_are_read_16_bytes_at_a_time():
    for C, dtype, number, V in (
        (8, "float32", "float", 4),
        (6, "float32", "float", 1),
        (16, "float16", "Pairs<f16>", 4),
        (4, "bfloat16", "Pairs<bf16>", 1),
        (3, "bfloat16", "bf16", 1),
        (2, "float64", "double", 2),
    ):
        lowering = pool_of(MaxPool2d((2, 2)), C, 8, 8, dtype=dtype, is_nhwc=True)
        assert (lowering.element, lowering.vector) == (number, V)
        assert pool_of(MaxPool2d((2, 2)), C, 8, 8, dtype=dtype).vector == 1
    assert pool_of(AvgPool2d((2, 2)), 16, 8, 8, dtype="float16", is_nhwc=True).vector == 8


def test_nothing_is_no_launch():
    for _, row_shape, layer in LAYERS:
        net = one_layer(layer, TensorType(("B", *row_shape)))
        claims = [c for kernel in ("pool", "reduce") for c in claims_of(net, kernel)]
        assert claims
        assert all(claim.facts.at(0).launches == () for claim in claims)


@pytest.mark.parametrize(("kernel", "row_shape", "layer"), LAYERS, ids=NAMES)
def test_sizes_are_given_at_run_time(kernel, row_shape, layer):
    """Other row counts and sizes give the same program, except for long rows and very many elements."""
    for claim in claims_of(one_layer(layer, TensorType(("B", *row_shape))), kernel):
        few, many = (tuple(launch.program for launch in claim.facts.at(B).launches) for B in (100_000, 120_000))
        assert few == many


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_on_a_gpu(dtype):
    for _, row_shape, layer in LAYERS:
        net = one_layer(layer, TensorType(("B", *row_shape), dtype))
        engine = onchip.compile(net, "cuda")
        x = numbers(4097 if np.prod(row_shape) < 2000 else 257, row_shape, dtype)
        got = engine(x)
        assert_right(net, got, x)
        for B in (1, 7):
            assert np.array_equal(engine(x[:B]), got[:B], equal_nan=True), f"{layer} in batches of {B}"


class ReduceTurned(ReduceKernel):
    """Only with channels last, where it can."""

    def claims(self, *given):
        return list(super().claims(*given))[-1:]


class PoolTurned(PoolKernel):
    """Only with channels last, where it can."""

    def claims(self, *given):
        return list(super().claims(*given))[-1:]


def planned_turned(net, device):
    return make_plan(net, device, [PoolTurned() if kernel.name == "pool" else kernel for kernel in KERNELS], Job())


def turned_network(row_shape, layer, dtype):
    nodes = (Node("x", ReLU(), ("given",)), Node("y", layer, ("x",)), Node("z", Clip(-9.0, 9.0), ("y",)))
    return Network({"given": TensorType(("B", *row_shape), dtype)}, nodes, ("z",), {})


def test_a_plan_with_channels_last():
    plan = planned_turned(turned_network((8, 6, 6), MaxPool2d((2, 2)), "float32"), H200)
    assert any(group.claim.kernel == "pool" and group.claim.writes for group in plan.groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pools_of_channels_that_lie_last_on_a_gpu(dtype):
    device, backend, chosen = find_device("cuda")
    for row_shape, layer in POOLS:
        net, x = turned_network(row_shape, layer, dtype), numbers(1000, row_shape, dtype)
        got = Engine(planned_turned(net, device), backend, chosen)(x)
        assert np.array_equal(got, onchip.compile(net, "cuda")(x), equal_nan=True), f"{layer}"
