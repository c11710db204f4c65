"""Weight gradients of Linears and convolutions on the emulated GPU: any geometry, splits of K, and the bias."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.gradient.weight_grad import MIN_SPLIT, WeightGradKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchSum,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    GlobalSum,
    Linear,
    WeightGrad,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cuda.bound_steps import BoundSteps

pytestmark = needs_gxx
CASES = {
    "linear": (Linear(), (70,), (9, 70)),
    "vectors": (Linear(), (3, 2, 5), (67, 5)),
    "conv": (Conv2d(), (3, 6, 7), (5, 3, 3, 3)),
    "strides and dilation": (Conv2d((2, 3), (1, 0, 2, 1), (1, 2)), (4, 9, 11), (66, 4, 3, 2)),
    "groups": (Conv2d(groups=3), (6, 5, 5), (9, 2, 2, 2)),
    "depthwise": (Conv2d(pads=(1, 1, 1, 1), groups=4), (4, 5, 6), (4, 1, 3, 3)),
    "one axis": (Conv1d((2,), (1, 1)), (30, 17), (8, 30, 3)),
    "transposed": (ConvTranspose2d((2, 2), (1, 1, 0, 0)), (5, 4, 3), (5, 7, 3, 3)),
    "transposed, one axis": (ConvTranspose1d((3,), groups=2), (4, 6), (4, 3, 5)),
}


# Of x and dy, and of the weight.
DTYPES = [
    *((dtype, dtype) for dtype in FLOATS),
    ("float64", "float32"),
    ("float32", "bfloat16"),
    ("float16", "float64"),
]


def network(layer, row, weight, with_bias, dtype="float32", weight_dtype="float32"):
    x, types = TensorType(("B", *row), dtype), {"weight": TensorType(weight, weight_dtype)}
    dy = TensorType(("B", *layer.infer((x,), types).row_shape), dtype)
    nodes = [Node("dw", WeightGrad(layer, "weight"), ("x", "dy"), {"weight": "w"})]
    if with_bias:
        rank = len(dy.shape)
        over = tuple(range(1, rank - 1)) if isinstance(layer, Linear) else tuple(range(2, rank))
        nodes += [Node("rows", GlobalSum(over), ("dy",))] if over else []
        nodes.append(Node("db", BatchSum(), ("rows" if over else "dy",)))
    outputs = ("dw", "db") if with_bias else ("dw",)
    return Network({"x": x, "dy": dy}, tuple(nodes), outputs, {"w": np.zeros(weight, numpy_dtype(weight_dtype))})


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("B", [1, 7, 2 * MIN_SPLIT + 9])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_weight_gradient(monkeypatch, case, B, with_bias, dtypes):
    if with_bias and "transposed" in case:
        pytest.skip("its bias is a sum of its own")
    net, rng, x_dtype = network(*CASES[case], with_bias, *dtypes), np.random.default_rng(B), numpy_dtype(dtypes[0])
    xs = [rng.standard_normal((B, *kind.row_shape), np.float32).astype(x_dtype) for kind in net.inputs.values()]
    claim = list(WeightGradKernel().claims(net, 0, H200, Job(batch=B)))[-1]
    if dtypes[0] == dtypes[1]:
        assert claim.nodes == tuple(node.name for node in net.nodes)
    else:  # the bias' gradient has the dtype of dy
        assert claim.nodes == ("dw",)
    gpu = emulated_gpu(monkeypatch)
    steps = BoundSteps(gpu, claim.facts.at(B))
    types = [net.types[name] for name in net.outputs if name in claim.nodes]
    outputs = [np.full(kind.row_shape, 77, numpy_dtype(kind.dtype)) for kind in types]
    scratch = np.full(steps.scratch_bytes + 16, 0xCD, np.uint8)
    steps.enqueue([x.ctypes.data for x in xs], [y.ctypes.data for y in outputs], scratch.ctypes.data, gpu.stream)
    layer = CASES[case][0]
    for dtype in (np.float64, np.float32):
        x, dy = (each.astype(dtype) for each in xs)
        weight = np.zeros(CASES[case][2], dtype)
        found = layer.backward((x,), {"weight": weight, "bias": np.zeros(len(dy[0]), dtype)}, dy, dy)[1]
        if dtype == np.float64:
            truth = found
    for name, got in zip(("weight", "bias"), outputs, strict=False):
        naive = found[name] if name in found else dy.sum(axis=tuple(range(dy.ndim - 1)))
        allowed = FACTOR * scaled_error(naive, truth[name]) + ULPS * max(
            DTYPE_ULP.get(of, ULP["fp32"]) for of in dtypes
        )
        assert scaled_error(got, truth[name]) <= allowed


def test_splits_depend_on_the_sizes_alone():
    (claim,) = WeightGradKernel().claims(network(*CASES["conv"], False), 0, H200, Job(batch=1))
    for B in (1, 100, 5000, 1 << 22):
        splits, split = claim.facts.splits(B)
        K = B * claim.facts.row_terms
        assert (splits - 1) * split < K <= splits * split
        assert split % 16 == 0
