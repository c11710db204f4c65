"""A network as a torch module: a sequence of torch functions with the same weights.

The module is a torch.fx graph, so calling it has no more Python overhead than a hand-written module, and
torch.compile sees plain calls.
"""

from __future__ import annotations

import functools
from typing import Any

from onchip.bench.frame import UnavailableError
from onchip.bench.peers.frameworks.torch_forms import choice, recurrent, windows
from onchip.bench.peers.frameworks.torch_forms.builder import Builder, Form, Value, Weights
from onchip.network.graph import Network, Node
from onchip.network.layers import (
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
    Interleave,
    Layer,
    LayerNorm,
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


def torch_module(net: Network, trains: bool = False) -> Any:
    """The network as a torch.fx.GraphModule; its parameters are the nodes' weights, in order.

    trains  batch norms by the batch's statistics, dropouts drop
    """
    import torch

    builder = Builder(torch, net, trains)
    for node in net.nodes:
        form = FORMS.get(type(node.layer)) or _spelled(node.layer)
        if form is None:
            raise UnavailableError(f"no torch function for {node.layer}")
        builder.add(node, form)
    outputs = tuple(builder.values[name] for name in net.outputs)
    builder.graph.output(outputs if len(outputs) > 1 else outputs[0])
    builder.graph.eliminate_dead_code()  # e.g. a Linear that a later node has inlined
    return torch.fx.GraphModule(builder.root, builder.graph)


def _relu(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    return fx.call("relu_" if fx.may_overwrite(node.inputs[0]) else "relu", x)


def _linear(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    return fx.call("linear", x, w["weight"], w.get("bias"))


def _batch_norm(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, BatchNorm1d | BatchNorm2d)
    weights = w["mean"], w["var"], w.get("weight"), w.get("bias")
    return fx.call("batch_norm", x, *weights, training=fx.trains, eps=node.layer.eps)


def _row_norm(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    if isinstance(layer, GroupNorm):
        return fx.call("group_norm", x, layer.groups, w.get("weight"), w.get("bias"), layer.eps)
    assert isinstance(layer, LayerNorm | RMSNorm)
    shape = layer.weight_shape(fx.net.types[node.inputs[0]])
    if isinstance(layer, RMSNorm):
        return fx.call("rms_norm", x, shape, w.get("weight"), layer.eps)
    return fx.call("layer_norm", x, shape, w.get("weight"), w.get("bias"), layer.eps)


def _reduce(function: str) -> Form:
    def form(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
        attributes = node.layer.attributes()
        return fx.call(function, x, dim=attributes["axes"], keepdim=attributes["keep"])

    return form


def _binary(function: str) -> Form:
    def form(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
        operands = [w[role] for role in ("first",) if role in w] + [*xs] + [w[r] for r in ("constant",) if r in w]
        return fx.call(function, *operands)

    return form


def _prelu(fx: Builder, node: Node, w: Weights, x: Value, *slopes: Value) -> Value:
    """torch's prelu accepts only one slope per channel."""
    slope = slopes[0] if slopes else w["constant"]
    return fx.call("where", fx.call("ge", x, 0), x, fx.call("mul", x, slope))


def _combine(function: str) -> Form:
    def form(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
        return functools.reduce(lambda a, b: fx.call(function, a, b), [*xs, *w.values()])

    return form


def _mask(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
    return fx.call("where", fx.call("ne", w.get("mask", xs[-1]), 0), w.get("first", xs[0]), 0)


def _div(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
    operands = [*(w[role] for role in ("first",) if role in w), *xs, *(w[role] for role in ("constant",) if role in w)]
    is_float = "float" in fx.net.types[node.name].dtype
    return fx.call("div", *operands, rounding_mode=None if is_float else "trunc")


def _mod(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
    return _binary("fmod" if node.layer.attributes()["truncated"] else "remainder")(fx, node, w, *xs)


def _compare(function: str) -> Form:
    def form(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
        dtype = getattr(fx.torch, fx.net.types[node.name].dtype)
        return fx.graph.call_method("to", (_binary(function)(fx, node, w, *xs), dtype))

    return form


def _hard_sigmoid(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """torch's hardsigmoid has a fixed slope of 1/6."""
    layer = node.layer
    assert isinstance(layer, HardSigmoid)
    return fx.call("clamp", fx.call("add", fx.call("mul", x, layer.slope), layer.shift), 0, 1)


def _to_pixels(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """The usual torch code; unlike ToPixels, it does not map NaN to 0."""
    y = fx.call("add", x, 1)
    for function, operand in (("div_", 2), ("mul_", 255)):
        y = fx.graph.call_method(function, (y, operand))
    return fx.graph.call_method("to", (fx.graph.call_method("clamp_", (y, 0, 255)), fx.torch.uint8))


def _cast(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, Cast | ToInts)
    return fx.graph.call_method("to", (x, getattr(fx.torch, node.layer.dtype)))


def _spelled(layer: Layer) -> Form | None:
    """The torch function that an elementwise layer names."""
    spelling = layer.torch if isinstance(layer, Elementwise) else None
    return None if spelling is None else _call(spelling.name, **spelling.attributes)


def _call(function: str, **names: str) -> Form:
    """A torch function of x; `names` maps torch's keywords to the layer's attributes."""

    def form(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
        attributes = node.layer.attributes()
        return fx.call(function, x, **{torch_name: attributes[name] for torch_name, name in names.items()})

    return form


# All but elementwise layers that name their function, and TokenConv, which only a rewrite creates: peers get the
# network before rewrites.
FORMS: dict[type[Layer], Form] = {
    ReLU: _relu,
    Cast: _cast,
    ToInts: _cast,
    HardSigmoid: _hard_sigmoid,
    Softmax: _call("softmax", dim="axis"),
    LogSoftmax: _call("log_softmax", dim="axis"),
    Linear: _linear,
    Conv1d: windows.conv,
    Conv2d: windows.conv,
    ConvTranspose1d: windows.conv_transpose,
    ConvTranspose2d: windows.conv_transpose,
    Embedding: lambda fx, node, w, x: fx.call("embedding", x, w["weight"]),
    BatchNorm1d: _batch_norm,
    BatchNorm2d: _batch_norm,
    LayerNorm: _row_norm,
    RMSNorm: _row_norm,
    GroupNorm: _row_norm,
    MaxPool1d: windows.max_pool,
    MaxPool2d: windows.max_pool,
    AvgPool1d: windows.avg_pool,
    AvgPool2d: windows.avg_pool,
    GlobalMax: _reduce("amax"),
    GlobalMean: _reduce("mean"),
    GlobalMin: _reduce("amin"),
    GlobalSum: _reduce("sum"),
    GlobalNorm: _reduce("norm"),
    Add: _combine("add"),
    Mul: _combine("mul"),
    Max: _combine("maximum"),
    Min: _combine("minimum"),
    Sub: _binary("sub"),
    Div: _div,
    Mod: _mod,
    Pow: _binary("pow"),
    PReLU: _prelu,
    Mask: _mask,
    Greater: _compare("gt"),
    GreaterOrEqual: _compare("ge"),
    Equal: _compare("eq"),
    MatMul: _binary("matmul"),
    Concat: lambda fx, node, w, *xs: fx.call("cat", xs, node.layer.attributes()["axis"]),
    Interleave: windows.interleave,
    Identity: lambda fx, node, w, x: x,
    Dropout: lambda fx, node, w, x: fx.call("dropout", x, node.layer.attributes()["p"]) if fx.trains else x,
    Permute: _call("permute", dims="axes"),
    Reshape: lambda fx, node, w, x: fx.call("reshape", x, (-1, *fx.net.types[node.name].row_shape)),
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
