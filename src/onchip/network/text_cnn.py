"""A convolutional network for sentences: Kim, Convolutional Neural Networks for Sentence Classification, 2014."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onchip.errors import InputError
from onchip.files import check_memory
from onchip.network.build import MAX_PARAMETERS
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Conv1d, Dropout, Embedding, GlobalMax, Linear, Permute, ReLU
from onchip.network.reading import show
from onchip.network.recipe import Array, Weight
from onchip.network.types import BATCH, TensorType

EMBEDDING, CHANNELS, KERNELS, DROPOUT = 300, 100, (3, 4, 5), 0.5  # Kim's
_EMBEDDED = 0.25  # largest absolute value of an initial embedding, as Kim's
_COPIES = 5  # of the weights: initial, trained, gradients, two optimiser states


def text_cnn(
    vocabulary: int,
    length: int,
    classes: int,
    *,
    embedding: int = EMBEDDING,
    channels: int = CHANNELS,
    kernels: Sequence[int] = KERNELS,
    dropout: float = DROPOUT,
    seed: int = 0,
    name: str = "text_cnn",
) -> Network:
    """ids (B, length) int32 below `vocabulary` -> logits (B, classes).

    Embedding; for each width in `kernels` a Conv1d of `channels`, ReLU and the maximum over the sentence; Dropout;
    Linear. Initial weights, which another framework can repeat: `rng = numpy.random.default_rng(seed)`, then
    `rng.random(shape, dtype=float32) * 2 - 1`, first the table, times 0.25; then the weight of each convolution and of
    the Linear, times sqrt(1 / fan-in). Biases are zero.
    """
    kernels = _checked_kernels(kernels)
    sizes = {"vocabulary": vocabulary, "length": length, "classes": classes, "embedding": embedding,
             "channels": channels, "seed": seed}  # fmt: skip
    for size_name, size in sizes.items():
        least = {"length": max(kernels), "seed": 0}.get(size_name, 1)
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least:
            expected, why = f"a whole number of at least {least}", ", the widest kernel" * (size_name == "length")
            raise InputError(f"bad {size_name}", got=show(size), expected=f"{expected}{why}", hint=f"{size_name}=100")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError("bad dropout", got=show(dropout), expected="at least 0, below 1", hint="dropout=0.5")
    parameters = vocabulary * embedding + sum(kernels) * embedding * channels + len(kernels) * channels * classes
    if parameters > MAX_PARAMETERS:
        got, expected = f"{parameters:,} parameters", f"at most {MAX_PARAMETERS:,}"
        raise InputError("the network is too large", got=got, expected=expected, hint="a smaller vocabulary")
    check_memory(parameters * 4 * _COPIES, "the network")

    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], largest: float) -> Array:
        return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(largest)

    weights: dict[str, Weight] = {"embedding.weight": draw((vocabulary, embedding), _EMBEDDED)}
    nodes = [
        Node("embedding", Embedding(), ("ids",), {"weight": "embedding.weight"}),
        Node("channels_first", Permute((0, 2, 1)), ("embedding",)),
    ]
    for K in kernels:
        weights[f"conv{K}.weight"] = draw((channels, embedding, K), (embedding * K) ** -0.5)
        weights[f"conv{K}.bias"] = np.zeros(channels, np.float32)
        nodes += [
            Node(f"conv{K}", Conv1d(), ("channels_first",), _both(f"conv{K}")),
            Node(f"relu{K}", ReLU(), (f"conv{K}",)),
            Node(f"max{K}", GlobalMax((-1,)), (f"relu{K}",)),
        ]
    nodes.append(Node("concat", Concat(1), tuple(f"max{K}" for K in kernels)))
    if dropout:
        nodes.append(Node("dropout", Dropout(dropout), ("concat",)))
    width = channels * len(kernels)
    weights["fc.weight"], weights["fc.bias"] = draw((classes, width), width**-0.5), np.zeros(classes, np.float32)
    nodes.append(Node("fc", Linear(), (nodes[-1].name,), _both("fc")))
    return Network({"ids": TensorType((BATCH, int(length)), "int32")}, tuple(nodes), ("fc",), weights, name)


def _checked_kernels(kernels: Sequence[int]) -> tuple[int, ...]:
    is_list = isinstance(kernels, Sequence) and len(kernels) > 0
    if not is_list or len(set(kernels)) < len(kernels) or any(type(K) is not int or K < 1 for K in kernels):
        expected = "widths of at least 1, each once"
        raise InputError("bad kernels", got=show(kernels), expected=expected, hint="kernels=(3, 4, 5)")
    return tuple(kernels)


def _both(name: str) -> dict[str, str]:
    return {"weight": f"{name}.weight", "bias": f"{name}.bias"}
