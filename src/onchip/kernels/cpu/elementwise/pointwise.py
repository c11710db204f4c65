"""pointwise: a run of pointwise layers in one pass over memory: activations, functions, and what is made of several
values and weights, with broadcasting; of float32, of ints, and Casts between them.

The run is a table of operations on blocks of numbers that stay in the first cache: BLOCK numbers of a row, or as many
whole rows as fit. A block's operand is where it lies outside (a value of the same size; a weight, written out for a
block), or in a thread's own memory (what other layers of the run made; a stretched value, gathered). A number's bits
depend on its own operands alone. What is done to ints, and Casts, are functions that are called by their addresses
(elementwise/ints.py).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.batch_norm import batch_norm_parts
from onchip.kernels.cpu.compiler.jit import address, address_of
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.elementwise.block import (
    ACTIVATE,
    APPLY,
    BLOCK,
    CALL,
    COMBINE,
    CUT,
    GATHER,
    INSIDE,
    MOVE,
    OUTSIDE,
    STRETCHED,
    WRITTEN_OUT,
    run_blocks,
)
from onchip.kernels.cpu.elementwise.ints import CASTS, CODE, COMPUTED_INTS, INT_COMBINATIONS, WHOLES, int_code
from onchip.kernels.cpu.microkernels.activation import code_of
from onchip.kernels.cpu.microkernels.function import COMBINATIONS, FUNCTIONS, combination_code
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.pointwise import CPU_ACTIVATIONS, may_divide_by_zero
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchNorm1d,
    BatchNorm2d,
    Broadcast,
    Cast,
    Dropout,
    Elementwise,
    Identity,
    Reshape,
    Slice,
    ToInts,
)
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_NODES, NEAR = 64, 8
_LONG_RUN = 8  # numbers of a stretched value that are copied, not looked up one by one
_MOVES, _NORMS = (Reshape, Identity, Dropout), (BatchNorm1d, BatchNorm2d)


# -- the run ---------------------------------------------------------------------------------------------------


@recipe_op
def for_a_block(weight: Array, own: tuple[int, ...], row: tuple[int, ...], rows: int) -> Array:
    """A weight, seen in the shape `own`, stretched to the shape of a row, for `rows` rows."""
    return np.tile(np.broadcast_to(weight.reshape(own), row).reshape(-1), rows)


@dataclass(frozen=True)
class Run:
    """What `bind` makes tables of; places in memory: inputs, outputs, weights, places of stretched values."""

    table: tuple[tuple[int, int, int, int, int], ...]  # without the codes of activations and the functions of CALLs
    activations: tuple[Elementwise | None, ...]  # of each operation
    functions: tuple[tuple[str, str], ...]  # of each operation that is a CALL, as numbers.CODE has them
    values: tuple[tuple[int, int, int, int], ...]
    stretched: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # rows, and the rows they are stretched to
    weights: tuple[str, ...]  # names of recipes
    size: int  # numbers of a row
    slots: int  # blocks of a thread's own memory


class _Writer:
    """Writes down the run of some nodes."""

    def __init__(self, net: Network, nodes: Sequence[Node]) -> None:
        self.net = net
        inside = {node.name for node in nodes}
        self.inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        outputs = set(net.outputs)
        self.outputs = [
            node.name
            for node in nodes
            if node.name in outputs or any(reader.name not in inside for reader in net.readers(node.name))
        ]
        self.size = net.types[nodes[0].name].row_size
        self.table: list[tuple[int, int, int, int, int]] = []
        self.activations: list[Elementwise | None] = []
        self.functions: list[tuple[str, str]] = []
        self.values: list[tuple[int, int, int, int]] = []
        self.kinds: list[str] = []  # of the values: what their numbers are
        self.known: dict[object, int] = {}
        self.stretched: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.recipes: dict[str, Recipe] = {}
        self.slots = 0
        for node in nodes:
            self._write(node)

    def run(self) -> Run:
        return Run(
            tuple(self.table), tuple(self.activations), tuple(self.functions), tuple(self.values),
            tuple(self.stretched), tuple(self.recipes), self.size, self.slots,
        )  # fmt: skip

    def _write(self, node: Node) -> None:
        layer, row, dtype = node.layer, self.net.types[node.name].row_shape, self.net.types[node.name].dtype
        if isinstance(layer, _MOVES):
            source = self._operand(node.inputs[0], self.net.types[node.inputs[0]].row_shape)
            if node.name in self.outputs:
                self._emit(MOVE, DTYPE_BYTES[dtype], self._made(node.name), source)
            else:
                self.known[node.name] = source
            return
        if isinstance(layer, Cast | ToInts):
            source = self._operand(node.inputs[0], row)
            self._convert(source, self._made(node.name))
            return
        if isinstance(layer, Slice):
            given = self.net.types[node.inputs[0]]
            lines = node.name, "lines"
            source = self._value(lines, STRETCHED, self.inputs.index(node.inputs[0]), given.row_size, "float32")
            widths = layer.sizes[-1] << 32 | given.row_shape[-1]
            self._emit(CUT, widths, self._made(node.name), source, layer.starts[-1])
            return
        if isinstance(layer, _NORMS):
            channels, total = (row[0], *(1,) * (len(row) - 1)), self._operand(node.inputs[0], row)
            made = self._made(node.name)
            for combination, recipe in batch_norm_parts(node, row[0], "float32"):
                constant = self._weight(recipe, channels, row)
                self._emit(COMBINE, COMBINATIONS.index(combination), made, total, constant)
                total = made
            return
        if not isinstance(layer, Broadcast):
            source = self._operand(node.inputs[0], row)
            if isinstance(layer, CPU_ACTIVATIONS):
                assert isinstance(layer, Elementwise)
                self._emit(ACTIVATE, 0, self._made(node.name), source, activation=layer)
            else:
                self._emit(APPLY, FUNCTIONS.index(type(layer)), self._made(node.name), source)
            return
        operands = [self._operand(value, row) for value in node.inputs]
        for role, name in node.weights.items():
            own = self.net.weights[name].shape
            operands.insert(0 if role == "first" else len(operands), self._weight(name, own, row))
        if dtype in COMPUTED_INTS:
            self._combine_ints(node, [self._wide(operand) for operand in operands])
            return
        total, made = operands[0], self._made(node.name)
        for operand in operands[1:]:
            self._emit(COMBINE, combination_code(layer), made, total, operand)
            total = made

    def _combine_ints(self, node: Node, operands: list[int]) -> None:
        is_wide = self.net.types[node.name].dtype == "int64"
        total, made = operands[0], self._made(node.name) if is_wide else self._inside((node.name, "total"), "int64")
        for operand in operands[1:]:
            self._call(("int64", "int64"), made, total, operand, int_code(node.layer))
            total = made
        if not is_wide:
            self._convert(total, self._made(node.name))

    def _convert(self, source: int, made: int) -> None:
        self._call((self.kinds[source], self.kinds[made]), made, source)

    def _call(self, function: tuple[str, str], to: int, a: int, b: int = 0, code: int = 0) -> None:
        self.functions.append(function)
        self._emit(CALL, code, to, a, b)

    def _emit(self, what: int, code: int, to: int, a: int, b: int = 0, activation: Elementwise | None = None) -> None:
        self.table.append((what, code, to, a, b))
        self.activations.append(activation)

    def _value(self, key: object, where: int, place: int, row_size: int, kind: str) -> int:
        self.known[key] = len(self.values)
        self.values.append((where, place, row_size, DTYPE_BYTES[kind]))
        self.kinds.append(kind)
        return self.known[key]

    def _made(self, name: str) -> int:
        kind = self.net.types[name].dtype
        if name in self.outputs:
            return self._value(name, OUTSIDE, len(self.inputs) + self.outputs.index(name), self.size, kind)
        return self._inside(name, kind)

    def _inside(self, key: object, kind: str) -> int:
        place = self.slots
        self.slots += 2 if DTYPE_BYTES[kind] == 8 else 1
        return self._value(key, INSIDE, place, self.size, kind)

    def _operand(self, value: str, row: tuple[int, ...]) -> int:
        if value in self.known:
            return self.known[value]
        given = self.net.types[value]
        place = self.inputs.index(value)
        if given.row_size == self.size:
            return self._value(value, OUTSIDE, place, self.size, given.dtype)
        key = (value, row)
        if key not in self.known:
            source = self._value((value, row, "outside"), STRETCHED, place, given.row_size, given.dtype)
            self.stretched.append((given.row_shape, row))
            made = self._inside(key, given.dtype)
            self._emit(GATHER, _stretch_code(given.dtype, given.row_shape, row), made, source, -len(self.stretched))
        return self.known[key]

    def _wide(self, value: int) -> int:
        """Ints as int64."""
        if self.kinds[value] == "int64":
            return value
        key = (value, "wide")
        if key not in self.known:
            self._convert(value, self._inside(key, "int64"))
        return self.known[key]

    def _weight(self, name: str | Recipe, own: tuple[int, ...], row: tuple[int, ...]) -> int:
        key = (name, row, "weight")
        if key not in self.known:
            rows, given = max(1, BLOCK // self.size), "float32"
            if isinstance(name, str):
                given = self.net.weight_type(name).dtype
            recipe = Recipe.of(for_a_block, (name,), (rows * self.size,), given, 0, own=own, row=row, rows=rows)
            self.recipes[f"w{len(self.recipes)}"] = recipe
            place = len(self.inputs) + len(self.outputs) + len(self.recipes) - 1
            self._value(key, WRITTEN_OUT, place, self.size, "int64" if given in COMPUTED_INTS else "float32")
        return self.known[key]


def _is_cut(net: Network, node: Node) -> bool:
    """Whether it is a Slice of neighbours along the last axis, all of the others."""
    if not isinstance(node.layer, Slice):
        return False
    *front, _ = net.types[node.inputs[0]].row_shape
    layer = node.layer
    return (
        list(layer.sizes[:-1]) == front
        and set(layer.steps) == {1}
        and not any(layer.starts[:-1])
        and 0 not in layer.sizes
    )


def _fits(net: Network, node: Node) -> bool:
    layer, made = node.layer, net.types[node.name].dtype
    if isinstance(layer, Cast | ToInts):
        return (net.types[node.inputs[0]].dtype, made) in (CASTS if isinstance(layer, Cast) else WHOLES)
    if isinstance(layer, _MOVES):
        return made in ("float32", *COMPUTED_INTS)
    if made in COMPUTED_INTS:  # a divisor that is 0 is found, and told of, by the reference
        return isinstance(layer, INT_COMBINATIONS) and not may_divide_by_zero(net, node)
    takes = _is_cut(net, node) or isinstance(layer, (*_NORMS, *CPU_ACTIVATIONS, *FUNCTIONS, *COMBINATIONS))
    given = (*net.input_types(node), *(net.weight_type(name) for name in node.weights.values()))
    return takes and all(each.dtype == "float32" for each in given)


# Where the longest run that a node is part of begins, for each node of a network; -1 for one that is part of none.
_BEGINS: weakref.WeakKeyDictionary[Network, list[int]] = weakref.WeakKeyDictionary()


def _begins(net: Network) -> list[int]:
    if net not in _BEGINS:
        found: list[int] = []
        made_by = {node.name: i for i, node in enumerate(net.nodes)}
        for i, node in enumerate(net.nodes):
            before = net.types[net.nodes[i - 1].name] if i and found[-1] >= 0 else None
            goes_on = before is not None and net.types[node.name].row_size == before.row_size
            if goes_on and isinstance(node.layer, Slice):  # of what the run does not make itself
                goes_on = made_by.get(node.inputs[0], -1) < found[-1]
            found.append(-1 if not _fits(net, node) else found[-1] if goes_on else i)
        _BEGINS[net] = found
    return _BEGINS[net]


class Pointwise:
    name = "pointwise"
    device_kind = "cpu"
    precisions = ("fp32",)

    def __init__(self, ends_before: Callable[[Network, int], bool] = lambda net, start: False) -> None:
        """ends_before  whether another kernel's group may begin at this layer; then a shorter chain is offered, too"""
        self.ends_before = ends_before

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """The longest run; one activation by itself is rowwise's. It begins where a run does, or little behind, where
        another kernel took the first layers along; not everywhere, for a long chain's sake."""
        first, begins = net.nodes[start], _begins(net)
        behind = start - begins[start]
        is_start = begins[start] >= 0 and (behind <= NEAR or behind % MAX_NODES == 0)
        if job.is_training or not is_start or isinstance(first.layer, _MOVES):
            return
        nodes = [
            net.nodes[i]
            for i in range(start, min(start + MAX_NODES, len(net.nodes)))
            if begins[i] == begins[start]  # they stand next to each other
        ]
        while isinstance(nodes[-1].layer, _MOVES):  # a view costs less
            nodes.pop()
        yield from self._claims(net, nodes)
        if isinstance(nodes[-1].layer, CPU_ACTIVATIONS):  # which another kernel may take along
            yield from self._claims(net, nodes[:-1])
        for i in range(1, len(nodes)):
            if self.ends_before(net, start + i):
                yield from self._claims(net, nodes[:i])

    def _claims(self, net: Network, nodes: Sequence[Node]) -> Iterator[Claim]:
        size = net.types[nodes[0].name].row_size if nodes else 0
        if not size or all(isinstance(node.layer, Slice) for node in nodes):
            return
        if len(nodes) == 1 and isinstance(nodes[0].layer, CPU_ACTIVATIONS):
            return
        writer = _Writer(net, nodes)
        moved = sum(net.types[name].row_bytes for name in (*writer.inputs, *writer.outputs))
        cached = 2 * size * len(writer.table)  # of 4 bytes: the first cache is quicker than the price's
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
        fixed = sum(recipe.nbytes for recipe in writer.recipes.values())
        cost = CoreCost(sum(map(net.row_flop, nodes)), moved, fixed, row_cache_bytes=cached)
        why = "one pass over memory" if len(nodes) > 1 else "one layer by itself"
        claim = Claim(
            self.name, f"{self.name}<{kinds}>", tuple(node.name for node in nodes), cost, why, writer.recipes,
            facts=writer.run(),
        )  # fmt: skip
        yield claim
        if _may_be_nhwc(net, nodes, writer):
            reads = dict.fromkeys(writer.inputs, Use(CHANNELS_LAST))
            yield dataclasses.replace(claim, reads=reads, writes=dict.fromkeys(writer.outputs, CHANNELS_LAST))

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        run = claim.facts
        assert isinstance(run, Run)
        kept = [_as_computed(weights[name]) for name in run.weights]
        kept += [_places(row, to, run.size) for row, to in run.stretched]
        arrays = max((place for where, place, *_ in run.values if where in (OUTSIDE, STRETCHED)), default=0) + 1
        table = np.array(run.table, np.int64)
        for i, activation in enumerate(run.activations):
            if activation is not None:
                table[i, 1] = code_of(activation)
        table[table[:, 0] == CALL, 0] = [address_of(CODE[function]) for function in run.functions]
        gathers = table[:, 0] == GATHER
        table[gathers, 4] = arrays + len(run.weights) - 1 - table[gathers, 4]
        values = np.array(run.values, np.int64)

        def facts(threads: int) -> tuple[int, object]:
            memory, places = words(*[0] * arrays, *kept), np.empty((threads, len(values)), np.int64)
            scratch = np.empty((threads, max(1, run.slots), BLOCK), np.float32)
            numbers = len(table), len(values), arrays, scratch.shape[1], run.size
            told = words(table, values, memory, places, scratch, *numbers)
            return address(told), (told, table, values, memory, places, scratch, kept)

        return CompiledLaunch(address_of(run_blocks), facts)


def _may_be_nhwc(net: Network, nodes: Sequence[Node], writer: _Writer) -> bool:
    """Whether the run does not care how its values lie: each number is made of those at its own place."""
    values, first = (*writer.inputs, *(node.name for node in nodes)), net.types[writer.inputs[0]].shape
    are_alike = not writer.recipes and all(net.types[value].shape == first for value in values)
    return are_alike and has_channels(net.types[values[0]]) and not any(value in net.outputs for value in values)


def _as_computed(weight: Array) -> Array:
    return np.ascontiguousarray(weight, np.int64 if weight.dtype.kind in "iu" else np.float32)


def _stretch_code(dtype: str, row: tuple[int, ...], to: tuple[int, ...]) -> int:
    """What `gather` is told of a value that is stretched: the runs of neighbours, or of the same number, if long."""
    axes = list(zip((1,) * (len(to) - len(row)) + tuple(row), to, strict=True))
    is_line, run = axes[-1][0] == axes[-1][1], 1
    while axes and (axes[-1][0] == axes[-1][1] if is_line else axes[-1][0] == 1):
        run *= axes.pop()[1]
    return DTYPE_BYTES[dtype] | (is_line << 4 | run << 8 if run >= _LONG_RUN else 0)


def _places(row: tuple[int, ...], to: tuple[int, ...], size: int) -> Array:
    """Where the numbers of a block's rows of shape `to` are in rows of shape `row`."""
    own = int(np.prod(row))
    rows = max(1, BLOCK // size)
    one = np.broadcast_to(np.arange(own).reshape((1,) * (len(to) - len(row)) + tuple(row)), to).reshape(-1)
    return np.asarray((np.arange(rows)[:, None] * own + one).reshape(-1), np.int64)
