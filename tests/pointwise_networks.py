"""Networks of pointwise layers for tests, and how they are planned, emulated and judged."""

from __future__ import annotations

import numpy as np

from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.elementwise.pointwise import PointwiseKernel
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Clip,
    Identity,
    LeakyReLU,
    Mul,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Tanh,
    ToPixels,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def network(inputs, nodes, outputs, weights=None):
    """inputs: name -> row shape or TensorType; nodes: (name, layer, reads, weights by role)."""
    types = {name: t if isinstance(t, TensorType) else TensorType(("B", *t)) for name, t in inputs.items()}
    made = tuple(Node(name, layer, reads, *given) for name, layer, reads, *given in nodes)
    return Network(types, made, outputs, weights or {})


def norm(C, seed=0, bias=True):
    """A batch norm far from 0: what is taken from what matters."""
    rng = np.random.default_rng(seed)
    made = {"n.mean": 100 + rng.standard_normal(C), "n.var": rng.random(C) + 0.1, "n.weight": rng.standard_normal(C)}
    made |= {"n.bias": rng.standard_normal(C)} if bias else {}
    return {name.partition(".")[2]: name for name in made}, {n: w.astype(np.float32) for n, w in made.items()}


def batch_norm(layer, *row, dtype="float32", bias=True):
    roles, weights = norm(row[0], bias=bias)
    return network({"x": TensorType(("B", *row), dtype)}, [("n", layer, ("x",), roles)], ("n",), weights)


def constant(layer, shape, *row, dtype="float32"):
    weights = {"c": np.random.default_rng(5).standard_normal(shape).astype(numpy_dtype(dtype))}
    given = {"x": TensorType(("B", *row), dtype)}
    return network(given, [("y", layer, ("x",), {"constant": "c"})], ("y",), weights)


def pair(layer, one, two, dtype="float32"):
    given = {"x": TensorType(("B", *one), dtype), "z": TensorType(("B", *two), dtype)}
    return network(given, [("y", layer, ("x", "z"))], ("y",))


def tree():
    """Values that are read twice, an output in the middle, a sum of three whose last is made first."""
    return network(
        {"x": (5, 7), "z": (5, 7), "u": (1, 7)},
        [
            ("a", Tanh(), ("x",)),
            ("b", Sigmoid(), ("z",)),
            ("c", Mul(), ("b", "a")),
            ("flat", Reshape(), ("c",)),
            ("d", LeakyReLU(0.2), ("flat",)),
            ("again", Reshape((5, 7)), ("d",)),
            ("e", Add(), ("x", "z", "a")),
            ("f", Add(), ("u", "e", "again", "e")),
            ("g", Identity(), ("f",)),
            ("h", ReLU(), ("g",)),
        ],
        ("c", "h", "again", "g"),
    )


NETWORKS = {
    **{
        str(layer): sequential(TensorType(("B", 5, 7)), [("y", layer)], {})
        for layer in (ReLU(), LeakyReLU(0.2), LeakyReLU(-0.5), Clip(-0.5, 0.7), Clip(high=0.25), Clip(0.5, -0.5),
                      Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"), ToPixels(), Identity(), Reshape((7, 5)))
    },
    "a chain": sequential(
        TensorType(("B", 6)), [("a", Tanh()), ("b", Clip(-0.5, 0.5)), ("r", Reshape((2, 3))), ("c", GELU())], {}
    ),
    "rows of a chain that is rounded": sequential(
        TensorType(("B", 3)), [("a", Tanh()), ("b", Cast("float16")), ("c", SiLU()), ("d", Cast("bfloat16"))], {}
    ),
    "bytes": sequential(TensorType(("B", 3, 5)), [("a", Tanh()), ("p", ToPixels()), ("r", Reshape())], {}),
    "bytes as floats": sequential(TensorType(("B", 3)), [("p", ToPixels()), ("c", Cast("float16"))], {}),
    "a tree": tree(),
    "four values at the same time": network(
        {"x": (9,)},
        [
            *((f"r{i}", layer, ("x",)) for i, layer in enumerate((Tanh(), Sigmoid(), GELU(), SiLU()))),
            ("s", Add(), ("x", "r0", "r1", "r2", "r3")),
            ("p", Mul(), ("s", "x")),
        ],
        ("p",),
    ),
    "twice": network({"x": (9,)}, [("a", ReLU(), ("x",)), ("y", Mul(), ("a", "a"))], ("y",)),
    "an input twice": network({"x": (9,)}, [("y", Mul(), ("x", "x", "x"))], ("y",)),
    "in two shapes": network(
        {"x": (4, 3), "z": (12,)},
        [("r", Reshape((12,)), ("x",)), ("y", Add(), ("r", "z")), ("w", Mul(), ("y", "r"))],
        ("r", "w"),
    ),
    "stretched after another shape": network(
        {"x": (12,), "z": (3, 1)}, [("r", Reshape((3, 4)), ("x",)), ("y", Mul(), ("z", "r"))], ("y",)
    ),
    "batch norm (C)": batch_norm(BatchNorm1d(), 8),
    "batch norm (C, L)": batch_norm(BatchNorm1d(eps=0.1), 3, 5, bias=False),
    "batch norm (C, H, W)": batch_norm(BatchNorm2d(), 3, 4, 4),
    "batch norm in half precision": batch_norm(BatchNorm2d(), 3, 2, 3, dtype="float16"),
    **{
        f"{layer.kind} {one} {two}": pair(layer, one, two)
        for layer, one, two in (
            (Add(), (8,), (8,)), (Mul(), (8,), (1,)), (Add(), (3, 4), (3, 1)), (Add(), (1, 4), (3, 4)),
            (Mul(), (3, 5), (1, 5)), (Mul(), (2, 3, 4), (2, 1, 4)), (Add(), (2, 1, 5), (1, 3, 1)), (Mul(), (), ()),
            (Add(), (2, 1, 3, 1, 2, 1), (2, 2, 3, 2, 2, 2)),
        )
    },
    **{
        f"constant {shape} on {row}": constant(Add(), shape, *row)
        for shape, row in (
            ((), (3,)), ((1,), (5,)), ((8,), (3, 8)), ((3, 1), (3, 8)), ((3, 1, 1), (3, 3, 3)), ((7,), (7,)),
        )
    },
    "constant in half precision": constant(Mul(), (5,), 3, 5, dtype="bfloat16"),
    "one number": constant(Mul(), (1,), 1),
}  # fmt: skip


def inputs_of(net, B, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for given in net.inputs.values():
        x = (
            100 + rng.standard_normal((B, *given.row_shape))
            if "n.mean" in net.weights
            else 2 * rng.standard_normal((B, *given.row_shape))
        )
        made.append(x.astype(numpy_dtype(given.dtype)))
    return tuple(made)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_right(net, engine, x, precision="fp32"):
    """At most twice the error of the naive run in the narrowest type there is, and a few units in the last place."""
    narrowest = max((t.dtype for t in net.types.values()), key=lambda dtype: DTYPE_ULP.get(dtype, 0.0))
    narrowest = narrowest if narrowest in DTYPE_ULP else "float32"
    for name, got, exact, naive in zip(
        net.outputs, as_tuple(engine(*x)), as_tuple(reference.forward(net, x)),
        as_tuple(reference.forward(net, x, narrowest)), strict=True,
    ):  # fmt: skip
        assert got.dtype == numpy_dtype(net.types[name].dtype)
        assert got.shape == exact.shape
        ulp = max(ULP["fp32"], DTYPE_ULP.get(narrowest, 0.0))
        step = 1 / 250 if any(isinstance(node.layer, ToPixels) for node in net.nodes) else 0.0
        allowed = FACTOR * scaled_error(naive, exact) + ULPS * ulp + step
        assert scaled_error(got, exact) <= allowed, name


def planned(net, device=H200, precision="fp32", kernels=KERNELS):
    return make_plan(net, device, kernels, Job(precision))


def emulated(gpu, net, precision="fp32"):
    plan = planned(net, gpu.device, precision)
    assert {group.claim.kernel for group in plan.groups} <= {"pointwise", "view"}
    return Engine(plan, CudaBackend(), "cuda:0")


def claims(net, start=0):
    return list(PointwiseKernel().claims(net, start, H200, Job()))
