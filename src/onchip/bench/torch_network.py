"""A network as a torch module: straight-line code of torch's own functions, with the same weights.

The module is a torch.fx graph, so that calling it costs no more Python than a module written by hand, and
torch.compile sees plain calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onchip.bench.frame import UnavailableError
from onchip.spec.layers import (
    ELU,
    GELU,
    SELU,
    Abs,
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
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    Cos,
    Div,
    Dropout,
    Embedding,
    Erf,
    Exp,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    GroupNorm,
    HardSwish,
    Identity,
    Interleave,
    Layer,
    LayerNorm,
    LeakyReLU,
    Linear,
    Log,
    LogSoftmax,
    MatMul,
    Max,
    MaxPool1d,
    MaxPool2d,
    Min,
    Mish,
    Mul,
    Permute,
    Pow,
    PReLU,
    Reciprocal,
    ReLU,
    Reshape,
    RMSNorm,
    Sigmoid,
    SiLU,
    Sin,
    Softmax,
    Softplus,
    Softsign,
    Sqrt,
    Sub,
    Tanh,
    ToPixels,
    TransposedConvolution,
)
from onchip.spec.layers.conv import geometry
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Made, materialise

Value = Any  # a node of the fx graph
Weights = Mapping[str, Value]  # by role
Form = Callable[..., Value]  # (builder, node, weights, *values it reads) -> the value it makes

# Their value is a new tensor that no gradient needs: a ReLU that is its only reader may overwrite it.
_OVERWRITABLE = (Linear, Convolution, TransposedConvolution, BatchNorm1d, BatchNorm2d, Add)


def torch_module(net: Network) -> Any:
    """The network as a torch.fx.GraphModule; its parameters are the weights that the nodes name, in their order."""
    import torch

    builder = _Builder(torch, net)
    for node in net.nodes:
        builder.add(node)
    outputs = tuple(builder.values[name] for name in net.outputs)
    builder.graph.output(outputs if len(outputs) > 1 else outputs[0])
    return torch.fx.GraphModule(builder.root, builder.graph)


class _Builder:
    """The graph so far: what is known of every value, and how functions of torch are called on them."""

    def __init__(self, torch: Any, net: Network) -> None:
        self.torch, self.net = torch, net
        self.root, self.graph = torch.nn.Module(), torch.fx.Graph()
        self.values: dict[str, Value] = {name: self.graph.placeholder(f"x{i}") for i, name in enumerate(net.inputs)}
        self._weights: dict[str, Value] = {}
        self._made: Made = {}

    def add(self, node: Node) -> None:
        form = _FORMS.get(type(node.layer))
        if form is None:
            raise UnavailableError(f"no torch function for {node.layer}")
        w = {role: self._weight(name) for role, name in node.weights.items()}
        self.values[node.name] = form(self, node, w, *(self.values[name] for name in node.inputs))

    def call(self, function: str, *arguments: Any, **options: Any) -> Value:
        """A function of torch.nn.functional or torch, by name."""
        functional = self.torch.nn.functional
        found = getattr(functional, function, None) or getattr(self.torch, function)
        return self.graph.call_function(found, arguments, options)

    def _weight(self, name: str) -> Value:
        """A weight as a parameter of the module."""
        if name not in self._weights:
            array = np.array(materialise(name, self.net.weights, self._made))  # a copy: the network's is read-only
            attribute = f"w{len(self._weights)}"
            self.root.register_parameter(attribute, self.torch.nn.Parameter(self.torch.from_numpy(array)))
            self._weights[name] = self.graph.get_attr(attribute)
        return self._weights[name]

    def may_overwrite(self, value: str) -> bool:
        maker = next((node for node in self.net.nodes if node.name == value), None)
        alone = len(self.net.readers(value)) == 1 and value not in self.net.outputs
        return maker is not None and isinstance(maker.layer, _OVERWRITABLE) and alone

    def pad(self, x: Value, before: Sequence[int], after: Sequence[int], fill: float = 0.0) -> Value:
        """Numbers around the axes behind the channels; torch wants the last axis first."""
        pads = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
        return self.call("pad", x, pads, value=fill)


def _relu(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    return to.call("relu_" if to.may_overwrite(node.inputs[0]) else "relu", x)


def _linear(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    return to.call("linear", x, w["weight"], w.get("bias"))


def _conv(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Conv1d | Conv2d)
    before, after = layer.pads[: layer.rank], layer.pads[layer.rank :]
    padding, is_cut = before, before != after and set(layer.stride) == {1}
    if is_cut:  # as much on both sides, and what is too much cut off: a few outputs more take less than a padded copy
        padding = tuple(map(max, before, after))
    elif before != after:
        x, padding = to.pad(x, before, after), (0,) * layer.rank
    function = f"conv{layer.rank}d"
    y = to.call(function, x, w["weight"], w.get("bias"), layer.stride, padding, layer.dilation, layer.groups)
    if not is_cut:
        return y
    sizes = to.net.types[node.name].row_shape[1:]
    places = [slice(p - b, p - b + n) for p, b, n in zip(padding, before, sizes, strict=True)]
    return to.graph.call_function(operator.getitem, (y, (slice(None), slice(None), *places)))


def _conv_transpose(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    """torch cuts as much off the end as off the front: an end that lacks numbers is lengthened, others are cut."""
    layer = node.layer
    assert isinstance(layer, ConvTranspose1d | ConvTranspose2d)
    padding, extra, places = [], [], []
    for axis, size in enumerate(to.net.types[node.name].row_shape[1:]):
        before, after = layer.pads[axis], layer.pads[layer.rank + axis]
        longer = layer.output_padding[axis] + before - after
        fits = 0 <= longer < max(layer.stride[axis], layer.dilation[axis])
        padding.append(before if fits else min(before, after))
        extra.append(longer if fits else layer.output_padding[axis])
        places.append(slice(None) if fits else slice(before - padding[-1], before - padding[-1] + size))
    weights, function = (w["weight"], w.get("bias")), f"conv_transpose{layer.rank}d"
    y = to.call(function, x, *weights, layer.stride, padding, extra, layer.groups, layer.dilation)
    if places == [slice(None)] * layer.rank:
        return y
    return to.graph.call_function(operator.getitem, (y, (slice(None), slice(None), *places)))


def _batch_norm(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, BatchNorm1d | BatchNorm2d)
    weights = w["mean"], w["var"], w.get("weight"), w.get("bias")
    return to.call("batch_norm", x, *weights, training=False, eps=node.layer.eps)


def _row_norm(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    if isinstance(layer, GroupNorm):
        return to.call("group_norm", x, layer.groups, w.get("weight"), w.get("bias"), layer.eps)
    assert isinstance(layer, LayerNorm | RMSNorm)
    shape = layer.weight_shape(to.net.types[node.inputs[0]])
    if isinstance(layer, RMSNorm):
        return to.call("rms_norm", x, shape, w.get("weight"), layer.eps)
    return to.call("layer_norm", x, shape, w.get("weight"), w.get("bias"), layer.eps)


def _max_pool(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, MaxPool1d | MaxPool2d)
    before, after = layer.pads[: layer.rank], layer.pads[layer.rank :]
    padding, ceil = before, layer.ceil
    if before != after or any(2 * pad > size for pad, size in zip(before, layer.kernel, strict=True)):
        # Not for torch to pad: as many numbers as the windows read, so that nothing is left to round up.
        sizes, counts = to.net.types[node.inputs[0]].row_shape[1:], to.net.types[node.name].row_shape[1:]
        stride, _, dilation = geometry(layer)
        ends = [
            (P - 1) * s + d * (K - 1) + 1 for P, s, d, K in zip(counts, stride, dilation, layer.kernel, strict=True)
        ]
        x = to.pad(x, before, [end - b - n for end, b, n in zip(ends, before, sizes, strict=True)], -np.inf)
        padding, ceil = (0,) * layer.rank, False
    return to.call(f"max_pool{layer.rank}d", x, layer.kernel, layer.stride, padding, layer.dilation, ceil)


def _avg_pool(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, AvgPool1d | AvgPool2d)
    padding = layer.pads[: layer.rank]
    odd = padding != layer.pads[layer.rank :] or any(
        2 * p > size for p, size in zip(padding, layer.kernel, strict=True)
    )
    if odd or set(layer.dilation) != {1}:
        raise UnavailableError(f"no torch function for {layer}")
    return to.call(f"avg_pool{layer.rank}d", x, layer.kernel, layer.stride, padding, layer.ceil, layer.count_pads)


def _reduce(function: str) -> Form:
    def form(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
        given = node.layer.attributes()
        return to.call(function, x, dim=given["axes"], keepdim=given["keep"])

    return form


def _ordered(function: str) -> Form:
    def form(to: _Builder, node: Node, w: Weights, *xs: Value) -> Value:
        operands = [w[role] for role in ("first",) if role in w] + [*xs] + [w[r] for r in ("constant",) if r in w]
        return to.call(function, *operands)

    return form


def _prelu(to: _Builder, node: Node, w: Weights, x: Value, *slopes: Value) -> Value:
    """torch's own takes a slope for each channel alone."""
    slope = slopes[0] if slopes else w["constant"]
    return to.call("where", to.call("ge", x, 0), x, to.call("mul", x, slope))


def _combine(function: str) -> Form:
    def form(to: _Builder, node: Node, w: Weights, *xs: Value) -> Value:
        return functools.reduce(lambda a, b: to.call(function, a, b), [*xs, *w.values()])

    return form


def _to_pixels(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    """As people write it; that a NaN becomes 0 is left out."""
    y = to.call("add", x, 1)
    for function, number in (("div_", 2), ("mul_", 255)):
        y = to.graph.call_method(function, (y, number))
    return to.graph.call_method("to", (to.graph.call_method("clamp_", (y, 0, 255)), to.torch.uint8))


def _interleave(to: _Builder, node: Node, w: Weights, *xs: Value) -> Value:
    """Phases of one size, each beside the next, with their channels last: as convolutions are fastest."""
    layer, sizes = node.layer, to.net.types[node.name].row_shape
    assert isinstance(layer, Interleave)
    rank = len(layer.stride)
    if any(size % s for size, s in zip(sizes[1:], layer.stride, strict=True)):
        raise UnavailableError(f"no torch function for {layer} of different sizes")
    parts = [to.call("permute", x, (0, *range(2, rank + 2), 1)) for x in xs]
    for axis, s in reversed(list(enumerate(layer.stride))):
        parts = [to.call("stack", parts[i : i + s], axis + 2) for i in range(0, len(parts), s)]
    y = to.call("reshape", parts[0], (-1, *sizes[1:], sizes[0]))
    return to.call("permute", y, (0, rank + 1, *range(1, rank + 1)))


def _cast(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, Cast)
    return to.graph.call_method("to", (x, getattr(to.torch, node.layer.dtype)))


def _plain(function: str, **names: str) -> Form:
    """A function of x and some of the layer's attributes; `names` says what torch calls those."""

    def form(to: _Builder, node: Node, w: Weights, x: Value) -> Value:
        given = node.layer.attributes()
        return to.call(function, x, **{torch_name: given[name] for torch_name, name in names.items()})

    return form


_FORMS: dict[type[Layer], Form] = {
    ReLU: _relu,
    LeakyReLU: _plain("leaky_relu", negative_slope="slope"),
    Clip: _plain("clamp", min="low", max="high"),
    Cast: _cast,
    Sigmoid: _plain("sigmoid"),
    Tanh: _plain("tanh"),
    SiLU: _plain("silu"),
    GELU: _plain("gelu", approximate="approximate"),
    ELU: _plain("elu", alpha="alpha"),
    SELU: _plain("selu"),
    HardSwish: _plain("hardswish"),
    Softplus: _plain("softplus"),
    Softsign: _plain("softsign"),
    Mish: _plain("mish"),
    **{kind: _plain(kind.__name__.lower()) for kind in (Abs, Sqrt, Reciprocal, Exp, Log, Sin, Cos, Erf)},
    Softmax: _plain("softmax", dim="axis"),
    LogSoftmax: _plain("log_softmax", dim="axis"),
    Linear: _linear,
    Conv1d: _conv,
    Conv2d: _conv,
    ConvTranspose1d: _conv_transpose,
    ConvTranspose2d: _conv_transpose,
    Embedding: lambda to, node, w, x: to.call("embedding", x, w["weight"]),
    BatchNorm1d: _batch_norm,
    BatchNorm2d: _batch_norm,
    LayerNorm: _row_norm,
    RMSNorm: _row_norm,
    GroupNorm: _row_norm,
    MaxPool1d: _max_pool,
    MaxPool2d: _max_pool,
    AvgPool1d: _avg_pool,
    AvgPool2d: _avg_pool,
    GlobalMax: _reduce("amax"),
    GlobalMean: _reduce("mean"),
    GlobalMin: _reduce("amin"),
    GlobalSum: _reduce("sum"),
    GlobalNorm: _reduce("norm"),
    Add: _combine("add"),
    Mul: _combine("mul"),
    Max: _combine("maximum"),
    Min: _combine("minimum"),
    Sub: _ordered("sub"),
    Div: _ordered("div"),
    Pow: _ordered("pow"),
    PReLU: _prelu,
    MatMul: _ordered("matmul"),
    Concat: lambda to, node, w, *xs: to.call("cat", xs, node.layer.attributes()["axis"]),
    Interleave: _interleave,
    Identity: lambda to, node, w, x: x,
    Dropout: lambda to, node, w, x: x,
    Permute: _plain("permute", dims="axes"),
    Reshape: lambda to, node, w, x: to.call("reshape", x, (-1, *to.net.types[node.name].row_shape)),
    ToPixels: _to_pixels,
}
