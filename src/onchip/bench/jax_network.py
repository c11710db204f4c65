"""A network as a function for jax.jit: one call of JAX a layer, with the same weights.

Channels stand in front, as in the network: XLA chooses itself how values lie between its kernels.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.bench.frame import UnavailableError
from onchip.spec.layers import (
    GELU,
    Add,
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
    Dropout,
    Embedding,
    GlobalMax,
    GlobalMean,
    Identity,
    Layer,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from onchip.spec.layers.conv import conv_groups, geometry
from onchip.spec.layers.norm import factor_and_shift
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Made, materialise
from onchip.spec.types import numpy_dtype

Value = Any  # an array of JAX
Weights = Mapping[str, Value]  # by role
Form = Callable[..., Value]  # (context, node, weights, *values it reads) -> the value it makes


@dataclass(frozen=True, eq=False)
class Context:
    """What every layer is written with."""

    jax: Any
    net: Network
    precision: Any  # of products: a jax.lax.Precision


def jax_function(
    jax: Any, net: Network, dtype: str, precision: Any
) -> tuple[Callable[[Value, Mapping[str, Weights]], Value], dict[str, Weights]]:
    """forward(x, weights) -> y, and the weights, of `dtype`, by node and role: arguments, as XLA would fold constants.

    x  (B, ...), of `dtype` or ids; y too is of `dtype`
    """
    forms = {node.name: _form(node) for node in net.nodes}
    made: Made = {}
    weights: dict[str, Weights] = {}
    for node in net.nodes:
        arrays = {role: materialise(name, net.weights, made) for role, name in node.weights.items()}
        prepare = _PREPARED.get(type(node.layer))
        prepared = prepare(node.layer, arrays) if prepare else arrays
        weights[node.name] = {role: jax.numpy.asarray(w, numpy_dtype(dtype)) for role, w in prepared.items()}
    context = Context(jax, net, precision)
    (first,), (last,) = net.inputs, net.outputs

    def forward(x: Value, given: Mapping[str, Weights]) -> Value:
        values = {first: x}
        for node in net.nodes:
            read = (values[name] for name in node.inputs)
            values[node.name] = forms[node.name](context, node, given[node.name], *read)
        return values[last]

    return forward, weights


def _form(node: Node) -> Form:
    if type(node.layer) not in _FORMS:
        raise UnavailableError(f"no function of JAX for {node.layer}")
    if isinstance(node.layer, AvgPool1d | AvgPool2d) and (any(node.layer.pads) or node.layer.ceil):
        raise UnavailableError(f"no function of JAX for {node.layer}")  # its windows hold different numbers of numbers
    return _FORMS[type(node.layer)]


# -- layers ------------------------------------------------------------------------------------------------


def _linear(to: Context, node: Node, w: Weights, x: Value) -> Value:
    y = to.jax.numpy.matmul(x, w["weight"], precision=to.precision)
    return y + w["bias"] if "bias" in w else y


def _turned(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    return {**w, "weight": w["weight"].T}


def _conv(to: Context, node: Node, w: Weights, x: Value) -> Value:
    stride, pads, dilation = geometry(node.layer)
    rank = len(stride)
    padding = tuple(zip(pads[:rank], pads[rank:], strict=True))
    return _windows(to, node, w, x, window_strides=stride, padding=padding, rhs_dilation=dilation)


def _conv_transpose(to: Context, node: Node, w: Weights, x: Value) -> Value:
    """A convolution with stride 1 over x with zeros in between; its weights are prepared for that."""
    stride, pads, dilation = geometry(node.layer)
    rank, extra = len(stride), node.layer.attributes()["output_padding"]
    span = [d * (K - 1) for d, K in zip(dilation, w["weight"].shape[2:], strict=True)]
    padding = tuple((span[a] - pads[a], span[a] - pads[rank + a] + extra[a]) for a in range(rank))
    ones = (1,) * rank
    return _windows(to, node, w, x, window_strides=ones, padding=padding, lhs_dilation=stride, rhs_dilation=dilation)


def _mirrored(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    """weight (C_in, C_out / G, kernel...) -> (C_out, C_in / G, kernel...), with its taps in the other direction."""
    weight, groups = w["weight"], conv_groups(layer)
    C_in, C_group, *kernel = weight.shape
    grouped = weight.reshape(groups, C_in // groups, C_group, *kernel).swapaxes(1, 2)
    taps = tuple(range(2, weight.ndim))
    return {**w, "weight": np.flip(grouped.reshape(groups * C_group, C_in // groups, *kernel), taps)}


def _windows(to: Context, node: Node, w: Weights, x: Value, **geometry: Any) -> Value:
    axes = "HW"[: x.ndim - 2]
    y = to.jax.lax.conv_general_dilated(
        x, w["weight"], dimension_numbers=(f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        feature_group_count=conv_groups(node.layer), precision=to.precision, **geometry,
    )  # fmt: skip
    return y + _by_channel(w["bias"], y) if "bias" in w else y


def _by_channel(numbers: Value, y: Value) -> Value:
    return numbers.reshape(1, -1, *(1,) * (y.ndim - 2))


def _batch_norm(to: Context, node: Node, w: Weights, x: Value) -> Value:
    return x * _by_channel(w["factor"], x) + _by_channel(w["shift"], x)


def _folded(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    assert isinstance(layer, BatchNorm1d | BatchNorm2d)
    return dict(zip(("factor", "shift"), factor_and_shift(w, layer.eps), strict=True))


def _max_pool(to: Context, node: Node, w: Weights, x: Value) -> Value:
    return _reduce_windows(to, node, x, -np.inf, to.jax.lax.max)


def _avg_pool(to: Context, node: Node, w: Weights, x: Value) -> Value:
    total = _reduce_windows(to, node, x, 0.0, to.jax.lax.add)
    return total / math.prod(node.layer.attributes()["kernel"])


def _reduce_windows(to: Context, node: Node, x: Value, start: float, function: Any) -> Value:
    stride, pads, dilation = geometry(node.layer)
    kernel, rank = node.layer.attributes()["kernel"], len(stride)
    padding = []
    for a, count in enumerate(to.net.types[node.name].row_shape[1:]):
        end = (int(count) - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1  # of the last window: past x if `ceil`
        padding.append((pads[a], max(pads[rank + a], end - pads[a] - x.shape[2 + a])))
    return to.jax.lax.reduce_window(
        x, start, function, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding),
        window_dilation=(1, 1, *dilation),
    )  # fmt: skip


def _reduce(function: str) -> Form:
    def form(to: Context, node: Node, w: Weights, x: Value) -> Value:
        assert isinstance(node.layer, GlobalMax | GlobalMean)
        return getattr(to.jax.numpy, function)(x, axis=node.layer.axes, keepdims=node.layer.keep)

    return form


def _clip(to: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, Clip)
    return to.jax.numpy.clip(x, node.layer.low, node.layer.high)


def _leaky_relu(to: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, LeakyReLU)
    return to.jax.numpy.where(x >= 0, x, node.layer.slope * x)


def _gelu(to: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, GELU)
    return to.jax.nn.gelu(x, approximate=node.layer.approximate == "tanh")


def _softmax(function: str) -> Form:
    def form(to: Context, node: Node, w: Weights, x: Value) -> Value:
        return getattr(to.jax.nn, function)(x, axis=node.layer.attributes()["axis"])

    return form


def _combine(function: Callable[[Value, Value], Value]) -> Form:
    return lambda to, node, w, *xs: functools.reduce(function, (*xs, *w.values()))


_PREPARED: dict[type[Layer], Callable[[Layer, Mapping[str, Array]], Mapping[str, Array]]] = {
    Linear: _turned,
    ConvTranspose1d: _mirrored,
    ConvTranspose2d: _mirrored,
    BatchNorm1d: _folded,
    BatchNorm2d: _folded,
}
_FORMS: dict[type[Layer], Form] = {
    ReLU: lambda to, node, w, x: to.jax.numpy.maximum(x, 0),
    LeakyReLU: _leaky_relu,
    Clip: _clip,
    Cast: lambda to, node, w, x: x.astype(numpy_dtype(node.layer.dtype)),
    Sigmoid: lambda to, node, w, x: to.jax.nn.sigmoid(x),
    Tanh: lambda to, node, w, x: to.jax.numpy.tanh(x),
    SiLU: lambda to, node, w, x: to.jax.nn.silu(x),
    GELU: _gelu,
    Softmax: _softmax("softmax"),
    LogSoftmax: _softmax("log_softmax"),
    Linear: _linear,
    Conv1d: _conv,
    Conv2d: _conv,
    ConvTranspose1d: _conv_transpose,
    ConvTranspose2d: _conv_transpose,
    # A place that lies nowhere needs no answer: every id has been checked.
    Embedding: lambda to, node, w, x: to.jax.numpy.take(w["weight"], x, axis=0, mode="clip"),
    BatchNorm1d: _batch_norm,
    BatchNorm2d: _batch_norm,
    MaxPool1d: _max_pool,
    MaxPool2d: _max_pool,
    AvgPool1d: _avg_pool,
    AvgPool2d: _avg_pool,
    GlobalMax: _reduce("max"),
    GlobalMean: _reduce("mean"),
    Add: _combine(operator.add),
    Mul: _combine(operator.mul),
    Concat: lambda to, node, w, *xs: to.jax.numpy.concatenate(xs, axis=node.layer.attributes()["axis"]),
    Identity: lambda to, node, w, x: x,
    Dropout: lambda to, node, w, x: x,
    Permute: lambda to, node, w, x: to.jax.numpy.transpose(x, node.layer.attributes()["axes"]),
    Reshape: lambda to, node, w, x: to.jax.numpy.reshape(x, (x.shape[0], *to.net.types[node.name].row_shape)),
}
