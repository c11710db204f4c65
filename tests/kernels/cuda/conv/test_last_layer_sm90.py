"""conv_last_layer_sm90: convolutions to few channels of y on Hopper. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from kernels.cuda.conv.test_last_layer import CASES, SMALL, exact, generator, images, network
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.conv.direct import Geometry
from onchip.kernels.cuda.conv.last_layer.sm90 import (
    GROUPS,
    ConvLastLayerSm90Kernel,
    ConvLastLayerSm90Lowering,
    cell_rows,
)
from onchip.network.graph import Network, Node
from onchip.network.layers import Conv2d, ConvTranspose2d, Permute, Tanh, ToPixels
from onchip.network.types import TensorType
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import compile

HALF, BRAIN = ("float16", "float16"), ("bfloat16", "float32")
FACES = Geometry(True, 64, 3, 1, (32, 32), (64, 64), (5, 5), (2, 2), (1, 1), (1, 1))


def claims_in(net, precision="fp16", start=1, device=H200):
    """One claim in NCHW, and one in NHWC where that is possible."""
    return list(ConvLastLayerSm90Kernel().claims(net, start, device, Job(precision)))


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "dtypes"), [("fp16", HALF), ("bf16", BRAIN)], ids=["fp16", "bf16"])
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtypes):
    gpu, net = emulated_gpu(monkeypatch), network(name, None, dtypes)
    claim, *others = claims_in(net, precision)
    assert isinstance(claim, Claim), claim
    assert claim.nodes == tuple(node.name for node in net.nodes[1:])
    x = images(net, 3 if name in SMALL else 1)
    want, got = exact(net, x, precision), run_claim(gpu, net, claim, x)
    eps = {"float16": 1e-3, "float32": 4e-6}[dtypes[1]]
    assert np.abs(got.astype(float) - want).max() <= eps * np.abs(want).max()
    assert np.array_equal(run_claim(gpu, net, claim, x[-1:]), got[-1:])
    assert all(np.array_equal(run_claim(gpu, net, other, x), got) for other in others)


@needs_gxx
def test_every_patch_makes_the_same_bits(monkeypatch):
    """Patches of one tile or of several, cut or not; two at a time, or many."""
    layer, weight = ConvTranspose2d((2, 2), (1, 1, 1, 1)), np.random.default_rng(0).standard_normal((40, 3, 4, 4))
    nodes = (Node("before", Tanh(), ("x",)), Node("c", layer, ("before",), {"weight": "w"}))
    given = TensorType(("B", 40, 21, 19), "float16")
    net = Network({"x": given}, nodes, ("c",), {"w": weight.astype(np.float16)})
    gpu, (_, claim) = emulated_gpu(monkeypatch), claims_in(net)
    x, made, patches = images(net, 2), [], set()
    for units, fast_bytes in ((1, 227 << 10), (132, 227 << 10), (2, 110 << 10)):
        facts = dataclasses.replace(claim.facts, units=units, fast_bytes=fast_bytes)
        patches.add((facts.patch(2), facts.stages(facts.patch(2))))
        made.append(run_claim(gpu, net, dataclasses.replace(claim, facts=facts), x))
    assert len(patches) == 3, patches
    assert all(np.array_equal(each, made[0]) for each in made)


@needs_gxx
def test_pixels_behind_a_permute_on_an_emulated_gpu(monkeypatch):
    gpu, net = emulated_gpu(monkeypatch), network("4x4 by steps of 2", Tanh(), HALF)
    nodes = (*net.nodes, Node("image", Permute((0, 2, 3, 1)), ("a",)), Node("pixels", ToPixels(), ("image",)))
    ended = Network(net.inputs, nodes, ("pixels",), net.weights)
    *_, claim = claims_in(ended)
    assert (claim.nodes, dict(claim.writes)) == (("c", "a", "image", "pixels"), {})
    assert claim.label == "conv_last_layer_sm90<64,3,4x4,Tanh,ToPixels>"
    x = images(net, 2)
    want, got = exact(ended, x, "fp16", "float32").astype(int), run_claim(gpu, ended, claim, x).astype(int)
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.99


@pytest.mark.parametrize(
    ("layer", "row", "shape", "word"),
    [
        (Conv2d(), (20, 8, 8), (3, 20, 3, 3), "16 B"),
        (Conv2d((1, 2)), (64, 8, 8), (3, 64, 3, 3), "stride 1 along W"),
        (Conv2d(), (1024, 60, 60), (16, 1024, 11, 11), "shared memory"),
        (Conv2d(), (64, 1 << 14, 1 << 14), (3, 64, 3, 3), "2^30"),
    ],
)
def test_what_it_refuses(layer, row, shape, word):
    nodes = (Node("before", Tanh(), ("x",)), Node("c", layer, ("before",), {"weight": "w"}))
    net = Network({"x": TensorType(("B", *row), "float16")}, nodes, ("c",), {"w": np.zeros(shape, np.float16)})
    (refused,) = claims_in(net)
    assert isinstance(refused, Refusal)
    assert word in refused.why
    (refused,) = claims_in(net, device=A100)
    assert "sm_90a" in refused.why
    (refused,) = claims_in(network("3x3"), "fp16")
    assert "float32 in fp16" in refused.why


def test_weights_lie_by_tap_block_and_column():
    """5 taps, stride 2, pads of 1: a cell of two positions reaches three pixels, one of them by one tap."""
    w = np.arange(2 * 5, dtype=np.float32).reshape(2, 1, 1, 5)  # two channels to one, five taps of a line
    made = cell_rows(w, 8, ((0,),), ((3, 1, -1), (4, 2, 0)), 0).reshape(3, 8, 64)  # tap, column, channel
    assert made[:, :2, :2].tolist() == [[[3, 8], [4, 9]], [[1, 6], [2, 7]], [[-0.0, 0], [0, 5]]]
    assert not made[:, 2:].any()
    assert not made[..., 2:].any()
    assert cell_rows(np.ones((1, 100, 3, 3)), 8, ((0, 1, 2),), ((0, 1, 2),), 1).shape == (9 * 2 * 8, 64)


def test_tiles_of_a_generator():
    """Cells of two pixels' phases: 24 columns, as many as there are; enough patches on their way."""
    lowering = ConvLastLayerSm90Lowering(FACES, "fp16", HALF, Tanh(), True, 132, 227 << 10, True).with_best_cells()
    assert (lowering.cell_height, lowering.columns, lowering.group) == (2, 24, 3)
    for B in (1, 7, 5248):
        patch = lowering.patch(B)
        assert lowering.stages(patch) >= 2
        assert lowering.shared_bytes(patch) <= 227 << 10
        assert lowering.launch(B).config.grid[0] == min(132, B * (8 if B == 1 else 8 // np.prod(patch)))


def test_sizes_cost_no_compilation():
    """One program per number of columns, whatever the layer."""
    claims = [claims_in(network(name, None, HALF))[0] for name in CASES]
    programs = {claim.facts.at(B).launches[0].program for claim in claims for B in (1, 1000)}
    assert len(programs) <= len(GROUPS)
    assert claims[0].facts.at(0).launches == ()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_plan_takes_it_for_a_last_layer(precision):
    *_, last = make_plan(generator(), H200, KERNELS, Job(precision, 4096)).groups
    assert last.claim.kernel == "conv_last_layer_sm90"
    assert last.claim.nodes[0] == "d"
    assert last.claim.reads[last.claim.facts and "r"].layout == CHANNELS_LAST


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture
def only_last(monkeypatch):
    """No other convolution, and transposed ones are not split."""
    others = ("conv_direct", "depthwise", "conv_sm90", "conv_first_layer", "conv_last_layer", "conv_implicit_gemm")
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", tuple(k for k in KERNELS if k.name not in others))


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtypes"), [("fp16", HALF), ("bf16", BRAIN), ("fp16", ("float16", "float32"))])
@pytest.mark.parametrize("name", CASES)
def test_right_with_the_same_bits_in_every_batch(only_last, name, precision, dtypes):
    net = network(name, Tanh(), dtypes)
    x = images(net, 4097 if name in SMALL else 130)
    engine = compile(net, "cuda", precision, without=("phases",))
    assert engine.plan.groups[-1].claim.kernel == "conv_last_layer_sm90"
    got, truth = engine(x), reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    ulp = max(ULP[precision], *(DTYPE_ULP.get(dtype, 0.0) for dtype in dtypes))
    assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ulp
    for first, count in ((0, 1), (65, 7), (43, 60)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert np.array_equal(engine(x), got)
    assert engine(x[:0]).shape == (0, *got.shape[1:])


@pytest.mark.gpu
def test_pixels_on_a_gpu(only_last):
    net = network("4x4 by steps of 2", Tanh(), HALF, pixels=True)
    x = images(net, 300)
    engine = compile(net, "cuda", "fp16", without=("phases",))
    assert engine.plan.groups[-1].claim.nodes == ("c", "a", "pixels")
    got, want = engine(x).astype(int), reference.forward(net, x, "float32").astype(int)
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.98
