"""python tests/sanitizer/kernels.py: small batches through every kind of fused network, NumPy in and NumPy out.

Small, since a sanitizer makes kernels a hundred times slower; and without torch, whose allocator hides from the tools
what is initialised and where an array ends. Prints what it ran; a precision that no kernel takes is told and left out.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from onchip.bench.cases.step_job import CHECKED_ROWS, StepJob
from onchip.bench.cases.training_networks import NETWORKS as TRAINED
from onchip.bench.cases.training_networks import TrainedNetwork
from onchip.errors import DeviceError, PlanError
from onchip.kernels import reference
from onchip.kernels.cuda.train.resident import args as mlp_train_args
from onchip.kernels.reference.scan import scan as scan_reference
from onchip.ladders import LADDERS, find_ladder, ladder_devices
from onchip.ladders.device import DeviceRows
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import (
    GELU,
    GRU,
    LSTM,
    RNN,
    Add,
    ArgMax,
    ArgMin,
    ArgTopK,
    AvgPool2d,
    Cast,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    CumSum,
    Embedding,
    GlobalMax,
    GlobalMean,
    GroupNorm,
    Interleave,
    LayerNorm,
    Linear,
    LinearResize,
    MatMul,
    MaxPool2d,
    Mul,
    Pad,
    Permute,
    Recurrent,
    ReLU,
    Reshape,
    RMSNorm,
    SequenceMax,
    Sigmoid,
    Slice,
    Softmax,
    Tanh,
    ToInts,
    TokenConv,
    TopK,
)
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.scan_op import ScanOp
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.gradient.over_rows import LOG, begin_steps, over_rows
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error, with_rounded_tables
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.engine import compile
from onchip.runtime.placement import find_device, plan
from onchip.runtime.scan import scan
from onchip.train.loop import fit
from onchip.train.order import hold_out
from onchip.workloads import sentiment

ROWS = (1, 7, 100)  # less than a tile, an odd number, several tiles with a part of one
LADDER_ROWS = {"faces": (1, 3)}  # (1, 33) of the other ladders, whose rows cost less
MANY_ROWS = (1, 7, 900)  # of kernels that are for many
EXPECTED_ROWS = 1 << 20  # small networks then run two blocks of rows at a time
STEP_ROWS = 9
ROWS_OF_STEPS, SIZES_OF_STEPS = 22, (9, 9, 4)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
NETWORKS = {
    "decode": mlp(72, 64, 64, 4, bias=False),
    "one number": mlp(1, 1, output="Tanh"),
    "odd widths": mlp(7, 13, 5, 3, activation="Sigmoid", output="Softmax"),
    "small": mlp(16, 32, 1),
    "one output": mlp(16, 32, 1, activation="GELU"),
    "wide": mlp(48, 128, 128, 128, 3, activation="Tanh"),
    "deep": mlp(128, 64, 64, 64, 64, 64, 3, activation="SiLU"),
    "widest": mlp(100, 200, 256, 10, activation="LeakyReLU", output="LogSoftmax"),
    "digits": mlp(784, 320, 160, 10, output="LogSoftmax"),
    # 72 numbers are whole pieces of 16 B: of a last piece, initcheck takes all bytes for read, and only some are.
    "too large for the chip": mlp(9001, 72, 3),
    "many weights": mlp(4096, 136),  # made on the GPU, too
    "rows of any length": mlp(1001, 264),
    "two large layers": mlp(256, 1024, 256, activation="GELU"),
    "few rows": mlp(1000, 264),
    "few rows, odd": mlp(1001, 131),
}
POINTWISE = {
    "pointwise": sequential(
        TensorType(("B", 5, 7)), [("a", Tanh()), ("r", Reshape()), ("b", GELU()), ("c", Cast("float16"))], {}
    ),
    "kept and stretched": Network(
        {"x": TensorType(("B", 3, 5))},
        (
            Node("a", Sigmoid(), ("x",)),
            Node("b", Tanh(), ("a",)),
            Node("s", Add(), ("b", "x", "a"), {"constant": "c"}),
        ),
        ("s",),
        {"c": np.arange(3, dtype=np.float32)[:, None]},
    ),
    "float64": sequential(
        TensorType(("B", 5, 7), "float64"), [("a", Tanh()), ("b", GELU()), ("c", Cast("float16"))], {}
    ),
    "ints": Network(
        {"x": TensorType(("B", 3, 5), "int32")},
        (Node("a", Mul(), ("x", "x"), {"constant": "c"}), Node("b", Add(), ("a", "x", "a"))),
        ("b",),
        {"c": np.arange(3, dtype=np.int32)[:, None]},
    ),
    "sums in half precision": sequential(TensorType(("B", 3, 77), "float16"), [("s", CumSum(2)), ("t", CumSum(1))], {}),
}


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32) / np.float32(np.prod(shape[1:]) ** 0.5)


GENERAL = {  # kernels with sizes at run time
    "norms, choices and resizes": sequential(
        TensorType(("B", 6, 7, 5)),
        [
            ("l", LayerNorm(1)),
            ("g", GroupNorm(2)),
            ("r", RMSNorm()),
            ("p", Pad((0, 1, 2, 0, 0, 1), "reflect")),
            ("s", Slice((0, 6, 0), (6, 7, 3), (1, -1, 2))),
            ("u", LinearResize((6, 9, 5), (1.0, 9 / 7, 5 / 3))),
        ],
        {"l.weight": weight(6, 7, 5), "g.bias": weight(6)},
    ),
    "long norms": sequential(TensorType(("B", 8200)), [("l", LayerNorm(1))], {}),
    "products of values": Network(
        {"a": TensorType(("B", 5, 7)), "b": TensorType(("B", 7, 6))}, (Node("y", MatMul(), ("a", "b")),), ("y",), {}
    ),
    "larger products of values": Network(
        {"a": TensorType(("B", 60, 68)), "b": TensorType(("B", 68, 61))}, (Node("y", MatMul(), ("a", "b")),), ("y",), {}
    ),
    "attention": Network(
        {"q": TensorType(("B", 2, 19, 7)), "k": TensorType(("B", 2, 7, 21)), "v": TensorType(("B", 2, 21, 9))},
        (Node("s", MatMul(), ("q", "k")), Node("p", Softmax(), ("s",)), Node("y", MatMul(), ("p", "v"))),
        ("y",),
        {},
    ),
    "added and normalised": Network(
        {"x": TensorType(("B", 3, 17)), "z": TensorType(("B", 3, 17))},
        (Node("s", Add(), ("x", "z")), Node("n", LayerNorm(), ("s",)), Node("y", Concat(1), ("s", "n"))),
        ("y",),
        {},
    ),
    "places in rows": sequential(TensorType(("B", 100)), [("a", ArgMax(1))], {}),
    "places in columns": sequential(TensorType(("B", 9, 40)), [("a", ArgMin(1))], {}),
    "the first of rows": sequential(TensorType(("B", 100)), [("a", ArgTopK(5))], {}),
    "the first of columns": sequential(TensorType(("B", 9, 40)), [("a", TopK(3, 1, False))], {}),
    "whole numbers": sequential(TensorType(("B", 33)), [("a", ToInts("int64"))], {}),
    "convolutions of float64": sequential(
        TensorType(("B", 12, 9, 8), "float64"), [("c", Conv2d())], {"c.weight": weight(20, 12, 3, 3)}
    ),
    "many weights of a window": sequential(  # inside of a network its values lie with channels last
        TensorType(("B", 512, 1, 3)),
        [("t", Tanh()), ("c", Conv2d()), ("m", GlobalMean())],
        {"c.weight": weight(520, 512, 1, 2)},
    ),
    "convolutions": sequential(
        TensorType(("B", 3, 9, 8)),
        [
            ("c", Conv2d(pads=(1, 1, 1, 1))),
            ("g", GELU()),
            ("t", ConvTranspose2d((2, 2), (1, 0, 0, 1))),
            ("d", Conv2d(groups=5)),
            ("n", Conv2d()),
        ],
        {
            "c.weight": weight(20, 3, 3, 3),
            "t.weight": weight(20, 5, 3, 3),
            "d.weight": weight(5, 1, 2, 2),
            "n.weight": weight(2, 5, 2, 2),
        },
    ),
    "convolutions in groups": sequential(
        TensorType(("B", 8, 9, 8)), [("c", Conv2d(groups=2))], {"c.weight": weight(4, 4, 3, 3)}
    ),
    "convolutions of many channels": sequential(
        TensorType(("B", 16, 9, 8)),
        [
            ("a", Conv2d(pads=(1, 1, 1, 1))),
            ("r", Tanh()),
            ("b", Conv2d((2, 1), (0, 1, 1, 1))),
            ("s", Tanh()),
            ("m", GlobalMean((2, 3))),
        ],
        {"a.weight": weight(64, 16, 3, 3), "b.weight": weight(72, 64, 3, 3)},
    ),
    "many images and a residual": Network(
        {"x": TensorType(("B", 64, 8, 8))},
        (
            *(
                Node(name, Conv2d(pads=(1, 1, 1, 1)), (value,), {"weight": f"{name}.weight"})
                for name, value in (("b", "x"), ("c", "b"))
            ),
            Node("s", Add(), ("c", "b")),
            Node("m", GlobalMean((2, 3)), ("s",)),
        ),
        ("m",),
        {f"{name}.weight": weight(64, 64, 3, 3) for name in "bc"},
    ),
    "last layers of images": sequential(
        TensorType(("B", 64, 9, 8)),
        [("t", Tanh()), ("c", ConvTranspose2d((2, 2), (1, 1, 1, 1))), ("a", Tanh())],
        {"c.weight": weight(64, 3, 4, 4)},
    ),
    "first layers of images and pools": sequential(
        TensorType(("B", 1, 15, 13)),
        [
            ("a", Conv2d(pads=(2, 2, 2, 2))),
            ("r", ReLU()),
            ("p", MaxPool2d((2, 2))),
            ("b", Conv2d()),
            ("q", AvgPool2d((2, 2))),
        ],
        {"a.weight": weight(6, 1, 5, 5), "b.weight": weight(9, 6, 3, 3)},
    ),
    "convolutions of one tap": sequential(
        TensorType(("B", 3, 32, 32)),
        [("p", Conv2d((2, 2), (1, 1, 1, 1))), ("y", Conv2d()), ("r", ReLU()), ("q", MaxPool2d((3, 3), (2, 2)))],
        {"p.weight": weight(8, 3, 3, 3), "y.weight": weight(16, 8, 1, 1)},
    ),
    "woven": Network(
        {"a": TensorType(("B", 3, 4)), "b": TensorType(("B", 3, 4))},
        (Node("y", Interleave((2,)), ("a", "b")),),
        ("y",),
        {},
    ),
    "pools": sequential(
        TensorType(("B", 3, 9, 8)),
        [("p", MaxPool2d((2, 2))), ("s", Softmax(1)), ("t", Permute((0, 3, 2, 1))), ("m", GlobalMean((1, 3)))],
        {},
    ),
    "rows": sequential(TensorType(("B", 100)), [("s", Softmax())], {}),
    "long rows": sequential(
        TensorType(("B", 3, 9000)), [("s", Softmax()), ("m", GlobalMean((1,))), ("n", GlobalMean((1,)))], {}
    ),
    "branches": Network(
        {"x": TensorType(("B", 5, 6, 7))},
        (
            Node("p", AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1)), ("x",)),
            Node("c", Concat(1), ("x", "p")),
            Node("s", Softmax(), ("c",)),
        ),
        ("s",),
        {},
    ),
}
HALF_IO = ("decode", "odd widths")  # these also with x and y in half precision


def cases() -> list[tuple[str, Network]]:
    halves = [(f"{name}, {io}", with_io(NETWORKS[name], io)) for name in HALF_IO for io in ("float16", "bfloat16")]
    return [*NETWORKS.items(), *halves, *POINTWISE.items(), *GENERAL.items(), *lookups()]


def lookups() -> list[tuple[str, Network]]:
    """Rows of a table and sums of such rows, of ids."""
    table = np.random.default_rng(1).standard_normal((120, 37), dtype=np.float32)
    given = TensorType(("B", 5), "int64")
    return [
        ("look-ups", sequential(given, [("e", Embedding())], {"e.weight": table})),
        ("sums", sequential(given, [("c", TokenConv())], {"c.weight": table.reshape(40, 3, 37)})),
        ("bags", sequential(given, [("e", Embedding()), ("m", GlobalMean((1,)))], {"e.weight": table})),
        ("several tables", _side_by_side(table)),
        ("maxima", _maxima(table)),
        ("lengths", Network(
            {"x": TensorType(("B", 3, 50)), "n": TensorType(("B",), "int32")},
            (Node("y", SequenceMax(5), ("x", "n")),), ("y",), {},
        )),
        *(("steps", _steps(layer)) for layer in (LSTM("bidirectional"), GRU(), GRU(reset_after=False), RNN())),
        *(("few rows of steps", _steps(layer, 70)) for layer in (LSTM("bidirectional"), GRU())),
        *(("steps of a cluster", _steps(layer, 136)) for layer in (LSTM("bidirectional"), GRU(reset_after=False))),
        ("steps of features", sequential(
            TensorType(("B", 5, 10)), [("p", Linear()), ("r", LSTM())],
            {"p.weight": weight(148, 10), "p.bias": weight(148), "r.recurrence": weight(1, 148, 37)},
        )),
        *(("wide steps", _steps(layer, 340)) for layer in (LSTM(), GRU(reset_after=False))),
        ("tables made on the GPU", _folded()), ("8-bit tables made on the GPU", _folded()),
    ]  # fmt: skip


def _side_by_side(table: np.ndarray) -> Network:
    """Columns of ids, each with a table of its own, and their rows in one."""
    nodes = [Node(f"s{i}", Slice((i,), (2,), (1,)), ("x",)) for i in (0, 3)]
    nodes += [Node(f"e{i}", Embedding(), (f"s{i}",), {"weight": f"t{i}"}) for i in (0, 3)]
    nodes.append(Node("y", Concat(1), ("e0", "e3")))
    weights = {"t0": table, "t3": np.ascontiguousarray(table[:77])}
    return Network({"x": TensorType(("B", 5), "int64")}, tuple(nodes), ("y",), weights)


def _steps(layer: Recurrent, units: int = 37) -> Network:
    """Of as many units as fill no warp, or more than a block, or a cluster, has in registers."""
    D, width = layer.directions, layer.gates * units
    return sequential(TensorType(("B", 5, D * width)), [("r", layer)], {"r.recurrence": weight(D, width, units)})


def _folded() -> Network:
    layers = [("e", Embedding()), ("p", Permute((0, 2, 1))), ("c", Conv1d()), ("m", GlobalMax((2,)))]
    weights = {"e.weight": weight(1500, 64), "c.weight": weight(72, 64, 3)}
    return sequential(TensorType(("B", 5), "int64"), layers, weights)


def _maxima(table: np.ndarray) -> Network:
    """Sums side by side, of which the largest over time are kept: with pads, and channels that fill no slice."""
    nodes = [
        Node("a", TokenConv(pads=(2, 1)), ("x",), {"weight": "a"}), Node("a.max", GlobalMax((2,)), ("a",)),
        Node("b", TokenConv(stride=2), ("x",), {"weight": "b"}), Node("b.relu", ReLU(), ("b",)),
        Node("b.max", GlobalMax((2,)), ("b.relu",)), Node("y", Concat(1), ("a.max", "b.max")),
    ]  # fmt: skip
    weights = {"a": table.reshape(40, 3, 37), "b": np.ascontiguousarray(table[:80].reshape(40, 2, 37))}
    return Network({"x": TensorType(("B", 5), "int64")}, tuple(nodes), ("y",), weights)


def expected_rows(name: str) -> int:
    return 1 if name.startswith("few rows") else EXPECTED_ROWS


def rows_of(name: str) -> tuple[int, ...]:
    return MANY_ROWS if name in ("convolutions", "many images and a residual") else ROWS


def tables_of(name: str) -> str:
    """How its folded tables are kept."""
    return "fp8" if name.startswith("8-bit") else "fp32"


def run_case(name: str, net: Network, device: str, precision: str) -> str:
    """Run the network and judge it by the reference; what was run, or why it was not. AssertionError if it is wrong."""
    try:
        engine = compile(net, device, precision, batch_hint=expected_rows(name), tables=tables_of(name))
    except (PlanError, DeviceError) as error:  # the device is here: what it refuses is the precision or the layer
        return f"left out: {error.what}"
    generator, x = np.random.default_rng(0), tuple[np.ndarray, ...]()
    for given in net.inputs.values():
        shape = (1000, *given.row_shape)
        drawn = generator.integers(0, 40, shape) if given.dtype in ID_DTYPES else generator.standard_normal(shape)
        x = (*x, drawn.astype(numpy_dtype(given.dtype)))
    truth = reference.forward(net, x)
    coarse = net if tables_of(name) == "fp32" else with_rounded_tables(net, tables_of(name))
    naive = scaled_error(reference.forward(coarse, x, NAIVE_DTYPE[precision]), truth)  # many rows: a steady yardstick
    allowed = FACTOR * naive + ULPS * max(ULP[precision], DTYPE_ULP.get(net.output.dtype, 0.0))
    counts = rows_of(name)
    whole = engine(*(rows[: max(counts)] for rows in x))
    error = scaled_error(whole, truth[: max(counts)])
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    for B in counts:
        assert engine(*(rows[:B] for rows in x)).tobytes() == whole[:B].tobytes(), f"other bits in a batch of {B}"
    kernels = ", ".join(group.claim.label for group in engine.plan.groups)
    return f"rows {counts}, error {error:.1e}: {kernels}"


SCAN_OPS = (("sum", "float32"), ("max", "int64"))
SCANS = (
    (1,),
    (3, 7),
    (5, 300),
    (20_001,),
    (3, 3000),
    (3, 9000),
    (9000, 3),
    (40, 30, 5),
)  # a tile, several, rows, columns


def run_scan(shape: tuple[int, ...], op: str, dtype: str, device: str) -> str:
    """Running totals along the first axis and the last; AssertionError if they are wrong."""
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)
    for axis in {0, len(shape) - 1}:
        truth = scan_reference(np.moveaxis(x, axis, -1), ScanOp(op))
        got = np.moveaxis(scan(x, op, axis=axis, device=device), axis, -1)
        assert np.array_equal(got, truth.astype(dtype)), f"axis {axis}"  # small numbers: every total is exact
    return "every axis"


# Of each: the network, rows and options; a short batch last.
TRAININGS = {
    "classes": (mlp(20, 40, 13, 3), 70, {"batch_size": 33, "momentum": 0.9, "validation": 0.2}),
    "two groups of blocks": (mlp(20, 40, 13, 3), 70, {"batch_size": 40}),
    "many outputs": (mlp(9, 40, output="Tanh"), 20, {"batch_size": 16, "loss": "mse", "optimiser": "adam"}),
    "launch by launch": (mlp(20, 40, 13, 3), 310, {"batch_size": 150, "momentum": 0.9}),
    "gradients of a length": (mlp(20, 40, 3), 310, {"batch_size": 150, "clip_norm": 0.1}),
    "several tiles": (mlp(200, 130, 70, 3), 1100, {"batch_size": 1000}),
    "a large batch": (mlp(6, 5, 3), 2100, {"batch_size": 2090, "weight_decay": 0.01}),
    "bytes": (mlp(20, 70, 40), 700, {"batch_size": 530}),
    "bytes, rows through all layers": (mlp(20, 70, 40, 3), 700, {"batch_size": 530, "clip_norm": 0.1}),
    "bytes, narrow layers": (mlp(20, 9, 3), 4300, {"batch_size": 4290}),
    "bytes, three launches": (mlp(20, 40, 13, 3), 310, {"batch_size": 150, "momentum": 0.9}),
    "bytes, a layer a block": (mlp(20, 40, 13, 3), 70, {"batch_size": 40}),
    "bytes, tiles a block": (mlp(20, 1024, 40, 3), 70, {"batch_size": 40}),  # in bf16 alone
}


def run_training(name: str, device: str, precision: str) -> str:
    """Two epochs, twice; AssertionError if their bits differ, or the first loss is not the network's."""
    net, n, options = TRAININGS[name]
    x = np.random.default_rng(0).standard_normal((n, net.input.row_size), dtype=np.float32)
    if "bytes" in name:
        x = np.random.default_rng(0).integers(0, 256, x.shape).astype(np.float32) / np.float32(255)
    y = np.arange(n) % net.output.row_size if options.get("loss") != "mse" else x[:, :1] + np.zeros(40, np.float32)
    try:
        one, other = (fit(net, x, y, device=device, precision=precision, epochs=2, shuffle=False, **options)
                      for _ in range(2))  # fmt: skip
    except DeviceError as refused:
        return f"left out: {refused.what}"
    assert one.losses.tobytes() == other.losses.tobytes(), "other losses the second time"
    for weight, w in one.network.weights.items():
        assert w.tobytes() == other.network.weights[weight].tobytes(), f"another {weight} the second time"
    options = {"loss": "cross_entropy", **options}
    rows = hold_out(n, float(options.get("validation", 0)), 0)[0][: int(options["batch_size"])]
    truth, _ = reference.loss_and_gradients(net, x[rows], y[rows], options["loss"], "float64")
    error = abs(one.losses[0] / truth - 1)
    assert error <= 0.02, f"first loss {one.losses[0]}, expected {truth}"
    return f"2 epochs, first loss off by {error:.1e}"


# Rows longer than registers hold, more ids than are ranked, states of a whole cluster, a resize,
# and the largest elements of rows and columns.
STEP_NETWORKS = {
    "long rows": sequential(
        TensorType(("B", 9)),
        [("a", Linear()), ("n", LayerNorm()), ("s", Softmax()), ("r", Reshape((5, 20, 82))), ("t", Softmax(1)),
         ("m", GlobalMax((2,))), ("f", Reshape((410,))), ("b", Linear())],
        {"a.weight": weight(8200, 9), "n.weight": weight(8200), "n.bias": weight(8200), "b.weight": weight(3, 410)},
    ),
    "many ids": sequential(
        TensorType(("B", 2100), "int64"), [("e", Embedding()), ("m", GlobalMean((1,))), ("f", Linear())],
        {"e.weight": weight(50, 4), "f.weight": weight(3, 4)},
    ),
    "states": sequential(
        TensorType(("B", 5, 6)), [("g", Linear()), ("r", LSTM(output="last")), ("f", Linear())],
        {"g.weight": weight(256, 6), "r.recurrence": weight(1, 256, 64), "f.weight": weight(3, 64)},
    ),
    "resized": sequential(
        TensorType(("B", 2, 5)),
        [("a", Linear()), ("s", LinearResize((2, 9), (1.0, 9 / 7))), ("r", Reshape((18,))), ("f", Linear())],
        {"a.weight": weight(7, 5), "f.weight": weight(3, 18)},
    ),
    "largest": sequential(
        TensorType(("B", 3, 5)),
        [("a", Linear()), ("t", TopK(4)), ("u", TopK(2, 1)), ("r", Reshape((8,))), ("f", Linear())],
        {"a.weight": weight(7, 5), "f.weight": weight(3, 8)},
    ),
}  # fmt: skip


class ClippedSteps(StepJob):
    @functools.cached_property
    def step(self) -> Network:
        return training_step(self.net, TrainingStep("cross_entropy", "momentum", clip_norm=0.1), decays=True)


def steps() -> list[tuple[str, StepJob]]:
    """Training steps of small networks."""
    small = {name: replace(net, build=partial(net.build, **net.small)) for name, net in TRAINED.items()}
    for name, net in STEP_NETWORKS.items():
        small[name] = TrainedNetwork(partial(lambda net: net, net), "cross_entropy", STEP_ROWS)
    found = [StepJob(name, network, STEP_ROWS, "fp32", "cuda", 1) for name, network in small.items()]
    found.append(ClippedSteps("clipped", small["lenet5"], STEP_ROWS, "fp32", "cuda", 1))
    return [(job.name, job) for job in found]


def run_step(of_fp32: StepJob, precision: str) -> str:
    """Two steps on a GPU, of two engines; AssertionError if their bits differ, or the losses are wrong."""
    job = replace(of_fp32, precision=precision)
    try:
        planned = plan(job.step, "cuda", Job(precision, STEP_ROWS))
    except (DeviceError, PlanError) as refused:
        return f"left out: {refused.what}"
    rows, ends = job.rows(CHECKED_ROWS), []
    for bound in (CudaStep(Gpu.get(0), planned) for _ in range(2)):
        bound.write_state(job.state())
        losses = np.array([bound.run(rows, CHECKED_ROWS)["loss"].item() for _ in range(2)])
        ends.append(bound.read_state())
    verdict = job.verify(losses)
    assert verdict.is_right, f"off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    for name, array in ends[0].items():
        assert array.tobytes() == ends[1][name].tobytes(), f"another {name} the second time"
    return f"2 steps, losses off by {verdict.error:.1e}"


def rows_step(name: str) -> Network:
    """Steps over a data set that stays on the device."""
    (job,) = (job for of, job in steps() if of == name)
    return over_rows(job.step, ROWS_OF_STEPS, len(SIZES_OF_STEPS))


def run_rows(name: str, precision: str) -> str:
    """An epoch of two engines; AssertionError if their bits differ."""
    step, ends = rows_step(name), []
    table = np.tile(np.array([1e-3, 0, 0.9, 0.1, 0.001], np.float32), (len(SIZES_OF_STEPS), 1))
    begin = begin_steps(step, np.arange(ROWS_OF_STEPS)[::-1], table)
    for bound in (CudaStep(Gpu.get(0), plan(step, "cuda", Job(precision, STEP_ROWS))) for _ in range(2)):
        bound.write_state(begin)
        for B in SIZES_OF_STEPS:
            bound.run({"share": np.full(B, 1 / B, np.float32)}, B)
        ends.append(bound.read_state())
    for state, array in ends[0].items():
        assert array.tobytes() == ends[1][state].tobytes(), f"another {state} the second time"
    assert np.isfinite(ends[0][LOG]).all()
    return f"{len(SIZES_OF_STEPS)} steps"


def small_sentiment() -> Network:
    """The report's has 4,096 channels: racecheck takes minutes for a sentence."""
    sizes = {"embedding": 32, "channels": 80, "kernels": (2, 3, 4, 5), "length": 9, "hidden": (24, 20, 12)}
    return reference.with_arrays(sentiment.network(vocabulary=50, classes=3, **sizes))


def sentences(B: int) -> DeviceRows:
    return DeviceRows(np.random.default_rng(B).integers(0, 50, (B, 9), dtype=np.int32))


def run_rung(ladder: str, rung: str, device: str) -> str:
    """A rung of a ladder, over few rows; AssertionError if it is wrong."""
    found = find_ladder(ladder, device)
    net, inputs = (small_sentiment(), sentences) if ladder == "sentiment" else (found.network(), found.inputs)
    (chosen,), rows = found.pick([rung]), LADDER_ROWS.get(ladder, (1, 33))
    for B in rows:
        x = inputs(B)
        try:
            verdict = chosen.verify(found.truth(net, x), chosen.prepare(net, x, 1)())
        except PlanError as refused:
            return f"left out: {refused.what}"
        assert verdict.is_right, f"{B} rows: off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    return f"{', '.join(map(str, rows))} rows"


def rungs(device: str) -> list[tuple[str, str]]:
    """The ladders' own kernels, without those that are racy or not deterministic on purpose."""
    return [
        (name, rung.name)
        for name in LADDERS
        if device in ladder_devices(name)
        for rung in find_ladder(name, device).rungs
        if not rung.nondeterministic and not rung.is_engine
    ]


def tasks(device: str) -> list[tuple[str, Callable[[], str]]]:
    """What is run, each with its name."""
    made: list[tuple[str, Callable[[], str]]] = []
    for shape, (op, dtype) in itertools.product(SCANS, SCAN_OPS):
        made.append((f"scan {shape} {op} {dtype}:", partial(run_scan, shape, op, dtype, device)))
    for name, precision in itertools.product(TRAININGS, PRECISIONS):
        made.append((f"train {name} {precision}:", partial(run_training, name, device, precision)))
    for (name, job), precision in itertools.product(steps() if device == "cuda" else (), PRECISIONS):
        made.append((f"step {name} {precision}:", partial(run_step, job, precision)))
    for name in ("lenet5", "tabular_resnet") if device == "cuda" else ():
        made.append((f"rows {name}:", partial(run_rows, name, "fp32")))
    for (name, net), precision in itertools.product(cases(), PRECISIONS):
        made.append((f"{name:<22} {precision:<5}", partial(run_case, name, net, device, precision)))
    for ladder, rung in rungs(device) if device == "cuda" else ():
        made.append((f"ladder {ladder} {rung}:", partial(run_rung, ladder, rung, device)))
    return made


def main(device: str = "cuda", part: str = "1/1") -> int:
    """part: "2/8" is the second of eight parts of the tasks."""
    find_device(device)  # DeviceError where there is none: nothing run is not nothing found
    number, parts = map(int, part.split("/"))
    failed = ran = 0
    for name, task in tasks(device)[number - 1 :: parts]:
        try:
            said = task()
            ran += not said.startswith("left out")
        except AssertionError as error:
            said, failed = f"WRONG: {error}", failed + 1
        print(f"{name} {said}", flush=True)
    print(f"{ran} ran, {failed} were wrong")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    mlp_train_args.DEADLINE_MS = 0  # blocks wait as long as a tool makes them
    sys.exit(main(*sys.argv[1:]))
