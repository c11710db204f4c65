"""pointwise on a GPU: the host's side of pointwise.cu. It claims runs of pointwise layers; pointwise_run.py writes them
down as the steps that the kernel goes through.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from onchip.kernels.cuda.divide import magic_of
from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.pointwise_run import (
    BINARY,
    MOST_LEVELS,
    MOST_OPERANDS,
    MOST_OUTPUTS,
    MOST_STEPS,
    MOVES,
    TYPES,
    UNARY,
    Operand,
    Run,
    RunWriter,
    TooLargeError,
    Where,
    why_not,
)
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    Budget,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Memory,
    Program,
    Steps,
    Struct,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.layers import Cast, Reshape
from onchip.spec.network import Network, Node

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, NUMBERS_A_THREAD, BLOCKS_A_UNIT = 256, 16, 5
TILE = THREADS * NUMBERS_A_THREAD
KEPT_BYTES = 4 * TILE  # of shared memory for a value that is kept
MOST_NUMBERS = 2**31 - 1  # of a launch
ALIGNED_ROWS = 16  # begin at a multiple of 16 bytes, whatever a row is
PROGRAM = Program(
    SOURCE,
    f"pointwise<Unary<{', '.join(row.cuda for row in UNARY)}>, Binary<{', '.join(row.cuda for row in BINARY)}>>",
)
BUDGET = Budget(registers=48, spill_bytes=224)  # spills: of GELU alone, of 16 erfc at the same time


@dataclass(frozen=True)
class PointwiseLowering:
    run: Run

    def at(self, B: int) -> Steps:
        """One launch, but for more numbers than 32 bits count."""
        if not self.run.row_size or not self.run.outputs:
            return Steps(())
        most = rows_a_launch(self.run.row_size)
        return Steps(tuple(self._launch(first, min(most, B - first)) for first in range(0, B, most)))

    def _launch(self, first: int, rows: int) -> KernelLaunch:
        count = rows * self.run.row_size
        config = LaunchConfig((-(-count // TILE), 1, 1), (THREADS, 1, 1), self.run.kept * KEPT_BYTES)
        return KernelLaunch(PROGRAM, config, (self._told(first, count),), BUDGET)

    def _told(self, first: int, count: int) -> Struct:
        """`Run` of pointwise.cu, for rows from `first` on."""
        run = self.run
        none = Int64(0)
        operands = [operand.pointer for operand in run.operands]
        pointers: list[Memory | Int64] = [*operands, *[none] * (MOST_OPERANDS - len(operands))]
        pointers += [*run.output_pointers, *[none] * (MOST_OUTPUTS - len(run.outputs))]
        types = bytes(TYPES.index(dtype) for dtype in run.outputs)
        data = [struct.pack("<qII8s", first * run.row_size, count, len(run.steps), types)]
        data += [_operand(operand, first) for operand in run.operands]
        data.append(bytes(OPERAND_BYTES * (MOST_OPERANDS - len(operands))))
        data += [struct.pack("<BBBxff", step.what, step.code, step.index, *step.told) for step in run.steps]
        data.append(bytes(STEP_BYTES * (MOST_STEPS - len(run.steps))))
        return Struct(tuple(pointers), b"".join(data))


_LEVEL = "<4I"
OPERAND_BYTES, STEP_BYTES = 16 + MOST_LEVELS * struct.calcsize(_LEVEL), 12


def _operand(operand: Operand, first: int) -> bytes:
    """`Operand` of pointwise.cu."""
    head = struct.pack(
        "<qBBBxI", first * operand.batch_stride, TYPES.index(operand.dtype), operand.where, len(operand.levels),
        operand.outer,
    )  # fmt: skip
    levels = b"".join(struct.pack(_LEVEL, size, *magic_of(size), stride) for size, stride in operand.levels)
    return (head + levels).ljust(OPERAND_BYTES, b"\0")


def rows_a_launch(row_size: int) -> int:
    """As many as 32 bits count, such that the next launch begins at a multiple of 16 bytes; 0: a row is too long."""
    if row_size <= MOST_NUMBERS // ALIGNED_ROWS:
        return MOST_NUMBERS // row_size // ALIGNED_ROWS * ALIGNED_ROWS
    return int(row_size <= MOST_NUMBERS and row_size % ALIGNED_ROWS == 0)


class Pointwise:
    name = "pointwise"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # it computes in float32

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """The longest run, and what of it stands in front of its last Casts and Reshapes, where a layer of another kind
        follows: its kernel may take those along. Not every part of it: a long chain would have too many."""
        first = net.nodes[start]
        if job.is_training or isinstance(first.layer, MOVES) or (why := why_not(net, first)) is None:
            return
        if not why and device.arch not in ARCHITECTURES:
            why = f"compiles for {', '.join(ARCHITECTURES)}, not {device.arch}"
        row_size = net.types[first.name].row_size
        if not why and row_size and not rows_a_launch(row_size):
            why = f"counts numbers of a row in 31 bits, got {row_size:,}"
        if why:
            yield Refusal(self.name, first.name, why)
            return
        nodes = _fitting(net, start)
        while nodes:
            try:
                run = RunWriter(net, nodes).write()
                break
            except TooLargeError as error:
                nodes, why = nodes[:-1], str(error)
        else:
            yield Refusal(self.name, first.name, why)
            return
        yield _claim(net, nodes, run)
        following = next(net.nodes_from(start + len(nodes)), None)
        if following is None or why_not(net, following) is not None:
            return
        behind = len(list(takewhile(lambda node: isinstance(node.layer, Cast | Reshape), reversed(nodes))))
        if 0 < behind < len(nodes):
            try:
                yield _claim(net, nodes[:-behind], RunWriter(net, nodes[:-behind]).write())
            except TooLargeError:
                return  # it would give more values


def _fitting(net: Network, start: int) -> list[Node]:
    """The nodes from `start` on that one run could hold, but for how much it needs."""
    first = net.nodes[start]
    size = net.types[first.name].row_size
    found: list[Node] = []
    for node in net.nodes_from(start):
        if net.types[node.name].row_size != size or why_not(net, node) != "":
            break
        found.append(node)
        if len(found) == MOST_STEPS - 2:  # the first step loads, the last one gives
            break
    return found


def _claim(net: Network, nodes: list[Node], run: Run) -> Claim:
    kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
    inside = {node.name for node in nodes}
    read = {value for node in nodes for value in node.inputs if value not in inside}
    moved = sum(net.types[name].row_bytes for name in (*read, *run.output_names))
    fixed = sum(recipe.nbytes for recipe in run.recipes.values())
    return Claim(
        kernel=Pointwise.name,
        label=f"{Pointwise.name}<{kinds}>",
        nodes=tuple(node.name for node in nodes),
        price=Price(sum(map(net.row_flop, nodes)), moved, fixed, precision="fp32"),
        why="one pass over memory" if len(nodes) > 1 else "one layer by itself",
        recipes=run.recipes,
        fast_bytes=run.kept * KEPT_BYTES,
        facts=PointwiseLowering(run),
    )


INSTANCES = (
    Instance(
        "every run",
        lambda device: PointwiseLowering(
            Run(1, (Operand(Int64(0), "float32", Where.WHOLE),), ("float32",), ("y",), (), 4, {})
        ).at(1).launches[0],
    ),
)  # fmt: skip
