"""conv_last_layer: convolutions to few channels of y at the tensor cores. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.conv.direct import Geometry
from onchip.kernels.cuda.conv.last_layer.cells import NO_TAP, cell_axis
from onchip.kernels.cuda.conv.last_layer.mma import GROUPS, ConvLastLayerKernel, cell_fragments
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Cast,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Permute,
    ReLU,
    Sigmoid,
    Tanh,
    ToPixels,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import compile

# layer, a row of x, the weight, whether there is a bias
CASES = {
    "3x3": (Conv2d(pads=(1, 1, 1, 1)), (64, 9, 10), (3, 64, 3, 3), True),
    "4x4 by steps of 2": (ConvTranspose2d((2, 2), (1, 1, 1, 1)), (64, 6, 7), (64, 3, 4, 4), True),
    "5x5, one channel": (Conv2d(), (24, 9, 8), (1, 24, 5, 5), False),
    "strides and dilation": (Conv2d((2, 1), (2, 0, 1, 3), (1, 2)), (40, 9, 11), (5, 40, 3, 2), True),
    "16 channels": (Conv2d(pads=(1, 0, 1, 0)), (16, 5, 6), (16, 16, 3, 1), True),
    "one tap": (Conv2d(), (72, 5, 4), (3, 72, 1, 1), True),
    "more out than in": (ConvTranspose2d((3, 2), (0, 1, 2, 0), output_padding=(1, 1)), (16, 4, 5), (16, 2, 3, 3), True),
    "transposed, with dilation": (
        ConvTranspose2d((2, 2), (1, 0, 0, 2), dilation=(2, 3)),
        (24, 5, 6),
        (24, 3, 3, 2),
        True,
    ),
    "phases without a tap": (ConvTranspose1d((4,), (1, 0)), (32, 9), (32, 3, 2), True),
    "large pads": (ConvTranspose2d((2, 2), (3, 2, 3, 2)), (16, 7, 7), (16, 1, 5, 5), True),
    "a signal": (Conv1d(pads=(4, 4)), (32, 300), (2, 32, 9), True),
    "many lines": (Conv2d(pads=(3, 3, 3, 3)), (16, 40, 150), (2, 16, 7, 7), True),
}
SMALL = [name for name in CASES if name != "many lines"]


def network(name, activation=None, dtypes=("float32", "float32"), pixels=False):
    """A convolution after an NHWC layer, its activation, and a Cast or ToPixels."""
    layer, row, shape, has_bias = CASES[name]
    is_transposed = isinstance(layer, ConvTranspose1d | ConvTranspose2d)
    weights = {"weight": rows(shape[0], int(np.prod(shape[1:])), seed=2).reshape(shape) / np.float32(4)}
    if has_bias:
        weights["bias"] = rows(1, shape[is_transposed], seed=3)[0]
    weights = {role: weight.astype(numpy_dtype(dtypes[0])) for role, weight in weights.items()}
    roles = {role: role for role in weights}
    nodes = [Node("before", Sigmoid(), ("x",)), Node("c", layer, ("before",), roles)]
    if activation is not None:
        nodes.append(Node("a", activation, ("c",)))
    if pixels:
        nodes.append(Node("pixels", ToPixels(), (nodes[-1].name,)))
    elif dtypes[0] != dtypes[1]:
        nodes.append(Node("cast", Cast(dtypes[1]), (nodes[-1].name,)))
    return Network({"x": TensorType(("B", *row), dtypes[0])}, tuple(nodes), (nodes[-1].name,), weights)


def images(net, B):
    given = net.inputs["x"]
    return rows(B, int(np.prod(given.row_shape))).reshape(B, *given.row_shape).astype(numpy_dtype(given.dtype))


def claims_in(net, precision="fp32", start=1):
    """One claim in NCHW, and one in NHWC where that is possible."""
    return list(ConvLastLayerKernel().claims(net, start, H200, Job(precision)))


def claim_in(net, precision="fp32", start=1):
    return next(iter(claims_in(net, precision, start)), None)


def rounded(array, precision):
    if precision == "tf32":
        return round_tf32(np.ascontiguousarray(array, np.float32))
    return array.astype(numpy_dtype(PRECISIONS[precision].dtype)).astype(np.float32)


def exact(net, x, precision, dtype="float64"):
    """y of rounded operands, in float64 by default; x is the input of the convolution."""
    first, *others = (node for node in net.nodes[1:] if not isinstance(node.layer, Cast))
    nodes = (dataclasses.replace(first, inputs=("x",)), *others)
    weights = {"weight": rounded(net.weights["weight"].astype(np.float32), precision)}
    if "bias" in net.weights:
        weights["bias"] = net.weights["bias"].astype(np.float32)
    bare = Network({"x": TensorType(net.inputs["x"].shape)}, nodes, (nodes[-1].name,), weights)
    return reference.forward(bare, rounded(x.astype(np.float32), precision), dtype)


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp32", ("float32", "float32")), ("fp16", ("float16", "float32")), ("bf16", ("float32", "float16")),
        ("tf32", ("bfloat16", "bfloat16")),
    ],
    ids=["fp32", "fp16", "bf16", "tf32"],
)  # fmt: skip
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtypes):
    gpu, net = emulated_gpu(monkeypatch), network(name, Tanh() if name == "3x3" else None, dtypes)
    claim, *others = claims_in(net, precision)
    assert isinstance(claim, Claim), claim
    assert claim.nodes == tuple(node.name for node in net.nodes[1:])
    x = images(net, 3 if name in SMALL else 1)
    want, got = exact(net, x, precision), run_claim(gpu, net, claim, x)
    eps = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtypes[1]]
    if precision == "fp16" and name == "3x3":
        eps = 5e-4  # an activation as exact as 16 bits
    assert np.abs(got.astype(float) - want).max() <= eps * np.abs(want).max()
    assert np.array_equal(run_claim(gpu, net, claim, x[-1:]), got[-1:])
    assert all(np.array_equal(run_claim(gpu, net, other, x), got) for other in others)


@needs_gxx
@pytest.mark.parametrize("name", ["3x3", "4x4 by steps of 2", "large pads", "strides and dilation"])
def test_every_tile_makes_the_same_bits(monkeypatch, name):
    """Tiles of all lines or of few, and of few columns where there is little shared memory."""
    gpu, net = emulated_gpu(monkeypatch), network(name)
    claim = claim_in(net)
    x, made, tiles = images(net, 2), [], set()
    least = claim.facts.shared_bytes((1, 1, 1)) + 2048
    for units, fast_bytes in ((1, 227 << 10), (132, 227 << 10), (1, 2 * least), (1, least + 8192)):
        lowering = dataclasses.replace(claim.facts, units=units, fast_bytes=fast_bytes)
        tiles.add(lowering.tile(2))
        made.append(run_claim(gpu, net, dataclasses.replace(claim, facts=lowering), x))
    assert len(tiles) > 1, tiles
    assert all(np.array_equal(each, made[0]) for each in made)


@needs_gxx
def test_pixels_on_an_emulated_gpu(monkeypatch):
    gpu, net = emulated_gpu(monkeypatch), network("4x4 by steps of 2", Tanh(), pixels=True)
    claim, x = claim_in(net), images(net, 2)
    assert claim.nodes == ("c", "a", "pixels")
    assert claim.label == "conv_last_layer<64,3,4x4,Tanh,ToPixels>"
    want = exact(net, x, "fp32", "float32").astype(int)  # where 0.99999999 is 1
    got = run_claim(gpu, net, claim, x).astype(int)
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.99


@needs_gxx
@pytest.mark.parametrize("name", ["4x4 by steps of 2", "a signal"])
def test_a_permute_and_what_is_behind_it_are_no_pass_of_their_own(monkeypatch, name):
    gpu, net = emulated_gpu(monkeypatch), network(name, Tanh())
    axes = (0, 2, 1) if name == "a signal" else (0, 2, 3, 1)
    nodes = (*net.nodes, Node("image", Permute(axes), ("a",)), Node("pixels", ToPixels(), ("image",)))
    ended = Network(net.inputs, nodes, ("pixels",), net.weights)
    *_, claim = claims_in(ended)
    assert (claim.nodes, dict(claim.writes)) == (("c", "a", "image", "pixels"), {})
    x = images(net, 2)
    want = exact(ended, x, "fp32", "float32").astype(int)
    got = run_claim(gpu, ended, claim, x).astype(int)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.99
    both = Network(net.inputs, nodes, ("image", "pixels"), net.weights)
    assert claims_in(both)[-1].nodes == ("c", "a", "image"), "somebody reads it"


def test_what_it_takes():
    net = network("3x3", ReLU())
    claim = claim_in(net, "fp16")
    assert (claim.reads["before"].layout, dict(claim.writes)) == (CHANNELS_LAST, {})
    assert claim.label == "conv_last_layer<64,3,3x3,ReLU>"
    first = dataclasses.replace(net.nodes[1], inputs=("x",))
    at_the_input = Network(net.inputs, (first, net.nodes[2]), ("a",), net.weights)
    assert claim_in(at_the_input, start=0) is None, "a network's input lies in rows"
    half = network("3x3", None, ("float16", "float16"))
    cast = Node("wide", Cast("float32"), ("before",))
    conv = dataclasses.replace(half.nodes[1], inputs=("wide",))
    weights = {name: weight.astype(np.float32) for name, weight in half.weights.items()}
    both = Network(half.inputs, (half.nodes[0], cast, conv), ("c",), weights)
    assert claim_in(both).nodes == ("wide", "c")
    assert claim_in(both).facts.dtypes == ("float16", "float32")


@pytest.mark.parametrize(
    ("layer", "row", "shape", "word"),
    [
        (Conv2d(), (18, 8, 8), (3, 18, 3, 3), "16 B"),
        (Conv2d(), (1024, 60, 60), (16, 1024, 11, 11), "shared memory"),
        (Conv2d(), (64, 1 << 14, 1 << 14), (3, 64, 3, 3), "2\\^30"),
    ],
)
def test_what_it_refuses(layer, row, shape, word):
    nodes = (Node("before", Tanh(), ("x",)), Node("c", layer, ("before",), {"weight": "w"}))
    net = Network({"x": TensorType(("B", *row))}, nodes, ("c",), {"w": np.zeros(shape, np.float32)})
    refused = claim_in(net)
    assert isinstance(refused, Refusal)
    assert word.replace("\\", "") in refused.why


def test_a_window_has_the_taps_that_its_places_reach():
    """5x5, stride 2, pads of 1: along an axis a cell of two positions reaches three pixels, one of them by one tap."""
    net = network("3x3")
    lowering = claim_in(net).facts
    twice = Geometry(True, 64, 3, 1, (8, 8), (16, 16), (5, 5), (2, 2), (1, 1), (1, 1))
    axis = cell_axis(twice, 0, 1)
    assert (axis.cell, axis.step, axis.first, axis.taps, axis.table) == (2, 1, -1, 3, ((3, 1, NO_TAP), (4, 2, 0)))
    w = np.arange(2 * 5, dtype=np.float32).reshape(2, 1, 1, 5)  # two channels to one, five taps of a line
    made = cell_fragments(w, 1, 8, 8, ((0,),), axis.table, 0).reshape(3, 8, 4, 2)  # tap, column, q, word
    assert made[:, :2, :2, 0].tolist() == [[[3, 8], [4, 9]], [[1, 6], [2, 7]], [[0, 0], [0, 5]]]
    assert not made[:, 2:].any()
    assert lowering.columns == lowering.axes[0].cell * lowering.axes[1].cell * 3


def test_cells_of_a_generator_are_the_phases_of_a_pixel():
    *_, claim = claims_in(network("4x4 by steps of 2", dtypes=("float16", "float16")), "fp16")
    assert claim.writes == {"c": CHANNELS_LAST}
    assert [axis.cell % 2 for axis in claim.facts.axes] == [0, 0]
    assert claim.facts.all_columns - claim.facts.columns < 8


def test_sizes_cost_no_compilation():
    """One program per number of columns of a warp tile, whatever the layer."""
    claims = [claim_in(network(name)) for name in SMALL]
    programs = {claim.facts.at(B).launches[0].program for claim in claims for B in (1, 1000)}
    assert len(programs) <= len(GROUPS)
    assert claim_in(network("3x3")).facts.at(0).launches == ()


def generator():
    """The end of a DCGAN: (B, 128, 16, 16) to images of 64 x 64."""
    weights = {"a": np.zeros((128, 64, 4, 4), np.float32), "b": np.zeros((64, 3, 4, 4), np.float32)}
    step = ConvTranspose2d((2, 2), (1, 1, 1, 1))
    nodes = (
        Node("s", Sigmoid(), ("x",)), Node("c", step, ("s",), {"weight": "a"}), Node("r", ReLU(), ("c",)),
        Node("d", step, ("r",), {"weight": "b"}), Node("t", Tanh(), ("d",)), Node("p", ToPixels(), ("t",)),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 128, 16, 16))}, nodes, ("p",), weights)


@pytest.mark.parametrize(("device", "precision"), [(H200, "fp32"), (H200, "tf32"), (A100, "fp16"), (A100, "bf16")])
def test_a_plan_takes_it_for_a_last_layer(device, precision):
    *_, last = make_plan(generator(), device, KERNELS, Job(precision, 4096)).groups
    assert last.claim.kernel == "conv_last_layer"
    assert last.claim.nodes == ("d", "t", "p")


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture
def only_last(monkeypatch):
    """No other convolution, and transposed ones are not split."""
    others = ("conv_direct", "depthwise", "conv_sm90", "conv_first_layer", "conv_last_layer_sm90", "conv_implicit_gemm")
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", tuple(k for k in KERNELS if k.name not in others))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_right_with_the_same_bits_in_every_batch(only_last, name, precision):
    net = network(name, Tanh())
    x = images(net, 4097 if name in SMALL else 130)
    engine = compile(net, "cuda", precision, without=("phases",))
    assert engine.plan.groups[-1].claim.kernel == "conv_last_layer"
    got, truth = engine(x), reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ULP[precision]
    for first, count in ((0, 1), (65, 7), (43, 60)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert np.array_equal(engine(x), got)
    assert engine(x[:0]).shape == (0, *got.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_dtype_on_a_gpu(only_last, precision, dtypes):
    for name in SMALL:
        net = network(name, None, dtypes)
        x = images(net, 130)
        engine = compile(net, "cuda", precision, without=("phases",))
        assert engine.plan.groups[-1].claim.kernel == "conv_last_layer"
        truth = reference.forward(net, x)
        naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
        ulp = max(ULP[precision], *(DTYPE_ULP.get(dtype, 0.0) for dtype in dtypes))
        assert scaled_error(engine(x), truth) <= FACTOR * naive + ULPS * ulp, f"{name} in {dtypes}"


@pytest.mark.gpu
def test_pixels_on_a_gpu(only_last):
    net = network("4x4 by steps of 2", Tanh(), pixels=True)
    x = images(net, 300)
    engine = compile(net, "cuda", without=("phases",))
    assert engine.plan.groups[-1].claim.nodes == ("c", "a", "pixels")
    got, want = engine(x).astype(int), reference.forward(net, x, "float32").astype(int)
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.99
