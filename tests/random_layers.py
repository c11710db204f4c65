"""How a random network grows: a layer of any kind, wherever one fits among the values that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import random_shapes
from networks import YES_NO
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
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.types import TensorType
from random_growth import MAX_DEGREE, MAX_NUMBERS, MAX_TOKENS, SIZES, VOCABULARY, Growing


def try_one(grow: Growing, what: type[Layer] | Layer, newest: bool = False) -> None:
    """A layer, or one of a kind, where it fits, if anywhere; taken back if its values are too large."""
    grow.newest = newest
    before = len(grow.nodes)
    if isinstance(what, Layer):
        if (value := grow.some_float(*((len(what.axes) - 1,) if isinstance(what, Permute) else (1, 2, 3)))) is not None:
            grow.add(what, value)
    else:
        MAKERS[what](grow, what)
    if any(grow.types[node.name].row_size > MAX_NUMBERS for node in grow.nodes[before:]):
        for node in grow.nodes[before:]:
            del grow.types[node.name]
        del grow.nodes[before:]


# -- layers: each maker adds one of its kind where it fits ------------------------------------------------------


def _on_any(grow: Growing, kind: type[Layer]) -> None:
    layer = Dropout(grow.pick((0.1, 0.5))) if kind is Dropout else kind()
    grow.add(layer, grow.some(lambda v: True))


def _on_floats(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float()) is None:
        return
    options: dict[type[Layer], Sequence[Layer]] = {
        LeakyReLU: (LeakyReLU(), LeakyReLU(0.2), LeakyReLU(0.0), LeakyReLU(-0.5), LeakyReLU(1.5)),
        Clip: (Clip(0, 6), Clip(-0.5, 0.7), Clip(low=-0.75), Clip(high=0.25), Clip(0.5, -0.5)),
        GELU: (GELU(), GELU("tanh")),
        ELU: (ELU(), ELU(0.3)),
        HardSigmoid: (HardSigmoid(), HardSigmoid(1 / 6)),
    }
    grow.add(grow.pick(options.get(kind) or (kind(),)), value)


def _on_tame_floats(grow: Growing, kind: type[Layer]) -> None:
    """Functions that make much of little where their slopes are steep: of numbers for which they are not."""
    if (value := grow.some_float()) is not None:
        grow.add(kind(), grow.add(Clip(0.25, 4.0), value))


def _mask(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float()) is not None:
        if grow.pick(YES_NO):
            grow.add(Mask(), value, **{grow.pick(("first", "mask")): grow.row(value)})
        else:
            grow.add(Mask(), value, grow.add(ReLU(), value))


def _compare(grow: Growing, kind: type[Layer]) -> None:
    """Of an input and constants, which nothing rounds: what is rounded might be on the other side."""
    values = [value for value in grow.inputs if value not in grow.steps and grow.is_float(value)]
    if values:
        value = grow.pick(values)
        grow.add(kind(), value, **{grow.pick(("first", "constant")): grow.row(value)})


def _ordered(grow: Growing, kind: type[Layer]) -> None:
    first = grow.some(lambda v: v not in grow.steps and (kind is Sub or grow.is_float(v)))
    if first is None or grow.types[first].dtype == "bool":
        return
    if kind in (Div, Pow):
        first = grow.add(Clip(0.5, 2.0), first)
    others = [v for v in grow.types if v not in grow.steps and _stretches(grow, v, first, grow.row(first))]
    second = grow.pick(others)
    if kind is Div:
        second = grow.add(Clip(0.5, 2.0), second)
    if kind in (Div, Pow) or grow.pick(YES_NO):
        values = [first, second]
        if kind is Pow and grow.degree.get(second, 1) > 1:
            values[1] = grow.add(Tanh(), second)
        # No base that crosses 0: a sign that was rounded away would be a NaN.
        grow.add(kind(), *(values if kind is PReLU or grow.pick(YES_NO) or kind is Pow else values[::-1]))
    else:
        grow.add(kind(), first, **{grow.pick(("first", "constant")): grow.row(first)})


def _over_axis(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1, 2, 3)) is not None:
        grow.add(kind(grow.axis(value)), value)


def _global(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1, 2, 3)) is not None:
        grow.add(kind(_axes(grow, value), grow.pick(YES_NO)), value)


def _argument(grow: Growing, kind: type[Layer]) -> None:
    """Of a network's input: what was rounded on the way may stand elsewhere."""
    if (value := grow.some(lambda v: v in grow.inputs and grow.is_float(v) and bool(grow.row(v)))) is not None:
        grow.add(kind(grow.axis(value), grow.pick(YES_NO), grow.pick(YES_NO)), value)


def _top_k(grow: Growing, kind: type[Layer]) -> None:
    """Places are those of an input's numbers, for the same reason."""
    value = grow.some(lambda v: (v in grow.inputs or kind is TopK) and grow.is_float(v) and bool(grow.row(v)))
    if value is not None:
        axis = grow.axis(value)
        n = grow.types[value].shape[axis]
        grow.add(kind(grow.pick([k for k in (1, 2, 3, 5, 8, n) if k <= n]), axis, grow.pick(YES_NO)), value)


def _whole(grow: Growing, kind: type[Layer]) -> None:
    """Of an input: what is rounded on the way might be on the other side of a whole number."""
    if (value := grow.some(lambda v: v in grow.inputs and v not in grow.steps and grow.is_float(v))) is not None:
        grow.add(kind(), value)


def _to_ints(grow: Growing, kind: type[Layer]) -> None:
    """Of an input, or of ints; of what is not below 0 bytes, which have no sign."""
    value = grow.some(lambda v: v not in grow.steps and (v in grow.inputs or not grow.is_float(v)))
    if value is not None:
        is_float = grow.is_float(value)
        dtypes = ("int64", "int32", "int16", "int8", "bool") if is_float else ("int64", "int32", "uint8", "bool")
        grow.add(ToInts(grow.pick(dtypes)), value)


def _mod(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: v not in grow.steps and grow.types[v].dtype in ID_DTYPES)) is not None:
        odd = grow.add(Add(), value, value, grow.add(Equal(), value, value))  # by 0 it would be an error
        grow.add(Mod(grow.pick(YES_NO)), value, odd)


def _matmul(grow: Growing, kind: type[Layer]) -> None:
    """A value times one that fits, times itself turned, or times a constant."""
    if (value := grow.some_float(2, 3)) is None or grow.degree.get(value, 1) >= MAX_DEGREE:
        return
    *front, M, K = grow.row(value)
    how = grow.pick(("turned", "turned", "first", "constant"))
    if how == "turned":
        rank = len(front) + 3
        other = grow.add(Permute((*range(rank - 2), rank - 1, rank - 2)), value)
        grow.add(MatMul(), *((value, other) if grow.pick(YES_NO) else (other, value)))
    elif how == "first":
        grow.add(MatMul(), value, first=(*front[grow.pick((0, 1)) :], grow.pick(SIZES), M))
    else:
        grow.add(MatMul(), value, constant=(*front[grow.pick((0, 1)) :], K, grow.pick(SIZES)))


def _sequence_max(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some_float(2)
    lengths = grow.some(lambda v: not grow.row(v) and grow.types[v].dtype in ID_DTYPES)
    if value is not None:
        if lengths is None:
            lengths = "lengths"
            grow.inputs[lengths] = grow.types[lengths] = TensorType(("B",), grow.pick(ID_DTYPES))
            grow.highest[lengths] = VOCABULARY - 1
        grow.add(SequenceMax(grow.pick((1, 1, 2, 3)), grow.pick((1, 1, 2))), value, lengths)


def _axes(grow: Growing, value: str) -> tuple[int, ...]:
    rank = len(grow.row(value))
    kept = [axis - grow.pick((0, rank + 1)) for axis in range(1, rank + 1) if grow.pick(YES_NO)]
    return tuple(kept) or (grow.axis(value),)


def _cum_sum(grow: Growing, kind: type[Layer]) -> None:
    def fits(value: str) -> bool:
        small = grow.degree.get(value, 1) < MAX_DEGREE and value not in grow.steps
        return small and bool(grow.row(value)) and grow.types[value].dtype != "bool"

    if (value := grow.some(fits)) is not None:
        grow.add(CumSum(grow.axis(value), grow.pick(YES_NO), grow.pick(YES_NO)), value)


def _linear(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1, 2, 3)) is not None:
        grow.linear(value, grow.pick(SIZES))


def _norm(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(*((3,) if kind is BatchNorm2d else (1, 2)))) is not None:
        grow.norm(value)


def _row_norm(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(*((2, 3) if kind is GroupNorm else (1, 2, 3)))) is None:
        return
    # A large eps: of numbers that are nearly alike, a norm makes a rounding what it likes.
    layer = kind(_groups(grow, grow.row(value)[0], 1) if kind is GroupNorm else grow.axis(value), grow.pick((0.1, 0.5)))
    shape = layer.weight_shape(grow.types[value])
    grow.add(layer, value, **{role: shape for role in kind.optional if grow.pick(YES_NO)})


def _windows(grow: Growing, sizes: Sequence[int], max_pad: int) -> dict[str, tuple[int, ...]]:
    """kernel, stride, pads and dilation of windows that fit; pads are at most the kernel's size and `max_pad`."""
    found = []
    for n in sizes:
        k, dilation = grow.pick((1, 2, 3, 3, 5)), grow.pick((1, 1, 1, 1, 2))
        before, after = (grow.pick(range(max(0, k + max_pad) + 1)) for _ in range(2))
        if n + before + after < dilation * (k - 1) + 1:
            k, dilation, before, after = 1, 1, 0, 0
        found.append((k, grow.pick((1, 1, 2, 3)), before, after, dilation))
    kernel, stride, before, after, dilation = zip(*found, strict=True)
    return {"kernel": kernel, "stride": stride, "pads": before + after, "dilation": dilation}


def _conv(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1 + kind.rank)) is None:
        return
    C, *sizes = grow.row(value)
    if not grow.pick(range(4)):  # an image of the same shape, which can be added to the first
        k = grow.pick((1, 3, 5))
        grow.conv(value, kind(pads=(k // 2,) * 2 * kind.rank), C, *(k,) * kind.rank)
        return
    frame = _windows(grow, sizes, max_pad=1)
    kernel, groups = frame.pop("kernel"), _groups(grow, C)
    grow.conv(value, kind(**frame, groups=groups), grow.pick((1, 2, 3, 5)) if groups > 1 else grow.pick(SIZES), *kernel)


def _groups(grow: Growing, C: int, one_in: int = 4) -> int:
    return grow.pick([d for d in range(1, C + 1) if C % d == 0]) if not grow.pick(range(one_in)) else 1


def _conv_transpose(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1 + kind.rank)) is None:
        return
    C, *sizes = grow.row(value)
    frame = _windows(grow, sizes, max_pad=0)
    kernel, stride, dilation = frame.pop("kernel"), frame["stride"], frame["dilation"]
    extra = tuple(grow.pick(range(max(s, d))) for s, d in zip(stride, dilation, strict=True))
    spans = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(sizes, stride, dilation, kernel, strict=True)]
    if any(span <= sum(frame["pads"][a :: kind.rank]) for a, span in enumerate(spans)):
        frame["pads"] = (0,) * 2 * kind.rank
    layer = kind(**frame, output_padding=extra, groups=_groups(grow, C))
    grow.transposed(value, layer, grow.pick((1, 2, 3, 5)), *kernel)


def _pool(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1 + kind.rank)) is None:
        return
    options: dict[str, Any] = {"ceil": grow.pick(YES_NO)}
    if kind in (AvgPool1d, AvgPool2d):
        options["count_pads"] = grow.pick(YES_NO)
    grow.add(kind(**_windows(grow, grow.row(value)[1:], max_pad=-1), **options), value)


def _embedding(grow: Growing, kind: type[Layer]) -> None:
    tops = grow.highest
    if (value := grow.some(lambda v: tops.get(v, MAX_TOKENS) < MAX_TOKENS and len(grow.row(v)) < 3)) is not None:
        grow.embedding(value, tops[value] + grow.pick((1, 1, 2, 4)), grow.pick(SIZES))


def _token_conv(grow: Growing, kind: type[Layer]) -> None:
    tops = grow.highest
    value = grow.some(lambda v: tops.get(v, MAX_TOKENS) < MAX_TOKENS and len(grow.row(v)) == 1)
    if value is not None:
        frame = _windows(grow, grow.row(value), max_pad=0)
        K = frame["dilation"][0] * (frame["kernel"][0] - 1) + 1  # it knows no dilation: so many taps fit
        C_out = grow.pick(SIZES)
        bias = {"bias": (C_out,)} if grow.pick(YES_NO) else {}
        layer = TokenConv(frame["stride"][0], frame["pads"])
        grow.add(layer, value, weight=(tops[value] + grow.pick((1, 1, 3)), K, C_out), **bias)


def _broadcast(grow: Growing, kind: type[Layer]) -> None:
    first = grow.some(lambda v: v not in grow.steps and (kind is not Mul or grow.degree.get(v, 1) < MAX_DEGREE))
    if first is None or grow.types[first].dtype == "bool":  # no numbers to add
        return
    values, row = [first], grow.row(first)
    if grow.is_float(first) and row and not grow.pick(range(3)):
        values.append(grow.add(grow.pick((GlobalMax, GlobalMean))(_axes(grow, first), keep=True), first))
    for _ in range(grow.pick((0, 1, 1, 1, 2))):
        others = [v for v in grow.types if v not in grow.steps and _stretches(grow, v, first, row)]
        values.append(grow.pick(others))
        row = np.broadcast_shapes(row, grow.row(values[-1]))
    if kind is Mul and sum(grow.degree.get(v, 1) for v in values) > MAX_DEGREE:
        values = values[:1]
    if grow.pick(YES_NO):
        values.reverse()
    constant = {}
    if len(values) == 1 or not grow.pick(range(3)):
        constant["constant"] = tuple(d if grow.pick((True, True, False)) else 1 for d in row)[grow.pick((0, 0, 1, 2)) :]
    grow.add(kind(), *values, **constant)


def _stretches(grow: Growing, value: str, first: str, row: tuple[int, ...]) -> bool:
    own = grow.row(value)
    fits = all(a == b or 1 in (a, b) for a, b in zip(own, row, strict=False))
    return fits and len(own) == len(row) and grow.types[value].dtype == grow.types[first].dtype


def _recurrent(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some(lambda v: grow.is_float(v) and len(grow.row(v)) >= 2 and grow.row(v)[-1] % kind.gates == 0)
    if value is None:  # then behind the product that a network has there
        value = grow.some_float(2, 3)
        value = None if value is None else grow.linear(value, kind.gates * grow.pick((1, 2, 3)))
    if value is None:
        return
    gates, output = kind.gates, grow.pick(("sequence", "last", "cell") if kind is LSTM else ("sequence", "last"))
    width = grow.row(value)[-1] // gates
    both = width % 2 == 0 and grow.pick(YES_NO)
    D, H = (2, width // 2) if both else (1, width)
    given: dict[str, Any] = {"activation": grow.pick(("tanh", "relu"))} if kind is RNN else {}
    if kind is GRU:
        given["reset_after"] = grow.pick(YES_NO)
    direction = "bidirectional" if both else grow.pick(("forward", "reverse"))
    states = [v for v in grow.types if grow.row(v) == (*grow.row(value)[:-2], D, H)]
    states = [v for v in states if grow.types[v].dtype == grow.types[value].dtype]
    first = [grow.pick(states) for _ in range(kind.states)] if states else []
    bias = {"bias": (D, H)} if given.get("reset_after") and grow.pick(YES_NO) else {}
    grow.add(kind(direction, output, **given), value, *first, recurrence=(D, gates * H, H), **bias)


MAKERS: dict[type[Layer], Callable[[Growing, Any], None]] = {
    **dict.fromkeys((Identity, Dropout), _on_any),
    **dict.fromkeys((ReLU, LeakyReLU, Clip, Sigmoid, Tanh, SiLU, GELU, ToPixels), _on_floats),
    **dict.fromkeys((ELU, SELU, HardSigmoid, HardSwish, Softplus, Softsign, Mish, Abs, Erf, Atan), _on_floats),
    **dict.fromkeys((Greater, GreaterOrEqual, Equal), _compare),
    **dict.fromkeys((Exp, Log, Sqrt, Reciprocal, Sin, Cos), _on_tame_floats),
    **dict.fromkeys((Sub, Div, Pow, PReLU), _ordered),
    Mask: _mask,
    **dict.fromkeys((Softmax, LogSoftmax), _over_axis),
    **dict.fromkeys((GlobalMax, GlobalMean, GlobalMin, GlobalSum, GlobalNorm), _global),
    **dict.fromkeys((ArgMax, ArgMin), _argument),
    MatMul: _matmul,
    **dict.fromkeys((BatchNorm1d, BatchNorm2d), _norm),
    **dict.fromkeys((LayerNorm, RMSNorm, GroupNorm), _row_norm),
    **dict.fromkeys((Slice, Gather, Pad, Tile), random_shapes.select),
    **dict.fromkeys((NearestResize, LinearResize), random_shapes.resize),
    **dict.fromkeys((Conv1d, Conv2d), _conv),
    **dict.fromkeys((ConvTranspose1d, ConvTranspose2d), _conv_transpose),
    **dict.fromkeys((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), _pool),
    **dict.fromkeys((Add, Mul, Max, Min), _broadcast),
    **dict.fromkeys((LSTM, GRU, RNN), _recurrent),
    SequenceMax: _sequence_max,
    Linear: _linear,
    CumSum: _cum_sum,
    Cast: random_shapes.cast,
    Concat: random_shapes.concat,
    Interleave: random_shapes.interleave,
    Permute: random_shapes.permute,
    Reshape: random_shapes.reshape,
    Embedding: _embedding,
    TokenConv: _token_conv,
    **dict.fromkeys((TopK, ArgTopK), _top_k),
    **dict.fromkeys((Floor, Ceil, Round, Sign), _whole),
    ToInts: _to_ints,
    Mod: _mod,
}
