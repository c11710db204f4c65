"""conv_first_layer: convolutions of few channels of x at the tensor cores. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.conv.first_layer import ConvFirstLayerKernel, Tile, window_fragments
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    AvgPool1d,
    AvgPool2d,
    Cast,
    Conv1d,
    Conv2d,
    GlobalMean,
    MaxPool1d,
    MaxPool2d,
    ReLU,
    Tanh,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.engine import compile

# layer, a row of x, the weight, whether there is a bias
CASES = {
    "3x3": (Conv2d(pads=(1, 1, 1, 1)), (3, 9, 10), (20, 3, 3, 3), True),
    "one channel, 5x5": (Conv2d(), (1, 14, 13), (6, 1, 5, 5), True),
    "7x7, stride 2": (Conv2d((2, 2), (3, 3, 3, 3)), (3, 21, 18), (64, 3, 7, 7), False),
    "odd pads, dilation": (Conv2d((1, 3), (2, 0, 1, 3), (2, 3)), (5, 8, 19), (33, 5, 2, 4), True),
    "one tap": (Conv2d(), (12, 5, 4), (9, 12, 1, 1), True),
    "many columns": (Conv2d(pads=(0, 2, 0, 2)), (2, 3, 150), (16, 2, 1, 5), True),
    "a signal": (Conv1d(pads=(2, 1)), (1, 321), (17, 1, 9), True),
    "a signal, stride": (Conv1d((3,), (1, 1)), (12, 20), (70, 12, 5), True),
    "small images": (Conv2d(), (3, 4, 4), (8, 3, 2, 2), True),
    "lines of 16 bytes": (Conv2d((2, 2), (1, 1, 1, 1)), (3, 10, 24), (8, 3, 3, 3), True),
    "lines of 8 bytes": (Conv2d(pads=(2, 2, 2, 2)), (1, 28, 28), (16, 1, 5, 5), True),
}
# a convolution of CASES, and the pool after it
POOLED = {
    "3x3": MaxPool2d((2, 2)),
    "one channel, 5x5": MaxPool2d((2, 2)),  # 10x9 positions: the last column is in no window
    "7x7, stride 2": AvgPool2d((2, 2)),
    "one tap": MaxPool2d((4, 2)),
    "many columns": AvgPool2d((1, 8)),
    "a signal": MaxPool1d((2,)),
    "a signal, stride": AvgPool1d((2,)),
    "small images": MaxPool2d((2, 1)),
    "lines of 8 bytes": MaxPool2d((2, 8)),
}


def network(name, activation=None, dtypes=("float32", "float32"), is_read=True, pool=None):
    """A convolution, its activation, a pool, a Cast if y has another dtype; with `is_read`, a reader of y."""
    layer, row, shape, has_bias = CASES[name]
    fan = np.float32(np.sqrt(np.prod(shape[1:])))
    weights = {"weight": (rows(shape[0], int(np.prod(shape[1:])), seed=2) / fan).reshape(shape)}
    if has_bias:
        weights["bias"] = rows(1, shape[0], seed=3)[0]
    weights = {role: weight.astype(numpy_dtype(dtypes[0])) for role, weight in weights.items()}
    nodes = [Node("c", layer, ("x",), {role: role for role in weights})]
    if activation is not None:
        nodes.append(Node("a", activation, ("c",)))
    if pool is not None:
        nodes.append(Node("p", pool, (nodes[-1].name,)))
    if dtypes[0] != dtypes[1]:
        nodes.append(Node("cast", Cast(dtypes[1]), (nodes[-1].name,)))
    if is_read:
        axes = tuple(range(2, 1 + len(row)))
        nodes.append(Node("mean", GlobalMean(axes), (nodes[-1].name,)))
    return Network({"x": TensorType(("B", *row), dtypes[0])}, tuple(nodes), (nodes[-1].name,), weights)


def images(net, B):
    given = net.inputs["x"]
    return rows(B, int(np.prod(given.row_shape))).reshape(B, *given.row_shape).astype(numpy_dtype(given.dtype))


def claims_in(net, precision="fp32", start=0):
    return [
        found for found in ConvFirstLayerKernel().claims(net, start, H200, Job(precision)) if isinstance(found, Claim)
    ]


def rounded(array, precision):
    if precision == "tf32":
        return round_tf32(np.ascontiguousarray(array, np.float32))
    return array.astype(numpy_dtype(PRECISIONS[precision].dtype)).astype(np.float32)


def exact(net, x, precision):
    """y of rounded operands, in float64, up to the convolution's activation."""
    layers = [node for node in net.nodes if not isinstance(node.layer, Cast | GlobalMean)]
    weights = {"weight": rounded(net.weights["weight"].astype(np.float32), precision)}
    if "bias" in net.weights:
        weights["bias"] = net.weights["bias"].astype(np.float32)
    bare = Network({"x": TensorType(net.inputs["x"].shape)}, tuple(layers), (layers[-1].name,), weights)
    return reference.forward(bare, rounded(x.astype(np.float32), precision))


@needs_gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp32", ("float32", "float32")), ("fp16", ("float32", "float16")), ("bf16", ("bfloat16", "float32")),
        ("tf32", ("float16", "bfloat16")),
    ],
    ids=["fp32", "fp16", "bf16", "tf32"],
)  # fmt: skip
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtypes):
    gpu, net = emulated_gpu(monkeypatch), network(name, Tanh() if name == "3x3" else ReLU(), dtypes)
    x = images(net, 5)
    want = exact(net, x, precision)
    eps = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtypes[1]]
    found = claims_in(net, precision)
    assert {claim.writes.get(claim.nodes[-1], ROWS) for claim in found} == {ROWS, CHANNELS_LAST}
    both = []
    for claim in found:
        assert claim.nodes == tuple(node.name for node in net.nodes[:-1])
        got = run_claim(gpu, net, claim, x)
        assert np.abs(got.astype(float) - want).max() <= eps * np.abs(want).max()
        assert np.array_equal(run_claim(gpu, net, claim, x[3:4]), got[3:4])
        both.append(got)
    assert np.array_equal(*both), "the layout decides about no bit"


def in_windows(pool, y):
    """y (B, C, H, W) or (B, C, W) grouped by pool window: (B, C, windows.., positions)."""
    size = pool.kernel
    y = y[(..., *(slice(side // n * n) for side, n in zip(y.shape[2:], size, strict=True)))]
    cut = y.reshape(*y.shape[:2], *(part for side, n in zip(y.shape[2:], size, strict=True) for part in (side // n, n)))
    rank = len(size)
    turned = cut.transpose(0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2))
    return turned.reshape(*turned.shape[: 2 + rank], -1)


def pooled_apart(pool, y):
    """The pool of the unfused convolution's result: pairs of adjacent values, then pairs of pairs."""
    found = in_windows(pool, y).astype(np.float32)
    is_largest = isinstance(pool, MaxPool1d | MaxPool2d)
    places = found.shape[-1]
    while found.shape[-1] > 1:
        a, b = found[..., ::2], found[..., 1::2]
        found = np.maximum(a, b) if is_largest else a + b
    return (found if is_largest else found / np.float32(places))[..., 0]


@needs_gxx
@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pool_comes_along(monkeypatch, name, precision):
    """The same bits as by itself, in rows and with channels last, however many rows there are."""
    gpu, pool = emulated_gpu(monkeypatch), POOLED[name]
    net = network(name, ReLU(), is_read=True, pool=pool)
    x = images(net, 5)
    alone, *_ = claims_in(network(name, ReLU()), precision)
    want = pooled_apart(pool, run_claim(gpu, network(name, ReLU()), alone, x))
    found = [claim for claim in claims_in(net, precision) if "p" in claim.nodes]
    assert {claim.writes.get("p", ROWS) for claim in found} == {ROWS, CHANNELS_LAST}
    for claim in found:
        got = run_claim(gpu, net, claim, x)
        assert np.array_equal(got, want)
        assert np.array_equal(run_claim(gpu, net, claim, x[3:4]), got[3:4])


@needs_gxx
def test_pools_of_16_bits_and_every_tile(monkeypatch):
    """Rounded after the pool; staged or not, in tiles of any size, with an odd or even number of channels."""
    gpu = emulated_gpu(monkeypatch)
    for name in ("3x3", "one channel, 5x5", "odd pads, dilation"):
        pool = MaxPool2d((2, 2))
        net = network(name, None, ("float32", "float16"), is_read=True, pool=pool)
        x, made = images(net, 9), []
        apart = network(name, None, ("float32", "float16"))
        want = pooled_apart(pool, run_claim(gpu, apart, claims_in(apart, "fp16")[0], x).astype(np.float32))
        for claim in claims_in(net, "fp16"):
            for units in (1, 5, 132) if "p" in claim.nodes else ():
                lowering = dataclasses.replace(claim.facts, units=units)
                made.append(run_claim(gpu, net, dataclasses.replace(claim, facts=lowering), x))
        assert len(made) == 6
        assert all(np.array_equal(each.astype(np.float32), want) for each in made)


def test_tiles_of_a_pool_are_made_at_a_time():
    """64 images in 128 tiles of 60 positions, not in 320 of 20: more than one wave."""
    nodes = (Node("c", Conv2d(), ("x",), {"weight": "w"}), Node("p", MaxPool2d((2, 2)), ("c",)))
    net = Network({"x": TensorType(("B", 6, 14, 14))}, nodes, ("p",), {"w": np.zeros((16, 6, 5, 5), np.float32)})
    (lowering,) = (claim.facts for claim in claims_in(net) if "p" in claim.nodes)
    assert (lowering.tile(64), lowering.tile(64).count(64, (10, 10))) == (Tile(1, 6, 10), 128)
    assert lowering.tile(1).count(1, (10, 10)) == 5


def test_which_pools_it_takes():
    def taken(*layers):
        net = network("3x3")
        nodes = [dataclasses.replace(net.nodes[0], name="n0")]
        for layer in layers:
            nodes.append(Node(f"n{len(nodes)}", layer, (nodes[-1].name,)))
        whole = Network(net.inputs, tuple(nodes), (nodes[-1].name,), net.weights)
        return max(len(claim.nodes) for claim in claims_in(whole))

    pool = MaxPool2d((2, 2))
    assert taken(pool) == 2
    assert taken(ReLU(), pool) == 3
    assert taken(pool, ReLU()) == 3, "the largest of what never falls"
    assert taken(pool, GELU()) == 2
    assert taken(AvgPool2d((2, 2)), ReLU()) == 2
    assert taken(ReLU(), pool, Tanh()) == 3
    assert taken(ReLU(), pool, Cast("float16")) == 4
    assert taken(ReLU(), Cast("float16"), pool) == 4
    for other in (MaxPool2d((3, 3)), MaxPool2d((2, 2), (1, 1)), MaxPool2d((2, 2), (2, 2), (1, 1, 0, 0)),
                  MaxPool2d((2, 2), ceil=True), MaxPool2d((2, 2), dilation=(2, 2)), MaxPool2d((8, 4))):  # fmt: skip
        assert taken(ReLU(), other) == 2
    net = network("3x3", ReLU(), is_read=False, pool=pool)
    read_twice = dataclasses.replace(net, outputs=("a", "p"))
    assert [claim.nodes for claim in claims_in(read_twice)] == [("c", "a")] * 2
    assert claims_in(net)[-1].label == "conv_first_layer<3,20,3x3,ReLU,MaxPool2d>"


@needs_gxx
def test_every_tile_makes_the_same_bits(monkeypatch):
    """Tiles of 32 to 256 positions, by the number of SMs."""
    gpu, net = emulated_gpu(monkeypatch), network("3x3")
    x, made, tiles = images(net, 3), [], set()
    for units in (1, 4, 7, 9, 132):
        claim = claims_in(net)[0]
        lowering = dataclasses.replace(claim.facts, units=units)
        tiles.add(lowering.tile(3))
        made.append(run_claim(gpu, net, dataclasses.replace(claim, facts=lowering), x))
    assert len(tiles) > 2
    assert all(np.array_equal(each, made[0]) for each in made)


@needs_gxx
def test_large_tiles_make_the_same_bits(monkeypatch):
    """1,024 positions of several images, the last tile partial; 256 with more SMs."""
    gpu, net = emulated_gpu(monkeypatch), network("small images", dtypes=("float16", "float16"))
    x, made, tiles = images(net, 810), [], set()
    for claim in claims_in(net, "fp16"):
        for units in (1, 2):
            lowering = dataclasses.replace(claim.facts, units=units)
            tiles.add(lowering.tile(810).images)
            made.append(run_claim(gpu, net, dataclasses.replace(claim, facts=lowering), x))
    assert tiles == {113, 28}
    assert all(np.array_equal(each, made[0]) for each in made)


@needs_gxx
def test_few_terms_in_fp32_are_as_exact_as_promised(monkeypatch):
    """Large weights in front of a Tanh: terms cancel, and what is left is hardly larger than their last bits."""
    gpu = emulated_gpu(monkeypatch)
    for C in (2, 3, 4, 8):
        w = 6 * rows(3, C, seed=4).reshape(3, C, 1, 1)
        nodes = (Node("c", Conv2d(), ("x",), {"weight": "w"}), Node("a", Tanh(), ("c",)))
        net = Network({"x": TensorType(("B", C, 8, 8))}, nodes, ("a",), {"w": w})
        x = images(net, 6)
        truth = reference.forward(net, x)
        naive = scaled_error(reference.forward(net, x, "float32"), truth)
        found = [
            c for kernel in ("conv_first_layer", "conv_direct") for c in claims_of(net, kernel) if c.nodes == ("c", "a")
        ]
        assert found
        for claim in found:
            error = scaled_error(run_claim(gpu, net, claim, x), truth)
            assert error <= FACTOR * naive + ULPS * ULP["fp32"], f"{claim.label}: {error / naive:.2g} naive errors"


@needs_gxx
def test_what_is_no_tap_spoils_nothing(monkeypatch):
    """A NaN next to a window, in the same 32-bit register as an odd tap, is not multiplied."""
    gpu, net = emulated_gpu(monkeypatch), network("3x3")
    x = images(net, 1)
    x[0, 1, 4, 6] = np.nan
    for precision in PRECISIONS:
        got = run_claim(gpu, net, claims_in(net, precision)[0], x)
        assert np.array_equal(np.isnan(got), np.isnan(reference.forward(network("3x3", is_read=False), x)))


def test_what_it_takes():
    net = network("3x3", ReLU(), ("float32", "float16"))
    claim = claims_in(net, "fp16")[0]
    assert claim.label == "conv_first_layer<3,20,3x3,ReLU>"
    assert claim.nodes == ("c", "a", "cast")
    cast = Node("before", Cast("float16"), ("x",))
    conv = dataclasses.replace(net.nodes[0], inputs=("before",))
    weights = {name: weight.astype(np.float16) for name, weight in net.weights.items()}
    both = Network(net.inputs, (cast, conv, net.nodes[1]), ("a",), weights)
    assert claims_in(both)[0].nodes == ("before", "c", "a")
    assert claims_in(both, start=1)[0].nodes == ("c", "a")
    assert claims_in(both)[0].facts.dtypes == ("float32", "float16")
    read_twice = dataclasses.replace(both, outputs=("before", "a"))
    assert claims_in(read_twice) == []
    assert [len(claims_in(network(name, is_read=False))) for name in CASES] == [1] * len(CASES), "in rows at the end"


def test_what_it_leaves_and_refuses():
    many = Network(
        {"x": TensorType(("B", 16, 8, 8))}, (Node("c", Conv2d(), ("x",), {"weight": "w"}),), ("c",),
        {"w": np.zeros((8, 16, 3, 3), np.float32)},
    )  # fmt: skip
    assert list(ConvFirstLayerKernel().claims(many, 0, H200, Job())) == []
    large = Network(
        {"x": TensorType(("B", 15, 40, 40))}, (Node("c", Conv2d(), ("x",), {"weight": "w"}),), ("c",),
        {"w": np.zeros((512, 15, 5, 5), np.float32)},
    )  # fmt: skip
    (refusal,) = ConvFirstLayerKernel().claims(large, 0, H200, Job())
    assert isinstance(refusal, Refusal)
    assert "shared memory" in refusal.why


def test_lines_of_taps_are_whole_words():
    w = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)
    made = window_fragments(w, 2, 8).reshape(8, 4, 2, 2)  # g, q, word, number
    assert made[0].transpose(1, 0, 2).reshape(16).tolist() == [1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 0, 0, 0, 0, 0]
    assert not made[1:].any()


def test_sizes_cost_no_compilation():
    programs = {claims_in(network(name, ReLU()))[0].facts.at(B).launches[0].program for name in ("3x3", "7x7, stride 2")
                for B in (1, 1000)}  # fmt: skip
    assert len(programs) == 1
    assert claims_in(network("3x3"))[0].facts.at(0).launches == ()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_plan_takes_it_for_a_first_layer(precision):
    weights = {"a": np.zeros((64, 3, 3, 3), np.float32), "b": np.zeros((64, 64, 3, 3), np.float32)}
    nodes = (
        Node("c", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "a"}), Node("r", ReLU(), ("c",)),
        Node("d", Conv2d(pads=(1, 1, 1, 1)), ("r",), {"weight": "b"}), Node("s", ReLU(), ("d",)),
        Node("m", GlobalMean((2, 3)), ("s",)),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 3, 32, 32))}, nodes, ("m",), weights)
    first, second, *_ = make_plan(net, H200, KERNELS, Job(precision, 4096)).groups
    # fp32 as three tf32 gemms of small K is slower than CUDA cores.
    assert first.claim.kernel == ("conv_direct" if precision == "fp32" else "conv_first_layer")
    assert second.claim.kernel == "conv_sm90"


# -- on a GPU --------------------------------------------------------------------------------------------------


class OnlyFirst:
    """A plan of conv_first_layer where it can: no other convolution."""

    @staticmethod
    def kernels():
        return [
            kernel
            for kernel in KERNELS
            if kernel.name not in ("conv_direct", "depthwise", "conv_sm90", "conv_implicit_gemm")
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("is_read", [False, True], ids=["in rows", "inside"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_right_with_the_same_bits_in_every_batch(monkeypatch, name, precision, is_read):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", tuple(OnlyFirst.kernels()))
    net = network(name, ReLU(), is_read=is_read)
    x = images(net, 4097)
    engine = compile(net, "cuda", precision)
    assert engine.plan.groups[0].claim.kernel == "conv_first_layer"
    got, truth = engine(x), reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ULP[precision]
    for first, count in ((0, 1), (65, 7), (43, 1000)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert np.array_equal(engine(x), got)
    assert engine(x[:0]).shape == (0, *got.shape[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", POOLED)
def test_pools_on_a_gpu(monkeypatch, name, precision):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", tuple(OnlyFirst.kernels()))
    net, apart = (network(name, ReLU(), is_read=False, pool=pool) for pool in (POOLED[name], None))
    x = images(net, 1000)
    engine = compile(net, "cuda", precision)
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_first_layer"]
    got, truth = engine(x), reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got, truth) <= FACTOR * naive + ULPS * ULP[precision]
    if precision in ("fp32", "tf32"):  # else the value between the two is rounded
        assert np.array_equal(got, pooled_apart(POOLED[name], compile(apart, "cuda", precision)(x)))
    for first, count in ((0, 1), (65, 7)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_dtype_on_a_gpu(monkeypatch, precision, dtypes):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", tuple(OnlyFirst.kernels()))
    for name in CASES:
        net = network(name, Tanh(), dtypes, is_read=False)
        x = images(net, 130)
        engine = compile(net, "cuda", precision)
        assert [group.claim.kernel for group in engine.plan.groups] == ["conv_first_layer"]
        truth = reference.forward(net, x)
        naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
        ulp = max(ULP[precision], *(DTYPE_ULP.get(dtype, 0.0) for dtype in dtypes))
        assert scaled_error(engine(x), truth) <= FACTOR * naive + ULPS * ulp, f"{name} in {dtypes}"
