"""conv/direct.cu on the host: any geometry, both layouts, every tile, the same bits. No GPU."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from layer_cases import CASES
from layer_cases import network as network_of
from onchip.kernels import reference
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.conv.direct import DIRECT, NARROW, TILES, ConvDirectKernel, ConvDirectLowering
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Clip,
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    HardSwish,
    ReLU,
    TransposedConvolution,
)
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.runtime.cuda.bound_steps import BoundSteps

pytestmark = needs_gxx
ALL_TILES = (*TILES, NARROW, DIRECT)
LAYOUTS = [(False, False), (True, True), (False, True), (True, False)]


def convolution(layer, row_shape, weight_shape, bias=True):
    """One layer 'y' over x."""
    given, fan = TensorType(("B", *row_shape)), math.sqrt(math.prod(weight_shape[1:]))
    weights = {"weight": rows(*weight_shape, seed=3) / np.float32(fan)}
    if bias:
        N = weight_shape[1] * layer.groups if isinstance(layer, TransposedConvolution) else weight_shape[0]
        weights["bias"] = rows(1, N, seed=4)[0]
    return Network({"x": given}, (Node("y", layer, ("x",), {name: name for name in weights}),), ("y",), weights)


def run(gpu, net, x, tile=None, nhwc=(False, False), dtypes=None):
    """y of the kernel, with nothing written past its end. x and y are NCHW here, whatever the layout in memory."""
    (claim,) = ConvDirectKernel().claims(net, 0, H200, Job())
    facts = claim.facts
    lowering = ConvDirectLowering(facts.geometry, dtypes or facts.dtypes, nhwc, facts.has_bias, 4, facts.activation)
    B, shape, guard = len(x), net.types["y"].row_shape, 64
    stored_type = np.moveaxis(x, 1, -1) if nhwc[0] else x
    made = np.full(B * math.prod(shape) + guard, 77, numpy_dtype(lowering.dtypes[1]))
    there = [gpu.upload(np.ascontiguousarray(array)) for array in (stored_type, made)]
    weights = {name: gpu.upload(materialise(recipe, net.weights)) for name, recipe in claim.recipes.items()}
    steps = Steps((lowering.launch(B, tile),)) if tile else lowering.at(B)
    BoundSteps(gpu, steps, weights).enqueue([there[0].pointer], [there[1].pointer], 0, gpu.stream)
    gpu.download(there[1], made)
    assert (made[-guard:] == 77).all()
    if nhwc[1]:
        return np.moveaxis(made[:-guard].reshape(B, *shape[1:], shape[0]), -1, 1)
    return made[:-guard].reshape(B, *shape)


def assert_right(net, x, got):
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


@pytest.mark.parametrize("tile", [DIRECT, NARROW, TILES[0]], ids=["direct", "narrow", "tile"])
def test_activations_are_taken_along(gpu, tile):
    alone = convolution(Conv2d(pads=(1, 1, 1, 1)), (3, 7, 5), (4, 3, 3, 3))
    for layer in (ReLU(), HardSwish(), Clip(-0.2, 0.3)):
        net = Network(alone.inputs, (*alone.nodes, Node("a", layer, ("y",))), ("a",), alone.weights)
        x = rows(3, 3 * 7 * 5).reshape(3, 3, 7, 5)
        assert_right(net, x, run(gpu, net, x, tile))


@pytest.mark.parametrize("nhwc", LAYOUTS, ids=["rows", "last", "to last", "to rows"])
@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda tile: f"{tile.positions}x{tile.channels}")
@pytest.mark.parametrize(
    ("layer", "row_shape", "weight_shape"),
    [
        (Conv2d(pads=(1, 1, 1, 1)), (5, 6, 6), (8, 5, 3, 3)),  # positions and channels in fours
        (Conv2d((2, 1), (0, 2, 1, 0)), (7, 5, 9), (70, 7, 3, 2)),
        (Conv2d((1, 2), (2, 0, 0, 1), (3, 2), 2), (4, 11, 9), (34, 2, 3, 3)),
        (Conv1d((3,), (4, 2), (2,)), (3, 151), (17, 3, 5)),
        (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (6, 7, 5), (6, 5, 5, 5)),
        (ConvTranspose2d((3, 2), (0, 1, 2, 0), (1, 1), (2, 3), 3), (6, 4, 5), (6, 4, 2, 3)),
        (ConvTranspose1d((4,), (1, 0), (3,)), (5, 20), (5, 18, 2)),  # phases without a tap
        (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (90, 20, 20), (90, 3, 5, 5)),  # several partial sums and blocks
    ],
    ids=["even", "odd", "dilated groups", "one axis", "transposed", "transposed groups", "no tap", "few out"],
)
def test_every_tile_in_every_layout(gpu, layer, row_shape, weight_shape, tile, nhwc):
    net = convolution(layer, row_shape, weight_shape)
    x = rows(3, *row_shape)
    got = run(gpu, net, x, tile, nhwc)
    assert_right(net, x, got)
    assert np.array_equal(got, run(gpu, net, x, DIRECT)), "neither the tile nor the layout may decide about bits"
    assert np.array_equal(run(gpu, net, x[1:2], tile, nhwc), got[1:2])


@pytest.mark.parametrize(
    "case", [case for case in CASES if isinstance(case.layer, Convolution | TransposedConvolution)], ids=str
)
@pytest.mark.parametrize("B", [1, 3])
def test_the_vocabulary(gpu, case, B):
    net = network_of(case)
    (name,) = net.inputs
    x = rows(B, *net.inputs[name].row_shape)
    assert_right(net, x, run(gpu, net, x))


@st.composite
def geometries(draw):
    """A convolution of any small geometry, plain or transposed, over one or two axes."""
    rank = draw(st.integers(1, 2))
    groups, C, N = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 17]))

    def several(low, high, count=rank):
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    kernel, stride, dilation, sides = several(1, 4), several(1, 4), several(1, 3), several(1, 9)
    pads = several(0, 3, 2 * rank)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if draw(st.booleans()):
        sides = tuple(
            max(n, span - a - b) for n, span, a, b in zip(sides, spans, pads[:rank], pads[rank:], strict=True)
        )
        layer = (Conv1d, Conv2d)[rank - 1](stride, pads, dilation, groups)
        weight = (N * groups, C, *kernel)
    else:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        full = [(n - 1) * s + span for n, s, span in zip(sides, stride, spans, strict=True)]
        cut = tuple(min(pad, (full[i % rank] - 1) // 2) for i, pad in enumerate(pads))
        layer = (ConvTranspose1d, ConvTranspose2d)[rank - 1](stride, cut, extra, dilation, groups)
        weight = (C * groups, N, *kernel)
    net = convolution(layer, (C * groups, *sides), weight, draw(st.booleans()))
    return net, draw(st.sampled_from(ALL_TILES)), draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([1, 3]))


@settings(max_examples=150)
@given(made=geometries())
def test_any_geometry(gpu, made):
    net, tile, nhwc, B = made
    x = rows(B, *net.inputs["x"].row_shape)
    assert_right(net, x, run(gpu, net, x, tile, nhwc))


def test_long_sums_are_sums_of_sums(gpu):
    """Sums in one row would be several times less exact than the reference's."""
    net = convolution(Conv2d(pads=(1, 1, 1, 1)), (300, 3, 3), (5, 300, 3, 3))
    x = rows(2, 300, 3, 3)
    got = run(gpu, net, x, TILES[2])
    assert_right(net, x, got)
    for tile in ALL_TILES:
        assert np.array_equal(run(gpu, net, x, tile), got)


def test_a_nan_stays_in_its_windows(gpu):
    net = convolution(Conv2d(pads=(1, 1, 1, 1)), (3, 8, 8), (6, 3, 3, 3))
    x = rows(2, 3, 8, 8)
    x[0, 1, 2, 2], x[1, 0, 7, 7] = np.nan, np.inf
    for tile in ALL_TILES:
        got = run(gpu, net, x, tile)
        wrong = ~np.isfinite(got)
        assert wrong[0, :, 1:4, 1:4].all()
        assert wrong[1, :, 6:, 6:].all()
        assert wrong.sum() == 6 * (9 + 4)


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float16")])
@pytest.mark.parametrize("tile", [TILES[1], NARROW, DIRECT], ids=["tile", "narrow", "direct"])
def test_numbers_in_half_precision(gpu, dtypes, tile):
    net = convolution(Conv2d((1, 1), (1, 1, 1, 1)), (3, 6, 6), (9, 3, 3, 3))
    x = rows(2, 3, 6, 6).astype(numpy_dtype(dtypes[0]))
    got = run(gpu, net, x, tile, dtypes=dtypes)
    whole = run(gpu, net, x.astype(np.float32), tile)
    assert got.tobytes() == whole.astype(numpy_dtype(dtypes[1])).tobytes()
