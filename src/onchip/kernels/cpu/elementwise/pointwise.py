"""pointwise: a chain of elementwise layers in one pass over memory: activations, functions, and operations on several
values and weights, with broadcasting; on float32 and ints, with Casts between them.

The chain becomes a table of operations on blocks that stay in L1: BLOCK elements of a row, or as many whole rows as
fit. Operands are in memory (values of the same size; weights, repeated to fill a block) or in the thread's scratch
(intermediates; broadcast values, gathered). An element's bits depend only on its operands. The functions of layers and
Casts are called by address (microkernels/loops.py, elementwise/casts.py): a network compiles only those it uses.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.batch_norm import batch_norm_ops
from onchip.kernels.chain import shares_rows
from onchip.kernels.cpu.compiler.compile_ahead import queue_functions
from onchip.kernels.cpu.compiler.jit import LinkedFunction, address, address_of
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.elementwise.block import (
    ACTIVATE,
    BLOCK,
    BROADCAST,
    CALL,
    COPY,
    GATHER,
    IN_MEMORY,
    IN_SCRATCH,
    REPEATED,
    SLICE,
    run_blocks,
)
from onchip.kernels.cpu.elementwise.casts import ALL_CASTS, CASTS, COMPUTED_INTS, TO_INT_CASTS
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.activation import code_of
from onchip.kernels.cpu.microkernels.loops import loop_of, parameters_word
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.pointwise import may_divide_by_zero, operation_of
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Activation,
    BatchNorm1d,
    BatchNorm2d,
    Broadcast,
    Cast,
    Dropout,
    Elementwise,
    Identity,
    Layer,
    Reshape,
    Slice,
    ToInts,
)
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_NODES, NEAR = 64, 8
_LONG_RUN = 8  # from this length on, runs of a broadcast value are copied, not gathered element by element
_MOVES, _NORMS = (Reshape, Identity, Dropout), (BatchNorm1d, BatchNorm2d)


# -- the table -------------------------------------------------------------------------------------------------


@recipe_op
def for_a_block(weight: Array, own: tuple[int, ...], row: tuple[int, ...], rows: int) -> Array:
    """A weight, reshaped to `own`, broadcast to the shape of a row and repeated for `rows` rows."""
    return np.tile(np.broadcast_to(weight.reshape(own), row).reshape(-1), rows)


@dataclass(frozen=True)
class Run:
    """What `bind` builds the tables from; memory slots: inputs, outputs, weights, index arrays of broadcast values."""

    table: tuple[tuple[int, int, int, int, int], ...]  # without codes of activations and addresses of CALLs
    activations: tuple[Elementwise | None, ...]  # per operation
    functions: tuple[LinkedFunction, ...]  # per CALL
    values: tuple[tuple[int, int, int, int], ...]
    broadcasts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # row shapes, before and after
    weights: tuple[str, ...]  # names of recipes
    size: int  # elements per row
    slots: int  # scratch blocks per thread


class _Writer:
    """Builds the table of a chain of nodes."""

    def __init__(self, net: Network, nodes: Sequence[Node]) -> None:
        self.net = net
        inside = {node.name for node in nodes}
        self.inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        self.outputs = [
            node.name
            for node in nodes
            if node.name in net.kept or any(reader.name not in inside for reader in net.readers(node.name))
        ]
        self.size = net.types[nodes[0].name].row_size
        self.table: list[tuple[int, int, int, int, int]] = []
        self.activations: list[Elementwise | None] = []
        self.functions: list[LinkedFunction] = []
        self.values: list[tuple[int, int, int, int]] = []
        self.dtypes: list[str] = []  # of the values
        self.known: dict[object, int] = {}
        self.broadcasts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.recipes: dict[str, Recipe] = {}
        self.slots = 0
        for node in nodes:
            self._write(node)

    def run(self) -> Run:
        return Run(
            tuple(self.table), tuple(self.activations), tuple(self.functions), tuple(self.values),
            tuple(self.broadcasts), tuple(self.recipes), self.size, self.slots,
        )  # fmt: skip

    def _write(self, node: Node) -> None:
        layer, row, dtype = node.layer, self.net.types[node.name].row_shape, self.net.types[node.name].dtype
        if isinstance(layer, _MOVES):
            source = self._operand(node.inputs[0], self.net.types[node.inputs[0]].row_shape)
            if node.name in self.outputs:
                self._emit(COPY, DTYPE_BYTES[dtype], self._output(node.name), source)
            else:
                self.known[node.name] = source
            return
        if isinstance(layer, Cast | ToInts):
            source = self._operand(node.inputs[0], row)
            self._convert(source, self._output(node.name))
            return
        if isinstance(layer, Slice):
            x_type = self.net.types[node.inputs[0]]
            lines = node.name, "lines"
            source = self._value(lines, BROADCAST, self.inputs.index(node.inputs[0]), x_type.row_size, "float32")
            widths = layer.sizes[-1] << 32 | x_type.row_shape[-1]
            self._emit(SLICE, widths, self._output(node.name), source, layer.starts[-1])
            return
        if isinstance(layer, _NORMS):
            channels, total = (row[0], *(1,) * (len(row) - 1)), self._operand(node.inputs[0], row)
            result = self._output(node.name)
            for combination, recipe in batch_norm_ops(node, row[0], "float32"):
                constant = self._weight(recipe, channels, row)
                self._compute(combination(), "float32", result, total, constant)
                total = result
            return
        if not isinstance(layer, Broadcast):
            source = self._operand(node.inputs[0], row)
            if isinstance(layer, Activation):
                assert isinstance(layer, Elementwise)
                self._emit(ACTIVATE, 0, self._output(node.name), source, activation=layer)
            else:
                self._compute(layer, dtype, self._output(node.name), source)
            return
        operands = [self._operand(value, row) for value in node.inputs]
        for role, name in node.weights.items():
            shape = self.net.weights[name].shape
            operands.insert(0 if role == "first" else len(operands), self._weight(name, shape, row))
        if dtype in COMPUTED_INTS:
            self._combine_ints(node, [self._as_int64(operand) for operand in operands])
            return
        total, result = operands[0], self._output(node.name)
        for operand in operands[1:]:
            self._compute(layer, dtype, result, total, operand)
            total = result

    def _combine_ints(self, node: Node, operands: list[int]) -> None:
        is_int64 = self.net.types[node.name].dtype == "int64"
        total, result = operands[0], self._output(node.name) if is_int64 else self._scratch((node.name, "sum"), "int64")
        for operand in operands[1:]:
            self._compute(node.layer, "int64", result, total, operand)
            total = result
        if not is_int64:
            self._convert(total, self._output(node.name))

    def _convert(self, src: int, dst: int) -> None:
        self.functions.append(ALL_CASTS[self.dtypes[src], self.dtypes[dst]])
        self._emit(CALL, 0, dst, src)

    def _compute(self, layer: Layer, dtype: str, dst: int, a: int, b: int = 0) -> None:
        self.functions.append(loop_of(layer, dtype))
        self._emit(CALL, parameters_word(layer), dst, a, b)

    def _emit(self, op: int, code: int, dst: int, a: int, b: int = 0, activation: Elementwise | None = None) -> None:
        self.table.append((op, code, dst, a, b))
        self.activations.append(activation)

    def _value(self, key: object, where: int, slot: int, row_size: int, dtype: str) -> int:
        self.known[key] = len(self.values)
        self.values.append((where, slot, row_size, DTYPE_BYTES[dtype]))
        self.dtypes.append(dtype)
        return self.known[key]

    def _output(self, name: str) -> int:
        dtype = self.net.types[name].dtype
        if name in self.outputs:
            return self._value(name, IN_MEMORY, len(self.inputs) + self.outputs.index(name), self.size, dtype)
        return self._scratch(name, dtype)

    def _scratch(self, key: object, dtype: str) -> int:
        slot = self.slots
        self.slots += 2 if DTYPE_BYTES[dtype] == 8 else 1
        return self._value(key, IN_SCRATCH, slot, self.size, dtype)

    def _operand(self, value: str, row: tuple[int, ...]) -> int:
        if value in self.known:
            return self.known[value]
        x_type = self.net.types[value]
        slot = self.inputs.index(value)
        if x_type.row_size == self.size:
            return self._value(value, IN_MEMORY, slot, self.size, x_type.dtype)
        key = (value, row)
        if key not in self.known:
            source = self._value((value, row, "outside"), BROADCAST, slot, x_type.row_size, x_type.dtype)
            self.broadcasts.append((x_type.row_shape, row))
            result = self._scratch(key, x_type.dtype)
            self._emit(GATHER, _gather_code(x_type.dtype, x_type.row_shape, row), result, source, -len(self.broadcasts))
        return self.known[key]

    def _as_int64(self, value: int) -> int:
        """An integer value as int64."""
        if self.dtypes[value] == "int64":
            return value
        key = (value, "wide")
        if key not in self.known:
            self._convert(value, self._scratch(key, "int64"))
        return self.known[key]

    def _weight(self, name: str | Recipe, shape: tuple[int, ...], row: tuple[int, ...]) -> int:
        key = (name, row, "weight")
        if key not in self.known:
            rows, dtype = max(1, BLOCK // self.size), "float32"
            if isinstance(name, str):
                dtype = self.net.weight_type(name).dtype
            recipe = Recipe.of(for_a_block, (name,), (rows * self.size,), dtype, 0, own=shape, row=row, rows=rows)
            self.recipes[f"w{len(self.recipes)}"] = recipe
            slot = len(self.inputs) + len(self.outputs) + len(self.recipes) - 1
            self._value(key, REPEATED, slot, self.size, "int64" if dtype in COMPUTED_INTS else "float32")
        return self.known[key]


def _is_slice(net: Network, node: Node) -> bool:
    """Whether the node is a contiguous Slice of the last axis and all of the others."""
    if not isinstance(node.layer, Slice):
        return False
    *outer, _ = net.types[node.inputs[0]].row_shape
    layer = node.layer
    return (
        list(layer.sizes[:-1]) == outer
        and set(layer.steps) == {1}
        and not any(layer.starts[:-1])
        and 0 not in layer.sizes
    )


def _fits(net: Network, node: Node) -> bool:
    layer, dtype = node.layer, net.types[node.name].dtype
    if isinstance(layer, Cast | ToInts):
        return (net.types[node.inputs[0]].dtype, dtype) in (CASTS if isinstance(layer, Cast) else TO_INT_CASTS)
    if isinstance(layer, _MOVES):
        return dtype in ("float32", *COMPUTED_INTS)
    op = operation_of(layer)
    has_loop = op is not None and op.cpu != ""
    if dtype in COMPUTED_INTS:  # the reference kernel reports a zero divisor
        return has_loop and not may_divide_by_zero(net, node)
    is_supported = has_loop or isinstance(layer, _NORMS) or _is_slice(net, node)
    types = (*net.input_types(node), *(net.weight_type(name) for name in node.weights.values()))
    return is_supported and all(each.dtype == "float32" for each in types)


# Per node of a network: first node of the longest chain that contains it, or -1.
_BEGINS: weakref.WeakKeyDictionary[Network, list[int]] = weakref.WeakKeyDictionary()


def _begins(net: Network) -> list[int]:
    if net not in _BEGINS:
        found: list[int] = []
        node_index = {node.name: i for i, node in enumerate(net.nodes)}
        for i, node in enumerate(net.nodes):
            before = net.nodes[i - 1] if i and found[-1] >= 0 else None
            goes_on = before is not None and net.types[node.name].row_size == net.types[before.name].row_size
            if goes_on and before is not None:
                inside = {each.name for each in net.nodes[found[-1] : i]} if net.state else set[str]()
                goes_on = shares_rows(net, before, node, inside)
            if goes_on and isinstance(node.layer, Slice):  # only of values from outside the chain
                goes_on = node_index.get(node.inputs[0], -1) < found[-1]
            found.append(-1 if not _fits(net, node) else found[-1] if goes_on else i)
        _BEGINS[net] = found
    return _BEGINS[net]


class PointwiseKernel(CpuKernel):
    """The longest chain; a single activation is left to rowwise. Claims start at the chain's first node or a few nodes
    later, where another kernel fused the first layers; not at every node of a long chain."""

    name = "pointwise"
    layers = (Layer,)
    dtypes = DTYPE_BYTES  # _begins decides

    def __init__(self, ends_before: Callable[[Network, int], bool] = lambda net, start: False) -> None:
        """ends_before  whether another kernel may start at this layer; then a shorter chain is claimed as well"""
        self.ends_before = ends_before

    def applies(self, net: Network, start: int) -> bool:
        begin = _begins(net)[start]
        is_start = begin >= 0 and (start - begin <= NEAR or (start - begin) % MAX_NODES == 0)
        return is_start and not isinstance(net.nodes[start].layer, _MOVES)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        begins = _begins(net)
        nodes = [
            net.nodes[i]
            for i in range(start, min(start + MAX_NODES, len(net.nodes)))
            if begins[i] == begins[start]  # contiguous
        ]
        while isinstance(nodes[-1].layer, _MOVES):  # views are cheaper
            nodes.pop()
        yield from self._claims(net, nodes)
        if isinstance(nodes[-1].layer, Activation):  # which another kernel may fuse
            yield from self._claims(net, nodes[:-1])
        for i in range(1, len(nodes)):
            if self.ends_before(net, start + i):
                yield from self._claims(net, nodes[:i])

    def _claims(self, net: Network, nodes: Sequence[Node]) -> Iterator[Claim]:
        size = net.types[nodes[0].name].row_size if nodes else 0
        if not size or all(isinstance(node.layer, Slice) for node in nodes):
            return
        if len(nodes) == 1 and isinstance(nodes[0].layer, Activation):
            return
        writer = _Writer(net, nodes)
        moved = sum(net.types[name].row_bytes for name in (*writer.inputs, *writer.outputs))
        cached = 2 * size * len(writer.table)  # counted as 4 bytes: L1 is faster than the cost model's cache
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
        fixed = sum(recipe.nbytes for recipe in writer.recipes.values())
        cost = CoreCost(sum(map(net.row_flop, nodes)), moved, fixed, row_cache_bytes=cached)
        why = "one pass over memory" if len(nodes) > 1 else "single layer"
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
        queue_functions((run_blocks, *run.functions))
        constants = [_as_computed(weights[name]) for name in run.weights]
        constants += [_gather_indices(row, to, run.size) for row, to in run.broadcasts]
        arrays = max((slot for where, slot, *_ in run.values if where in (IN_MEMORY, BROADCAST)), default=0) + 1
        table = np.array(run.table, np.int64)
        for i, activation in enumerate(run.activations):
            if activation is not None:
                table[i, 1] = code_of(activation)
        table[table[:, 0] == CALL, 0] = [address_of(function) for function in run.functions]
        gathers = table[:, 0] == GATHER
        table[gathers, 4] = arrays + len(run.weights) - 1 - table[gathers, 4]
        values = np.array(run.values, np.int64)

        def facts(threads: int) -> tuple[int, object]:
            memory, addresses = words(*[0] * arrays, *constants), np.empty((threads, len(values)), np.int64)
            scratch = np.empty((threads, max(1, run.slots), BLOCK), np.float32)
            sizes = len(table), len(values), arrays, scratch.shape[1], run.size
            fields = words(table, values, memory, addresses, scratch, *sizes)
            return address(fields), (fields, table, values, memory, addresses, scratch, constants)

        return CompiledLaunch(address_of(run_blocks), facts)


def _may_be_nhwc(net: Network, nodes: Sequence[Node], writer: _Writer) -> bool:
    """Whether any layout works: each element is computed from elements at the same position."""
    values, first = (*writer.inputs, *(node.name for node in nodes)), net.types[writer.inputs[0]].shape
    are_alike = not writer.recipes and all(net.types[value].shape == first for value in values)
    return are_alike and has_channels(net.types[values[0]]) and not any(value in net.outputs for value in values)


def _as_computed(weight: Array) -> Array:
    return np.ascontiguousarray(weight, np.int64 if weight.dtype.kind in "iu" else np.float32)


def _gather_code(dtype: str, row: tuple[int, ...], to: tuple[int, ...]) -> int:
    """The code of `gather` for a broadcast value: element size; for long runs, their kind and length."""
    axes = list(zip((1,) * (len(to) - len(row)) + tuple(row), to, strict=True))
    is_line, run = axes[-1][0] == axes[-1][1], 1
    while axes and (axes[-1][0] == axes[-1][1] if is_line else axes[-1][0] == 1):
        run *= axes.pop()[1]
    return DTYPE_BYTES[dtype] | (is_line << 4 | run << 8 if run >= _LONG_RUN else 0)


def _gather_indices(row: tuple[int, ...], to: tuple[int, ...], size: int) -> Array:
    """Indices into rows of shape `row` for the elements of a block of rows of shape `to`."""
    x_size = int(np.prod(row))
    rows = max(1, BLOCK // size)
    one = np.broadcast_to(np.arange(x_size).reshape((1,) * (len(to) - len(row)) + tuple(row)), to).reshape(-1)
    return np.asarray((np.arange(rows)[:, None] * x_size + one).reshape(-1), np.int64)
