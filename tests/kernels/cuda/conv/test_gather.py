"""conv_gather: GEMM over looked-up rows, without storing the embedding. On the host, then on a GPU."""

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from fake_cuda import Array
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.conv.gather import ConvGatherKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Conv1d, Embedding, Linear, Permute, ReLU, Reshape, Tanh
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job
from onchip.plan.layout import CHANNELS_LAST
from onchip.plan.planner import make_plan
from onchip.runtime.check import FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine


def text_network(way, V=30, E=20, S=7, N=24, ids="int32", dtype="float32", is_bare=False):
    """ids -> Embedding -> the layers of `way` -> ReLU, unless bare."""
    layer, shape, move = {
        "each word": (Linear(), (N, E), None),
        "all words": (Linear(), (N, S * E), Reshape((S * E,))),
        "windows": (Conv1d((1,), (2, 1)), (N, E, 3), Permute((0, 2, 1))),
        "windows apart": (Conv1d((2,), (0, 0), (2,)), (N, E, 2), Permute((0, 2, 1))),
    }[way]
    fan = np.float32(np.sqrt(np.prod(shape[1:])))
    weights = {
        "table": rows(V, E, seed=1), "w": (rows(N, int(np.prod(shape[1:])), seed=2) / fan).reshape(shape),
        "b": rows(1, N, seed=3)[0],
    }  # fmt: skip
    nodes = [Node("e", Embedding(), ("x",), {"weight": "table"})]
    if move is not None:
        nodes.append(Node("m", move, ("e",)))
    nodes.append(Node("c", layer, (nodes[-1].name,), {"weight": "w", "bias": "b"}))
    if not is_bare:
        nodes.append(Node("a", ReLU(), ("c",)))
    weights = {name: weight.astype(numpy_dtype(dtype)) for name, weight in weights.items()}
    return Network({"x": TensorType(("B", S), ids)}, tuple(nodes), (nodes[-1].name,), weights)


def some_ids(net, B):
    limit, given = net.weights["table"].shape[0], net.inputs["x"]
    return np.random.default_rng(0).integers(0, limit, (B, *given.row_shape)).astype(given.dtype)


def claims_in(net, precision="fp32", start=0, device=H200):
    return list(ConvGatherKernel().claims(net, start, device, Job(precision)))


VERIFIED = 130  # last rows of a GPU run: the reference is far slower than the kernel
WAYS = ("each word", "all words", "windows", "windows apart")
SIZES = {"usual": (30, 24), "narrow pieces": (9, 22), "odd": (5, 7), "one": (3, 1), "long": (40, 130)}


@needs_gxx
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("precision", "dtype", "ids"),
    [("fp32", "float32", "int32"), ("fp16", "float16", "int64"), ("bf16", "float32", "int64")],
)
def test_on_an_emulated_gpu(monkeypatch, way, sizes, precision, dtype, ids):
    V, E = SIZES[sizes]
    net = text_network(way, V, E, ids=ids, dtype=dtype)
    claim, *_ = claims_in(net, precision)
    assert claim.nodes == tuple(node.name for node in net.nodes)
    x = some_ids(net, 9)
    gpu = emulated_gpu(monkeypatch)
    got = run_claim(gpu, net, claim, x)
    truth = reference.forward(net, x)
    eps = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 3e-2}[precision]
    assert np.abs(got.astype(float) - truth).max() <= eps * np.abs(truth).max()
    assert np.array_equal(run_claim(gpu, net, claim, x[4:5]), got[4:5])


def test_what_it_takes():
    net = text_network("windows")
    longest, shorter = claims_in(net)
    assert longest.label == "conv_gather<30,20,3,24,ReLU>"
    assert (longest.nodes, shorter.nodes) == (("e", "m", "c", "a"), ("e", "m", "c"))
    assert longest.writes == {"a": CHANNELS_LAST}
    assert longest.cost.row_bytes == 7 * 4 + 7 * 20 * 4 + net.types["a"].row_bytes
    flat, words = claims_in(text_network("all words"))[0], claims_in(text_network("each word"))[0]
    assert (flat.label, words.label) == ("conv_gather<30,20,7,24,ReLU>", "conv_gather<30,20,24,ReLU>")
    assert not words.writes
    twice = Network(net.inputs, net.nodes, ("a", "e"), net.weights)
    assert claims_in(twice) == [], "somebody else wants the embedded text"
    assert claims_in(text_network("each word", N=4)) == []
    assert claims_in(net, start=1) == []


@needs_gxx
def test_a_sum_behind_words(monkeypatch):
    net = text_network("each word", is_bare=True)
    nodes = (*net.nodes[:-1], Node("o", Tanh(), ("z",)), net.nodes[-1], Node("s", Add(), ("c", "o")))
    inputs = {**net.inputs, "z": TensorType(("B", 7, 24))}
    assert claims_in(Network(inputs, nodes, ("s",), net.weights)) == [], "the Linear does not follow"
    nodes = (Node("o", Tanh(), ("z",)), *net.nodes, Node("s", Add(), ("c", "o")))
    both = Network(inputs, nodes, ("s",), net.weights)
    claim = claims_in(both, start=1)[0]
    assert claim.nodes == ("e", "c", "s")
    x, o = some_ids(net, 5), rows(5, 7 * 24, seed=9).reshape(5, 7, 24)
    got, truth = run_claim(emulated_gpu(monkeypatch), both, claim, x, o), reference.forward(net, x) + o
    assert np.abs(got - truth).max() <= 4e-6 * np.abs(truth).max()


def only_gathered():
    names = ("conv_gather", "permute", "view", "pointwise")
    return tuple(kernel for kernel in KERNELS if kernel.name in names)


@needs_gxx
@pytest.mark.parametrize("way", ["each word", "all words"])
def test_the_first_bad_id_is_told_by_the_next_call(monkeypatch, way):
    gpu, net = emulated_gpu(monkeypatch), text_network(way)
    engine = Engine(make_plan(net, H200, only_gathered(), Job(without=("fold",))), CudaBackend(), "cuda:0")
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_gather"]
    good = some_ids(net, 70)
    bad, want = good.copy(), engine(good)
    bad[[69, 33, 33], [0, 4, 2]] = 30
    made = engine(Array(gpu, bad))  # another row is looked up: nothing is raised, nothing fails
    assert np.array_equal(made.numpy()[:33], want[:33])
    with pytest.raises(InputError, match="row 33, position 2: id 30, expected 0 to 29"):
        engine(Array(gpu, good))
    assert np.array_equal(engine(Array(gpu, good)).numpy(), want)


def test_a_plan_takes_it_where_tables_cost_too_much():
    """Folded tables would have every word at every position."""
    net = text_network("all words", V=50_000, E=256, S=16, N=512)
    plan = make_plan(net, A100, KERNELS, Job("fp16", 4096))
    assert [group.claim.kernel for group in plan.groups] == ["conv_gather"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_right_with_the_same_bits_in_every_batch(monkeypatch, way, precision):
    monkeypatch.setattr(
        "onchip.kernels.cuda.KERNELS", (*only_gathered(), *(k for k in KERNELS if k.name == "pointwise"))
    )
    net = text_network(way, V=1000, E=100, S=11, N=72)
    x = some_ids(net, 4097)
    engine = onchip.compile(net, "cuda", precision, without=("fold",))
    assert engine.plan.groups[0].claim.kernel == "conv_gather"
    got, verified = engine(x), x[-VERIFIED:]
    truth = reference.forward(net, verified)
    naive = scaled_error(reference.forward(net, verified, NAIVE_DTYPE[precision]), truth)
    assert scaled_error(got[-VERIFIED:], truth) <= FACTOR * naive + ULPS * ULP[precision]
    for first, count in ((0, 1), (65, 7), (43, 1000)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
    assert engine(x[:0]).shape == (0, *got.shape[1:])
