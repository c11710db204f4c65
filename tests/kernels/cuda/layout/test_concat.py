"""Concat and Interleave on a GPU: every element at its position, in every dtype and layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from layer_cases import CASES
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.layout.concat import ConcatKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Identity, Interleave
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.bound_steps import BoundSteps

DTYPES = ("float32", "float16", "uint8", "int64")


def together(layer, row_shapes, dtype="float32", reads=None):
    """The layer 'y' over inner values, and with a reader: any layout is allowed."""
    inputs = {f"x{i}": TensorType(("B", *shape), dtype) for i, shape in enumerate(row_shapes)}
    nodes = [Node(f"v{i}", Identity(), (f"x{i}",)) for i in range(len(row_shapes))]
    names = tuple(f"v{i}" for i in (reads or range(len(row_shapes))))
    nodes += [Node("y", layer, names), Node("end", Identity(), ("y",))]
    return Network(inputs, tuple(nodes), ("end",), {})


def values(net, B):
    rng = np.random.default_rng(B)
    return tuple(rng.integers(0, 100, (B, *t.row_shape)).astype(numpy_dtype(t.dtype)) for t in net.inputs.values())


def assert_woven(gpu, net, B):
    """In every layout that is offered."""
    xs = values(net, B)
    truth = reference.forward(net, xs).astype(numpy_dtype(net.types["y"].dtype))
    start = len(net.inputs)
    claims = list(ConcatKernel().claims(net, start, H200, Job()))
    for claim in claims:
        is_nhwc = bool(claim.writes)
        there = [np.ascontiguousarray(np.moveaxis(x, 1, -1) if is_nhwc else x) for x in xs]
        read = [there[int(name[1:])] for name in dict.fromkeys(net.nodes[start].inputs)]
        there_y = gpu.upload(np.full(truth.nbytes + 64, 77, np.uint8))
        uploaded = [gpu.upload(x) for x in read]
        bound = BoundSteps(gpu, claim.facts.at(B))
        bound.enqueue([x.pointer for x in uploaded], [there_y.pointer], 0, gpu.stream)
        made = np.zeros(truth.nbytes + 64, np.uint8)
        gpu.download(there_y, made)
        assert (made[-64:] == 77).all()
        assert made[:-64].tobytes() == (np.moveaxis(truth, 1, -1) if is_nhwc else truth).tobytes()
    return len(claims)


@needs_gxx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [case for case in CASES if isinstance(case.layer, Concat | Interleave)], ids=lambda case: str(case.layer)
)
def test_the_vocabulary(monkeypatch, case, dtype):
    gpu = emulated_gpu(monkeypatch)
    for B in (1, 5):
        assert_woven(gpu, together(case.layer, case.rows, dtype, case.reads), B)


@st.composite
def unions(draw):
    row = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if len(row) > 1 and draw(st.booleans()):
        stride = tuple(draw(st.integers(1, 3)) for _ in row[1:])
        return together(Interleave(stride), [row], draw(st.sampled_from(DTYPES)), (0,) * int(np.prod(stride)))
    axis = draw(st.integers(1, len(row)))
    rows = [[*row[: axis - 1], draw(st.sampled_from([1, 2, 4, 7, 32])), *row[axis:]] for _ in range(3)]
    reads = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    used = sorted(set(reads))
    return together(Concat(axis), [rows[i] for i in used], draw(st.sampled_from(DTYPES)), tuple(map(used.index, reads)))


@needs_gxx
@settings(max_examples=60)
@given(net=unions(), B=st.sampled_from([1, 3]))
def test_any_union(monkeypatch, net, B):
    assert_woven(emulated_gpu(monkeypatch), net, B)


@needs_gxx
def test_both_layouts_are_offered_inside_a_network(monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    assert assert_woven(gpu, together(Concat(1), [(3, 4, 5), (2, 4, 5)]), 3) == 2
    assert assert_woven(gpu, together(Concat(2), [(3, 4, 5), (3, 2, 5)]), 3) == 2
    assert assert_woven(gpu, together(Interleave((2, 1)), [(8, 3, 4), (8, 3, 4)]), 3) == 2
    assert assert_woven(gpu, together(Concat(1), [(1, 4, 5), (2, 4, 5)]), 3) == 1  # one channel is row-major
    assert assert_woven(gpu, together(Concat(1), [(2, 4, 5)] * 11), 3) == 2  # more than one launch
    at_the_ends = together(Concat(1), [(3, 4, 5), (2, 4, 5)]).replace(outputs=("y",))
    plan = make_plan(at_the_ends, H200, KERNELS, Job("bf16"))
    assert [group.claim.label for group in plan.groups] == ["concat<Concat,2>"]
    assert not plan.groups[0].claim.has_layouts


@needs_gxx
def test_what_stays_together_is_moved_in_long_words(monkeypatch):
    def words(net):
        (claim, *_) = ConcatKernel().claims(net, len(net.inputs), H200, Job())
        return {launch.program.name_expression for launch in claim.facts.at(8).launches}

    assert words(together(Concat(1), [(2, 6), (4, 6)])) == {"concat<uint4, u32>"}
    assert words(together(Concat(1), [(3, 2), (1, 2)])) == {"concat<unsigned long long, u32>"}
    assert words(together(Concat(2), [(3, 5), (3, 4)], "float16")) == {"concat<unsigned short, u32>"}
    assert words(together(Interleave((2,)), [(3, 4), (3, 4)])) == {"interleave<unsigned, u32>"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layer", "row_shapes"),
    [
        (Concat(1), [(3, 40), (16, 40), (1, 40)]),
        (Concat(-1), [(7, 5), (7, 64)]),
        (Concat(2), [(5, 2, 9), (5, 3, 9)]),
        (Interleave((2,)), [(7, 33), (7, 32)]),
        (Interleave((2, 3)), [(6, 10, 8)] * 6),
    ],
    ids=str,
)
def test_on_a_gpu(layer, row_shapes, dtype):
    net = together(layer, row_shapes, dtype)
    engine = onchip.compile(net, "cuda")
    for B in (1, 7, 4097):
        xs = values(net, B)
        assert np.array_equal(engine(*xs), reference.forward(net, xs))
