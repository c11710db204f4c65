"""Algebra that can be done once: each rewrite is a pure function Network -> Network.

A rewrite derives weights only as recipes, so planning costs nothing however large the network is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.spec.layers import Linear, Reshape
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Recipe, Weight


def drop_unread(net: Network) -> tuple[Network, list[str]]:
    """A layer whose value nobody reads and that is no output   becomes   nothing."""
    needed = set(net.outputs)
    kept = []
    for node in reversed(net.nodes):
        if node.name in needed:
            needed.update(node.inputs)
            kept.append(node)
    if len(kept) == len(net.nodes):
        return net, []
    told = [f"dropped {node.name}: nobody reads it" for node in net.nodes if node.name not in needed]
    return net.replace(nodes=reversed(kept)), told


def drop_idle_reshapes(net: Network) -> tuple[Network, list[str]]:
    """x -> Reshape to the shape it has -> f   becomes   x -> f."""
    alias: dict[str, str] = {}
    nodes, told = [], []
    for node in net.nodes:
        inputs = tuple(alias.get(value, value) for value in node.inputs)
        idle = isinstance(node.layer, Reshape) and net.types[node.name] == net.types[node.inputs[0]]
        if idle and node.name not in net.outputs:
            alias[node.name] = inputs[0]
            told.append(f"dropped {node.name}: it changes nothing")
        else:
            nodes.append(Node(node.name, node.layer, inputs, node.weights))
    return (net.replace(nodes=nodes), told) if told else (net, [])


def merge_linears(net: Network) -> tuple[Network, list[str]]:
    """Linear(W1, b1) -> Linear(W2, b2)   becomes   Linear(W2 W1, W2 b1 + b2), where that is less work.

    Only where nothing stands between them, nobody else reads the first, and the product has fewer numbers
    than its factors (a bottleneck stays). The product is taken in float64 and rounded once.
    """
    for second in net.nodes:
        if not isinstance(second.layer, Linear):
            continue
        first = next((n for n in net.nodes if n.name == second.inputs[0]), None)
        if first is None or not isinstance(first.layer, Linear) or first.name in net.outputs:
            continue
        if len(net.readers(first.name)) != 1:
            continue
        D_mid, D_in = net.weights[first.weights["weight"]].shape
        D_out, _ = net.weights[second.weights["weight"]].shape
        if D_out * D_in >= D_mid * (D_in + D_out):
            continue
        merged = _merge(net, first, second)
        rest, told = merge_linears(merged)
        return rest, [f"merged {first.name} into {second.name}: {D_in}-{D_mid}-{D_out} is one {D_in}-{D_out}", *told]
    return net, []


def _merge(net: Network, first: Node, second: Node) -> Network:
    w1, w2 = first.weights["weight"], second.weights["weight"]
    b1, b2 = first.weights.get("bias"), second.weights.get("bias")
    dtype = net.weight_type(w2).dtype
    D_mid, D_in = net.weights[w1].shape
    D_out, _ = net.weights[w2].shape

    def weight(W1: Array, W2: Array) -> Array:
        return (W2.astype(np.float64) @ W1.astype(np.float64)).astype(W2.dtype)

    weights: dict[str, Weight] = dict(net.weights)
    merged = f"{first.name}+{second.name}"  # `first` vanishes here, so no later merge makes this name again
    roles = {"weight": f"{merged}.weight"}
    weights[roles["weight"]] = Recipe("merge_linear", (w1, w2), (D_out, D_in), dtype, 2 * D_out * D_mid * D_in, weight)
    if b1 is not None:

        def bias(W2: Array, B1: Array, *B2: Array) -> Array:
            total = W2.astype(np.float64) @ B1.astype(np.float64)
            return (total + B2[0].astype(np.float64) if B2 else total).astype(W2.dtype)

        roles["bias"] = f"{merged}.bias"
        sources = (w2, b1) if b2 is None else (w2, b1, b2)
        weights[roles["bias"]] = Recipe("merge_linear_bias", sources, (D_out,), dtype, 2 * D_out * D_mid, bias)
    elif b2 is not None:
        roles["bias"] = b2
    joined = Node(second.name, Linear(), first.inputs, roles)
    nodes = [joined if node is second else node for node in net.nodes if node is not first]
    return net.replace(nodes=nodes, weights=weights)


REWRITES: tuple[Callable[[Network], tuple[Network, list[str]]], ...] = (
    drop_unread,
    drop_idle_reshapes,
    merge_linears,
)


def rewrite(net: Network) -> tuple[Network, tuple[str, ...]]:
    """Apply every rewrite once, in order; also says what was done, a line each."""
    told: list[str] = []
    for step in REWRITES:
        net, lines = step(net)
        told += lines
    return net, tuple(told)
