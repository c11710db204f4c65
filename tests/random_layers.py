"""How a random network grows: a layer of any kind, wherever one fits among the values that are there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from networks import YES_NO, Grow, Pick, row_shapes
from onchip.spec.layers import (
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
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Broadcast,
    Cast,
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
    Erf,
    Exp,
    Gather,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
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
    RowNorm,
    SequenceMax,
    Sigmoid,
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
    TokenConv,
    ToPixels,
)  # fmt: skip
from onchip.spec.layers.embedding import ID_DTYPES
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 65)
FLOATS = ("float32", "float16", "bfloat16", "float64")
OTHER_INTS = ("uint8", "int8", "int16", "bool")
MOST_NUMBERS = 2500  # of a row of any value
VOCABULARY = 5  # ids that an input of an id dtype holds
MOST_TOKENS = 100  # of a table
MOST_DEGREE = 4  # of a value in the inputs: powers of a power soon overflow in half precision


class Growing(Grow):
    """A network in the making, and what is known of its values."""

    def __init__(self, pick: Pick, rank: int, takes_ids: bool) -> None:
        """rank  axes of a row of the first input"""
        self.own_float = pick(("float32",) * 10 + FLOATS)
        self.newest = False
        self.highest: dict[str, int] = {}  # of ints that can be ids; none is below 0
        self.degree: dict[str, int] = {}
        self.steps: set[str] = set()  # ints that are rounded floats: one off is right, and no layer may make more of it
        dtype = pick(ID_DTYPES) if takes_ids else self.own_float
        super().__init__(pick, *_row_shape(pick, rank), dtype=dtype)
        for i in range(pick((0, 0, 0, 1, 1, 2))):
            given = self.types["x"]
            if pick(YES_NO):
                dtype = pick((self.own_float,) * 4 + FLOATS + ID_DTYPES * 2 + OTHER_INTS)
                given = TensorType(("B", *_row_shape(pick, pick((0, 1, 1, 2, 2, 3, 3)))), dtype)
            self.inputs[f"x{i + 1}"] = self.types[f"x{i + 1}"] = given
        self.highest.update({name: VOCABULARY - 1 for name, given in self.inputs.items() if given.dtype in ID_DTYPES})

    def try_one(self, what: type[Layer] | Layer, newest: bool = False) -> None:
        """A layer, or one of a kind, where it fits, if anywhere; taken back if its values are too large."""
        self.newest = newest
        before = len(self.nodes)
        if isinstance(what, Layer):
            if (
                value := self.some_float(*((len(what.axes) - 1,) if isinstance(what, Permute) else (1, 2, 3)))
            ) is not None:
                self.add(what, value)
        else:
            MAKERS[what](self, what)
        if any(self.types[node.name].row_size > MOST_NUMBERS for node in self.nodes[before:]):
            for node in self.nodes[before:]:
                del self.types[node.name]
            del self.nodes[before:]

    def add(self, layer: Layer, *values: str, **shapes: tuple[int, ...]) -> str:
        own = self.types[values[0]].dtype
        self.weight_dtype = own if "float" in own or isinstance(layer, Broadcast | MatMul) else self.own_float
        if shapes and not isinstance(layer, Broadcast | MatMul) and not self.pick(range(8)):
            self.weight_dtype = self.pick(FLOATS)
        name = super().add(layer, *values, **shapes)
        self._follow(self.nodes[-1])
        return name

    def _follow(self, node: Node) -> None:
        name, layer, constants = node.name, node.layer, len(node.weights)
        self.steps.discard(name)  # of a layer that was taken back
        self.highest.pop(name, None)
        degrees = [self.degree.get(value, 1) for value in node.inputs]
        self.degree[name] = max(degrees)
        if isinstance(layer, Mul | MatMul):
            self.degree[name] = sum(degrees)
        elif isinstance(layer, CumSum):
            self.degree[name] += 1
        elif isinstance(layer, PReLU):
            self.degree[name] = sum(degrees) + constants
        elif isinstance(layer, Tanh | Sigmoid | Softmax | Clip | HardSigmoid | Softsign | RowNorm):
            self.degree[name] = 1
        if isinstance(layer, ToPixels) or self.steps.intersection(node.inputs):
            self.steps.add(name)
        tops = [self.highest.get(value) for value in node.inputs]
        if self.types[name].dtype in ID_DTYPES and None not in tops:
            if isinstance(layer, Add):
                self.highest[name] = sum(tops) + 3 * constants
            elif isinstance(layer, Mul):
                self.highest[name] = int(np.prod(tops)) * 3**constants
            elif isinstance(layer, CumSum):
                self.highest[name] = tops[0] * self.types[name].row_size
            elif isinstance(layer, Pad):
                self.highest[name] = max(tops[0], 1)
            elif not isinstance(layer, Sub):  # which goes below 0
                self.highest[name] = max((*tops, 3 * constants))

    def some(self, fits: Callable[[str], bool]) -> str | None:
        """A value that fits: the newest, one that nobody reads yet, or any."""
        found = [value for value in self.types if fits(value)]
        if not found:
            return None
        read = {value for node in self.nodes for value in node.inputs}
        unread = [value for value in found if value not in read]
        return found[-1] if self.newest else self.pick((found[-1], self.pick(unread or found), self.pick(found)))

    def some_float(self, *ranks: int) -> str | None:
        """A value of floats with so many axes behind the batch; any number if none is said."""
        return self.some(lambda v: self.is_float(v) and (not ranks or len(self.row(v)) in ranks))

    def is_float(self, value: str) -> bool:
        return "float" in self.types[value].dtype

    def axis(self, value: str) -> int:
        """An axis of a row, counted from the front or from the end."""
        rank = len(self.row(value))
        return self.pick((*range(1, rank + 1), *range(-rank, 0)))

    def finish(self, name: str) -> Network:
        read = {value for node in self.nodes for value in node.inputs}
        ends = [node.name for node in self.nodes if node.name not in read]
        if len(ends) > 1 and not self.pick(range(8)):  # a layer that nobody reads
            ends.remove(self.pick(ends))
        if not self.pick(range(3)):
            ends.insert(self.pick((0, len(ends))), self.pick([node.name for node in self.nodes]))
        if not self.pick(range(12)):
            ends.append(self.pick(tuple(self.inputs)))
        used = {weight for node in self.nodes for weight in node.weights.values()}  # not of what was taken back
        self.weights = {weight: values for weight, values in self.weights.items() if weight in used}
        return self.network(*ends).replace(name=name)


def _row_shape(pick: Pick, rank: int) -> tuple[int, ...]:
    row = [pick(SIZES) for _ in range(rank)]
    while np.prod(row) > MOST_NUMBERS // 4:
        row[row.index(max(row))] //= 2
    return tuple(row)


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
        grow.add(Mask(), value, mask=grow.row(value))


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
        grow.add(kind(), *(values if kind is PReLU or grow.pick(YES_NO) else values[::-1]))
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


def _matmul(grow: Growing, kind: type[Layer]) -> None:
    """A value times one that fits, times itself turned, or times a constant."""
    if (value := grow.some_float(2, 3)) is None or grow.degree.get(value, 1) >= MOST_DEGREE:
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
        small = grow.degree.get(value, 1) < MOST_DEGREE and value not in grow.steps
        return small and bool(grow.row(value)) and grow.types[value].dtype != "bool"

    if (value := grow.some(fits)) is not None:
        grow.add(CumSum(grow.axis(value), grow.pick(YES_NO), grow.pick(YES_NO)), value)


def _cast(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: v not in grow.steps)) is not None:
        grow.add(Cast(grow.pick(("float32", "float32", *FLOATS))), value)


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


def _windows(grow: Growing, sizes: Sequence[int], most_pad: int) -> dict[str, tuple[int, ...]]:
    """kernel, stride, pads and dilation of windows that fit; pads are at most the kernel's size and `most_pad`."""
    found = []
    for n in sizes:
        k, dilation = grow.pick((1, 2, 3, 3, 5)), grow.pick((1, 1, 1, 1, 2))
        before, after = (grow.pick(range(max(0, k + most_pad) + 1)) for _ in range(2))
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
    frame = _windows(grow, sizes, most_pad=1)
    kernel, groups = frame.pop("kernel"), _groups(grow, C)
    grow.conv(value, kind(**frame, groups=groups), grow.pick((1, 2, 3, 5)) if groups > 1 else grow.pick(SIZES), *kernel)


def _groups(grow: Growing, C: int, one_in: int = 4) -> int:
    return grow.pick([d for d in range(1, C + 1) if C % d == 0]) if not grow.pick(range(one_in)) else 1


def _conv_transpose(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some_float(1 + kind.rank)) is None:
        return
    C, *sizes = grow.row(value)
    frame = _windows(grow, sizes, most_pad=0)
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
    grow.add(kind(**_windows(grow, grow.row(value)[1:], most_pad=-1), **options), value)


def _embedding(grow: Growing, kind: type[Layer]) -> None:
    tops = grow.highest
    if (value := grow.some(lambda v: tops.get(v, MOST_TOKENS) < MOST_TOKENS and len(grow.row(v)) < 3)) is not None:
        grow.embedding(value, tops[value] + grow.pick((1, 1, 2, 4)), grow.pick(SIZES))


def _token_conv(grow: Growing, kind: type[Layer]) -> None:
    tops = grow.highest
    value = grow.some(lambda v: tops.get(v, MOST_TOKENS) < MOST_TOKENS and len(grow.row(v)) == 1)
    if value is not None:
        frame = _windows(grow, grow.row(value), most_pad=0)
        K = frame["dilation"][0] * (frame["kernel"][0] - 1) + 1  # it knows no dilation: so many taps fit
        C_out = grow.pick(SIZES)
        bias = {"bias": (C_out,)} if grow.pick(YES_NO) else {}
        layer = TokenConv(frame["stride"][0], frame["pads"])
        grow.add(layer, value, weight=(tops[value] + grow.pick((1, 1, 3)), K, C_out), **bias)


def _broadcast(grow: Growing, kind: type[Layer]) -> None:
    first = grow.some(lambda v: v not in grow.steps and (kind is not Mul or grow.degree.get(v, 1) < MOST_DEGREE))
    if first is None or grow.types[first].dtype == "bool":  # no numbers to add
        return
    values, row = [first], grow.row(first)
    if grow.is_float(first) and row and not grow.pick(range(3)):
        values.append(grow.add(grow.pick((GlobalMax, GlobalMean))(_axes(grow, first), keep=True), first))
    for _ in range(grow.pick((0, 1, 1, 1, 2))):
        others = [v for v in grow.types if v not in grow.steps and _stretches(grow, v, first, row)]
        values.append(grow.pick(others))
        row = np.broadcast_shapes(row, grow.row(values[-1]))
    if kind is Mul and sum(grow.degree.get(v, 1) for v in values) > MOST_DEGREE:
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


def _concat(grow: Growing, kind: type[Layer]) -> None:
    if (first := grow.some(lambda v: bool(grow.row(v)))) is None:
        return
    axis = grow.axis(first)
    at = axis - 1 if axis > 0 else axis

    def cut(value: str) -> tuple[object, ...]:
        row = list(grow.row(value))
        if len(row) == len(grow.row(first)):
            row[at] = 0
        return grow.types[value].dtype, *row

    others = [value for value in grow.types if cut(value) == cut(first)]
    values = [first, *(grow.pick(others) for _ in range(grow.pick((0, 1, 1, 1, 2, 3))))]
    if grow.pick(YES_NO):
        values.reverse()
    grow.add(Concat(axis), *values)


def _interleave(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: len(grow.row(v)) in (2, 3))) is None:
        return
    stride = tuple(grow.pick((1, 2, 2, 3)) for _ in grow.row(value)[1:])
    alike = [v for v in grow.types if grow.types[v] == grow.types[value]]
    shorter: dict[tuple[bool, ...], str] = {}
    if grow.is_float(value) and all(n > 1 for n in grow.row(value)[1:]) and grow.pick(YES_NO):
        # The last phase of every axis may have one number fewer: a window of two has.
        pool = MaxPool1d if len(stride) == 1 else MaxPool2d
        for short in itertools.product(YES_NO, repeat=len(stride)):
            if any(short):
                shorter[short] = grow.add(pool(tuple(1 + s for s in short), (1,) * len(stride)), value)
    phases = []
    for phase in Interleave(stride).phases():
        is_last = tuple(s > 1 and p == s - 1 for p, s in zip(phase, stride, strict=True))
        phases.append(shorter.get(is_last) or grow.pick(alike))
    grow.add(Interleave(stride), *phases)


def _permute(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: bool(grow.row(v)))) is not None:
        axes = list(range(1, 1 + len(grow.row(value))))
        grow.add(Permute((0, *(axes.pop(grow.pick(range(len(axes)))) for _ in grow.row(value)))), value)


def _reshape(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some(lambda v: True)
    row = list(grow.pick(row_shapes(grow.types[value].row_size)))
    if grow.pick(YES_NO):
        row[grow.pick(range(len(row)))] = -1
    grow.add(Reshape(tuple(row)), value)


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


def _select(grow: Growing, kind: type[Layer]) -> None:
    """Behind any value; what is padded is zeros or ones, which are ids and numbers of every dtype."""
    if (value := grow.some(lambda v: bool(grow.row(v)))) is None:
        return
    row, pick = grow.row(value), grow.pick
    if kind is Slice:
        steps = [pick((1, 1, 2, -1, -2)) for _ in row]
        taken = [range(n)[slice(pick((None, None, n // 2)), None, step)] for n, step in zip(row, steps, strict=True)]
        grow.add(Slice(tuple(r.start for r in taken), tuple(map(len, taken)), tuple(steps)), value)
    elif kind is Gather:
        axis = grow.axis(value)
        n = row[axis - 1 if axis > 0 else axis]
        grow.add(Gather(axis, tuple(pick(range(n)) for _ in range(pick((1, 2, 5))))), value)
    elif kind is Pad:
        pads = tuple(pick((0, 0, 1, 2)) for _ in (*row, *row))
        grow.add(Pad(pads, pick(("constant", "constant", "reflect", "edge", "wrap")), pick((0.0, 1.0))), value)
    else:
        grow.add(Tile(tuple(pick((1, 1, 2, 3)) for _ in row)), value)


def _resize(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some_float(1, 2, 3) if kind is LinearResize else grow.some(lambda v: bool(grow.row(v)))
    if value is None:
        return
    row = grow.row(value)
    sizes = tuple(grow.pick((n, n, 2 * n, n + 1, max(1, n // 2))) for n in row)
    options = [grow.pick(("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"))]
    if kind is NearestResize:
        options.append(grow.pick(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")))
    grow.add(kind(sizes, tuple(size / n for n, size in zip(row, sizes, strict=True)), *options), value)


MAKERS: dict[type[Layer], Callable[[Growing, Any], None]] = {
    **dict.fromkeys((Identity, Dropout), _on_any),
    **dict.fromkeys((ReLU, LeakyReLU, Clip, Sigmoid, Tanh, SiLU, GELU, ToPixels), _on_floats),
    **dict.fromkeys((ELU, SELU, HardSigmoid, HardSwish, Softplus, Softsign, Mish, Abs, Erf), _on_floats),
    **dict.fromkeys((Exp, Log, Sqrt, Reciprocal, Sin, Cos), _on_tame_floats),
    **dict.fromkeys((Sub, Div, Pow, PReLU), _ordered),
    Mask: _mask,
    **dict.fromkeys((Softmax, LogSoftmax), _over_axis),
    **dict.fromkeys((GlobalMax, GlobalMean, GlobalMin, GlobalSum, GlobalNorm), _global),
    **dict.fromkeys((ArgMax, ArgMin), _argument),
    MatMul: _matmul,
    **dict.fromkeys((BatchNorm1d, BatchNorm2d), _norm),
    **dict.fromkeys((LayerNorm, RMSNorm, GroupNorm), _row_norm),
    **dict.fromkeys((Slice, Gather, Pad, Tile), _select),
    **dict.fromkeys((NearestResize, LinearResize), _resize),
    **dict.fromkeys((Conv1d, Conv2d), _conv),
    **dict.fromkeys((ConvTranspose1d, ConvTranspose2d), _conv_transpose),
    **dict.fromkeys((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), _pool),
    **dict.fromkeys((Add, Mul, Max, Min), _broadcast),
    **dict.fromkeys((LSTM, GRU, RNN), _recurrent),
    SequenceMax: _sequence_max,
    Linear: _linear,
    CumSum: _cum_sum,
    Cast: _cast,
    Concat: _concat,
    Interleave: _interleave,
    Permute: _permute,
    Reshape: _reshape,
    Embedding: _embedding,
    TokenConv: _token_conv,
}
