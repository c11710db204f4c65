"""16-bit values between layers, for a job in fp16 or bf16."""

from __future__ import annotations

import dataclasses
from typing import cast

from onchip.network.graph import Network, Node
from onchip.network.io import with_io_dtypes
from onchip.network.layers import (
    ArgMax,
    ArgMin,
    ArgTopK,
    Broadcast,
    Cast,
    Convolution,
    Embedding,
    Linear,
    MatMul,
    ToInts,
    TokenConv,
    TransposedConvolution,
)
from onchip.network.layers.cast import CastTo
from onchip.network.recipe import Recipe, Weight, as_is
from onchip.network.types import TensorType
from onchip.plan.rewrites.drop import drop_idle, drop_unread
from onchip.plan.rewrites.edit import Rewritten

# Their weight must have the dtype of their values.
_TYPED_BY_WEIGHT = (Embedding, TokenConv, Broadcast, MatMul)
_GEMMS = (Linear, MatMul, Convolution, TransposedConvolution, TokenConv)
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # by a job's precision


def narrow_values(net: Network, precision: str) -> Rewritten:
    """x -> f -> g -> y in float32   becomes   x -> Cast(dtype) -> f -> g -> Cast(float32) -> y.

    Layers still compute and accumulate in float32: a kernel rounds what it writes, and gemms would round their operands
    anyway. This halves the bytes between kernels. ArgMax and similar layers read a network input unrounded: rounding
    may create ties. Nothing changes in a network with float64, without gemms (precision applies to gemms), or that
    casts floats to ids: 16 bits hold only the first few hundred exactly.
    """
    dtypes = {t.dtype for t in net.types.values()}
    has_gemms = any(isinstance(node.layer, _GEMMS) for node in net.nodes)
    casts_to_ids = any(isinstance(node.layer, ToInts) and node.layer.dtype != "bool" for node in net.nodes)
    if precision not in _DTYPES or not has_gemms or casts_to_ids or "float64" in dtypes or "float32" not in dtypes:
        return net, []
    dtype = _DTYPES[precision]
    weights: dict[str, Weight] = dict(net.weights)

    def narrowed(node: Node) -> Node:
        if isinstance(node.layer, Cast):
            return dataclasses.replace(node, layer=Cast(cast(CastTo, _narrow(node.layer.dtype, dtype))))
        role = next((role for role in ("weight", "constant", "first", "mask") if role in node.weights), "")
        name = node.weights.get(role, "")
        if not isinstance(node.layer, _TYPED_BY_WEIGHT) or not role or net.weight_type(name).dtype != "float32":
            return node
        narrow_name = f"{name}.{dtype}"
        weights[narrow_name] = Recipe.of(as_is, (name,), net.weights[name].shape, dtype)
        return dataclasses.replace(node, weights={**node.weights, role: narrow_name})

    inputs = {name: TensorType(t.shape, _narrow(t.dtype, dtype)) for name, t in net.inputs.items()}
    nodes = tuple(map(narrowed, net.nodes))
    inside = Network(inputs, nodes, net.outputs, weights, net.name)
    io_dtypes = {name: net.types[name].dtype for name in (*net.inputs, *net.outputs)}
    narrow = drop_unread(drop_idle(_read_inputs_unrounded(with_io_dtypes(inside, io_dtypes)))[0])[0]
    return narrow, [f"stored values between layers in {dtype}"]


def _read_inputs_unrounded(net: Network) -> Network:
    source_of = {
        node.name: node.inputs for node in net.nodes if isinstance(node.layer, Cast) and node.inputs[0] in net.inputs
    }
    nodes = (
        dataclasses.replace(node, inputs=source_of.get(node.inputs[0], node.inputs))
        if isinstance(node.layer, ArgMax | ArgMin | ArgTopK | ToInts)
        else node
        for node in net.nodes
    )
    return Network(net.inputs, tuple(nodes), net.outputs, net.weights, net.name)


def _narrow(dtype: str, narrow: str) -> str:
    return narrow if dtype == "float32" else dtype
