"""A random network in the making: what is known of its values, and where a layer may read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from networks import YES_NO, Grow, Pick
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Broadcast,
    Clip,
    CumSum,
    HardSigmoid,
    Layer,
    MatMul,
    Mul,
    Pad,
    PReLU,
    RowNorm,
    Sigmoid,
    Softmax,
    Softsign,
    Sub,
    Tanh,
    ToInts,
    ToPixels,
)  # fmt: skip
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.types import DTYPE_BYTES, TensorType

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 65)
FLOATS = ("float32", "float16", "bfloat16", "float64")
OTHER_INTS = ("uint8", "int8", "int16", "bool")
MAX_NUMBERS = 2500  # of a row of any value
VOCABULARY = 5  # ids that an input of an id dtype holds
MAX_TOKENS = 100  # of a table
MAX_DEGREE = 4  # of a value in the inputs: powers of a power soon overflow in half precision


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
            elif isinstance(layer, ToInts):
                if DTYPE_BYTES[self.types[name].dtype] >= DTYPE_BYTES[self.types[node.inputs[0]].dtype]:
                    self.highest[name] = tops[0]
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
    while np.prod(row) > MAX_NUMBERS // 4:
        row[row.index(max(row))] //= 2
    return tuple(row)
