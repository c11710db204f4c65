"""One or more small cases of every layer, odd on purpose: for tests that go through the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    GELU,
    GRU,
    LSTM,
    RNN,
    SELU,
    Abs,
    Add,
    ArgMax,
    ArgMin,
    ArgTopK,
    Atan,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Ceil,
    Clip,
    Concat,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Cos,
    CumSum,
    Div,
    Dropout,
    Embedding,
    Equal,
    Erf,
    Exp,
    Floor,
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
    HardSwish,
    Identity,
    Interleave,
    Layer,
    LayerNorm,
    LeakyReLU,
    Linear,
    LinearResize,
    Log,
    LogSoftmax,
    Mask,
    MatMul,
    Max,
    MaxPool1d,
    MaxPool2d,
    Min,
    Mish,
    Mod,
    Mul,
    NearestResize,
    Pad,
    Permute,
    Pow,
    PReLU,
    Reciprocal,
    ReLU,
    Reshape,
    RMSNorm,
    Round,
    SequenceMax,
    Sigmoid,
    Sign,
    SiLU,
    Sin,
    Slice,
    Softmax,
    Softplus,
    Softsign,
    Sqrt,
    Sub,
    Tanh,
    Tile,
    ToInts,
    TokenConv,
    ToPixels,
    TopK,
)  # fmt: skip
from onchip.network.types import TensorType, numpy_dtype

VOCABULARY = 9


@dataclass(frozen=True)
class Case:
    layer: Layer
    rows: tuple[tuple[int, ...], ...]  # the shape of a row of each input
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reads: tuple[int, ...] = ()  # which input each operand is, if not each once
    positive: bool = False  # its values are positive: for logarithms, roots and quotients

    def __str__(self) -> str:
        return f"{self.layer}-{'+'.join('x'.join(map(str, row)) for row in self.rows)}-{','.join(self.weights)}"

    def takes_ints(self, i: int) -> bool:
        """Whether input i holds ids or lengths."""
        is_length = isinstance(self.layer, SequenceMax) and i == 1
        return isinstance(self.layer, Embedding | TokenConv | Mod) or is_length


def _norm(width: int, *more: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("mean", "var", *more), (width,))


REDUCTIONS = (GlobalMax, GlobalMean, GlobalMin, GlobalSum, GlobalNorm)
CASES = [
    *(Case(layer, ((5, 7),)) for layer in (ReLU(), LeakyReLU(0.2), Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"))),
    *(Case(layer, ((5, 7),)) for layer in (Clip(-0.5, 0.7), Clip(0, 6), Clip(high=0.25), Clip(low=-0.75))),
    *(Case(layer, ((5, 7),)) for layer in (ELU(), ELU(0.3), SELU(), HardSigmoid(), HardSigmoid(1 / 6), HardSwish())),
    *(Case(layer, ((5, 7),)) for layer in (Softplus(), Softsign(), Mish(), Abs(), Exp(), Sin(), Cos(), Erf(), Atan())),
    *(Case(layer, ((5, 7),)) for layer in (Floor(), Ceil(), Round(), Sign())),
    *(Case(layer, ((5, 7),), positive=True) for layer in (Sqrt(), Reciprocal(), Log())),
    *(Case(layer, ((3, 11, 2),)) for layer in (Softmax(), Softmax(2), LogSoftmax(-2), LogSoftmax())),
    Case(Linear(), ((13,),), {"weight": (7, 13), "bias": (7,)}),
    Case(Linear(), ((3, 5),), {"weight": (4, 5)}),
    Case(Conv1d(), ((3, 9),), {"weight": (4, 3, 3), "bias": (4,)}),
    Case(Conv1d((2,), (2, 1), (3,), 2), ((4, 10),), {"weight": (6, 2, 3)}),
    Case(Conv2d(), ((2, 4, 5),), {"weight": (3, 2, 4, 5), "bias": (3,)}),
    Case(Conv2d((2, 1), (1, 0, 2, 3), (1, 2), 3), ((3, 6, 7),), {"weight": (6, 1, 3, 2), "bias": (6,)}),
    Case(ConvTranspose1d(), ((3, 4),), {"weight": (3, 2, 1)}),
    Case(ConvTranspose1d((3,), (1, 2), (2,), (2,), 2), ((4, 5),), {"weight": (4, 3, 4), "bias": (6,)}),
    Case(ConvTranspose2d((2, 2), (1, 1, 2, 2)), ((3, 4, 3),), {"weight": (3, 2, 5, 5), "bias": (2,)}),
    Case(ConvTranspose2d((1, 3), (0, 1, 2, 0), (1, 2), (2, 1), 3), ((3, 3, 4),), {"weight": (3, 2, 2, 3)}),
    Case(Embedding(), ((5,),), {"weight": (VOCABULARY, 4)}),
    Case(Embedding(), ((),), {"weight": (VOCABULARY, 3)}),
    Case(TokenConv(), ((6,),), {"weight": (VOCABULARY, 3, 4), "bias": (4,)}),
    Case(TokenConv(2, (2, 1)), ((7,),), {"weight": (VOCABULARY, 4, 3)}),
    Case(BatchNorm1d(), ((5,),), _norm(5, "weight", "bias")),
    Case(BatchNorm1d(1e-3), ((3, 4),), _norm(3)),
    Case(BatchNorm2d(), ((3, 2, 5),), _norm(3, "bias")),
    Case(BatchNorm2d(), ((2, 3, 3),), _norm(2, "weight")),
    Case(LayerNorm(), ((5, 7),), {"weight": (7,), "bias": (7,)}),
    Case(LayerNorm(2, 1e-3), ((2, 3, 4),), {"bias": (3, 4)}),
    Case(RMSNorm(), ((3, 12),), {"weight": (12,)}),
    Case(RMSNorm(1, 0.1), ((3, 5),)),
    Case(GroupNorm(2), ((6, 3, 5),), {"weight": (6,), "bias": (6,)}),
    Case(GroupNorm(3), ((3, 8),), {"weight": (3,)}),
    Case(MaxPool1d((3,), (2,), (1, 2)), ((3, 9),)),
    Case(MaxPool1d((2,), ceil=True), ((2, 7),)),
    Case(MaxPool2d((2, 3), (2, 1), (1, 0, 0, 2), (1, 2), True), ((3, 6, 7),)),
    Case(AvgPool1d((3,), (2,), (2, 0)), ((3, 9),)),
    Case(AvgPool1d((4,), (3,), (1, 1), (1,), True, True), ((2, 9),)),
    Case(AvgPool2d((2, 3), (2, 2), (1, 0, 1, 2), (1, 1), True), ((3, 6, 7),)),
    Case(AvgPool2d((3, 2), (1, 2), (0, 1, 2, 0), (2, 1), False, True), ((2, 6, 7),)),
    *(Case(kind((-1,)), ((3, 17),)) for kind in REDUCTIONS),
    *(Case(kind((3, -3), True), ((3, 4, 5),)) for kind in REDUCTIONS),
    Case(ArgMax(), ((3, 17),)),
    Case(ArgMax(1, True, True), ((5, 3),)),
    Case(ArgMin(-2, last=True), ((3, 4, 5),)),
    Case(TopK(3), ((3, 17),)),
    Case(TopK(4, 1, False), ((4, 3),)),
    Case(ArgTopK(2, -2), ((2, 5, 3),)),
    Case(ArgTopK(1, largest=False), ((7,),)),
    Case(SequenceMax(), ((3, 7), ())),
    Case(SequenceMax(3, 2), ((4, 5), ())),
    Case(Add(), ((3, 4), (3, 1), (1, 4)), {"constant": (4,)}),
    Case(Add(), ((5,),), reads=(0, 0)),
    Case(Mul(), ((3, 4), (3, 1)), {"constant": (3, 4)}),
    Case(Mul(), ((2, 3),), {"constant": ()}),
    Case(Mul(), ((4,), (4,)), reads=(0, 1, 0)),
    *(Case(kind(), ((3, 4), (3, 1), (1, 4)), {"constant": (4,)}) for kind in (Max, Min)),
    *(Case(kind(), ((3, 1), (3, 4)), positive=True) for kind in (Sub, Div, Pow, PReLU)),
    *(Case(kind(), ((3, 4),), {"first": (4,)}, positive=True) for kind in (Sub, Div, Pow)),
    *(Case(kind(), ((3, 4),), {"constant": (3, 1)}) for kind in (Div, PReLU)),
    Case(Mask(), ((3, 1),), {"mask": (4,)}),
    Case(Mask(), ((3, 1), (1, 4))),
    Case(Mask(), ((3, 1),), {"first": (4,)}),
    *(Case(kind(), ((3, 1), (3, 4))) for kind in (Greater, GreaterOrEqual, Equal)),
    *(Case(kind(), ((3, 4),), {"first": (3, 1)}) for kind in (Greater, GreaterOrEqual, Equal)),
    Case(Equal(), ((3, 4),), reads=(0, 0)),
    Case(Mod(), ((3, 4),), {"constant": (4,)}),
    Case(Mod(True), ((3, 4),), {"constant": (3, 1)}),
    Case(MatMul(), ((5, 3), (3, 7))),
    Case(MatMul(), ((2, 1, 5, 3), (1, 4, 3, 6))),
    Case(MatMul(), ((2, 4, 3),), {"first": (5, 4)}),
    Case(MatMul(), ((2, 4, 3),), {"constant": (2, 3, 2)}),
    Case(Concat(), ((3, 2), (1, 2), (4, 2))),
    Case(Concat(-1), ((3, 2), (3, 5))),
    Case(Interleave((2, 3)), ((2, 3, 2), (2, 3, 2), (2, 3, 1), (2, 2, 2), (2, 2, 2), (2, 2, 1))),
    Case(Interleave((2,)), ((3, 4), (3, 4))),
    Case(Permute((0, 2, 3, 1)), ((2, 3, 4),)),
    Case(Reshape((2, -1)), ((3, 4),)),
    Case(Slice((4, 1), (2, 3), (-3, 2)), ((5, 7),)),
    Case(Slice((0, 4), (3, 8), (1, 1)), ((3, 16),)),
    Case(Gather(-2, (2, 0, 0)), ((3, 4),)),
    Case(Pad((0, 1, 2, 1, 0, -1), value=0.5), ((2, 3, 4),)),
    *(Case(Pad((0, 2, 1, 3), mode), ((2, 4),)) for mode in ("reflect", "edge", "wrap")),
    Case(Tile((1, 3)), ((2, 1),)),
    Case(NearestResize((2, 6, 5), (1.0, 2.0, 1.25)), ((2, 3, 4),)),
    Case(LinearResize((2, 6, 3), (1.0, 2.0, 0.75)), ((2, 3, 4),)),
    Case(LinearResize((7,), (3.5,), "align_corners"), ((2,),)),
    Case(CumSum(), ((3, 19),)),
    Case(CumSum(1, exclusive=True), ((5, 3),)),
    Case(CumSum(-2, exclusive=True, reverse=True), ((5, 3),)),
    Case(CumSum(reverse=True), ((8,),)),
    Case(Identity(), ((3,),)),
    Case(Dropout(0.3), ((3, 2),)),
    Case(ToPixels(), ((2, 5),)),
    Case(LSTM(), ((5, 12),), {"recurrence": (1, 12, 3)}),
    Case(LSTM("bidirectional", "last"), ((4, 24), (2, 3), (2, 3)), {"recurrence": (2, 12, 3)}),
    Case(LSTM("reverse", "cell"), ((3, 8),), {"recurrence": (1, 8, 2)}),
    Case(GRU("bidirectional"), ((4, 30), (2, 5)), {"recurrence": (2, 15, 5), "bias": (2, 5)}),
    Case(GRU("reverse", reset_after=False), ((2, 3, 9),), {"recurrence": (1, 9, 3)}),
    Case(RNN(output="last"), ((6, 7), (1, 7)), {"recurrence": (1, 7, 7)}),
    Case(RNN("bidirectional", activation="relu"), ((3, 8),), {"recurrence": (2, 4, 4)}),
    *(Case(Cast(dtype), ((3, 5),)) for dtype in ("float64", "float32", "float16", "bfloat16")),
    *(Case(ToInts(dtype), ((3, 5),)) for dtype in ("int64", "int32", "int16", "int8", "uint8", "bool")),
]  # fmt: skip


# As wide as the blocks of a BLAS, whose order of sums changes there, and as the tiles of a GPU's kernels.
WIDE = [
    Case(Linear(), ((784,),), {"weight": (320, 784), "bias": (320,)}),
    Case(Linear(), ((5, 301),), {"weight": (97, 301)}),
    Case(Conv1d(), ((130, 16),), {"weight": (67, 130, 5), "bias": (67,)}),
    Case(Conv1d(), ((130, 5),), {"weight": (67, 130, 5)}),
    Case(Conv2d((2, 2), (1, 1, 1, 1), groups=2), ((34, 15, 15),), {"weight": (66, 17, 3, 3)}),
    Case(ConvTranspose2d((2, 2), (1, 1, 2, 2)), ((128, 5, 5),), {"weight": (128, 33, 5, 5)}),
    Case(Softmax(), ((3, 1003),)),
    Case(LogSoftmax(1), ((1003, 3),)),
    Case(GlobalMean((-1, -2)), ((3, 31, 33),)),
    Case(GlobalMean((1,)), ((513,),)),
    Case(MatMul(), ((70, 301), (301, 97))),
    Case(LayerNorm(), ((3, 1003),), {"weight": (1003,), "bias": (1003,)}),
    Case(GroupNorm(2), ((6, 31, 33),), {"weight": (6,), "bias": (6,)}),
    Case(CumSum(), ((1003,),)),
    Case(LSTM(), ((3, 4 * 150),), {"recurrence": (1, 4 * 150, 150)}),
    Case(AvgPool2d((7, 7), (1, 1)), ((17, 15, 15),)),
]


def network(case: Case, dtype: str = "float32", seed: int = 0) -> Network:
    """The case as a network of one layer 'y'."""
    rng = np.random.default_rng(seed)
    weights = {}
    for role, shape in case.weights.items():
        values = rng.standard_normal(shape)
        if role == "mask":
            values = values > 0
        if role == "recurrence":
            values /= shape[-1] ** 0.5  # else errors grow from step to step
        is_positive = role == "var" or case.positive
        if isinstance(case.layer, Mod):
            weights[role] = rng.integers(1, 5, shape).astype(np.int32) * rng.choice([-1, 1], shape).astype(np.int32)
            continue
        weights[role] = (np.abs(values) + 0.1 if is_positive else values).astype(numpy_dtype(dtype))
    kinds = ("int32" if case.takes_ints(i) else dtype for i in range(len(case.rows)))
    given = {f"x{i}": TensorType(("B", *row), kind) for i, (row, kind) in enumerate(zip(case.rows, kinds, strict=True))}
    names = tuple(f"x{i}" for i in case.reads or range(len(case.rows)))
    return Network(given, (Node("y", case.layer, names, {role: role for role in weights}),), ("y",), weights)


def random_inputs(case: Case, B: int, dtype: str = "float32", seed: int = 1) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.integers(0, VOCABULARY, (B, *row)).astype(np.int32) if case.takes_ints(i)
        else _numbers(rng, case, (B, *row)).astype(numpy_dtype(dtype))
        for i, row in enumerate(case.rows)
    )  # fmt: skip


def _numbers(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape)
    return np.abs(values) + 0.1 if case.positive else values
