"""Einsum of one or two operands, decomposed into reductions, permutations and one gemm."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, folds, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.layers import GlobalSum, Layer, Linear, MatMul, Mul, Permute, Reshape, Slice
from onchip.network.reading import MAX_RANK, show
from onchip.network.recipe import Array


@folds("Einsum")
def fold_einsum(graph: GraphReader, op: Op) -> Array:
    arrays = [graph.constant(op, index) for index in range(len(op.inputs))]
    terms, y = _parse(op, [array.ndim for array in arrays])
    axes = [pair for term, array in zip(terms, arrays, strict=True) for pair in zip(term, array.shape, strict=True)]
    graph.spend(op, math.prod(dict(axes).values()))
    return np.asarray(np.einsum(f"{','.join(terms)}->{y}", *arrays))


@reads("Einsum")
def read_einsum(graph: GraphReader, op: Op) -> None:
    constants = [graph.is_constant(op, index) for index in range(len(op.inputs))]
    x = graph.value(op, constants.index(False))
    operands = [
        _Operand(graph, op, "", "", graph.weight_constant(op, index, x)) if is_constant
        else _Operand(graph, op, "", graph.value(op, index), None)
        for index, is_constant in enumerate(constants)
    ]  # fmt: skip
    terms, y = _parse(op, [len(operand.row) + (operand.array is None and not graph.one_row) for operand in operands])
    if not graph.one_row:
        batch = next(term[:1] for term, is_constant in zip(terms, constants, strict=True) if not is_constant)
        rest = [term if is_constant else term[1:] for term, is_constant in zip(terms, constants, strict=True)]
        for i, operand in enumerate(operands):
            if operand.array is not None and rest[i][:1] == batch and len(same := graph.once(operand.array)) == 1:
                operand.array, rest[i] = same[0], rest[i][1:]  # the same for every row
        leading = {term[:1] for term, is_constant in zip(terms, constants, strict=True) if not is_constant}
        if leading != {y[:1]} or batch in "".join(rest):
            got = f"{','.join(terms)}->{y}"
            raise FormatError(f"{op} would mix the rows of the batch", got=got, expected="the batch first, once each")
        terms, y = rest, y[1:]
    for operand, term in zip(operands, terms, strict=True):
        operand.name_axes(term)
    for i, operand in enumerate(operands):
        others = operands[1 - i].letters if len(operands) > 1 else ""
        operand.sum_but({*y, *others})
    whole = operands[0] if len(operands) == 1 else _contracted(operands, y)
    whole.order_by(y)
    graph.bind_output(op, 0, whole.value)


def _parse(op: Op, ranks: list[int]) -> tuple[list[str], str]:
    """One letter per axis of every operand and of the result; axes of an ellipsis get fresh letters."""
    text = op.attribute("equation", b"").decode(errors="replace").replace(" ", "")
    left, arrow, y = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks) or not 1 <= len(terms) <= 2:
        expected = "one or two operands, one term each"
        raise FormatError(f"{op}: bad equation", got=f"{show(text)} of {len(ranks)}", expected=expected)
    unused = [letter for letter in string.ascii_letters if letter not in text][:MAX_RANK]
    widest = 0
    for index, (term, rank) in enumerate(zip(terms, ranks, strict=True)):
        hidden = rank - len(term.replace("...", ""))
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", term) or hidden < 0 or (hidden and "..." not in term):
            raise FormatError(f"{op}: bad equation", got=f"{show(text)}, {rank} axes", expected="one letter per axis")
        widest = max(widest, hidden)
        terms[index] = term.replace("...", "".join(unused[len(unused) - hidden :]))
    ellipsis = "".join(unused[len(unused) - widest :])
    if not arrow:  # letters that occur once, in alphabetical order
        together = "".join(terms)
        once = sorted(letter for letter in set(together) - set(ellipsis) if together.count(letter) == 1)
        return terms, ellipsis + "".join(once)
    y = y.replace("...", ellipsis)
    if len(set(y)) < len(y) or not set(y) <= set("".join(terms)):
        raise FormatError(f"{op}: bad equation", got=show(text), expected="distinct letters of operands")
    return terms, y


@dataclass
class _Operand:
    """A value or a constant, and the letters of its axes without the batch; methods change its layout."""

    graph: GraphReader
    op: Op
    letters: str
    value: str
    array: Array | None

    @property
    def row(self) -> tuple[int, ...]:
        return self.graph.types[self.value].row_shape if self.array is None else self.array.shape

    def sizes(self, letters: str) -> list[int]:
        return [self.row[self.letters.index(letter)] for letter in letters]

    def name_axes(self, letters: str) -> None:
        """Name the axes. A repeated letter selects the diagonal: every (n + 1)th element of the flattened matrix."""
        self.letters = letters
        while twice := next((letter for letter in self.letters if self.letters.count(letter) > 1), ""):
            first, last = self.letters.index(twice), self.letters.rindex(twice)
            n, others = self.row[first], [axis for axis in range(len(self.letters)) if axis not in (first, last)]
            if self.row[last] != n:
                raise FormatError(f"{self.op}: sizes differ", got=str(list(self.row)), expected=f"{n} twice")
            self._permute([*others, first, last])
            kept = list(self.row[:-2])
            self.reshape([*kept, n * n])
            zeros, ones = (0,) * len(kept), (1,) * len(kept)
            if self.array is None:
                self._become(Slice((*zeros, 0), (*kept, n), (*ones, n + 1)))
            else:
                self.array = self.array[..., :: n + 1]
            self.letters = "".join(self.letters[axis] for axis in others) + twice

    def sum_but(self, kept: set[str]) -> None:
        gone = tuple(axis for axis, letter in enumerate(self.letters) if letter not in kept)
        if gone and self.array is not None:
            self.array = self.array.sum(axis=gone, dtype=np.float64).astype(self.array.dtype)
        elif gone:
            self._become(GlobalSum(tuple(axis + 1 for axis in gone)))
        self.letters = "".join(letter for letter in self.letters if letter in kept)

    def order_by(self, letters: str) -> None:
        self._permute([self.letters.index(letter) for letter in letters])
        self.letters = letters

    def reshape(self, row: Sequence[int]) -> None:
        if self.array is not None:
            self.array = self.array.reshape(row)
        elif tuple(row) != self.row:
            self._become(Reshape(tuple(row)))

    def _permute(self, order: list[int]) -> None:
        if self.array is not None:
            self.array = self.array.transpose(order)
        elif order != sorted(order):
            self._become(Permute((0, *(axis + 1 for axis in order))))

    def _become(self, layer: Layer) -> None:
        self.value = self.graph.add_step(self.op, layer, (self.value,))


def _contracted(operands: list[_Operand], y: str) -> _Operand:
    """A batched gemm if a shared letter is summed; else an elementwise product."""
    a, b = operands if operands[0].array is None else operands[::-1]
    shared = "".join(letter for letter in a.letters if letter in b.letters)
    if a.sizes(shared) != b.sizes(shared):
        got = f"{list(a.row)} and {list(b.row)}"
        raise FormatError(f"{a.op}: sizes differ", got=got, expected=f"equal sizes for {shared}")
    summed = "".join(letter for letter in shared if letter not in y)
    if not summed:
        for one in (a, b):
            one.order_by("".join(letter for letter in y if letter in one.letters))
            sizes = dict(zip(one.letters, one.row, strict=True))
            one.reshape([sizes.get(letter, 1) for letter in y])
        return _combined(Mul(), a, b, "constant", y)
    batched = "".join(letter for letter in shared if letter in y)
    only_a, only_b = ("".join(letter for letter in one.letters if letter not in shared) for one in (a, b))
    leading, rows, columns, K = a.sizes(batched), a.sizes(only_a), b.sizes(only_b), math.prod(a.sizes(summed))
    a.order_by(batched + only_a + summed)
    if b.array is not None and not batched:
        b.order_by(only_b + summed)
        a.reshape([*rows, K])
        b.reshape([math.prod(columns), K])
        whole = _combined(Linear(), a, b, "weight", only_a + only_b)
    else:
        b.order_by(batched + summed + only_b)
        a.reshape([*leading, math.prod(rows), K])
        b.reshape([*leading, K, math.prod(columns)])
        whole = _combined(MatMul(), a, b, "constant", batched + only_a + only_b)
    whole.reshape([*leading, *rows, *columns])
    return whole


def _combined(layer: Layer, a: _Operand, b: _Operand, role: str, letters: str) -> _Operand:
    graph, op = a.graph, a.op
    if b.array is None:
        return _Operand(graph, op, letters, graph.add_step(op, layer, (a.value, b.value)), None)
    name = next(name for index, name in enumerate(op.inputs) if graph.is_constant(op, index))
    y = graph.add_step(op, layer, (a.value,), {role: graph.weight(name, b.array)})
    return _Operand(graph, op, letters, y, None)
