"""Depthwise convolutions on a GPU: what the kernel claims, that it is right and has conv's bits. Emulated here, and
on a GPU where there is one."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import as_of_many, claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common import window
from onchip.kernels.cuda.conv.depthwise import DepthwiseKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Clip,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import Engine
from onchip.runtime.placement import find_device

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = ("float32", "float16", "bfloat16", "float64")
SAME = Conv2d(pads=(1, 1, 1, 1), groups=8)


def network(layer, row_shape, weight_shape, *after, dtype="float32", bias=True, ends=True):
    """An Identity, the convolution c, what comes after it, and an Identity; without ends: the middle alone."""
    narrow = numpy_dtype(dtype)
    weights = {"w": (rows(*weight_shape, seed=3) / math.sqrt(math.prod(weight_shape[1:]))).astype(narrow)}
    if bias:
        weights["b"] = rows(1, weight_shape[0], seed=4)[0].astype(narrow)
    roles = {"weight": "w"} | ({"bias": "b"} if bias else {})
    nodes, value = [], "x"
    for name, each in (
        ("i", Identity()),
        ("c", layer),
        *((f"a{i}", each) for i, each in enumerate(after)),
        ("o", Identity()),
    ):
        if ends or name not in "io":
            nodes.append(Node(name, each, (value,), roles if name == "c" else {}))
            value = name
    return Network({"x": TensorType(("B", *row_shape), dtype)}, tuple(nodes), (value,), weights)


def claim_in(net, layout=ROWS, kernel="depthwise"):
    start = next(i for i, node in enumerate(net.nodes) if node.name == "c")
    (value,) = net.nodes[start].inputs
    claim, *_ = [claim for claim in claims_of(net, kernel, start=start) if claim.layout_read(value) == layout]
    return claim


SHAPES = {
    "3x3": (SAME, (8, 11, 9), (8, 1, 3, 3)),
    "3x3 by 2": (Conv2d((2, 2), (1, 1, 1, 1), groups=8), (8, 19, 6), (8, 1, 3, 3)),
    "3x3, few rows": (SAME, (8, 4, 5), (8, 1, 3, 3)),
    "3x3, fewer rows": (SAME, (8, 2, 5), (8, 1, 3, 3)),
    "5x5": (Conv2d((1, 2), (2, 2, 2, 2), groups=6), (6, 9, 8), (6, 1, 5, 5)),
    "5x5 by 2, two of one": (Conv2d((2, 1), (0, 3, 2, 0), groups=3), (3, 13, 8), (6, 1, 5, 5)),
    "odd channels": (Conv2d(groups=7), (7, 6, 6), (7, 1, 3, 3)),
    "dilated": (Conv2d((2, 1), (2, 0, 1, 3), (2, 3), 4), (4, 9, 10), (4, 1, 3, 3)),
    "any window": (Conv2d((3, 1), (1, 0, 0, 2), groups=4), (4, 8, 7), (12, 1, 4, 2)),
    "3x3 in words": (Conv2d(pads=(1, 1, 1, 1), groups=4), (4, 6, 16), (4, 1, 3, 3)),
    "3x3 by 2 in words": (Conv2d((2, 2), (1, 1, 1, 1), groups=2), (2, 9, 24), (2, 1, 3, 3)),
    "5x5 in words": (Conv2d(pads=(2, 2, 2, 2), groups=3), (3, 7, 12), (3, 1, 5, 5)),
    "7x7": (Conv2d(pads=(3, 3, 3, 3), groups=8), (8, 9, 10), (8, 1, 7, 7)),
    "6x7 by 2": (Conv2d((2, 2), (2, 3, 3, 3), groups=4), (4, 13, 11), (4, 1, 6, 7)),
    "7x3 dilated across": (Conv2d(pads=(3, 2, 3, 2), dilation=(1, 2), groups=4), (4, 8, 9), (4, 1, 7, 3)),
    "long sums": (Conv2d(pads=(11, 11, 11, 11), groups=4), (4, 6, 5), (4, 1, 23, 23)),
    "1x1": (Conv2d(groups=8), (8, 3, 5), (8, 1, 1, 1)),
    "one channel to many": (Conv2d(pads=(1, 1, 1, 1)), (1, 7, 6), (20, 1, 3, 3)),
    "signal": (Conv1d((2,), (1, 1), groups=8), (8, 20), (8, 1, 3)),
    "signal, 5": (Conv1d(groups=5), (5, 12), (10, 1, 5)),
    "signal, long sums": (Conv1d((1,), (296, 300), groups=2), (2, 8), (2, 1, 600)),
    "pads alone": (Conv2d((3, 3), (6, 6, 6, 6), groups=4), (4, 2, 2), (4, 1, 3, 3)),
}  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("shape", SHAPES)
def test_right_with_the_bits_of_conv(monkeypatch, shape):
    gpu = emulated_gpu(monkeypatch)
    net = network(*SHAPES[shape])
    x = rows(7, *net.input.row_shape)
    whole = run_claim(gpu, net, as_of_many(claim_in(net)), x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(whole, run_claim(gpu, net, claim_in(net, kernel="conv_direct"), x))
    assert np.array_equal(run_claim(gpu, net, claim_in(net), x[2:5]), whole[2:5])
    if net.input.row_shape[0] > 1:
        assert np.array_equal(run_claim(gpu, net, as_of_many(claim_in(net, CHANNELS_LAST)), x), whole)
        assert np.array_equal(run_claim(gpu, net, claim_in(net, CHANNELS_LAST), x[6:]), whole[6:])


@needs_gxx
@pytest.mark.parametrize("layout", [ROWS, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(monkeypatch, dtype, layout):
    gpu = emulated_gpu(monkeypatch)
    for shape in (
        "3x3",
        "3x3 by 2",
        "3x3 in words",
        "3x3 by 2 in words",
        "5x5",
        "5x5 in words",
        "7x7",
        "any window",
        "signal",
    ):
        net = network(*SHAPES[shape], dtype=dtype, bias=shape != "5x5")
        x = rows(3, *net.input.row_shape).astype(numpy_dtype(dtype))
        got = run_claim(gpu, net, as_of_many(claim_in(net, layout)), x)
        assert got.dtype == x.dtype
        assert np.array_equal(run_claim(gpu, net, claim_in(net, layout), x), got)
        ulps = {"float32": 4, "float64": 2**-23, "float16": 2**14, "bfloat16": 2**17}[dtype]
        assert_error_within(got, reference.forward(net, x), reference.forward(net, x, dtype), ulps=ulps)


@needs_gxx
@pytest.mark.parametrize("layout", [ROWS, CHANNELS_LAST])
@pytest.mark.parametrize(
    "after", [ReLU(), Clip(-0.25, 0.5), LeakyReLU(0.2), SiLU(), GELU()], ids=lambda layer: layer.kind
)
def test_an_activation_comes_along(monkeypatch, after, layout):
    gpu = emulated_gpu(monkeypatch)
    net = network(*SHAPES["3x3"], after)
    x = rows(2, *net.input.row_shape)
    x[1, 3, 2, 2] = np.nan
    claim = claim_in(net, layout)
    assert claim.nodes == ("c", "a0")
    got, truth = run_claim(gpu, net, claim, x), reference.forward(net, x)
    assert np.array_equal(np.isnan(got), np.isnan(truth))
    finite = np.isfinite(truth)
    assert_error_within(got[finite], truth[finite], reference.forward(net, x, "float32")[finite])


@needs_gxx
@pytest.mark.parametrize("layout", [ROWS, CHANNELS_LAST])
def test_more_threads_than_31_bits_count(monkeypatch, layout):
    """The kernel for very many, on few."""
    gpu = emulated_gpu(monkeypatch)
    net = network(*SHAPES["3x3 by 2"])
    x, claim = rows(3, *net.input.row_shape), claim_in(net, layout)
    few = run_claim(gpu, net, claim, x)
    monkeypatch.setattr(window, "index_of", lambda count: "long long")
    assert "long long" in claim.facts.at(3).launches[0].program.name_expression
    assert np.array_equal(run_claim(gpu, net, claim, x), few)


@st.composite
def geometries(draw):
    """A depthwise convolution of any small geometry, over one or two axes."""
    rank = draw(st.integers(1, 2))

    def several(low, high, count=rank):
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    kernel, stride, dilation = (
        several(1, 8) if draw(st.booleans()) else (draw(st.integers(1, 5)),) * rank,
        several(1, 3),
        draw(st.sampled_from([(1,), (2,)])) * rank,
    )
    pads, C, each = several(0, 3, 2 * rank), draw(st.sampled_from([1, 3, 4])), draw(st.sampled_from([1, 1, 2]))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sides = tuple(
        max(n, span - a - b) for n, span, a, b in zip(several(1, 20), spans, pads[:rank], pads[rank:], strict=True)
    )
    layer = (Conv1d, Conv2d)[rank - 1](stride, pads, dilation, C)
    return network(layer, (C, *sides), (C * each, 1, *kernel), bias=draw(st.booleans()))


@needs_gxx
@settings(max_examples=40)
@given(net=geometries(), B=st.sampled_from([1, 3, 9]))
def test_any_geometry(monkeypatch, net, B):
    gpu = emulated_gpu(monkeypatch)
    x = rows(B, *net.input.row_shape)
    truth, naive = reference.forward(net, x), reference.forward(net, x, "float32")
    for claim in claims_of(net, "depthwise", start=1):
        assert_error_within(run_claim(gpu, net, claim, x), truth, naive)


# -- planning --------------------------------------------------------------------------------------------------


def test_the_planner_takes_it_for_groups_of_one_channel():
    def kernels(*given, **options):
        return [
            group.claim.label
            for group in make_plan(network(*given, ends=False, **options), H200, KERNELS, Job()).groups
        ]

    assert kernels(*SHAPES["3x3"]) == ["depthwise<8,8,3x3>"]
    assert kernels(*SHAPES["3x3"], Clip(0.0, 6.0)) == ["depthwise<8,8,3x3,Clip>"]
    assert kernels(*SHAPES["signal, 5"]) == ["depthwise<5,10,5>"]
    assert kernels(*SHAPES["any window"], dtype="float64") == ["depthwise<4,12,4x2>"]
    assert kernels(Conv2d(groups=4), (8, 9, 9), (8, 2, 3, 3)) == ["conv_direct<8,8,3x3>"]


def test_what_it_leaves_to_others():
    last = network(*SHAPES["3x3"], Softmax(1))
    assert claim_in(last).nodes == ("c",)
    double = network(*SHAPES["3x3"], Sigmoid(), dtype="float64")
    assert claim_in(double).nodes == ("c",)
    both = dataclasses.replace(network(*SHAPES["3x3"], ReLU()), outputs=("c", "o"))
    assert claim_in(both).nodes == ("c",), "what others read is given out"
    weights = {"w": rows(8, 1, 3, 3)}
    layer = Node("c", ConvTranspose2d(groups=8), ("x",), {"weight": "w"})
    assert claims_of(Network({"x": TensorType(("B", 8, 5, 5))}, (layer,), ("c",), weights), "depthwise") == []


def test_what_it_refuses():
    for net, device, word in (
        (network(*SHAPES["3x3"]), dataclasses.replace(H200, arch="sm_70"), "on sm_70"),
        (network(Conv2d(groups=2), (2, 40_000, 40_000), (2, 1, 3, 3)), H200, "fewer than 2^31 elements"),
    ):
        (refusal,) = DepthwiseKernel().claims(net, 1, device, Job())
        assert isinstance(refusal, Refusal)
        assert word in refusal.why


def test_sizes_cost_no_compilation():
    """Except for the outputs per thread: fewer with small outputs, and with heights that leave many past the end."""
    nets = [network(Conv2d(pads=(1, 1, 1, 1), groups=C), (C, side, 9), (C, 1, 3, 3)) for C, side in ((8, 8), (40, 56))]
    for layout in (ROWS, CHANNELS_LAST):
        few, many = (
            {claim_in(net, layout).facts.at(B).launches[0].program for net in nets for B in counts}
            for counts in ((1, 2), (2000, 4000))
        )
        assert len(few) == len(many) == 1
    assert claim_in(nets[0]).facts.at(0).launches == ()


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_right_with_the_same_bits_in_every_batch(shape, precision):
    net = network(*SHAPES[shape], ReLU(), ends=False)
    x = rows(4097, *net.input.row_shape)
    engine = onchip.compile(net, "cuda", precision)
    assert [group.claim.kernel for group in engine.plan.groups] == ["depthwise"]
    got, truth = engine(x), reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ULP[precision]
    for first, count in ((0, 1), (65, 7), (43, 1000)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert np.array_equal(engine(x), got)
    assert engine(x[:0]).shape == (0, *got.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_on_a_gpu(dtype):
    for shape in SHAPES:
        net = network(*SHAPES[shape], dtype=dtype, ends=False)
        x = rows(130, *net.input.row_shape).astype(numpy_dtype(dtype))
        got, truth = onchip.compile(net, "cuda")(x), reference.forward(net, x)
        naive = scaled_error(reference.forward(net, x, dtype), truth)
        ulp = 2.0**-46 if dtype == "float64" else max(ULP["fp32"], DTYPE_ULP.get(dtype, 0.0))
        assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ulp, f"{shape} in {dtype}"


class Turned(DepthwiseKernel):
    """Only with channels last, where it can."""

    def claims(self, *given):
        return list(super().claims(*given))[-1:]


def planned(shape, device, kernel, dtype="float32"):
    """A network, and a plan of it without conv."""
    layer, row_shape, weight_shape = SHAPES[shape]
    bare = network(layer, row_shape, weight_shape, SiLU(), Clip(-9.0, 9.0), dtype=dtype, ends=False)
    first, *others = bare.nodes
    nodes = (Node("r", ReLU(), ("x",)), dataclasses.replace(first, inputs=("r",)), *others)
    net = Network(bare.inputs, nodes, bare.outputs, bare.weights)
    kernels = [kernel if each.name == "depthwise" else each for each in KERNELS if each.name != "conv_direct"]
    return net, make_plan(net, device, kernels, Job())


def test_a_plan_with_channels_last():
    for shape in SHAPES:
        net, plan = planned(shape, H200, Turned())
        (claim,) = (group.claim for group in plan.groups if group.claim.kernel == "depthwise")
        assert claim.nodes == ("c", "a0")
        assert bool(claim.writes) == (net.input.row_shape[0] > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_channels_last_on_a_gpu(shape, dtype):
    device, backend, chosen = find_device("cuda")
    net, turned = planned(shape, device, Turned(), dtype)
    _, in_rows = planned(shape, device, DepthwiseKernel(), dtype)
    x = rows(1000, *net.input.row_shape).astype(numpy_dtype(dtype))
    assert np.array_equal(Engine(turned, backend, chosen)(x), Engine(in_rows, backend, chosen)(x))
