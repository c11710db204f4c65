"""Encode a chain of elementwise layers as the steps of elementwise/pointwise.cu: a program over an accumulator.

A step loads the accumulator, applies an operation of kernels/pointwise.py, combines it with another value, or stores
it. A value that a later step needs is kept in shared memory. The whole chain computes in one number type
(NUMBER_BYTES); only a Cast and a store round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from onchip.kernels.batch_norm import batch_norm_parts
from onchip.kernels.cuda.common.program import Input, Int64, Memory, Output, StatusWord, Weight
from onchip.kernels.pointwise import BINARY, UNARY, Operation, may_divide_by_zero, operation_of
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Broadcast,
    Cast,
    Div,
    Dropout,
    Equal,
    Greater,
    GreaterOrEqual,
    Identity,
    Layer,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    Ordered,
    Reshape,
    Sub,
    ToInts,
)
from onchip.network.layers.cast import Whole
from onchip.network.recipe import Recipe, as_is

# As in elementwise/pointwise.cu.
MAX_OPERANDS, MAX_OUTPUTS, MAX_STEPS, MAX_LEVELS = 12, 6, 64, 6
MAX_KEPT = 4  # values at once; 64 KiB of shared memory
TYPES = ("float32", "float16", "bfloat16", "uint8", "float64", "int64", "int32", "int16", "int8")
NUMBER_BYTES = {"float": 4, "double": 8, "long long": 8}  # accumulator types


def _structs(rows: Iterable[Operation]) -> tuple[str, ...]:
    """The operations' structs; ordered operations also with swapped operands."""
    return tuple(
        name
        for row in rows
        for name in ((row.cuda, f"Turned<{row.cuda}>") if issubclass(row.layer, Ordered) else (row.cuda,))
    )


# Structs of pointwise.cu, indexed by step code. The first ones are common; chains of only these use a kernel with fewer
# registers. Ints have their own lists.
FUNCTIONS = _structs(UNARY)
COMBINATIONS = _structs(BINARY)
COMMON_FUNCTIONS = [row.layer for row in UNARY].index(ELU)  # those before it
COMMON_COMBINATIONS = 2
_OF_INTS = (ToInts, Add, Mul, Max, Min, Sub, Mask, Div, Mod, Greater, GreaterOrEqual, Equal)
INT_FUNCTIONS = _structs(row for row in UNARY if row.layer in _OF_INTS)
INT_COMBINATIONS = _structs(row for row in BINARY if row.layer in _OF_INTS)
FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
_COMPUTED = {"float": FLOATS, "double": ("float64",), "long long": INTS}  # layer dtypes per number type
# Dtypes that each number type represents exactly.
_HELD = {"float": (*FLOATS, "uint8"), "double": ("float64", *FLOATS, "uint8"), "long long": (*INTS, "bool")}
_EXACT = (*FLOATS, "uint8", "int16", "int8", "bool")  # float32 represents all their values
_BYTES = {"bool": "uint8"}

MOVES = (Identity, Dropout, Reshape)
_NORMS = (BatchNorm1d, BatchNorm2d)


class Where(IntEnum):
    """Access pattern of an operand for four contiguous elements of the result."""

    WHOLE = 0  # same index as the result
    NEIGHBOURS = 1  # contiguous
    ALIKE = 2  # one element
    APART = 3


class What(IntEnum):
    LOAD = 0
    TAKE = 1
    KEEP = 2
    GIVE = 3
    APPLY = 4
    COMBINE = 5
    COMBINE_KEPT = 6


@dataclass(frozen=True)
class Operand:
    """A value or a weight, indexed by elements of the result: index n is divided by each level's size in turn, each
    remainder counts its stride, and the last quotient counts `outer`."""

    pointer: Memory | Int64
    dtype: str
    where: Where
    levels: tuple[tuple[int, int], ...] = ()  # (size, stride), innermost first
    outer: int = 1
    batch_stride: int = 1  # row stride

    def seen_by(self, count: int) -> Operand:
        """The operand for the first `count` elements alone: WHOLE if they have the same index as the result."""
        is_whole = bool(self.levels) and self.levels[0][0] >= count and self.levels[0][1] == 1
        return Operand(self.pointer, self.dtype, Where.WHOLE) if is_whole else self


@dataclass(frozen=True)
class Step:
    what: What
    index: int = 0  # of an operand, an output or a kept value
    code: int = 0  # of an operation, in FUNCTIONS or COMBINATIONS
    # Parameters. Of ints: whether the operand, or the accumulator, is a divisor that may be 0.
    told: tuple[float, float] = (0, 0)


@dataclass(frozen=True, eq=False)
class Run:
    number: str  # key of NUMBER_BYTES
    neighbours: int  # contiguous elements per thread: 8 if all layers are 16-bit, else 4
    row_size: int
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]  # dtypes
    output_names: tuple[str, ...]
    steps: tuple[Step, ...]
    kept: int  # values at once
    recipes: Mapping[str, Recipe]  # by the names of Weights
    divisors: StatusWord | None = None  # reports a divisor of 0

    @property
    def is_common(self) -> bool:
        """Whether all of its operations are among the common ones."""
        return all(
            step.code < (COMMON_FUNCTIONS if step.what is What.APPLY else COMMON_COMBINATIONS) for step in self.steps
        )

    @property
    def output_pointers(self) -> tuple[Output, ...]:
        return tuple(Output(i) for i in range(len(self.outputs)))


class TooLargeError(Exception):
    """The chain exceeds the kernel's limits."""


# -- which layers ----------------------------------------------------------------------------------------------


def why_not(net: Network, node: Node) -> str | None:
    """Why no chain accepts the node; "" if one does, None if the node is not elementwise at all."""
    layer, given = node.layer, net.types[node.inputs[0]].dtype
    if not isinstance(layer, (*MOVES, *_NORMS, Cast)) and operation_of(layer) is None:
        return None
    if _BYTES.get(given, given) in TYPES:
        return ""
    return None if isinstance(layer, MOVES) else f"computes on {', '.join(TYPES)}, not {given}"


def fits(net: Network, node: Node, number: str) -> bool:
    """Whether an elementwise node can be part of a chain of this number type."""
    layer, given = node.layer, net.types[node.inputs[0]].dtype
    if isinstance(layer, MOVES):
        return given in _HELD[number]
    if isinstance(layer, ToInts) and number == "long long":
        return given in _HELD[number]
    if not isinstance(layer, Cast):
        return given in _COMPUTED[number] and (number != "long long" or isinstance(layer, _OF_INTS))
    if number == "float":  # a float64 input may be rounded once
        if layer.dtype == "float64":
            return given in _EXACT
        return given != "float64" or layer.dtype == "float32"
    return number == "double" and "float64" in (given, layer.dtype)


# -- operands --------------------------------------------------------------------------------------------------


def stretch(pointer: Memory | Int64, dtype: str, row: Sequence[int], to: Sequence[int], batch_stride: int) -> Operand:
    """Rows of shape `row` broadcast to rows of shape `to`, by NumPy's rules.

    batch_stride  row stride; 0 for a weight
    """
    row = (1,) * (len(to) - len(row)) + tuple(row)
    strides = [math.prod(row[axis + 1 :]) if size > 1 else 0 for axis, size in enumerate(row)]
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(to), reversed(strides), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:  # the same as one longer axis
            levels[-1] = (size * levels[-1][0], levels[-1][1])
        else:
            levels.append((size, stride))
    outer = batch_stride
    if levels and batch_stride == levels[-1][0] * levels[-1][1]:
        outer = levels.pop()[1]
    if len(levels) > MAX_LEVELS:
        raise TooLargeError(f"stretches along at most {MAX_LEVELS} axes")
    return Operand(pointer, dtype, _where(levels, outer), tuple(levels), outer, batch_stride)


def _where(levels: list[tuple[int, int]], outer: int) -> Where:
    if not levels:
        return Where.WHOLE if outer == 1 else Where.ALIKE if outer == 0 else Where.APART
    size, stride = levels[0]
    if size % 4 or stride > 1:
        return Where.APART
    return Where.NEIGHBOURS if stride else Where.ALIKE


# -- the chain -------------------------------------------------------------------------------------------------


class RunWriter:
    """Encodes one chain; TooLargeError if it exceeds the kernel's limits."""

    def __init__(self, net: Network, nodes: Sequence[Node], number: str) -> None:
        self.net, self.nodes, self.number = net, nodes, number
        inside = {node.name for node in nodes}
        self.inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        outside = set(net.outputs)
        self.outputs = [
            node.name
            for node in nodes
            if node.name in outside or any(reader.name not in inside for reader in net.readers(node.name))
        ]
        self.steps: list[Step] = []
        self.operands: list[Operand] = []
        self.recipes: dict[str, Recipe] = {}
        self.kept: dict[str, int] = {}  # value -> slot
        self.max_kept = 0
        self.holds = ""  # the value in the accumulator
        # MOVES alias their input: name -> the value that holds the data.
        self.source: dict[str, str] = {}
        for node in nodes:
            root = self.source.get(node.inputs[0], node.inputs[0])
            self.source[node.name] = root if isinstance(node.layer, MOVES) else node.name
        self.working = [n for n in nodes if not isinstance(n.layer, MOVES) or n.name in self.outputs]
        self.uses: dict[str, int] = {}
        for node in self.working:
            for root in self._roots(node):
                self.uses[root] = self.uses.get(root, 0) + 1

    def write(self) -> Run:
        types = self.net.types
        if len(self.outputs) > MAX_OUTPUTS:
            raise TooLargeError(f"gives at most {MAX_OUTPUTS} values")
        for i, node in enumerate(self.working):
            self._compute(node)
            if node.name in self.outputs:
                self.steps.append(Step(What.GIVE, self.outputs.index(node.name)))
            if self._is_needed_later(i):
                self._keep(self.source[node.name])
        return self._run(
            types[self.nodes[0].name].row_size,
            tuple(_BYTES.get(types[name].dtype, types[name].dtype) for name in self.outputs),
        )

    def _run(self, row_size: int, dtypes: tuple[str, ...]) -> Run:
        if len(self.operands) > MAX_OPERANDS:
            raise TooLargeError(f"reads at most {MAX_OPERANDS} values and weights")
        if len(self.steps) > MAX_STEPS:
            raise TooLargeError(f"takes at most {MAX_STEPS} steps")
        return Run(
            self.number, 8 if self._is_narrow() else 4, row_size, tuple(self.operands), dtypes, tuple(self.outputs),
            tuple(self.steps), self.max_kept, self.recipes, self._divisors(),
        )  # fmt: skip

    def _divisors(self) -> StatusWord | None:
        nodes = [node for node in self.nodes if may_divide_by_zero(self.net, node)]
        if not nodes:
            return None
        return StatusWord("', '".join(node.name for node in nodes), self.net.types[nodes[0].name].row_shape, 0)

    def _is_narrow(self) -> bool:
        """Whether every layer reads and writes 16-bit floats."""
        values = {value for node in self.nodes for value in (*node.inputs, node.name)}
        return self.number == "float" and all(
            self.net.types[value].dtype in ("float16", "bfloat16") for value in values
        )

    def _roots(self, node: Node) -> list[str]:
        return [self.source.get(value, value) for value in node.inputs]

    # -- values ------------------------------------------------------------------------------------------------

    def _compute(self, node: Node) -> None:
        """Leaves the node's value in the accumulator."""
        layer, values = node.layer, list(node.inputs)
        roots, is_turned = self._roots(node), "first" in node.weights
        if len(values) > 1 and roots[1] == self.holds != roots[0]:  # a + b equals b + a bit for bit
            values[:2], roots[:2] = values[1::-1], roots[1::-1]
            is_turned = isinstance(layer, Ordered)
        row = operation_of(layer)
        to = self.net.types[node.name if isinstance(layer, Broadcast) else values[0]].row_shape
        self._load(values[0], roots[0], to)
        if isinstance(layer, _NORMS):
            self._normalise(node)
        elif isinstance(layer, Broadcast) and row is not None:
            code = self._code(f"Turned<{row.cuda}>" if is_turned else row.cuda)
            told = (not is_turned, is_turned) if may_divide_by_zero(self.net, node) else (0, 0)
            for value, root in zip(values[1:], roots[1:], strict=True):
                if root in self.kept:
                    self.steps.append(Step(What.COMBINE_KEPT, self.kept[root], code, told))
                else:
                    self.steps.append(Step(What.COMBINE, self._value(value, root, to), code, told))
            for name in node.weights.values():
                given = self.net.weight_type(name)
                recipe = Recipe.of(as_is, (name,), self.net.weights[name].shape, given.dtype)
                self.steps.append(Step(What.COMBINE, self._weight(recipe, recipe.shape, to), code, told))
            dtype = self.net.types[node.name].dtype
            if dtype in INTS and dtype != "int64":  # wrap before a comparison or division
                self._apply(ToInts(cast(Whole, dtype)))
        elif row is not None:
            self._apply(layer)
        self.holds = self.source[node.name]
        for root in roots:
            self.uses[root] -= 1
            if not self.uses[root]:
                self.kept.pop(root, None)

    def _code(self, struct: str) -> int:
        """Code of a binary operation."""
        return (INT_COMBINATIONS if self.number == "long long" else COMBINATIONS).index(struct)

    def _apply(self, layer: Layer) -> None:
        row = operation_of(layer)
        assert row is not None
        told = row.parameter_values(layer) if self.number == "double" else map(float, row.told(layer))
        p, q = (*told, 0, 0)[:2]
        code = (INT_FUNCTIONS if self.number == "long long" else FUNCTIONS).index(row.cuda)
        self.steps.append(Step(What.APPLY, 0, code, (p, q)))

    def _normalise(self, node: Node) -> None:
        to = self.net.types[node.name].row_shape
        row, dtype = (to[0], *(1,) * (len(to) - 1)), "float64" if self.number == "double" else "float32"
        for combination, recipe in batch_norm_parts(node, to[0], dtype):
            code = self._code(combination.__name__)
            self.steps.append(Step(What.COMBINE, self._weight(recipe, row, to), code))

    def _load(self, value: str, root: str, to: tuple[int, ...]) -> None:
        if root == self.holds:
            return
        if root in self.kept:
            self.steps.append(Step(What.TAKE, self.kept[root]))
        else:
            self.steps.append(Step(What.LOAD, self._value(value, root, to)))

    def _is_needed_later(self, i: int) -> bool:
        """Whether a node other than the next one reads what this one leaves in the accumulator."""
        root = self.source[self.working[i].name]
        if root not in self.source or root in self.kept or not self.uses.get(root):
            return False  # an input can be loaded again
        following = self._roots(self.working[i + 1])[:2]
        return self.uses[root] > 1 or root not in following

    def _keep(self, root: str) -> None:
        free = [place for place in range(MAX_KEPT) if place not in self.kept.values()]
        if not free:
            raise TooLargeError(f"keeps at most {MAX_KEPT} values for later")
        self.kept[root] = free[0]
        self.max_kept = max(self.max_kept, free[0] + 1)
        self.steps.append(Step(What.KEEP, free[0]))

    # -- operands ----------------------------------------------------------------------------------------------

    def _value(self, value: str, root: str, to: tuple[int, ...]) -> int:
        """An input of the chain, in the shape that the reader sees."""
        given = self.net.types[value]
        dtype = self.net.types[root].dtype
        pointer = Input(self.inputs.index(root))
        return self._operand(stretch(pointer, _BYTES.get(dtype, dtype), given.row_shape, to, given.row_size))

    def _weight(self, recipe: Recipe, row: Sequence[int], to: tuple[int, ...]) -> int:
        names = {known: name for name, known in self.recipes.items()}
        name = names.get(recipe, f"w{len(names)}")
        self.recipes[name] = recipe
        return self._operand(stretch(Weight(name), recipe.dtype, row, to, 0))

    def _operand(self, operand: Operand) -> int:
        if operand not in self.operands:
            self.operands.append(operand)
        return self.operands.index(operand)
