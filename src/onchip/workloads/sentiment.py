"""sentiment: classify sentences of 16 tokens as good or bad, by four convolutions over embedded tokens and an MLP.

ids (B, 16) -> embedding -> Conv1d of widths 3, 5, 7 and 9, ReLU, max over time, concatenated
-> Linear 2,048, 1,024, 512 with ReLU -> Linear 2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise

from onchip.formats.weights.flat_file import FlatTensor, draw_flat, read_flat
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Conv1d, Embedding, GlobalMax, Linear, Permute, ReLU, SequenceMax
from onchip.network.recipe import Weight
from onchip.network.types import BATCH, TensorType

VOCABULARY, EMBEDDING, CHANNELS, KERNELS, LENGTH = 21_635, 4_096, 1_024, (3, 5, 7, 9), 16
HIDDEN, CLASSES = (2_048, 1_024, 512), 2
SENTENCES = 16_384  # the job


def network(
    weights: str | os.PathLike[str] | None = None,
    seed: int = 0,
    *,
    vocabulary: int = VOCABULARY,
    embedding: int = EMBEDDING,
    channels: int = CHANNELS,
    kernels: Sequence[int] = KERNELS,
    length: int = LENGTH,
    hidden: Sequence[int] = HIDDEN,
    classes: int = CLASSES,
    lengths: bool = False,
) -> Network:
    """The network with weights from a file (params.bin, in the order of `layout`), or seeded ones (draw_flat).

    lengths  add sentence lengths as a second input (B,) int32: maxima are over windows within the sentence, and 0 if
             there are none; ids past the end have no effect
    """
    widths = (channels * len(kernels), *hidden, classes)
    stored = layout(vocabulary, embedding, channels, kernels, widths)
    found: dict[str, Weight] = {**(draw_flat(stored, seed) if weights is None else read_flat(weights, stored))}

    nodes = [
        Node("emb", Embedding(), ("ids",), {"weight": "emb.weight"}),
        Node("channels_first", Permute((0, 2, 1)), ("emb",)),
    ]
    for K in kernels:
        nodes += [
            Node(f"conv{K}", Conv1d(), ("channels_first",), _both(f"conv{K}")),
            Node(f"relu{K}", ReLU(), (f"conv{K}",)),
            Node(f"max{K}", SequenceMax(K), (f"relu{K}", "lengths")) if lengths
            else Node(f"max{K}", GlobalMax((-1,)), (f"relu{K}",)),
        ]  # fmt: skip
    nodes.append(Node("concat", Concat(1), tuple(f"max{K}" for K in kernels)))
    last = len(widths) - 1
    for i in range(1, last + 1):
        nodes.append(Node(f"fc{i}", Linear(), (nodes[-1].name,), _both(f"fc{i}")))
        if i < last:
            nodes.append(Node(f"relu_fc{i}", ReLU(), (f"fc{i}",)))
    inputs = {"ids": TensorType((BATCH, length), "int32")}
    if lengths:
        inputs["lengths"] = TensorType((BATCH,), "int32")
    return Network(inputs, tuple(nodes), (f"fc{last}",), found, "sentiment")


def layout(
    vocabulary: int, embedding: int, channels: int, kernels: Sequence[int], widths: Sequence[int]
) -> list[FlatTensor]:
    """Layout of params.bin: the table; each convolution (C_out, C_in, K), bias; each Linear (out, in), bias.

    Seeded weights have standard deviation sqrt(2 / fan-in), which keeps the scale of activations from layer to layer.
    """
    tensors = [FlatTensor("emb.weight", (vocabulary, embedding), 1.0)]
    for K in kernels:
        tensors += _layer(f"conv{K}", (channels, embedding, K))
    for i, (D_in, D_out) in enumerate(pairwise(widths), start=1):
        tensors += _layer(f"fc{i}", (D_out, D_in))
    return tensors


def _layer(name: str, shape: tuple[int, ...]) -> list[FlatTensor]:
    spread = math.sqrt(2 / max(1, math.prod(shape[1:])))
    return [FlatTensor(f"{name}.weight", shape, spread), FlatTensor(f"{name}.bias", shape[:1], 0.1)]


def _both(name: str) -> dict[str, str]:
    return {"weight": f"{name}.weight", "bias": f"{name}.bias"}
