"""Text networks that tests put through engines: an embedding, convolutions side by side, maxima over time."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import (  # fmt: skip
    GELU,
    Concat,
    Conv1d,
    Embedding,
    GlobalMax,
    LeakyReLU,
    Linear,
    Permute,
    ReLU,
    SequenceMax,
    Sigmoid,
    Tanh,
    TokenConv,
)
from onchip.network.types import TensorType


def weight(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def text_network(
    V=60, E=10, S=11, branches=((3, 40), (5, 40)), dtype="int32", bias=True, activation=ReLU, conv=None, behind=False
):
    """Embedding, convolutions of (taps, channels) side by side, activation, maximum over time, Linear.

    behind  the activation stands behind the maximum
    """
    weights = {"emb": weight(V, E), "fc": weight(4, sum(C for _, C in branches), scale=0.2)}
    nodes = [Node("emb", Embedding(), ("ids",), {"weight": "emb"}), Node("turn", Permute((0, 2, 1)), ("emb",))]
    ends = []
    for i, (K, C) in enumerate(branches):
        weights[f"w{i}"] = weight(C, E, K, seed=i, scale=1 / np.sqrt(E * K))
        roles = {"weight": f"w{i}"}
        if bias:
            weights[f"b{i}"] = weight(C, seed=i)
            roles["bias"] = f"b{i}"
        nodes.append(Node(f"conv{i}", conv or Conv1d(), ("turn",), roles))
        for layer in (GlobalMax((-1,)), activation()) if behind else (activation(), GlobalMax((-1,))):
            nodes.append(Node(f"{layer.kind}{i}", layer, (nodes[-1].name,)))
        ends.append(nodes[-1].name)
    nodes += [Node("cat", Concat(1), tuple(ends)), Node("fc", Linear(), ("cat",), {"weight": "fc"})]
    return Network({"ids": TensorType(("B", S), dtype)}, tuple(nodes), ("fc",), weights)


def with_lengths(net, dtype="int32"):
    """The same network for sentences of different lengths, a second input: each maximum over windows within them."""
    nodes = []
    for node in net.nodes:
        if isinstance(node.layer, GlobalMax):
            conv = net.by_name[node.inputs[0]]
            while not isinstance(conv.layer, Conv1d | TokenConv):
                conv = net.by_name[conv.inputs[0]]
            shape, pads = net.weights[conv.weights["weight"]].shape, conv.layer.pads
            stride = conv.layer.stride if isinstance(conv.layer, TokenConv) else conv.layer.stride[0]
            K = shape[1] if isinstance(conv.layer, TokenConv) else shape[2]
            node = Node(node.name, SequenceMax(max(1, K - pads[0]), stride), (*node.inputs, "lengths"))
        nodes.append(node)
    inputs = {**net.inputs, "lengths": TensorType(("B",), dtype)}
    return Network(inputs, tuple(nodes), net.outputs, net.weights)


def some_lengths(net, B, seed=0):
    """Of every kind: none, too short for a window, up to the end, past it."""
    S = next(iter(net.inputs.values())).row_size
    return np.random.default_rng(seed).integers(-1, S + 3, B).astype(net.inputs["lengths"].dtype)


NETWORKS = {
    "two branches": text_network(),
    "four branches, odd widths": text_network(branches=((3, 7), (5, 129), (7, 16), (2, 200)), dtype="int64"),
    "one branch": text_network(branches=((4, 33),), activation=Tanh),
    "one tap, one channel": text_network(branches=((1, 1),), V=2, E=2000, S=1),
    "pads and stride": text_network(conv=Conv1d((2,), (2, 3)), activation=Sigmoid),
    "as long as the sentence": text_network(branches=((11, 130),), bias=False),
    "leaky": text_network(activation=lambda: LeakyReLU(0.3)),
    "flat": text_network(activation=lambda: LeakyReLU(0.0), branches=((2, 19),)),
    "behind the maximum": text_network(activation=Tanh, behind=True),
    "one branch, behind": text_network(branches=((4, 33),), behind=True),
    # Behind the maximum it does not matter whether it falls.
    "falling behind": text_network(activation=GELU, behind=True),
    "leaky behind": text_network(activation=lambda: LeakyReLU(-0.5), behind=True, branches=((3, 21), (3, 6))),
}
