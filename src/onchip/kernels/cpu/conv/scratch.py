"""How many images of a tile go through which operations of conv_fused together, and where their values lie meanwhile.

Parts   The operations are cut into parts, and a tile goes through each part group by group. Few images a group, so that
        what a layer touches stays in the cache; many, as weights that do not stay there come from afar once a group.
        Where a part ends, what is handed on is written for all images before the first is read.
Memory  A value of one part has room for a group, and the next group uses it again; one that is handed on has room for
        the tile. Values that are not of use at the same time share memory, so it is in the cache when it is written.
Zeros   around an image and behind the channels of a pixel are there from the start, and nobody writes there. So images
        with a rim share memory only with those that lie alike, and images with pads with none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.conv.operation import Operation
from onchip.kernels.cpu.conv.values import Store
from onchip.kernels.cpu.memory import first_places

_PASSES = 3  # how often a layer goes over what it touches
_HANDED_ON = 2  # passes over what a part hands on
_CALL_BYTES = 4 << 10  # that come from afar in the time of a call
_LONGEST = 24  # layers of a part

Uses = Mapping[Store, tuple[int, int]]  # the operations that use a value first and last


class Part(NamedTuple):
    first: int  # of its operations
    last: int
    group: int  # images


@dataclass(frozen=True)
class Scratch:
    """For a tile of images; a thread's."""

    parts: tuple[Part, ...]
    floats: int
    places: Mapping[Store, int]  # where stores begin, in floats
    handed_on: frozenset[Store]  # those with room for the tile


def make_scratch(operations: Sequence[Operation], layers: Sequence[str], images: int, fast_bytes: int) -> Scratch:
    """layers: of the operations"""
    uses = _uses(operations)
    parts = _cut(operations, layers, uses, images, fast_bytes)
    part_of = [part for part in parts for _ in range(part.first, part.last + 1)]
    live: dict[Store, tuple[int, int]] = {}
    room: dict[Store, int] = {}
    handed_on = []
    for store, (first, last) in uses.items():
        made_in, read_in = part_of[first], part_of[last]
        live[store], count = (first, last), made_in.group
        if made_in is not read_in:
            live[store], count = (made_in.first, read_in.last), images
            handed_on.append(store)
        room[store] = -(-store.size * count // LANES) * LANES
    places, floats = _places(live, room)
    return Scratch(parts, floats, places, frozenset(handed_on))


def _uses(operations: Sequence[Operation]) -> Uses:
    uses: dict[Store, tuple[int, int]] = {}
    for i, op in enumerate(operations):
        for view in op.values():
            uses[view.store] = (uses.get(view.store, (i, i))[0], i)
    return uses


def _places(live: Uses, room: Mapping[Store, int]) -> tuple[dict[Store, int], int]:
    """Where stores begin, and the end of the last one: first those with zeros that nobody writes."""
    places: dict[Store, int] = {}
    alike: dict[Hashable, list[tuple[int, int]]] = {}  # places, and until when each is of use
    end = 0
    for store in sorted(live, key=lambda store: live[store][0]):
        if not (any(store.rim) or store.pixel != store.C):
            continue
        same = alike.setdefault((store.sizes, store.rim, room[store], store.pixel == store.C or store), [])
        free = next((i for i, (_, until) in enumerate(same) if until < live[store][0]), None)
        if free is None:
            free, end = len(same), end + room[store]
            same.append((end - room[store], 0))
        places[store] = same[free][0]
        same[free] = (places[store], live[store][1])
    others = {store: use for store, use in live.items() if store not in places}
    behind = {store: end + at for store, at in first_places(others, room).items()}
    return places | behind, max((end, *(at + room[store] for store, at in behind.items())))


# -- parts and groups ------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    first: int  # of its operations
    last: int
    touched: int  # bytes of the values of an image
    weights: int  # bytes
    held: int  # bytes of an image that were made before it and are read by it or behind it


def _cut(
    operations: Sequence[Operation], layers: Sequence[str], uses: Uses, images: int, fast_bytes: int
) -> tuple[Part, ...]:
    """The parts with the fewest bytes from afar, an image."""
    if images == 1:
        return (Part(0, len(operations) - 1, 1),)
    found = _layers(operations, layers, uses)
    groups = sorted({min(images, 1 << shift) for shift in range(images.bit_length() + 1)}, reverse=True)
    half = fast_bytes // 2
    handed_on = [_HANDED_ON * layer.held if images * layer.held > half else 1 for layer in found]  # no cut for nothing
    best = [(0.0, 0, 0)]  # for the layers so far: bytes; where their last part begins, and its group
    for end in range(1, len(found) + 1):
        ways = []
        for group in groups:
            weights, inside = 0, 0.0
            for begin in range(end - 1, max(-1, end - 1 - _LONGEST), -1):
                layer = found[begin]
                weights += layer.weights
                inside += _CALL_BYTES * (layer.last - layer.first + 1) / group
                inside += _PASSES * layer.touched if group > 1 and group * layer.touched > half else 0
                fetched = weights / (group if weights > half else images)
                ways.append((best[begin][0] + handed_on[begin] + inside + fetched, begin, group))
        best.append(min(ways, key=lambda way: way[0]))
    parts: list[Part] = []
    end = len(found)
    while end > 0:
        _, begin, group = best[end]
        parts.append(Part(found[begin].first, found[end - 1].last, group))
        end = begin
    return tuple(reversed(parts))


def _layers(operations: Sequence[Operation], layers: Sequence[str], uses: Uses) -> list[_Layer]:
    """Operations in a row that are of one layer."""
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1]]
    crossing = [0] * (len(operations) + 1)  # how many bytes more are held before an operation than before the last one
    for store, (first, last) in uses.items():
        crossing[first + 1] += 4 * store.size
        crossing[last + 1] -= 4 * store.size
    held = 0
    found = []
    for first, behind in zip(starts, [*starts[1:], len(layers)], strict=True):
        mine = operations[first:behind]
        held_before = held + crossing[first]
        held += sum(crossing[first:behind])
        touched = sum(4 * store.size for store in {view.store for op in mine for view in op.values()})
        found.append(_Layer(first, behind - 1, touched, sum(op.weight_bytes() for op in mine), held_before))
    return found
