"""Convolutions of any shape on a GPU: what the kernel claims (anywhere), and that it is right (on a GPU)."""

import dataclasses
import math

import numpy as np
import pytest

import onchip
from checks import rows
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.conv.direct import (
    DIRECT,
    NARROW,
    TILES,
    ConvDirectKernel,
)
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Identity, TransposedConvolution
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import Engine
from onchip.runtime.placement import find_device

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SAME = Conv2d(pads=(1, 1, 1, 1))

COSTS = costs_of(H200).conv_direct


def chain(row_shape, *layers, bias=True, dtype="float32"):
    """Pairs of a layer and the shape of its weight, in sequence: c0, c1, ..."""
    nodes, weights, value = [], {}, "x"
    for i, (layer, shape) in enumerate(layers):
        weights[f"w{i}"] = rows(*shape, seed=i) / np.float32(math.sqrt(math.prod(shape[1:])))
        N = shape[1] * layer.groups if isinstance(layer, TransposedConvolution) else shape[0]
        weights[f"b{i}"] = rows(1, N, seed=50 + i)[0]
        roles = {"weight": f"w{i}"} | ({"bias": f"b{i}"} if bias else {})
        nodes.append(Node(f"c{i}", layer, (value,), roles))
        value = f"c{i}"
    used = {name for node in nodes for name in node.weights.values()}
    weights = {name: weights[name].astype(numpy_dtype(dtype)) for name in used}
    return Network({"x": TensorType(("B", *row_shape), dtype)}, tuple(nodes), (value,), weights)


# Kernels that also claim convolutions.
OTHERS = ("conv_sm90", "conv_first_layer", "conv_last_layer", "conv_last_layer_sm90", "conv_implicit_gemm")


def claims_of(net, start=0, precision="fp32", device=H200):
    return list(ConvDirectKernel().claims(net, start, device, Job(precision)))


# -- planning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_takes_convolutions_of_every_kind(precision):
    for layer, shape in (
        (SAME, (64, 16, 3, 3)), (Conv2d(groups=4), (8, 4, 2, 2)), (ConvTranspose2d((2, 2)), (16, 8, 5, 5)),
    ):  # fmt: skip
        kernels = [k for k in KERNELS if k.name not in OTHERS]
        plan = make_plan(chain((16, 9, 9), (layer, shape)), A100, kernels, Job(precision))
        assert [group.claim.kernel for group in plan.groups] == ["conv_direct"]
    plan = make_plan(chain((16, 30), (Conv1d(), (7, 16, 5))), H200, kernels, Job(precision))
    assert [group.claim.label for group in plan.groups] == ["conv_direct<16,7,5>"]


def test_a_transposed_convolution_stays_one_launch():
    """Its phases are tiles of one launch: convolutions side by side, and what weaves them together, would be five."""
    net = chain((512, 4, 4), (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (512, 256, 5, 5)))
    for batch in (1, 1024):
        plan = make_plan(net, A100, KERNELS, Job(batch=batch))
        (label,) = (group.claim.label for group in plan.groups if group.claim.kernel != "permute")
        assert label in ("conv_direct<512,256,5x5>", "conv_implicit_gemm<512,256,5x5>")
        assert "left out phases" in str(plan)


def test_what_it_costs():
    net = chain((64, 32, 32), (SAME, (64, 64, 3, 3)))
    (claim,) = claims_of(net, precision="fp16")
    cost = claim.cost
    assert cost.row_flop == 32 * 32 * 64 * (2 * 64 * 9 + 1)
    assert cost.row_bytes == 2 * 4 * 64 * 32 * 32
    assert cost.fixed_bytes == 4 * (64 * 64 * 9 + 64)
    whole = 64 * 9 / (64 * 9 + COSTS.overhead_elements)  # of a tile's time
    assert (cost.precision, cost.rate) == ("fp32", pytest.approx(TILES[0].share(COSTS) * whole))
    (few,) = claims_of(chain((64, 32, 32), (SAME, (8, 64, 3, 3))))
    assert few.cost.rate == pytest.approx(TILES[2].share(COSTS) / 2 * whole)
    (fewer,) = claims_of(chain((64, 32, 32), (SAME, (3, 64, 3, 3))))
    assert fewer.cost.rate == pytest.approx(NARROW.share(COSTS) * 3 / 4 * 64 / 68)
    (single,) = claims_of(chain((64, 32, 32), (Conv2d(groups=64), (64, 1, 3, 3))))
    assert single.cost.rate == COSTS.depthwise_share


def test_sizes_cost_no_compilation():
    programs = set()
    for C, N, side, taps in ((64, 64, 32, 3), (48, 200, 57, 5), (3, 130, 224, 7)):
        (claim,) = claims_of(chain((C, side, side), (Conv2d(), (N, C, taps, taps))))
        programs.add(claim.facts.at(1 << 10).launches[0].program)
    assert len(programs) == 1


def test_tiles_are_chosen_by_the_sizes():
    def tile(B, C, N, side, groups=1):
        (claim,) = claims_of(chain((C, side, side), (Conv2d(groups=groups), (N, C // groups, 3, 3))))
        return claim.facts.tile(B)

    assert tile(256, 64, 64, 34) is TILES[0]
    assert tile(4, 64, 64, 34) is TILES[1]
    assert tile(256, 64, 16, 34) is TILES[2]
    assert tile(256, 64, 3, 34) is NARROW
    assert tile(256, 64, 64, 34, groups=64) is DIRECT


def test_blocks_cover_every_output():
    net = chain((6, 7, 5), (ConvTranspose2d((2, 3)), (6, 70, 5, 5)))
    (claim,) = claims_of(net)
    facts = claim.facts
    H, W = net.types["c0"].row_shape[1:]
    assert facts.geometry.blocks(3, TILES[0]) == 6 * 2 * math.ceil(3 * math.ceil(H / 2) * math.ceil(W / 3) / 128)
    assert facts.geometry.blocks(3, DIRECT) == math.ceil(3 * 70 * H * W / 256)
    assert facts.at(0).launches == ()


def test_both_layouts_are_offered_inside_a_network():
    net = chain((3, 9, 8), *[(SAME, (8, C, 3, 3)) for C in (3, 8, 8)])

    def layouts(start):
        name = net.nodes[start].name
        value = net.nodes[start].inputs[0]
        return {(claim.layout_read(value), claim.writes.get(name, ROWS)) for claim in claims_of(net, start)}

    assert layouts(0) == {(ROWS, ROWS), (ROWS, CHANNELS_LAST)}
    assert layouts(1) == {(a, b) for a in (ROWS, CHANNELS_LAST) for b in (ROWS, CHANNELS_LAST)}
    assert layouts(2) == {(ROWS, ROWS), (CHANNELS_LAST, ROWS)}
    assert all(claim.reads["c0"].is_read_often for claim in claims_of(net, 1))
    narrow = chain((8, 9, 8), *[(SAME, (N, C, 3, 3)) for N, C in ((8, 8), (3, 8), (8, 3))])
    found = {
        (claim.layout_read("c0"), bool(claim.writes)): claim.facts.at(1024).launches[0].program.name_expression
        for claim in claims_of(narrow, 1)
    }
    assert set(found) == {(layout, is_nhwc) for layout in (ROWS, CHANNELS_LAST) for is_nhwc in (False, True)}
    for (layout, _), program in found.items():  # four channels per thread only where adjacent positions are contiguous
        assert program.startswith("conv_narrow") == (layout == ROWS)
    grouped = chain((8, 9, 8), *[(Conv2d(groups=8), (8, 1, 2, 2))] * 3)
    assert [(bool(c.writes), c.has_layouts) for c in claims_of(grouped, 1)] == [(False, False), (True, True)]


def test_weights_lie_with_their_taps_in_front():
    net = chain((4, 9, 8), (Conv2d(groups=2), (6, 2, 3, 2)), (ConvTranspose2d(groups=3), (6, 5, 2, 3)))
    (first, *_), (second, *_) = claims_of(net, 0), claims_of(net, 1)
    w0, w1 = net.weights["w0"], net.weights["w1"]
    assert np.array_equal(materialise(first.recipes["weight"], net.weights), w0.transpose(2, 3, 1, 0))
    assert np.array_equal(materialise(second.recipes["weight"], net.weights), w1.transpose(2, 3, 0, 1))
    half = chain((4, 9, 8), (Conv2d(), (6, 4, 3, 2)), dtype="float16")
    (claim,) = claims_of(half)
    assert {materialise(recipe, half.weights).dtype for recipe in claim.recipes.values()} == {np.dtype("float32")}


def test_what_it_refuses():
    net = chain((3, 5, 5), (SAME, (4, 3, 3, 3)))
    (refusal,) = claims_of(net, device=dataclasses.replace(H200, arch="sm_70"))
    assert isinstance(refusal, Refusal)
    assert "on sm_70" in refusal.why
    (refusal,) = claims_of(chain((4, 40_000, 40_000), (SAME, (4, 4, 3, 3))))
    assert "images of up to" in refusal.why
    other = Network({"x": TensorType(("B", 3))}, (Node("i", Identity(), ("x",)),), ("i",), {})
    assert claims_of(other) == []


# -- on a GPU --------------------------------------------------------------------------------------------------


def verify(net, x, precision):
    """Plan without tensor cores, run, and compare with the float64 reference; the naive run is the baseline."""
    device, backend, chosen = find_device("cuda")
    kernels = [k for k in KERNELS if k.name not in OTHERS]
    engine = Engine(make_plan(net, device, kernels, Job(precision)), backend, chosen)
    assert {"conv_direct", "depthwise"} & {group.claim.kernel for group in engine.plan.groups}
    got = engine(x)
    truth = reference.forward(net, x)
    narrow = NAIVE_DTYPE[precision] if net.output.dtype == "float32" else net.output.dtype
    naive = scaled_error(reference.forward(net, x, narrow), truth)
    allowed = FACTOR * naive + ULPS * max(ULP[precision], DTYPE_ULP.get(net.output.dtype, 0.0))
    error = scaled_error(got, truth)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, naive {naive:.3g}"
    return engine, got


SHAPES = {
    "3x3": ((64, 14, 14), (SAME, (64, 64, 3, 3))),
    "1x1": ((96, 9, 9), (Conv2d(), (130, 96, 1, 1))),
    "strided stem": ((3, 40, 40), (Conv2d((2, 2), (3, 3, 3, 3)), (64, 3, 7, 7))),
    "odd": ((17, 13, 7), (Conv2d((2, 1), (0, 2, 1, 0), (2, 3)), (33, 17, 3, 2))),
    "groups": ((24, 10, 11), (Conv2d(pads=(1, 1, 1, 1), groups=3), (48, 8, 3, 3))),
    "depthwise": ((72, 15, 15), (Conv2d((2, 2), (1, 1, 1, 1), groups=72), (72, 1, 3, 3))),
    "few channels out": ((64, 12, 12), (SAME, (3, 64, 3, 3))),
    "long sums": ((300, 4, 4), (SAME, (20, 300, 3, 3))),
    "one axis": ((40, 65), (Conv1d((1,), (4, 4), (2,)), (96, 40, 5))),
    "faces": ((64, 8, 8), (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (64, 32, 5, 5))),
    "faces, last": ((64, 8, 8), (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (64, 3, 5, 5))),
    "transposed, odd": ((12, 5, 7), (ConvTranspose2d((3, 2), (0, 1, 2, 0), (1, 1), (2, 3), 3), (12, 6, 2, 3))),
    "transposed, phases without a tap": ((5, 20), (ConvTranspose1d((4,), (1, 0), (3,)), (5, 18, 2))),
    "transposed, depthwise": ((32, 6, 6), (ConvTranspose2d((2, 2), groups=32), (32, 1, 4, 4))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_right_with_the_same_bits_in_every_batch(precision, shape):
    net = chain(*SHAPES[shape])
    x = rows(130, *net.input.row_shape)
    engine, whole = verify(net, x, precision)
    for first, count in ((0, 1), (65, 3), (43, 70)):
        assert np.array_equal(engine(x[first : first + count]), whole[first : first + count])
    assert np.array_equal(engine(x), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("lasts", ["rows", "channels last"])
def test_layouts_between_groups(lasts):
    class Kept(ConvDirectKernel):
        def claims(self, *given):
            answers = list(super().claims(*given))
            return [answers[-1] if lasts == "channels last" else answers[0]]

    layers = [(SAME, (48, 8, 3, 3)), (Conv2d((2, 1), groups=4), (24, 12, 3, 2)), (Conv2d(groups=24), (24, 1, 3, 3))]
    net = chain((8, 17, 18), *layers, (ConvTranspose2d((2, 2), (1, 0, 0, 1)), (24, 20, 3, 4)))
    x = rows(33, 8, 17, 18)
    device, backend, chosen = find_device("cuda")
    kernels = [kernel for kernel in KERNELS if kernel.name not in OTHERS]
    plain = make_plan(net, device, kernels, Job(without=("phases",)))
    kept = [Kept() if kernel.name == "conv_direct" else kernel for kernel in kernels]
    plan = make_plan(net, device, kept, Job(without=("phases",)))
    between = {layout for group in plan.groups for layout in group.claim.writes.values()}
    assert between == ({CHANNELS_LAST} if lasts == "channels last" else set())
    got = Engine(plan, backend, chosen)(x)
    assert np.array_equal(got, Engine(plain, backend, chosen)(x))
    truth = reference.forward(net, x)
    assert (
        scaled_error(got, truth) <= FACTOR * scaled_error(reference.forward(net, x, "float32"), truth) + 4 * ULP["fp32"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
def test_numbers_in_half_precision(precision, io):
    layers = [(SAME, (64, 16, 3, 3)), (Conv2d(groups=64), (64, 1, 2, 2))]
    for net in (chain((16, 9, 10), *layers, dtype=io), with_io(chain((16, 9, 10), *layers, bias=False), io)):
        _, got = verify(net, rows(50, 16, 9, 10).astype(numpy_dtype(io)), precision)
        assert got.dtype == numpy_dtype(io)


@pytest.mark.gpu
def test_a_nan_stays_in_its_windows():
    net = chain((24, 8, 8), (SAME, (40, 24, 3, 3)))
    x = rows(100, 24, 8, 8)
    x[3, 1, 2, 2], x[77, 0, 7, 7] = np.nan, np.inf
    wrong = ~np.isfinite(onchip.compile(net, "cuda")(x))
    assert wrong[3, :, 1:4, 1:4].all()
    assert wrong[77, :, 6:, 6:].all()
    assert wrong.sum() == 40 * (9 + 4)
