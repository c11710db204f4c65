"""The scale that clips gradients on an emulated GPU: gradients of any shape, or their rows."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchSum, ClipScale, GlobalNorm, Reshape
from onchip.network.types import TensorType, numpy_dtype

SHAPES = {"a": (3, 5), "b": (4099,), "c": (1,)}
COUNT = len(SHAPES)


def clipped(clip_norm=0.5, dtype="float32", between=()):
    """As plan/gradient/step.py writes them: rows of the gradients, with layers before them; their norms; the scale."""
    inputs = {f"{name}.x": TensorType(("B", *shape), dtype) for name, shape in SHAPES.items()}
    nodes = [Node(name, BatchSum(), (f"{name}.x",)) for name in SHAPES]
    nodes += between
    nodes += [Node(f"{name}.row", Reshape(), (name,)) for name in SHAPES]
    nodes += [Node(f"{name}.norm", GlobalNorm((1,)), (f"{name}.row",)) for name in SHAPES]
    nodes.append(Node("scale", ClipScale(clip_norm), tuple(f"{name}.norm" for name in SHAPES)))
    return Network(inputs, tuple(nodes), ("scale",), {})


def gradients(dtype, size):
    rng = np.random.default_rng(0)
    return [
        (size * rng.standard_normal((1, *shape), np.float32)).astype(numpy_dtype(dtype)) for shape in SHAPES.values()
    ]


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e25])
def test_scale(monkeypatch, dtype, size):
    gpu, net, given = emulated_gpu(monkeypatch), clipped(dtype=dtype), gradients(dtype, size)
    truth = reference.forward(net, tuple(given), "float64")
    rows = [array.reshape(1, -1) for array in given]
    for start, xs in ((COUNT, given), (2 * COUNT, rows)):  # of the gradients, and of rows that others have made
        (claim,) = claims_of(net, "clip", start=start)
        assert claim.nodes == tuple(node.name for node in net.nodes[start:])
        assert_error_within(run_claim(gpu, net, claim, *xs), truth, truth, ulps=ulps_of(dtype))


def test_rows_alone_begin_it():
    """A Reshape before them that is none of theirs, as of a gradient that was summed over axes."""
    net = clipped(between=[Node("other", Reshape((5, 3)), ("a",))])
    assert claims_of(net, "clip", start=COUNT) == []
    (claim,) = claims_of(net, "clip", start=COUNT + 1)
    assert claim.nodes[0] == "a.row"
    assert claims_of(net, "clip", start=COUNT + 2) == []
    kept = net.replace(outputs=(*net.outputs, "b.norm"))  # another reads a norm
    assert all(claims_of(kept, "clip", start=start) == [] for start in range(len(net.nodes)))
