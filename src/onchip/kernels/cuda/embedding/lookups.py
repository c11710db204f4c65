"""Look-ups in several tables in one launch, with their Concat fused: host side of embedding/lookups.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Memory,
    Output,
    Program,
    StatusWord,
    Steps,
    Struct,
    UInt32,
    Weight,
    in_line,
)
from onchip.kernels.cuda.common.strides import View
from onchip.kernels.cuda.embedding.gather import BLOCKS_PER_SM, IDS, THREADS, WORDS
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Embedding, Reshape, Slice
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
MOST, MAX_KINDS = 16, 8  # parts and status words per launch
MAX_NODES = 512  # search limit from `start`


@dataclass(frozen=True)
class Part:
    """Items of a batch row that are stored contiguously: table rows, or chunks of a value."""

    source: Memory  # the table, or the value
    ids: Input | None
    status: StatusWord | None
    place: tuple[int, int, int]  # each, row, first: strides and offset, in ids or, for a value, in bytes
    count: int
    item_bytes: int
    output: int
    to_row_bytes: int
    to_bytes: int  # offset of the first item

    @property
    def word_bytes(self) -> int:
        """The widest word that divides all sizes and offsets."""
        return math.gcd(self.item_bytes, self.to_row_bytes, self.to_bytes, *(() if self.ids else self.place), 16)

    def packed(self, word: int, statuses: Sequence[StatusWord]) -> bytes:
        """`Part` of embedding/lookups.cu."""
        words, unit = self.item_bytes // word, 1 if self.ids else word
        return struct.pack(
            "<6q4I", *(n // unit for n in self.place), self.status.limit if self.status else 0,
            self.to_row_bytes // word, self.to_bytes // word, self.count, words,
            min(words - 1, THREADS - 1).bit_length(), statuses.index(self.status) if self.status else 0,
        )  # fmt: skip


@dataclass(frozen=True)
class LookupsLowering:
    """lookups(parts, s0, .., s7, B, blocks), for up to MOST parts each"""

    parts: tuple[Part, ...]
    ids_dtype: str
    units: int

    def at(self, B: int) -> Steps:
        return Steps(tuple(self._launch(parts, B) for parts in self._shares()) if B else ())

    def _shares(self) -> list[list[Part]]:
        """The parts of each launch."""
        shares: list[list[Part]] = [[]]
        for part in self.parts:
            kinds = {each.status for each in (*shares[-1], part) if each.status}
            if len(shares[-1]) == MOST or len(kinds) > MAX_KINDS:
                shares.append([])
            shares[-1].append(part)
        return shares

    @property
    def launches(self) -> int:
        return len(self._shares())

    def _launch(self, parts: list[Part], B: int) -> KernelLaunch:
        word = math.gcd(*(part.word_bytes for part in parts))
        statuses = list(dict.fromkeys(part.status for part in parts if part.status))
        threads = max(B * part.count << min(part.item_bytes // word - 1, THREADS - 1).bit_length() for part in parts)
        blocks = min(-(-threads // THREADS), -(-self.units * BLOCKS_PER_SM // len(parts)))
        missing = [Int64(0)] * (MOST - len(parts))
        pointers: list[Memory | Int64] = [*(part.source for part in parts), *missing]
        pointers += [*(part.ids or Int64(0) for part in parts), *missing]
        pointers += [*(Output(part.output) for part in parts), *missing]
        packed = b"".join(part.packed(word, statuses) for part in parts)
        words: list[Argument] = [*statuses, *[Int64(0)] * (MAX_KINDS - len(statuses))]
        return KernelLaunch(
            Program(SOURCE, f"lookups<{IDS[self.ids_dtype]}, {WORDS[word]}>"), in_line(blocks * len(parts)),
            (Struct(tuple(pointers), packed.ljust(MOST * 64, b"\0")), *words, Int64(B), UInt32(blocks)),
            Budget(registers=64), after=(),
        )  # fmt: skip


class Lookups:
    name = "lookups"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # rows are copied unchanged

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Consecutive Embeddings, the Slices of their ids, and their Concat if it follows."""
        if job.is_training or device.arch not in ARCHITECTURES:
            return
        if start and _looks_up(net, net.nodes[start - 1]):
            return  # a chain is claimed from its start only: trying every part of it is quadratic
        nodes = _run(net, start)
        for end in dict.fromkeys((len(nodes), len(nodes) - isinstance(nodes[-1].layer, Concat)) if nodes else ()):
            kept = nodes[:end]
            while kept and not isinstance(kept[-1].layer, Embedding | Concat):
                kept = kept[:-1]
            if sum(isinstance(node.layer, Embedding | Concat) for node in kept) > 1:
                claim = _claim(net, kept, device)
                if claim is not None:
                    yield claim


def _looks_up(net: Network, node: Node) -> bool:
    is_ids = net.types[node.name].dtype in IDS and isinstance(node.layer, Slice | Reshape)
    return is_ids or isinstance(node.layer, Embedding)


def _run(net: Network, start: int) -> list[Node]:
    nodes: list[Node] = []
    made: set[str] = set()  # outputs of Embeddings
    moved: set[str] = set()  # ids
    for node in net.nodes_from(start):
        layer = node.layer
        if isinstance(layer, Embedding) or (isinstance(layer, Reshape) and node.inputs[0] in made):
            made.add(node.name)
        elif _looks_up(net, node):
            moved.add(node.name)
        elif isinstance(layer, Concat) and any(value in made for value in node.inputs):
            axis = row_axis(layer.axis, net.types[node.name]) - 1
            if math.prod(net.types[node.name].row_shape[:axis]) == 1 and moved.isdisjoint(node.inputs):
                nodes.append(node)
            break
        else:
            break
        nodes.append(node)
        if len(nodes) == MAX_NODES:
            break
    return nodes


def _claim(net: Network, nodes: list[Node], device: Device) -> Claim | None:
    inside = {node.name: node for node in nodes}
    read = dict.fromkeys(value for node in nodes for value in node.inputs)
    values = [value for value in read if value not in inside]
    outputs = [
        node for node in nodes
        if node.name in net.output_names or any(each.name not in inside for each in net.readers(node.name))
    ]  # fmt: skip
    if not outputs or outputs[-1] is not nodes[-1]:
        return None
    recipes: dict[str, Recipe] = {}
    parts: list[Part] = []
    for number, node in enumerate(outputs):
        row_bytes, begin = net.types[node.name].row_bytes, 0
        for value in node.inputs if isinstance(node.layer, Concat) else (node.name,):
            part = _part(net, inside, values, recipes, value, (number, row_bytes, begin))
            if part is None:
                return None
            parts.append(part)
            begin += part.count * part.item_bytes
    dtypes = {net.types[values[part.ids.index]].dtype for part in parts if part.ids}
    if len(dtypes) != 1:
        return None
    lowering = LookupsLowering(tuple(parts), dtypes.pop(), device.units)
    id_bytes = DTYPE_BYTES[lowering.ids_dtype]
    moved = sum(part.count * (2 * part.item_bytes + (id_bytes if part.ids else 0)) for part in parts)
    looked_up = sum(part.ids is not None for part in parts)
    return Claim(
        Lookups.name, f"{Lookups.name}<{looked_up}{',Concat' if isinstance(nodes[-1].layer, Concat) else ''}>",
        tuple(node.name for node in nodes), Cost(0, moved, launches=lowering.launches),
        f"{looked_up} look-ups, up to {MOST} a launch", recipes, facts=lowering,
    )  # fmt: skip


def _part(
    net: Network, inside: Mapping[str, Node], values: list[str], recipes: dict[str, Recipe], value: str,
    to: tuple[int, int, int],
) -> Part | None:  # fmt: skip
    """The copy that produces a value; None if no strides address its ids."""
    node, given = inside.get(value), net.types[value]
    while node is not None and isinstance(node.layer, Reshape) and net.types[node.name].dtype not in IDS:
        node = inside[node.inputs[0]]
    looks_up = node is not None and isinstance(node.layer, Embedding)
    view = View.of(net, inside, node.inputs[0] if node is not None and looks_up else value)
    line = view.line()
    if line is None:
        return None
    source, row = values.index(view.value), net.types[view.value]
    if node is None or not looks_up:
        size = DTYPE_BYTES[given.dtype]
        first, each = line[0] * size, line[1] * size
        if value not in inside or each == size:  # contiguous elements are one item
            return Part(Input(source), None, None, (0, row.row_bytes, first), 1, given.row_bytes, *to)
        return Part(Input(source), None, None, (each, row.row_bytes, first), given.row_size, size, *to)
    V, E = net.weights[node.weights["weight"]].shape
    dtype, name = net.types[node.name].dtype, f"table {len(recipes)}"
    table = Recipe.of(as_is, (node.weights["weight"],), (V, E), dtype)
    name = next((known for known, made in recipes.items() if made == table), name)
    recipes[name] = table
    status = StatusWord(view.value, row.row_shape, V)
    count, place = net.types[node.inputs[0]].row_size, (line[1], row.row_size, line[0])
    return Part(Weight(name), Input(source), status, place, count, E * DTYPE_BYTES[dtype], *to)


def _instance(ids: str, item_bytes: int) -> Instance:
    status = StatusWord("ids", (8,), 1000)
    parts = tuple(
        Part(Weight("t"), Input(0), status, (1, 8, i), 1, item_bytes, 0, 8 * item_bytes, i * item_bytes)
        for i in range(8)
    )
    made = LookupsLowering(parts, ids, 132)
    return Instance(f"{ids}, rows of {item_bytes} B", lambda device: made.at(4096).launches[0])


INSTANCES = (_instance("int64", 64), _instance("int32", 4), _instance("int64", 6), _instance("int32", 3))
