"""A network as a function for jax.jit: one JAX call per layer, with the same weights.

The layout is NCHW, as in the network: XLA chooses its own layouts between kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onchip.bench.frame import UnavailableError
from onchip.bench.peers.frameworks.jax_forms import choice, recurrent, windows
from onchip.bench.peers.frameworks.jax_forms.context import Context, Form, Value, Weights
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    GELU,
    GRU,
    LSTM,
    RNN,
    Add,
    ArgMax,
    ArgMin,
    ArgTopK,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Clip,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    CumSum,
    Div,
    Dropout,
    Elementwise,
    Embedding,
    Equal,
    Gather,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    Greater,
    GreaterOrEqual,
    GroupNorm,
    HardSigmoid,
    Identity,
    Layer,
    LayerNorm,
    LeakyReLU,
    Linear,
    LinearResize,
    LogSoftmax,
    Mask,
    MatMul,
    Max,
    MaxPool1d,
    MaxPool2d,
    Min,
    Mod,
    Mul,
    NearestResize,
    Pad,
    Permute,
    Pow,
    PReLU,
    ReLU,
    Reshape,
    RMSNorm,
    SequenceMax,
    Slice,
    Softmax,
    Sub,
    Tile,
    ToInts,
    ToPixels,
    TopK,
)
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Array, Evaluated, materialise
from onchip.network.types import TensorType, numpy_dtype


def jax_function(
    jax: Any, net: Network, dtype: str, precision: Any
) -> tuple[Callable[[Sequence[Value], Mapping[str, Weights]], Value], dict[str, Weights]]:
    """forward(xs, weights) -> y, and the weights by node and role: as arguments, because XLA would fold constants.

    xs  (B, ...) each, of `dtype` or ids; y and all float weights are of `dtype`
    """
    forms: dict[str, Form] = {}
    for node in net.nodes:
        form = FORMS.get(type(node.layer)) or _spelled(node.layer)
        if form is None:
            raise UnavailableError(f"no JAX function for {node.layer}")
        forms[node.name] = form
    materialised: Evaluated = {}
    weights: dict[str, Weights] = {}
    for node in net.nodes:
        arrays = {role: materialise(name, net.weights, materialised) for role, name in node.weights.items()}
        prepare = _PREPARED.get(type(node.layer))
        prepared = prepare(node.layer, arrays) if prepare else arrays
        weights[node.name] = {
            role: jax.numpy.asarray(w, w.dtype if w.dtype.kind in "iu" else numpy_dtype(dtype))
            for role, w in prepared.items()
        }
    context = Context(jax, net, precision)
    (last,) = net.outputs

    def forward(xs: Sequence[Value], weights: Mapping[str, Weights]) -> Value:
        values = dict(zip(net.inputs, xs, strict=True))
        for node in net.nodes:
            inputs = (values[name] for name in node.inputs)
            values[node.name] = forms[node.name](context, node, weights[node.name], *inputs)
        return values[last]

    return forward, weights


# -- layers ------------------------------------------------------------------------------------------------


def _linear(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    y = ctx.jax.numpy.matmul(x, w["weight"], precision=ctx.precision)
    return y + w["bias"] if "bias" in w else y


def _transposed(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    return {**w, "weight": w["weight"].T}


def _batch_norm(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    return x * windows.by_channel(w["factor"], x) + windows.by_channel(w["shift"], x)


def _folded(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    assert isinstance(layer, BatchNorm1d | BatchNorm2d)
    return dict(zip(("factor", "shift"), factor_and_shift(w, layer.eps), strict=True))


def _row_norm(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """Sums in float32, as in JAX's libraries."""
    layer, numpy = node.layer, ctx.jax.numpy
    assert isinstance(layer, LayerNorm | RMSNorm | GroupNorm)
    groups = layer.parts(TensorType(("B", *x.shape[1:])))
    x32 = x.astype("float32").reshape(x.shape[0], groups.count, groups.size)
    if layer.is_centred:
        x32 = x32 - numpy.mean(x32, axis=-1, keepdims=True)
    variance = numpy.mean(x32 * x32, axis=-1, keepdims=True)
    y = (x32 * ctx.jax.lax.rsqrt(variance + layer.eps)).astype(x.dtype).reshape(x.shape)
    shaped = windows.by_channel if isinstance(layer, GroupNorm) else lambda weight, y: weight
    y = y * shaped(w["weight"], y) if "weight" in w else y
    return y + shaped(w["bias"], y) if "bias" in w else y


def _reduce(function: str) -> Form:
    def form(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
        attributes = node.layer.attributes()
        return getattr(ctx.jax.numpy, function)(x, axis=attributes["axes"], keepdims=attributes["keep"])

    return form


def _norm(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    attributes = node.layer.attributes()
    return ctx.jax.numpy.sqrt(ctx.jax.numpy.sum(x * x, axis=attributes["axes"], keepdims=attributes["keep"]))


def _clip(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, Clip)
    return ctx.jax.numpy.clip(x, node.layer.low, node.layer.high)


def _hard_sigmoid(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, HardSigmoid)
    return ctx.jax.numpy.clip(node.layer.slope * x + node.layer.shift, 0, 1)


def _leaky_relu(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, LeakyReLU)
    return ctx.jax.numpy.where(x >= 0, x, node.layer.slope * x)


def _prelu(ctx: Context, node: Node, w: Weights, x: Value, *slopes: Value) -> Value:
    return ctx.jax.numpy.where(x >= 0, x, x * (slopes[0] if slopes else w["constant"]))


def _elu(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, ELU)
    return ctx.jax.nn.elu(x, node.layer.alpha)


def _gelu(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, GELU)
    return ctx.jax.nn.gelu(x, approximate=node.layer.approximate == "tanh")


def _softmax(function: str) -> Form:
    def form(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
        return getattr(ctx.jax.nn, function)(x, axis=node.layer.attributes()["axis"])

    return form


def _combine(function: Callable[[Value, Value], Value]) -> Form:
    return lambda ctx, node, w, *xs: functools.reduce(function, (*xs, *w.values()))


def _extreme(function: str) -> Form:
    return lambda ctx, node, w, *xs: functools.reduce(getattr(ctx.jax.numpy, function), (*xs, *w.values()))


def _operands(w: Weights, xs: Sequence[Value]) -> list[Value]:
    return [*([w["first"]] if "first" in w else []), *xs, *([w["constant"]] if "constant" in w else [])]


def _binary(function: Callable[[Value, Value], Value]) -> Form:
    return lambda ctx, node, w, *xs: function(*_operands(w, xs))


def _matmul(ctx: Context, node: Node, w: Weights, *xs: Value) -> Value:
    return ctx.jax.numpy.matmul(*_operands(w, xs), precision=ctx.precision)


def _mask(ctx: Context, node: Node, w: Weights, *xs: Value) -> Value:
    x = w.get("first", xs[0])
    return ctx.jax.numpy.where(w.get("mask", xs[-1]) != 0, x, numpy_dtype(str(x.dtype)).type(0))


def _div(ctx: Context, node: Node, w: Weights, *xs: Value) -> Value:
    a, b = ctx.jax.numpy.broadcast_arrays(*_operands(w, xs))
    return a / b if "float" in ctx.net.types[node.name].dtype else ctx.jax.lax.div(a, b)


def _mod(ctx: Context, node: Node, w: Weights, *xs: Value) -> Value:
    function = ctx.jax.numpy.fmod if node.layer.attributes()["truncated"] else ctx.jax.numpy.mod
    return _binary(function)(ctx, node, w, *xs)


def _compare(function: Callable[[Value, Value], Value]) -> Form:
    return lambda ctx, node, w, *xs: function(*_operands(w, xs)).astype(xs[0].dtype)


def _to_ints(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """Narrow types go through int32: XLA saturates values that do not fit, onchip wraps."""
    dtype = numpy_dtype(node.layer.attributes()["dtype"])
    is_narrow = dtype.itemsize < 4 and dtype.kind != "b"  # bool is x != 0, also for fractions
    return (x.astype("int32") if is_narrow else x).astype(dtype)


def _to_pixels(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """The usual formula; unlike onchip's, it does not map NaN to 0."""
    return ctx.jax.numpy.clip((x + 1) / 2 * 255, 0, 255).astype("uint8")


def _spelled(layer: Layer) -> Form | None:
    """The function of jax that an elementwise layer names."""
    if not isinstance(layer, Elementwise) or not layer.jax:
        return None
    find = operator.attrgetter(layer.jax)
    return lambda ctx, node, w, x: find(ctx.jax)(x)


_PREPARED: dict[type[Layer], Callable[[Layer, Mapping[str, Array]], Mapping[str, Array]]] = {
    Linear: _transposed,
    ConvTranspose1d: windows.mirrored,
    ConvTranspose2d: windows.mirrored,
    BatchNorm1d: _folded,
    BatchNorm2d: _folded,
}
# All but elementwise layers that name their function, and TokenConv and Interleave, which only rewrites create: peers
# get the network before rewrites.
FORMS: dict[type[Layer], Form] = {
    ReLU: lambda ctx, node, w, x: ctx.jax.numpy.maximum(x, 0),
    LeakyReLU: _leaky_relu,
    PReLU: _prelu,
    Clip: _clip,
    Cast: lambda ctx, node, w, x: x.astype(numpy_dtype(node.layer.dtype)),
    ToInts: _to_ints,
    HardSigmoid: _hard_sigmoid,
    ELU: _elu,
    GELU: _gelu,
    Softmax: _softmax("softmax"),
    LogSoftmax: _softmax("log_softmax"),
    Linear: _linear,
    MatMul: _matmul,
    Conv1d: windows.conv,
    Conv2d: windows.conv,
    ConvTranspose1d: windows.conv_transpose,
    ConvTranspose2d: windows.conv_transpose,
    # The mode does not matter: every id has been checked.
    Embedding: lambda ctx, node, w, x: ctx.jax.numpy.take(w["weight"], x, axis=0, mode="clip"),
    BatchNorm1d: _batch_norm,
    BatchNorm2d: _batch_norm,
    **dict.fromkeys((LayerNorm, RMSNorm, GroupNorm), _row_norm),
    MaxPool1d: windows.max_pool,
    MaxPool2d: windows.max_pool,
    AvgPool1d: windows.avg_pool,
    AvgPool2d: windows.avg_pool,
    GlobalMax: _reduce("max"),
    GlobalMean: _reduce("mean"),
    GlobalMin: _reduce("min"),
    GlobalSum: _reduce("sum"),
    GlobalNorm: _norm,
    Add: _combine(operator.add),
    Mul: _combine(operator.mul),
    Max: _extreme("maximum"),
    Min: _extreme("minimum"),
    Sub: _binary(operator.sub),
    Div: _div,
    Mod: _mod,
    Pow: _binary(operator.pow),
    Mask: _mask,
    Greater: _compare(operator.gt),
    GreaterOrEqual: _compare(operator.ge),
    Equal: _compare(operator.eq),
    Concat: lambda ctx, node, w, *xs: ctx.jax.numpy.concatenate(xs, axis=node.layer.attributes()["axis"]),
    Identity: lambda ctx, node, w, x: x,
    Dropout: lambda ctx, node, w, x: x,
    Permute: lambda ctx, node, w, x: ctx.jax.numpy.transpose(x, node.layer.attributes()["axes"]),
    Reshape: lambda ctx, node, w, x: ctx.jax.numpy.reshape(x, (x.shape[0], *ctx.net.types[node.name].row_shape)),
    ToPixels: _to_pixels,
    **dict.fromkeys((Slice, Gather, Pad, Tile, NearestResize), choice.select),
    LinearResize: choice.linear_resize,
    ArgMax: choice.argument,
    ArgMin: choice.argument,
    TopK: choice.top_k,
    ArgTopK: choice.top_k,
    CumSum: choice.cum_sum,
    SequenceMax: choice.sequence_max,
    **dict.fromkeys((LSTM, GRU, RNN), recurrent.recurrent),
}
