"""Every layer, with attributes from Hypothesis: ONNX Runtime runs the written file like the reference, and the file
reads back as the same network."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onchip.errors import ShapeError
from onchip.formats.onnx.ops.base import WRITERS
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.writer import write_onnx
from onchip.kernels import reference
from onchip.network import layers
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS
from onchip.network.types import TensorType, numpy_dtype
from onnx_models import SETTINGS, numbers, rows_of, run_onnx

NEVER_SAVED = {"TokenConv", "Interleave"}  # only rewrites create them
sizes = st.integers(1, 7)


def one_layer(layer, *shapes, dtype="float32", seed=0, **weights) -> Network:
    """A network of one layer over inputs of these row shapes."""
    rng = np.random.default_rng(seed)
    arrays = {f"layer.{role}": rng.standard_normal(shape).astype(numpy_dtype(dtype)) for role, shape in weights.items()}
    if "layer.mask" in arrays:
        arrays["layer.mask"] = (arrays["layer.mask"] > 0).astype(numpy_dtype(dtype))
    if "layer.var" in arrays:
        arrays["layer.var"] = abs(arrays["layer.var"])
    inputs = {f"x{i}": TensorType(("B", *shape), dtype) for i, shape in enumerate(shapes)}
    node = Node("layer", layer, tuple(inputs), {role: f"layer.{role}" for role in weights})
    return Network(inputs, (node,), ("layer",), arrays)


@st.composite
def windows(draw, rank, pools=False):
    """Attributes of a window, and row sizes that fit it."""
    each = st.tuples(*[st.integers(1, 3)] * rank)
    kernel, stride, dilation = draw(each), draw(each), draw(each)
    highest = [k - 1 for k in kernel] * 2 if pools else [3] * 2 * rank
    pads = tuple(draw(st.integers(0, n)) for n in highest)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    row = tuple(n + draw(st.integers(0, 6)) for n in spans)
    return kernel, stride, pads, dilation, row


@st.composite
def convolutions(draw, kind):
    layer = LAYERS[kind]
    kernel, stride, pads, dilation, row = draw(windows(layer.rank))
    groups, C_in, C_out = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    weights = {"weight": (groups * C_out, C_in, *kernel), "bias": (groups * C_out,)}
    given = {"stride": stride, "pads": pads, "dilation": dilation, "groups": groups}
    if "Transpose" in kind:
        weights["weight"] = (groups * C_in, C_out, *kernel)
        given["output_padding"] = tuple(draw(st.integers(0, s - 1)) for s in stride)  # ONNX Runtime's limit
    if draw(st.booleans()):
        del weights["bias"]
    return one_layer(layer(**given), (groups * C_in, *row), **weights)


@st.composite
def pools(draw, kind):
    layer = LAYERS[kind]
    kernel, stride, pads, dilation, row = draw(windows(layer.rank, pools=True))
    given = {"kernel": kernel, "stride": stride, "pads": pads, "dilation": dilation, "ceil": draw(st.booleans())}
    if "Avg" in kind:
        given["count_pads"] = draw(st.booleans())
    return one_layer(layer(**given), (draw(st.integers(1, 3)), *row))


@st.composite
def over_axes(draw, kind):
    row = draw(st.lists(sizes, min_size=1, max_size=4))
    axes = st.integers(1, len(row)).flatmap(lambda a: st.sampled_from([a, a - len(row) - 1]))
    if kind.startswith("Global"):
        chosen = draw(st.lists(axes, min_size=1, max_size=len(row), unique_by=lambda a: a % (len(row) + 1)))
        return one_layer(LAYERS[kind](tuple(chosen), draw(st.booleans())), row)
    if kind == "CumSum":
        dtype = draw(st.sampled_from(["float32", "float64", "int32", "int64"]))
        return one_layer(layers.CumSum(draw(axes), draw(st.booleans()), draw(st.booleans())), row, dtype=dtype)
    if kind.endswith("TopK"):
        axis = draw(axes)
        k = draw(st.integers(1, row[axis % (len(row) + 1) - 1]))
        return one_layer(LAYERS[kind](k, axis, draw(st.booleans())), row)
    if kind.startswith("Arg"):
        return one_layer(LAYERS[kind](draw(axes), draw(st.booleans()), draw(st.booleans())), row)
    return one_layer(LAYERS[kind](draw(axes)), row)


@st.composite
def combinations(draw, kind):
    """Values with rows of one shape, or of size 1 on some axes, and perhaps a constant of lower rank."""
    row = draw(st.lists(sizes, max_size=3))
    shrunk = st.tuples(*[st.sampled_from([n, 1]) for n in row])
    shapes = [row, *draw(st.lists(shrunk, max_size=2))]
    weights = {}
    if len(shapes) == 1 or draw(st.booleans()):
        weights["constant"] = draw(shrunk)[draw(st.integers(0, len(row))) :]
    # Max with a scalar is a Clip.
    assume(kind in ("Add", "Mul") or len(shapes) > 1 or math.prod(weights["constant"]) > 1)
    return one_layer(LAYERS[kind](), *shapes, **weights)


@st.composite
def concatenations(draw):
    row = draw(st.lists(sizes, min_size=1, max_size=3))
    axis = draw(st.integers(1, len(row)))
    widths = draw(st.lists(sizes, min_size=1, max_size=4))
    shapes = [(*row[: axis - 1], width, *row[axis:]) for width in widths]
    return one_layer(layers.Concat(axis - draw(st.sampled_from([0, len(row) + 1]))), *shapes)


@st.composite
def reshapes(draw):
    row = draw(st.lists(sizes, max_size=4))
    new = draw(st.permutations(row))
    if draw(st.booleans()):
        new = [*new[:1], math.prod(new[1:])]
    return one_layer(layers.Reshape(tuple(new)), row)


@st.composite
def permutations(draw):
    row = draw(st.lists(sizes, min_size=1, max_size=4))
    return one_layer(layers.Permute((0, *draw(st.permutations(range(1, len(row) + 1))))), row)


@st.composite
def embeddings(draw):
    ids = draw(st.lists(sizes, max_size=2))
    dtype = draw(st.sampled_from(["int32", "int64"]))
    table = numbers(draw(st.integers(5, 9)), draw(sizes), dtype=draw(st.sampled_from(["float32", "float64"])))
    node = Node("layer", layers.Embedding(), ("x0",), {"weight": "table"})
    return Network({"x0": TensorType(("B", *ids), dtype)}, (node,), ("layer",), {"table": table})


@st.composite
def batch_norms(draw, kind):
    C = draw(sizes)
    row = {"BatchNorm1d": [(C,), (C, 4)], "BatchNorm2d": [(C, 3, 2)]}[kind]
    roles = ("mean", "var", *draw(st.sampled_from([("weight", "bias"), ("weight",), ("bias",), ()])))
    layer = LAYERS[kind](draw(st.sampled_from([1e-5, 1e-3, 0.5])))
    return one_layer(layer, draw(st.sampled_from(row)), **dict.fromkeys(roles, (C,)))


@st.composite
def row_norms(draw, kind):
    C, *_ = row = draw(st.lists(sizes, min_size=2 if kind == "GroupNorm" else 1, max_size=4))
    axis = draw(st.sampled_from(range(-len(row), 0)))
    first = draw(st.sampled_from([d for d in range(1, C + 1) if C % d == 0])) if kind == "GroupNorm" else axis
    layer = LAYERS[kind](first, draw(st.sampled_from([1e-5, 1e-3, 0.5])))
    shape = (C,) if kind == "GroupNorm" else tuple(row[axis:])
    return one_layer(layer, row, **{role: shape for role in LAYERS[kind].optional if draw(st.booleans())})


@st.composite
def selections(draw, kind):
    row = draw(st.lists(sizes, min_size=1, max_size=3))
    if kind == "Slice":
        taken = [range(n)[draw(st.slices(n))] for n in row]
        assume(all(map(len, taken)))  # ONNX Runtime does not support empty rows here
        layer = layers.Slice(*(tuple(part(r) for r in taken) for part in (lambda r: r.start, len, lambda r: r.step)))
    elif kind == "Gather":
        axis = draw(st.integers(1, len(row)))
        indices = draw(st.lists(st.integers(0, row[axis - 1] - 1), min_size=1, max_size=5))
        steps = {b - a for a, b in itertools.pairwise(indices)}
        assume(len(steps) > 1 or steps == {0})  # evenly spaced, it is read as a Slice
        layer = layers.Gather(axis, tuple(indices))
    elif kind == "Tile":
        repeats = tuple(draw(st.integers(1, 3)) for _ in row)
        assume(max(repeats) > 1)  # else nothing is read back
        layer = layers.Tile(repeats)
    else:
        mode = draw(st.sampled_from(["constant", "reflect", "edge", "wrap"]))
        most = min(row) - 1 if mode in ("reflect", "wrap") else 3  # ONNX Runtime's limit
        pads = [draw(st.integers(0, most)) for _ in (*row, *row)]
        assume(any(pads))
        layer = layers.Pad(tuple(pads), mode, draw(st.sampled_from([0.0, 1.5])) if mode == "constant" else 0.0)
    return one_layer(layer, row, dtype=draw(st.sampled_from(["float32", "int64"])) if kind != "Pad" else "float32")


@st.composite
def resizes(draw, kind):
    """Images only: ONNX Runtime resizes only their last axes."""
    H, W = draw(sizes), draw(sizes)
    made = draw(st.sampled_from([(2 * H, 2 * W), (H + 1, 3 * W), (3, 4)]))
    how = draw(st.sampled_from(["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]))
    options = [draw(st.sampled_from(["round_prefer_floor", "floor"]))] if kind == "NearestResize" else []
    # ONNX Runtime rounds positions in float32, onchip in float64: only ties exact in both.
    assume(kind == "LinearResize" or how == "asymmetric" or made == (2 * H, 2 * W))
    return one_layer(LAYERS[kind]((2, *made), (1.0, made[0] / H, made[1] / W), how, *options), (2, H, W))


@st.composite
def elementwise(draw, kind):
    choices = {
        "GELU": [layers.GELU(), layers.GELU("tanh")], "LeakyReLU": [layers.LeakyReLU(), layers.LeakyReLU(0.3)],
        "Dropout": [layers.Dropout(), layers.Dropout(0.25)], "ELU": [layers.ELU(), layers.ELU(0.3)],
        "HardSigmoid": [layers.HardSigmoid(), layers.HardSigmoid(0.25), layers.HardSigmoid(0.3, 0.1)],
        "Clip": [layers.Clip(*bounds) for bounds in ((0, 6), (-0.1, None), (None, 0.3), (0.7, -0.2), (None, None))],
    }  # fmt: skip
    row = draw(st.lists(sizes, max_size=3))
    dtype = draw(st.sampled_from(["float32", "float64"] if kind not in FLOAT32 else ["float32"]))
    return one_layer(draw(st.sampled_from(choices.get(kind, [LAYERS[kind]()]))), row, dtype=dtype)


@st.composite
def ordered(draw, kind):
    """Two values; or one, and a non-scalar constant as first or second operand."""
    row = draw(st.lists(st.integers(2, 7), min_size=1, max_size=3))
    shrunk = st.tuples(*[st.sampled_from([n, 1]) for n in row])
    if draw(st.booleans()):
        return one_layer(LAYERS[kind](), row, draw(shrunk))
    # Sub of a constant is read as Add, Div by one as Mul.
    role = {"PReLU": "constant", "Sub": "first", "Div": "first"}.get(kind) or draw(
        st.sampled_from(["first", "constant"])
    )
    return one_layer(LAYERS[kind](), row, **{role: row[draw(st.integers(0, len(row) - 1)) :]})


@st.composite
def linears(draw):
    row, width = draw(st.lists(sizes, min_size=1, max_size=3)), draw(sizes)
    weights = {"weight": (width, row[-1]), "bias": (width,)}
    if draw(st.booleans()):
        del weights["bias"]
    return one_layer(layers.Linear(), row, **weights)


@st.composite
def maxima_of_sequences(draw):
    """Lengths below 5: with windows of up to 6 and strides of up to 3, none, some or all fit."""
    layer = layers.SequenceMax(draw(st.integers(1, 6)), draw(st.integers(1, 3)))
    dtype, kind = draw(st.sampled_from(["float32", "float64", "float16"])), draw(st.sampled_from(["int32", "int64"]))
    x = TensorType(("B", draw(sizes), draw(st.integers(2, 7))), dtype)
    node = Node("layer", layer, ("x0", "n"))
    return Network({"x0": x, "n": TensorType(("B",), kind)}, (node,), ("layer",), {})


@st.composite
def masks(draw):
    row = draw(st.lists(sizes, min_size=1, max_size=3))
    return one_layer(layers.Mask(), row, mask=row[draw(st.integers(0, len(row) - 1)) :])


@st.composite
def products(draw):
    """Two stacks of matrices with broadcast leading axes; or one and a constant other than a right-hand matrix."""
    front, M, K, N = draw(st.lists(sizes, max_size=2)), draw(sizes), draw(sizes), draw(sizes)
    shrunk = st.tuples(*[st.sampled_from([n, 1]) for n in front])
    how = draw(st.sampled_from(["values", "first", "constant"] if front else ["values", "first"]))
    if how == "values":
        return one_layer(layers.MatMul(), (*front, M, K), (*draw(shrunk), K, N))
    if how == "first":
        return one_layer(layers.MatMul(), (*front, K, N), first=(*front[draw(st.integers(0, len(front))) :], M, K))
    return one_layer(layers.MatMul(), (*front, M, K), constant=(*front[-1:], K, N))


@st.composite
def casts(draw):
    given = draw(st.sampled_from(["float64", "float32", "float16", "int32", "int64", "uint8", "bool"]))
    to = draw(st.sampled_from([dtype for dtype in ("float64", "float32", "float16") if dtype != given]))
    return one_layer(layers.Cast(to), draw(st.lists(sizes, max_size=3)), dtype=given)


@st.composite
def wholes(draw):
    """From wider to narrower ints: a file widens ids only before a lookup."""
    given = draw(st.sampled_from(["float64", "float32", "float16", "int64"]))
    to = draw(st.sampled_from(["int64", "int32", "int8", "bool"] if given != "int64" else ["int32", "uint8", "bool"]))
    return one_layer(layers.ToInts(to), draw(st.lists(sizes, max_size=3)), dtype=given)


@st.composite
def rests(draw):
    """By divisors of both signs, not 0, which ONNX Runtime rejects."""
    row, dtype = draw(st.lists(sizes, min_size=1, max_size=3)), draw(st.sampled_from(["int32", "int64"]))
    net = one_layer(layers.Mod(draw(st.booleans())), row, dtype=dtype, constant=row[-1:])
    numbers = draw(st.lists(st.sampled_from([-7, -2, 1, 3, 5]), min_size=row[-1], max_size=row[-1]))
    return net.replace(weights={"layer.constant": np.array(numbers, dtype)})


@st.composite
def recurrences(draw, kind):
    layer = LAYERS[kind]
    H, direction = draw(st.integers(1, 5)), draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    given = {"output": draw(st.sampled_from(["sequence", "last"] + ["cell"] * (kind == "LSTM")))}
    D = 2 if direction == "bidirectional" else 1
    weights = {"recurrence": (D, layer.gates * H, H)}
    if kind == "RNN":
        given["activation"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind == "GRU":
        given["reset_after"] = draw(st.booleans())
        weights |= {"bias": (D, H)} if given["reset_after"] and draw(st.booleans()) else {}
    states = [(D, H)] * layer.states if draw(st.booleans()) else []
    return one_layer(layer(direction, **given), (draw(sizes), D * layer.gates * H), *states, **weights)


# ONNX Runtime supports fewer operators in float64.
FLOAT32 = {"GELU", "Erf", "Atan", "Mish", "HardSwish", "HardSigmoid", "Softplus", "Softsign", "ELU", "SELU"}
FUNCTIONS = (
    "ELU", "SELU", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Mish", "Abs", "Sign", "Sqrt", "Reciprocal",
    "Exp", "Log", "Sin", "Cos", "Erf", "Atan", "Floor", "Ceil", "Round",
)  # fmt: skip
FEW = (
    *FUNCTIONS,
    "Max",
    "Min",
    "Sub",
    "Div",
    "PReLU",
    "Greater",
    "GreaterOrEqual",
    "Equal",
    "Mask",
    "GlobalMin",
    "GlobalSum",
    "GlobalNorm",
    "ArgMin",
)
STRATEGIES = {
    **{kind: convolutions(kind) for kind in ("Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d")},
    **{kind: pools(kind) for kind in ("MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d")},
    **{kind: over_axes(kind) for kind in ("GlobalMax", "GlobalMean", "GlobalMin", "GlobalSum")},
    **{kind: over_axes(kind) for kind in ("GlobalNorm", "CumSum", "Softmax", "LogSoftmax", "ArgMax", "ArgMin")},
    **{kind: over_axes(kind) for kind in ("TopK", "ArgTopK")},
    "MatMul": products(), "Mask": masks(),
    **{kind: combinations(kind) for kind in ("Add", "Mul", "Max", "Min")},
    **{kind: ordered(kind) for kind in ("Sub", "Div", "Pow", "PReLU", "Greater", "GreaterOrEqual", "Equal")},
    **{kind: elementwise(kind) for kind in FUNCTIONS},
    **{kind: batch_norms(kind) for kind in ("BatchNorm1d", "BatchNorm2d")},
    **{kind: selections(kind) for kind in ("Slice", "Gather", "Pad", "Tile")},
    **{kind: resizes(kind) for kind in ("NearestResize", "LinearResize")},
    **{kind: row_norms(kind) for kind in ("LayerNorm", "RMSNorm", "GroupNorm")},
    **{kind: elementwise(kind) for kind in ("ReLU", "LeakyReLU", "Clip", "Sigmoid", "Tanh", "SiLU", "GELU")},
    **{kind: elementwise(kind) for kind in ("Identity", "Dropout")},
    "Concat": concatenations(), "Reshape": reshapes(), "Permute": permutations(), "Embedding": embeddings(),
    **{kind: recurrences(kind) for kind in ("LSTM", "GRU", "RNN")},
    "Linear": linears(), "Cast": casts(), "ToInts": wholes(), "Mod": rests(), "SequenceMax": maxima_of_sequences(),
}  # fmt: skip


MANY = ("Add", "Mul", "Max", "Min")


def test_every_layer_is_covered():
    assert set(STRATEGIES) | {"ToPixels"} == set(WRITERS)
    assert set(WRITERS) | NEVER_SAVED == set(LAYERS)


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind not in FEW])
@settings(SETTINGS, max_examples=25)
@given(data=st.data(), rows=st.sampled_from([1, 2, 5]))
def test_written_run_and_read_back(tmp_path, kind, data, rows):
    check_both_ways(tmp_path, kind, data, rows)


@pytest.mark.parametrize("kind", FEW)
@settings(SETTINGS, max_examples=4)
@given(data=st.data(), rows=st.sampled_from([1, 5]))
def test_layers_of_few_attributes_too(tmp_path, kind, data, rows):
    check_both_ways(tmp_path, kind, data, rows)


def check_both_ways(tmp_path, kind, data, rows):
    try:
        net = data.draw(STRATEGIES[kind])
    except ShapeError:  # attributes that make the output empty
        assume(False)
    write_onnx(net, tmp_path / "net.onnx")
    xs = rows_of(net, rows)
    truth = reference.forward(net, xs)
    (got,) = run_onnx(tmp_path / "net.onnx", *xs)
    assert got.dtype.name == net.output.dtype
    tolerance = 2.0**-11 if got.dtype == "float16" else 2e-5
    np.testing.assert_allclose(got, truth, rtol=tolerance, atol=tolerance)

    back = read_onnx(tmp_path / "net.onnx")
    assert (back.inputs, back.output) == (net.inputs, net.output)
    np.testing.assert_allclose(reference.forward(back, xs), truth, rtol=1e-7, atol=1e-7)
    if kind == "Identity":
        assert back.nodes == net.nodes
    elif len(net.inputs) + len(net.nodes[0].weights) < 3 or kind not in MANY:  # ONNX's operators are binary
        (node,), (kept,) = net.nodes, back.nodes
        assert kept.name == "layer"
        assert normal(kept.layer, net) == normal(node.layer, net)
        for role, name in node.weights.items() if kind != "Mask" else ():  # written as a Cast of the constant
            assert kept.weights[role] == name
            assert back.weights[name].tobytes() == net.weights[name].tobytes()


def normal(layer, net):
    """The layer with non-negative axes, a Reshape with explicit sizes, and no Slice of a whole row."""
    rank = len(net.types["x0"].shape)
    if isinstance(layer, layers.Slice):
        taken = zip(layer.starts, layer.sizes, layer.steps, strict=True)
        ranges = [range(start, start + size * step, step) for start, size, step in taken]
        return layers.Identity() if ranges == [range(n) for n in net.types["x0"].row_shape] else layer
    if isinstance(layer, layers.Reshape):
        return layers.Reshape(net.output.row_shape)
    if hasattr(layer, "axis"):
        return dataclasses.replace(layer, axis=layer.axis % rank)
    if hasattr(layer, "axes") and hasattr(layer, "keep"):
        return dataclasses.replace(layer, axes=tuple(sorted(axis % rank for axis in layer.axes)))
    return layer


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_pixels_are_written_and_read_back(tmp_path, dtype):
    net = one_layer(layers.ToPixels(), (3, 5, 4), dtype=dtype)
    write_onnx(net, tmp_path / "net.onnx")
    back = read_onnx(tmp_path / "net.onnx")
    assert (back.nodes, back.inputs, back.outputs) == (net.nodes, net.inputs, net.outputs)
    if dtype != "float32":
        return
    x = np.random.default_rng(0).uniform(-1.5, 1.5, (6, 3, 5, 4)).astype(np.float32)
    x[0, 0, 0] = [np.nan, np.inf, -np.inf, 1]
    (got,) = run_onnx(tmp_path / "net.onnx", x)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, reference.forward(net, x, "float32"))


@pytest.mark.parametrize("D_out", [1, 4])
def test_pixels_after_a_linear_leave_it_without_a_bias(tmp_path, D_out):
    net = one_layer(layers.Linear(), (3,), weight=(D_out, 3))
    pixels = net.replace(nodes=(*net.nodes, Node("pixels", layers.ToPixels(), ("layer",))), outputs=("pixels",))
    write_onnx(pixels, tmp_path / "net.onnx")
    assert read_onnx(tmp_path / "net.onnx").nodes == pixels.nodes
