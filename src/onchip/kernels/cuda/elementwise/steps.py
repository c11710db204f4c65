"""Encode a chain of elementwise layers as the steps of elementwise/pointwise.cu: a program over an accumulator.

A step loads the accumulator, applies an operation of kernels/pointwise.py, combines it with another value, or stores
it. A value that a later step needs goes to a slot in shared memory. The whole chain computes in one accumulator type
(ACC_BYTES); only a Cast and a store round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from onchip.kernels.batch_norm import BATCH_NORMS, batch_norm_ops, is_changing_norm
from onchip.kernels.cuda.common.arguments import Input, Int64, Memory, Output, StatusWord, Weight
from onchip.kernels.cuda.common.layers import struct_of
from onchip.kernels.pointwise import BINARY, GRADIENTS, UNARY, Operation, may_divide_by_zero, operation_of
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Add,
    Broadcast,
    Cast,
    Clip,
    Div,
    Dropout,
    Equal,
    Greater,
    GreaterOrEqual,
    Identity,
    Layer,
    LeakyReLU,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    Ordered,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Sub,
    Tanh,
    ToInts,
    ToPixels,
)
from onchip.network.layers.cast import IntDtype
from onchip.network.recipe import Recipe, as_is

# As in elementwise/pointwise.cu.
MAX_OPERANDS, MAX_OUTPUTS, MAX_STEPS, MAX_LEVELS = 12, 6, 64, 6
MAX_SLOTS = 4  # values in shared memory at once: 64 KiB
TYPES = ("float32", "float16", "bfloat16", "uint8", "float64", "int64", "int32", "int16", "int8")
ACC_BYTES = {"float": 4, "double": 8, "long long": 8}  # accumulator types


# Structs of pointwise.cu; a step's code is an index. The first ones are common: chains of only these use a kernel with
# fewer registers. Chains of ints have separate lists. Structs of users' layers follow, in chains with such layers.
_COMMON = (ReLU, LeakyReLU, Clip, Sigmoid, Tanh, SiLU, GELU, ToPixels, Cast)
COMMON_COMBINATIONS = 2


def _structs(op: Operation) -> tuple[str, ...]:
    """The operation's struct; of an ordered operation also with swapped operands."""
    return (struct_of(op), f"Swapped<{struct_of(op)}>") if issubclass(op.layer, Ordered) else (struct_of(op),)


def _all_structs(operations: Iterable[Operation]) -> tuple[str, ...]:
    return tuple(name for op in operations for name in _structs(op))


FUNCTIONS = _all_structs(sorted(UNARY, key=lambda op: op.layer not in _COMMON))
COMBINATIONS = _all_structs(BINARY)
GRADIENT_STRUCTS = _all_structs(GRADIENTS)  # those that a chain uses follow COMBINATIONS, as those of users' layers
COMMON_FUNCTIONS = sum(op.layer in _COMMON for op in UNARY)
_INT_LAYERS = (ToInts, Add, Mul, Max, Min, Sub, Mask, Div, Mod, Greater, GreaterOrEqual, Equal)
INT_FUNCTIONS = _all_structs(op for op in UNARY if op.layer in _INT_LAYERS)
INT_COMBINATIONS = _all_structs(op for op in BINARY if op.layer in _INT_LAYERS)
FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
_COMPUTED = {"float": FLOATS, "double": ("float64",), "long long": INTS}  # layer dtypes per accumulator type
# Dtypes that each accumulator type represents exactly.
_REPRESENTED = {"float": (*FLOATS, "uint8"), "double": ("float64", *FLOATS, "uint8"), "long long": (*INTS, "bool")}
_EXACT = (*FLOATS, "uint8", "int16", "int8", "bool")  # float32 represents all their values
_BYTES = {"bool": "uint8"}
DTYPES = (*TYPES, *_BYTES)  # of values

MOVES = (Identity, Dropout, Reshape)


class Access(IntEnum):
    """Access pattern of an operand for four contiguous elements of the result."""

    CONTIGUOUS = 0  # same index as the result
    VECTOR4 = 1  # contiguous, at another index
    BROADCAST = 2  # the same element
    STRIDED = 3


class Opcode(IntEnum):
    LOAD = 0
    LOAD_SLOT = 1
    STORE_SLOT = 2
    STORE = 3
    APPLY = 4
    COMBINE = 5
    COMBINE_SLOT = 6


@dataclass(frozen=True)
class Operand:
    """A value or a weight. The offset of result element n: divide n by each level's size in turn; multiply each
    remainder by the level's stride and the last quotient by `outer`; add them up."""

    pointer: Memory | Int64
    dtype: str
    access: Access
    levels: tuple[tuple[int, int], ...] = ()  # (size, stride), innermost first
    outer: int = 1
    batch_stride: int = 1  # row stride

    def for_first(self, count: int) -> Operand:
        """The operand for the first `count` elements: CONTIGUOUS if they have the same index as the result."""
        is_contiguous = bool(self.levels) and self.levels[0][0] >= count and self.levels[0][1] == 1
        return Operand(self.pointer, self.dtype, Access.CONTIGUOUS) if is_contiguous else self


@dataclass(frozen=True)
class Step:
    opcode: Opcode
    index: int = 0  # of an operand, an output or a slot
    code: int = 0  # of an operation, in FUNCTIONS or COMBINATIONS
    # Of the operation. For ints: whether the operand, and whether the accumulator, is a divisor that may be 0.
    parameters: tuple[float, float] = (0, 0)


@dataclass(frozen=True, eq=False)
class Run:
    acc_type: str  # key of ACC_BYTES
    vector: int  # contiguous elements per thread: 8 if all layers are 16-bit, else 4
    row_size: int
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]  # dtypes
    output_names: tuple[str, ...]
    steps: tuple[Step, ...]
    slots: int  # in shared memory
    recipes: Mapping[str, Recipe]  # keyed by Weight name
    divisors: StatusWord | None = None  # reports a divisor of 0
    more_functions: tuple[str, ...] = ()  # structs of users' layers; their codes follow those of FUNCTIONS
    more_combinations: tuple[str, ...] = ()

    @property
    def is_common(self) -> bool:
        """Whether the chain uses common operations only."""
        limits = {Opcode.APPLY: COMMON_FUNCTIONS}
        return all(step.code < limits.get(step.opcode, COMMON_COMBINATIONS) for step in self.steps)

    @property
    def output_pointers(self) -> tuple[Output, ...]:
        return tuple(Output(i) for i in range(len(self.outputs)))


class TooLargeError(Exception):
    """The chain exceeds the kernel's limits."""


# -- which layers ----------------------------------------------------------------------------------------------


def is_elementwise(layer: Layer) -> bool:
    op = operation_of(layer)
    return isinstance(layer, (*MOVES, *BATCH_NORMS, Cast)) or (op is not None and op.struct != "")


def fits(net: Network, node: Node, acc_type: str) -> bool:
    """Whether an elementwise node can be part of a chain of this accumulator type."""
    layer, x_dtype = node.layer, net.types[node.inputs[0]].dtype
    if x_dtype not in DTYPES or is_changing_norm(net, node):
        return False
    if isinstance(layer, MOVES):
        return x_dtype in _REPRESENTED[acc_type]
    if isinstance(layer, ToInts) and acc_type == "long long":
        return x_dtype in _REPRESENTED[acc_type]
    if not isinstance(layer, Cast):
        return x_dtype in _COMPUTED[acc_type] and (acc_type != "long long" or isinstance(layer, _INT_LAYERS))
    if acc_type == "float":  # a float64 input may be rounded once
        if layer.dtype == "float64":
            return x_dtype in _EXACT
        return x_dtype != "float64" or layer.dtype == "float32"
    return acc_type == "double" and "float64" in (x_dtype, layer.dtype)


# -- operands --------------------------------------------------------------------------------------------------


def broadcast(pointer: Memory | Int64, dtype: str, row: Sequence[int], to: Sequence[int], batch_stride: int) -> Operand:
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
        raise TooLargeError(f"broadcasts over at most {MAX_LEVELS} axes")
    return Operand(pointer, dtype, _access(levels, outer), tuple(levels), outer, batch_stride)


def _access(levels: list[tuple[int, int]], outer: int) -> Access:
    if not levels:
        return Access.CONTIGUOUS if outer == 1 else Access.BROADCAST if outer == 0 else Access.STRIDED
    size, stride = levels[0]
    if size % 4 or stride > 1:
        return Access.STRIDED
    return Access.VECTOR4 if stride else Access.BROADCAST


def _code(structs: list[str], op: Operation, is_swapped: bool = False) -> int:
    """The index of an operation's struct; one that is not there yet is appended."""
    if struct_of(op) not in structs:
        structs += _structs(op)
    return structs.index(_structs(op)[is_swapped])


# -- the chain -------------------------------------------------------------------------------------------------


class RunWriter:
    """Encodes one chain; TooLargeError if it exceeds the kernel's limits."""

    def __init__(self, net: Network, nodes: Sequence[Node], acc_type: str) -> None:
        self.net, self.nodes, self.acc_type = net, nodes, acc_type
        inside = {node.name for node in nodes}
        self.inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        self.outputs = [
            node.name
            for node in nodes
            if node.name in net.kept or any(reader.name not in inside for reader in net.readers(node.name))
        ]
        self.steps: list[Step] = []
        self.operands: list[Operand] = []
        self.recipes: dict[str, Recipe] = {}
        self.slots: dict[str, int] = {}  # value -> slot
        self.max_slots = 0
        is_int = acc_type == "long long"
        self.functions = list(INT_FUNCTIONS if is_int else FUNCTIONS)
        self.combinations = list(INT_COMBINATIONS if is_int else COMBINATIONS)
        self.current = ""  # the value in the accumulator
        # MOVES alias their input: name -> the value that holds the data.
        self.source: dict[str, str] = {}
        for node in nodes:
            root = self.source.get(node.inputs[0], node.inputs[0])
            self.source[node.name] = root if isinstance(node.layer, MOVES) else node.name
        self.encoded = [n for n in nodes if not isinstance(n.layer, MOVES) or n.name in self.outputs]
        self.uses: dict[str, int] = {}
        for node in self.encoded:
            for root in self._roots(node):
                self.uses[root] = self.uses.get(root, 0) + 1

    def write(self) -> Run:
        types = self.net.types
        if len(self.outputs) > MAX_OUTPUTS:
            raise TooLargeError(f"writes at most {MAX_OUTPUTS} values")
        for i, node in enumerate(self.encoded):
            self._compute(node)
            if node.name in self.outputs:
                self.steps.append(Step(Opcode.STORE, self.outputs.index(node.name)))
            if self._is_reused(i):
                self._store_slot(self.source[node.name])
        return self._run(
            types[self.nodes[0].name].row_size,
            tuple(_BYTES.get(types[name].dtype, types[name].dtype) for name in self.outputs),
        )

    def _run(self, row_size: int, dtypes: tuple[str, ...]) -> Run:
        if len(self.operands) > MAX_OPERANDS:
            raise TooLargeError(f"reads at most {MAX_OPERANDS} values and weights")
        if len(self.steps) > MAX_STEPS:
            raise TooLargeError(f"supports at most {MAX_STEPS} steps")
        is_int = self.acc_type == "long long"
        more_functions = self.functions[len(INT_FUNCTIONS if is_int else FUNCTIONS) :]
        more_combinations = self.combinations[len(INT_COMBINATIONS if is_int else COMBINATIONS) :]
        return Run(
            self.acc_type, 8 if self._is_narrow() else 4, row_size, tuple(self.operands), dtypes, tuple(self.outputs),
            tuple(self.steps), self.max_slots, self.recipes, self._divisors(), tuple(more_functions),
            tuple(more_combinations),
        )  # fmt: skip

    def _divisors(self) -> StatusWord | None:
        nodes = [node for node in self.nodes if may_divide_by_zero(self.net, node)]
        if not nodes:
            return None
        return StatusWord("', '".join(node.name for node in nodes), self.net.types[nodes[0].name].row_shape, 0)

    def _is_narrow(self) -> bool:
        """Whether every layer reads and writes 16-bit floats."""
        values = {value for node in self.nodes for value in (*node.inputs, node.name)}
        return self.acc_type == "float" and all(
            self.net.types[value].dtype in ("float16", "bfloat16") for value in values
        )

    def _roots(self, node: Node) -> list[str]:
        return [self.source.get(value, value) for value in node.inputs]

    # -- values ------------------------------------------------------------------------------------------------

    def _compute(self, node: Node) -> None:
        """Append the steps that compute the node's value in the accumulator."""
        layer, values = node.layer, list(node.inputs)
        roots, is_swapped = self._roots(node), "first" in node.weights
        if len(values) > 1 and roots[1] == self.current != roots[0]:  # a + b equals b + a bit for bit
            values[:2], roots[:2] = values[1::-1], roots[1::-1]
            is_swapped = isinstance(layer, Ordered)
        op = operation_of(layer)
        to = self.net.types[node.name if isinstance(layer, Broadcast) else values[0]].row_shape
        self._load(values[0], roots[0], to)
        if isinstance(layer, BATCH_NORMS):
            self._normalise(node)
        elif isinstance(layer, Broadcast) and op is not None:
            code = _code(self.combinations, op, is_swapped)
            checks = may_divide_by_zero(self.net, node)
            parameters = (not is_swapped, is_swapped) if checks else self._parameters(op, layer)
            for value, root in zip(values[1:], roots[1:], strict=True):
                if root in self.slots:
                    self.steps.append(Step(Opcode.COMBINE_SLOT, self.slots[root], code, parameters))
                else:
                    self.steps.append(Step(Opcode.COMBINE, self._value(value, root, to), code, parameters))
            for name in node.weights.values():
                weight_type = self.net.weight_type(name)
                recipe = Recipe.of(as_is, (name,), self.net.weights[name].shape, weight_type.dtype)
                self.steps.append(Step(Opcode.COMBINE, self._weight(recipe, recipe.shape, to), code, parameters))
            dtype = self.net.types[node.name].dtype
            if dtype in INTS and dtype != "int64":  # wrap before a comparison or division
                self._apply(ToInts(cast(IntDtype, dtype)))
        elif op is not None:
            self._apply(layer)
        self.current = self.source[node.name]
        for root in roots:
            self.uses[root] -= 1
            if not self.uses[root]:
                self.slots.pop(root, None)

    def _apply(self, layer: Layer) -> None:
        op = operation_of(layer)
        assert op is not None
        self.steps.append(Step(Opcode.APPLY, 0, _code(self.functions, op), self._parameters(op, layer)))

    def _parameters(self, op: Operation, layer: Layer) -> tuple[float, float]:
        values = op.parameter_values(layer) if self.acc_type == "double" else map(float, op.float32_parameters(layer))
        p, q = (*values, 0, 0)[:2]
        return p, q

    def _normalise(self, node: Node) -> None:
        to = self.net.types[node.name].row_shape
        row, dtype = (to[0], *(1,) * (len(to) - 1)), "float64" if self.acc_type == "double" else "float32"
        for combination, recipe in batch_norm_ops(node, to[0], dtype):
            code = self.combinations.index(combination.__name__)
            self.steps.append(Step(Opcode.COMBINE, self._weight(recipe, row, to), code))

    def _load(self, value: str, root: str, to: tuple[int, ...]) -> None:
        if root == self.current:
            return
        if root in self.slots:
            self.steps.append(Step(Opcode.LOAD_SLOT, self.slots[root]))
        else:
            self.steps.append(Step(Opcode.LOAD, self._value(value, root, to)))

    def _is_reused(self, i: int) -> bool:
        """Whether a node other than the next one reads this node's value."""
        root = self.source[self.encoded[i].name]
        if root not in self.source or root in self.slots or not self.uses.get(root):
            return False  # an input can be loaded again
        following = self._roots(self.encoded[i + 1])[:2]
        return self.uses[root] > 1 or root not in following

    def _store_slot(self, root: str) -> None:
        free = [slot for slot in range(MAX_SLOTS) if slot not in self.slots.values()]
        if not free:
            raise TooLargeError(f"keeps at most {MAX_SLOTS} values in shared memory")
        self.slots[root] = free[0]
        self.max_slots = max(self.max_slots, free[0] + 1)
        self.steps.append(Step(Opcode.STORE_SLOT, free[0]))

    # -- operands ----------------------------------------------------------------------------------------------

    def _value(self, value: str, root: str, to: tuple[int, ...]) -> int:
        """An input of the chain, broadcast to the shape `to`."""
        x = self.net.types[value]
        dtype = self.net.types[root].dtype
        pointer = Input(self.inputs.index(root))
        return self._operand(broadcast(pointer, _BYTES.get(dtype, dtype), x.row_shape, to, x.row_size))

    def _weight(self, recipe: Recipe, row: Sequence[int], to: tuple[int, ...]) -> int:
        names = {known: name for name, known in self.recipes.items()}
        name = names.get(recipe, f"w{len(names)}")
        self.recipes[name] = recipe
        return self._operand(broadcast(Weight(name), recipe.dtype, row, to, 0))

    def _operand(self, operand: Operand) -> int:
        if operand not in self.operands:
            self.operands.append(operand)
        return self.operands.index(operand)
