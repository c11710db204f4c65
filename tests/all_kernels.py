"""One network of all kernels of a GPU, ids and images in, and arrays where a GPU finds them: real or emulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from fake_cuda import Array
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    LSTM,
    Add,
    AvgPool2d,
    Concat,
    Conv2d,
    CumSum,
    Embedding,
    GlobalMax,
    LayerNorm,
    Linear,
    LinearResize,
    MaxPool2d,
    Mul,
    Permute,
    ReLU,
    Reshape,
    SequenceMax,
    Sigmoid,
    Slice,
    Softmax,
    Tanh,
    TokenConv,
)
from onchip.network.types import TensorType
from onchip.runtime.cuda.gpu import Gpu

WORDS, PAIRS, COUNTS = 40, 30, 50  # rows of the tables
S = 6  # ids a row


def weight(*shape: int) -> np.ndarray:
    fan = np.prod(shape[1:]) if len(shape) > 1 else 1
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(fan))


def all_kernels(width: int = 2100) -> Network:
    """Branches over words, pairs and an image, which meet in a sum.

    words, pairs  (B, S) ids of an Embedding and of a TokenConv; the prefix sums of words are ids of a third table
    image         (B, 3, 10, 9)
    lengths       (B,) of words
    width         of the largest layer: by default more than an SM holds
    """
    nodes = (
        Node("words.rows", Embedding(), ("words",), {"weight": "words.table"}),
        Node("words.norm", LayerNorm(), ("words.rows",)),
        Node("words.turned", Permute((0, 2, 1)), ("words.norm",)),
        Node("words.sums", CumSum(2), ("words.turned",)),
        Node("words.flat", Reshape(), ("words.sums",)),
        Node("totals", CumSum(1), ("words",)),
        Node("totals.rows", Embedding(), ("totals",), {"weight": "totals.table"}),
        Node("totals.most", GlobalMax((1,)), ("totals.rows",)),
        Node("pairs.sums", TokenConv(), ("pairs",), {"weight": "pairs.table"}),
        Node("pairs.max", GlobalMax((2,)), ("pairs.sums",)),
        Node("conv", Conv2d(pads=(1, 1, 1, 1)), ("image",), {"weight": "conv.weight", "bias": "conv.bias"}),
        Node("halves", Conv2d(groups=2), ("conv",), {"weight": "halves.weight"}),
        Node("apart", Conv2d(pads=(1, 1, 1, 1), groups=8), ("halves",), {"weight": "apart.weight"}),
        Node("relu", ReLU(), ("apart",)),
        Node("pool", MaxPool2d((2, 2)), ("relu",)),
        Node("smooth", AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1)), ("pool",)),
        Node("mirrored", Slice((0, 0, 3), (8, 5, 4), (1, 1, -1)), ("smooth",)),
        Node("stretched", LinearResize((8, 5, 4), (1.0, 1.25, 1.0)), ("mirrored",)),
        Node("both", Concat(1), ("pool", "stretched")),
        Node("soft", Softmax(1), ("both",)),
        Node("image.flat", Reshape(), ("soft",)),
        Node("words.max", SequenceMax(2), ("words.turned", "lengths")),
        Node("words.walked", LSTM(output="last"), ("words.rows",), {"recurrence": "words.recurrence"}),
        Node("all", Concat(1), ("words.flat", "words.max", "words.walked", "image.flat")),
        Node("wide", Linear(), ("all",), {"weight": "wide.weight"}),
        Node("tanh", Tanh(), ("wide",)),
        Node("narrow", Linear(), ("tanh",), {"weight": "narrow.weight"}),
        Node("gate", Sigmoid(), ("pairs.max",)),
        Node("gated", Mul(), ("narrow", "gate")),
        Node("y", Add(), ("gated", "totals.most")),
    )
    weights = {
        "words.table": weight(WORDS, 8), "totals.table": weight(COUNTS, 5), "pairs.table": weight(PAIRS, 3, 5),
        "conv.weight": weight(8, 3, 3, 3), "conv.bias": weight(8), "apart.weight": weight(8, 1, 3, 3),
        "halves.weight": weight(8, 4, 1, 1), "words.recurrence": weight(1, 8, 2),
        "wide.weight": weight(width, 8 * S + 8 + 2 + 16 * 5 * 4), "narrow.weight": weight(5, width),
    }  # fmt: skip
    given = {
        "words": TensorType(("B", S), "int64"),
        "pairs": TensorType(("B", S), "int32"),
        "image": TensorType(("B", 3, 10, 9)),
        "lengths": TensorType(("B",), "int32"),
    }
    return Network(given, nodes, ("y", "soft"), weights)


def inputs(B: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Ids of words are small, so that their prefix sums are valid ids, too."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, COUNTS // S, (B, S))
    pairs = rng.integers(0, PAIRS, (B, S)).astype(np.int32)
    image = rng.standard_normal((B, 3, 10, 9), dtype=np.float32)
    return words, pairs, image, rng.integers(0, S + 1, B).astype(np.int32)


class EmulatedArrays:
    """Arrays of the emulated GPU; a stream is an int, on which they are ready."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def streams(self, count: int) -> list[int]:
        return [self._gpu.new_stream() for _ in range(count)]

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        yield

    def put(self, x: np.ndarray, stream: int) -> Any:
        return Array(self._gpu, x, stream=stream)

    def fetch(self, y: Any) -> np.ndarray:
        return y.numpy()


class TorchArrays:
    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def streams(self, count: int) -> list[Any]:
        return [self._torch.cuda.Stream() for _ in range(count)]

    def on(self, stream: Any) -> Any:
        return self._torch.cuda.stream(stream)

    def put(self, x: np.ndarray, stream: Any) -> Any:
        return self._torch.from_numpy(x).cuda()

    def fetch(self, y: Any) -> np.ndarray:
        return y.cpu().numpy()
