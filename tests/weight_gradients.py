"""Networks of one weight gradient, and the bias' gradient, for tests of the kernels that compute it."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchSum,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    GlobalSum,
    Layer,
    Linear,
    WeightGrad,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Claim
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu

# The layer, a row of x, and the weight.
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


def network(
    layer: Layer,
    row: tuple[int, ...],
    weight: tuple[int, ...],
    with_bias: bool,
    dtype: str = "float32",
    weight_dtype: str = "float32",
) -> Network:
    """Of x and dy: dw, and the sum of dy. dtype: of x and dy"""
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


def run(gpu: Gpu, net: Network, claim: Claim, *xs: np.ndarray) -> list[np.ndarray]:
    """dw, and the bias' gradient if the claim computes it."""
    steps = BoundSteps(gpu, claim.facts.at(len(xs[0])))
    types = [net.types[name] for name in net.outputs if name in claim.nodes]
    outputs = [np.full(kind.row_shape, 77, numpy_dtype(kind.dtype)) for kind in types]
    given, written = [gpu.upload(x) for x in xs], [gpu.upload(y) for y in outputs]
    scratch = gpu.upload(np.full(steps.scratch_bytes + 16, 0xCD, np.uint8))
    steps.enqueue([x.pointer for x in given], [y.pointer for y in written], scratch.pointer, gpu.stream)
    return [gpu.download(y, np.empty_like(like)) for y, like in zip(written, outputs, strict=True)]
