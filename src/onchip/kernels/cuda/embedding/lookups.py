"""Look-ups in several tables in one launch, with their Concat fused: host side of embedding/lookups.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Memory,
    Output,
    StatusWord,
    Struct,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import IDS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.strides import View
from onchip.kernels.cuda.embedding.gather import BLOCKS_PER_SM, THREADS, WORDS
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Embedding, Reshape, Slice
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job

SOURCE = Path(__file__).with_suffix(".cu")
MAX_SOURCES, MAX_STATUSES = 16, 8  # per launch
MAX_NODES = 512  # per claim


class SourceStruct(CStruct):
    source, c_name = SOURCE, "Source"
    _fields_ = (
        ("each", c_int64), ("row", c_int64), ("first", c_int64), ("V", c_int64), ("to_row", c_int64),
        ("to_first", c_int64), ("count", c_uint32), ("words", c_uint32), ("lane_bits", c_uint32), ("status", c_uint32),
    )  # fmt: skip


class Sources(CStruct):
    source, c_name = SOURCE, "Sources"
    _fields_ = (
        ("x", c_void_p * MAX_SOURCES), ("ids", c_void_p * MAX_SOURCES), ("y", c_void_p * MAX_SOURCES),
        ("src", SourceStruct * MAX_SOURCES),
    )  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Items that a row of an output stores contiguously: table rows, or chunks of a value."""

    memory: Memory  # the table, or the value
    ids: Input | None
    status: StatusWord | None
    address: tuple[int, int, int]  # item stride, row stride, offset; in ids, or in bytes of a value
    count: int
    item_bytes: int
    output: int  # index
    to_row_bytes: int  # per row of the output
    to_bytes: int  # offset of the first item

    @property
    def word_bytes(self) -> int:
        """Width of the widest word that divides all sizes and offsets."""
        return math.gcd(self.item_bytes, self.to_row_bytes, self.to_bytes, *(() if self.ids else self.address), 16)

    def packed(self, word: int, statuses: Sequence[StatusWord]) -> Struct:
        words, unit = self.item_bytes // word, 1 if self.ids else word
        each, row, first = (n // unit for n in self.address)
        return SourceStruct.of(
            each=each, row=row, first=first, V=self.status.limit if self.status else 0,
            to_row=self.to_row_bytes // word, to_first=self.to_bytes // word, count=self.count, words=words,
            lane_bits=_lane_bits(words), status=statuses.index(self.status) if self.status else 0,
        )  # fmt: skip


def _lane_bits(words: int) -> int:
    """log2 of the threads per item: one per word, up to a block."""
    return min(words - 1, THREADS - 1).bit_length()


@dataclass(frozen=True)
class LookupsLowering:
    """lookups(sources, s0, .., s7, B, blocks), one launch per MAX_SOURCES sources"""

    sources: tuple[Source, ...]
    ids_dtype: str
    units: int

    def at(self, B: int) -> Steps:
        return Steps(tuple(self._launch(sources, B) for sources in self._per_launch()) if B else ())

    def _per_launch(self) -> list[list[Source]]:
        """The sources of each launch."""
        launches: list[list[Source]] = [[]]
        for source in self.sources:
            statuses = {known.status for known in (*launches[-1], source) if known.status}
            if len(launches[-1]) == MAX_SOURCES or len(statuses) > MAX_STATUSES:
                launches.append([])
            launches[-1].append(source)
        return launches

    @property
    def launches(self) -> int:
        return len(self._per_launch())

    def _launch(self, sources: list[Source], B: int) -> KernelLaunch:
        word = math.gcd(*(source.word_bytes for source in sources))
        statuses = list(dict.fromkeys(source.status for source in sources if source.status))
        threads = max(B * source.count << _lane_bits(source.item_bytes // word) for source in sources)
        blocks = min(-(-threads // THREADS), -(-self.units * BLOCKS_PER_SM // len(sources)))
        packed = Sources.of(
            x=[source.memory for source in sources], ids=[source.ids or NOTHING for source in sources],
            y=[Output(source.output) for source in sources],
            src=[source.packed(word, statuses) for source in sources],
        )  # fmt: skip
        padded: list[Argument] = [*statuses, *[NOTHING] * (MAX_STATUSES - len(statuses))]
        return KernelLaunch(
            Program(SOURCE, f"lookups<{IDS[self.ids_dtype]}, {WORDS[word]}>"), grid_1d(blocks * len(sources)),
            (packed, *padded, Int64(B), UInt32(blocks)), Budget(registers=64), after=(),
        )  # fmt: skip


class LookupsKernel(CudaKernel):
    name = "lookups"
    layers = (Embedding, Reshape, Slice)
    dtypes = IDS

    def applies(self, net: Network, start: int) -> bool:
        """A chain is claimed from its start only: trying every subchain is quadratic."""
        starts_chain = not start or not _is_lookup_or_ids(net, net.nodes[start - 1])
        return starts_chain and _is_lookup_or_ids(net, net.nodes[start])

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        """Consecutive Embeddings, the Slices of their ids, and their Concat if it follows."""
        nodes = _chain(net, start)
        for end in dict.fromkeys((len(nodes), len(nodes) - isinstance(nodes[-1].layer, Concat))):
            claimed = nodes[:end]
            while claimed and not isinstance(claimed[-1].layer, Embedding | Concat):
                claimed = claimed[:-1]
            count = sum(isinstance(node.layer, Embedding | Concat) for node in claimed)
            if count > 1 and (claim := self._claim_of(net, claimed, device)):
                yield claim

    def _claim_of(self, net: Network, nodes: list[Node], device: Device) -> Claim | None:
        inside = {node.name: node for node in nodes}
        read = dict.fromkeys(value for node in nodes for value in node.inputs)
        values = [value for value in read if value not in inside]
        outputs = [
            node for node in nodes
            if node.name in net.kept or any(reader.name not in inside for reader in net.readers(node.name))
        ]  # fmt: skip
        if not outputs or outputs[-1] is not nodes[-1]:
            return None
        recipes: dict[str, Recipe] = {}
        sources: list[Source] = []
        for output, node in enumerate(outputs):
            row_bytes, begin = net.types[node.name].row_bytes, 0
            for value in node.inputs if isinstance(node.layer, Concat) else (node.name,):
                source = _source(net, inside, values, recipes, value, (output, row_bytes, begin))
                if source is None:
                    return None
                sources.append(source)
                begin += source.count * source.item_bytes
        dtypes = {net.types[values[source.ids.index]].dtype for source in sources if source.ids}
        if len(dtypes) != 1:
            return None
        lowering = LookupsLowering(tuple(sources), dtypes.pop(), device.units)
        id_bytes = DTYPE_BYTES[lowering.ids_dtype]
        moved = sum(source.count * (2 * source.item_bytes + (id_bytes if source.ids else 0)) for source in sources)
        looked_up = sum(source.ids is not None for source in sources)
        label = f"{self.name}<{looked_up}{',Concat' if isinstance(nodes[-1].layer, Concat) else ''}>"
        return self.claim(
            net, nodes[0], lowering, label=label, nodes=tuple(node.name for node in nodes),
            cost=Cost(0, moved, launches=lowering.launches), recipes=recipes,
            why=f"{looked_up} look-ups, up to {MAX_SOURCES} per launch",
        )  # fmt: skip


def _is_lookup_or_ids(net: Network, node: Node) -> bool:
    is_ids = net.types[node.name].dtype in IDS and isinstance(node.layer, Slice | Reshape)
    return is_ids or isinstance(node.layer, Embedding)


def _chain(net: Network, start: int) -> list[Node]:
    nodes: list[Node] = []
    embedded: set[str] = set()  # outputs of Embeddings
    ids: set[str] = set()  # Slices and Reshapes of ids
    for node in net.nodes_from(start):
        layer = node.layer
        if isinstance(layer, Embedding) or (isinstance(layer, Reshape) and node.inputs[0] in embedded):
            embedded.add(node.name)
        elif _is_lookup_or_ids(net, node):
            ids.add(node.name)
        elif isinstance(layer, Concat) and any(value in embedded for value in node.inputs):
            axis = row_axis(layer.axis, net.types[node.name]) - 1
            if math.prod(net.types[node.name].row_shape[:axis]) == 1 and ids.isdisjoint(node.inputs):
                nodes.append(node)
            break
        else:
            break
        nodes.append(node)
        if len(nodes) == MAX_NODES:
            break
    return nodes


def _source(
    net: Network, inside: Mapping[str, Node], values: list[str], recipes: dict[str, Recipe], value: str,
    to: tuple[int, int, int],
) -> Source | None:  # fmt: skip
    """The source that a value is copied from; None if its ids or elements are not strided."""
    node, y = inside.get(value), net.types[value]
    while node is not None and isinstance(node.layer, Reshape) and net.types[node.name].dtype not in IDS:
        node = inside[node.inputs[0]]
    looks_up = node is not None and isinstance(node.layer, Embedding)
    view = View.of(net, inside, node.inputs[0] if node is not None and looks_up else value)
    line = view.line()
    if line is None:
        return None
    index, row = values.index(view.value), net.types[view.value]
    if node is None or not looks_up:
        size = DTYPE_BYTES[y.dtype]
        first, stride = line[0] * size, line[1] * size
        if value not in inside or stride == size:  # contiguous elements are one item
            return Source(Input(index), None, None, (0, row.row_bytes, first), 1, y.row_bytes, *to)
        return Source(Input(index), None, None, (stride, row.row_bytes, first), y.row_size, size, *to)
    V, E = net.weights[node.weights["weight"]].shape
    dtype, name = net.types[node.name].dtype, f"table {len(recipes)}"
    table = Recipe.of(as_is, (node.weights["weight"],), (V, E), dtype)
    name = next((known for known, recipe in recipes.items() if recipe == table), name)
    recipes[name] = table
    status = StatusWord(view.value, row.row_shape, V)
    count, address = net.types[node.inputs[0]].row_size, (line[1], row.row_size, line[0])
    return Source(Weight(name), Input(index), status, address, count, E * DTYPE_BYTES[dtype], *to)


def _instance(ids: str, item_bytes: int) -> Instance:
    status = StatusWord("ids", (8,), 1000)
    sources = tuple(
        Source(Weight("t"), Input(0), status, (1, 8, i), 1, item_bytes, 0, 8 * item_bytes, i * item_bytes)
        for i in range(8)
    )
    lowering = LookupsLowering(sources, ids, 132)
    return instance(f"{ids}, rows of {item_bytes} B", lowering, B=4096)


INSTANCES = (_instance("int64", 64), _instance("int32", 4), _instance("int64", 6), _instance("int32", 3))
