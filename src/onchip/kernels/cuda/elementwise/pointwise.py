"""Chains of elementwise layers: host side of elementwise/pointwise.cu. elementwise/steps.py encodes the steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from ctypes import c_double, c_float, c_int64, c_uint8, c_uint32, c_void_p
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from onchip.kernels.batch_norm import is_changing_norm
from onchip.kernels.chain import shares_rows
from onchip.kernels.cuda.common.arguments import NOTHING, Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import OVERLAPPING, Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.elementwise.steps import (
    ACC_BYTES,
    COMBINATIONS,
    COMMON_COMBINATIONS,
    COMMON_FUNCTIONS,
    DTYPES,
    FUNCTIONS,
    GRADIENT_STRUCTS,
    INT_COMBINATIONS,
    INT_FUNCTIONS,
    MAX_LEVELS,
    MAX_OPERANDS,
    MAX_OUTPUTS,
    MAX_STEPS,
    MOVES,
    TYPES,
    Access,
    Opcode,
    Operand,
    Run,
    RunWriter,
    Step,
    TooLargeError,
    fits,
    is_elementwise,
)
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Layer, Reshape
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels
from onchip.plan.plan import values_read

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BYTES_PER_THREAD = 256, 64
TILE_BYTES = THREADS * BYTES_PER_THREAD  # of elements per block, and of shared memory per slot
BLOCKS_PER_SM = 5  # small inputs: one wave
MAX_ELEMENTS = 2**31 - 1  # elements per launch
ALIGNED_ROWS = 16  # any 16 rows are a multiple of 16 bytes
# For 5 blocks per SM, or 3. sm_90 does not spill; others spill a little in float chains.
COMMON_BUDGETS = {"float": Budget(48, spill_bytes=192), "double": Budget(80), "long long": Budget(80)}
BUDGETS = {"float": Budget(80, spill_bytes=32), "double": Budget(128), "long long": Budget(80)}  # 3 blocks per SM, or 2


class LevelStruct(CStruct):
    source, c_name = SOURCE, "Level"
    _fields_ = (("by", Divider), ("stride", c_uint32))


class OperandStruct(CStruct):
    source, c_name = SOURCE, "Operand"
    _fields_ = (
        ("first", c_int64), ("type", c_uint8), ("access", c_uint8), ("levels", c_uint8), ("outer", c_uint32),
        ("level", LevelStruct * MAX_LEVELS),
    )  # fmt: skip


def _structs(acc_type: str, number: Any) -> tuple[type[CStruct], type[CStruct]]:
    """Step and Run of an accumulator type."""

    class StepStruct(CStruct):
        source, c_name = SOURCE, f"Step<{acc_type}>"
        _fields_ = (("opcode", c_uint8), ("code", c_uint8), ("index", c_uint8), ("p", number), ("q", number))

    class RunStruct(CStruct):
        source, c_name = SOURCE, f"Run<{acc_type}>"
        _fields_ = (
            ("operand_at", c_void_p * MAX_OPERANDS), ("output_at", c_void_p * MAX_OUTPUTS), ("first", c_int64),
            ("count", c_uint32), ("steps", c_uint32), ("outputs", c_uint8 * 8),
            ("operands", OperandStruct * MAX_OPERANDS), ("step", StepStruct * MAX_STEPS),
        )  # fmt: skip

    return StepStruct, RunStruct


STRUCTS = {
    "float": _structs("float", c_float), "double": _structs("double", c_double),
    "long long": _structs("long long", c_int64),
}  # fmt: skip


def program_of(run: Run, per_thread: int) -> Program:
    """The kernel of a chain, of all operations or only of the common ones.

    per_thread  elements per thread
    """
    functions, combinations = FUNCTIONS, COMBINATIONS
    if run.acc_type == "long long":
        functions, combinations = INT_FUNCTIONS, INT_COMBINATIONS
    elif run.is_common:
        functions, combinations = FUNCTIONS[:COMMON_FUNCTIONS], COMBINATIONS[:COMMON_COMBINATIONS]
    unary, binary = (*functions, *run.more_functions), (*combinations, *run.more_combinations)
    lists = f"Unary<{', '.join(unary)}>, Binary<{', '.join(binary)}>"
    return Program(SOURCE, f"pointwise<{run.acc_type}, {run.vector}, {per_thread}, {lists}>")


@dataclass(frozen=True)
class PointwiseLowering:
    run: Run
    units: int
    overlaps: bool  # whether the device has programmatic dependent launch

    def at(self, B: int) -> Steps:
        """One launch, or several if the elements exceed 31-bit indices."""
        if not self.run.row_size or not self.run.outputs:
            return Steps(())
        most = rows_per_launch(self.run.row_size)
        return Steps(tuple(self._launch(first, min(most, B - first)) for first in range(0, B, most)))

    def _launch(self, first: int, rows: int) -> KernelLaunch:
        count = rows * self.run.row_size
        acc_type, vector, per_thread = self.run.acc_type, self.run.vector, self._per_thread(count)
        slot_bytes = self.run.slots * THREADS * per_thread * ACC_BYTES[acc_type]
        overlaps = self.overlaps and per_thread == vector
        blocks = -(-count // (THREADS * per_thread))
        config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), slot_bytes, overlaps=overlaps)
        program = program_of(self.run, per_thread)
        budget = (COMMON_BUDGETS if self.run.is_common else BUDGETS)[acc_type]
        return KernelLaunch(program, config, (self._packed(first, count), self.run.divisors or NOTHING), budget)

    def _per_thread(self, count: int) -> int:
        """Elements per thread: few if that fits in one wave."""
        few = self.run.vector
        is_small = count <= self.units * BLOCKS_PER_SM * THREADS * few
        return few if is_small else BYTES_PER_THREAD // ACC_BYTES[self.run.acc_type]

    def _packed(self, first: int, count: int) -> Struct:
        """Rows from `first` on."""
        run = self.run
        step, whole = STRUCTS[run.acc_type]
        return whole.of(
            operand_at=[operand.pointer for operand in run.operands], output_at=run.output_pointers,
            first=first * run.row_size, count=count, steps=len(run.steps), outputs=list(map(TYPES.index, run.outputs)),
            operands=[_operand(operand if first else operand.for_first(count), first) for operand in run.operands],
            step=[
                step.of(opcode=each.opcode, code=each.code, index=each.index, p=p, q=q)
                for each in run.steps for p, q in (each.parameters,)
            ],
        )  # fmt: skip


def _operand(operand: Operand, first: int) -> Struct:
    return OperandStruct.of(
        first=first * operand.batch_stride, type=TYPES.index(operand.dtype), access=operand.access,
        levels=len(operand.levels), outer=operand.outer,
        level=[LevelStruct.of(by=divider(size), stride=stride) for size, stride in operand.levels],
    )  # fmt: skip


def rows_per_launch(row_size: int) -> int:
    """Rows within 31-bit indices, such that the next launch starts 16-byte aligned; 0: a row is too long."""
    if row_size <= MAX_ELEMENTS // ALIGNED_ROWS:
        return MAX_ELEMENTS // row_size // ALIGNED_ROWS * ALIGNED_ROWS
    return int(row_size <= MAX_ELEMENTS and row_size % ALIGNED_ROWS == 0)


class PointwiseKernel(CudaKernel):
    name = "pointwise"
    layers = (Layer,)
    dtypes = DTYPES

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        return is_elementwise(node.layer) and not isinstance(node.layer, MOVES) and not is_changing_norm(net, node)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """The longest chain, and the chain without its last Casts and Reshapes where a layer of another kind follows:
        that layer's kernel may fuse them. Not every prefix: a long chain has too many."""
        first = net.nodes[start]
        row_size = net.types[first.name].row_size
        if row_size and not rows_per_launch(row_size):
            yield Refusal(self.name, first.name, f"needs rows of fewer than 2^31 elements, got {row_size:,}")
            return
        acc_type, nodes = _longest(net, start)
        run = _written(net, nodes, acc_type)
        if isinstance(run, str) and nodes:  # then as many as fit, by bisection
            count = bisect.bisect(
                range(1, len(nodes)), False, key=lambda n: isinstance(_written(net, nodes[:n], acc_type), str)
            )
            nodes = nodes[: max(1, count)]
            run = _written(net, nodes, acc_type)
        if isinstance(run, str):
            yield Refusal(self.name, first.name, run)
            return
        yield from self._chain(net, nodes, run, device)
        following = next(net.nodes_from(start + len(nodes)), None)
        if following is None or is_elementwise(following.layer):
            return
        trailing = len(list(takewhile(lambda node: isinstance(node.layer, Cast | Reshape), reversed(nodes))))
        if 0 < trailing < len(nodes):
            shorter = _written(net, nodes[:-trailing], acc_type)
            if not isinstance(shorter, str):  # it may have too many outputs
                yield from self._chain(net, nodes[:-trailing], shorter, device)

    def _chain(self, net: Network, nodes: list[Node], run: Run, device: Device) -> Iterator[Claim]:
        """The claim of a chain; also in NHWC if all values have channels and no operand is broadcast."""
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
        inside = {node.name for node in nodes}
        read = {value for node in nodes for value in node.inputs if value not in inside}
        moved = sum(net.types[name].row_bytes for name in (*read, *run.output_names))
        claim = self.claim(
            net, nodes[0], PointwiseLowering(run, device.units, device.arch in OVERLAPPING),
            label=f"{self.name}<{kinds}>", nodes=tuple(node.name for node in nodes),
            cost=Cost(sum(map(net.row_flop, nodes)), moved, recipe_bytes(run.recipes), precision="fp32"),
            why="one pass over memory" if len(nodes) > 1 else "single layer",
            recipes=run.recipes, fast_bytes=run.slots * TILE_BYTES,
        )  # fmt: skip
        yield claim
        may_be_nhwc = all(operand.access is Access.CONTIGUOUS for operand in run.operands)
        may_be_nhwc = may_be_nhwc and all(has_channels(net.types[name]) for name in (*read, *run.output_names))
        # Network inputs and outputs stay row-major.
        if may_be_nhwc and net.inputs.keys().isdisjoint(read) and all(map(net.readers, run.output_names)):
            reads = dict.fromkeys(values_read(net, claim), Use(CHANNELS_LAST))
            yield replace(claim, reads=reads, writes=dict.fromkeys(run.output_names, CHANNELS_LAST))


def _written(net: Network, nodes: list[Node], acc_type: str) -> Run | str:
    """The chain of these nodes, or why it does not fit."""
    if not nodes:
        return "has no element type for it"
    try:
        return RunWriter(net, nodes, acc_type).write()
    except TooLargeError as error:
        return str(error)


def _longest(net: Network, start: int) -> tuple[str, list[Node]]:
    """A chain's accumulator type and nodes: after a Cast, float or double, whichever covers more nodes."""
    runs = {acc_type: _fitting(net, start, acc_type) for acc_type in ACC_BYTES}
    acc_type = max(runs, key=lambda acc_type: len(runs[acc_type]))
    return acc_type, runs[acc_type]


def _fitting(net: Network, start: int, acc_type: str) -> list[Node]:
    """The nodes from `start` on that can share a chain, before the kernel's limits."""
    first = net.nodes[start]
    size = net.types[first.name].row_size
    found: list[Node] = []
    inside: set[str] = set()
    for node in net.nodes_from(start):
        if not shares_rows(net, first, node, inside):
            break
        if net.types[node.name].row_size != size or not is_elementwise(node.layer) or not fits(net, node, acc_type):
            break
        found.append(node)
        inside.add(node.name)
        if len(found) == MAX_STEPS - 2:  # the first step loads, the last one stores
            break
    return found


def _instance(
    acc_type: str, vector: int = 4, is_common: bool = False, rows: int = 1 << 24, gradients: tuple[str, ...] = ()
) -> Instance:
    steps = () if is_common else (Step(Opcode.APPLY, code=COMMON_FUNCTIONS),)
    run = Run(
        acc_type, vector, 1, (Operand(NOTHING, "uint8", Access.CONTIGUOUS),), ("uint8",), ("y",), steps, 4, {},
        more_combinations=gradients,
    )  # fmt: skip
    kind = ("common " if is_common else "") + ("short " if rows == 1 else "")
    name = f"every {kind}run of {acc_type}, {vector} neighbours" + (", with gradients" if gradients else "")
    return Instance(name, lambda device: PointwiseLowering(run, device.units, True).at(rows).launches[0])


INSTANCES = (
    _instance("float", is_common=True), _instance("float", 8, is_common=True), _instance("double", is_common=True),
    *map(_instance, ACC_BYTES), _instance("float", 8), _instance("float", rows=1),
    _instance("float", is_common=True, rows=1), _instance("float", 8, is_common=True, rows=1),
    _instance("double", rows=1), _instance("long long", rows=1), _instance("float", gradients=GRADIENT_STRUCTS),
)  # fmt: skip
