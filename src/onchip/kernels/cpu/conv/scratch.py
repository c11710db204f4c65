"""Splits the operations of conv_fused into segments, chooses each segment's group size, and assigns scratch offsets.

Segments  A tile of images runs through each segment group by group. Small groups keep a layer's values in cache; large
          groups fetch weights that exceed the cache less often. A segment writes its live-out values for the whole tile
          before the next segment reads them.
Memory    A value used in one segment holds one group, and every group reuses it; a live-out value holds the tile.
          Values with disjoint lifetimes share memory, which is then in cache when it is written.
Zeros     Borders of images and channel pads are zeroed once and never written. So images with a border share memory
          only with images of the same layout, and images with channel pads share none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.conv.operation import Operation
from onchip.kernels.cpu.conv.values import Store
from onchip.kernels.cpu.memory import first_fit_offsets

_PASSES = 3  # memory passes over the values of a layer that exceed the cache
_OUT_PASSES = 2  # the same, over live-out values
_CALL_BYTES = 4 << 10  # bytes fetched from memory in the time of one call
_MAX_LAYERS = 24  # per segment

Uses = Mapping[Store, tuple[int, int]]  # first and last operation that uses a value


class Segment(NamedTuple):
    first: int  # operation
    last: int
    group: int  # images per group


@dataclass(frozen=True)
class Scratch:
    """One thread's scratch for a tile of images."""

    segments: tuple[Segment, ...]
    floats: int
    offsets: Mapping[Store, int]  # of stores, in floats
    live_out: frozenset[Store]  # those that hold the whole tile


def plan_scratch(operations: Sequence[Operation], layers: Sequence[str], images: int, fast_bytes: int) -> Scratch:
    """layers: the layer of each operation"""
    uses = _uses(operations)
    segments = _partition(operations, layers, uses, images, fast_bytes)
    segment_of = [segment for segment in segments for _ in range(segment.first, segment.last + 1)]
    live: dict[Store, tuple[int, int]] = {}
    sizes: dict[Store, int] = {}
    live_out = []
    for store, (first, last) in uses.items():
        writer, last_reader = segment_of[first], segment_of[last]
        live[store], count = (first, last), writer.group
        if writer is not last_reader:
            live[store], count = (writer.first, last_reader.last), images
            live_out.append(store)
        sizes[store] = -(-store.size * count // LANES) * LANES
    offsets, floats = _assign_offsets(live, sizes)
    return Scratch(segments, floats, offsets, frozenset(live_out))


def _uses(operations: Sequence[Operation]) -> Uses:
    uses: dict[Store, tuple[int, int]] = {}
    for i, op in enumerate(operations):
        for view in op.values():
            uses[view.store] = (uses.get(view.store, (i, i))[0], i)
    return uses


def _assign_offsets(live: Uses, sizes: Mapping[Store, int]) -> tuple[dict[Store, int], int]:
    """Offsets of all stores, and the total size; stores with borders or pads come first."""
    offsets: dict[Store, int] = {}
    slots: dict[Hashable, list[tuple[int, int]]] = {}  # offset and last use
    end = 0
    for store in sorted(live, key=lambda store: live[store][0]):
        if not (any(store.border) or store.pixel != store.C):
            continue
        shared = slots.setdefault((store.sizes, store.border, sizes[store], store.pixel == store.C or store), [])
        free = next((i for i, (_, until) in enumerate(shared) if until < live[store][0]), None)
        if free is None:
            free, end = len(shared), end + sizes[store]
            shared.append((end - sizes[store], 0))
        offsets[store] = shared[free][0]
        shared[free] = (offsets[store], live[store][1])
    others = {store: use for store, use in live.items() if store not in offsets}
    packed = {store: end + at for store, at in first_fit_offsets(others, sizes).items()}
    return offsets | packed, max((end, *(at + sizes[store] for store, at in packed.items())))


# -- segments and groups ---------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    first: int  # operation
    last: int
    touched: int  # bytes of its values, per image
    weights: int  # bytes
    live: int  # bytes per image that are live on entry


def _partition(
    operations: Sequence[Operation], layers: Sequence[str], uses: Uses, images: int, fast_bytes: int
) -> tuple[Segment, ...]:
    """The segments with the least memory traffic per image."""
    if images == 1:
        return (Segment(0, len(operations) - 1, 1),)
    costs = _layers(operations, layers, uses)
    groups = sorted({min(images, 1 << shift) for shift in range(images.bit_length() + 1)}, reverse=True)
    half = fast_bytes // 2
    boundary = [_OUT_PASSES * layer.live if images * layer.live > half else 1 for layer in costs]  # 1 breaks ties
    best = [(0.0, 0, 0)]  # per number of layers: bytes; first layer and group size of the last segment
    for end in range(1, len(costs) + 1):
        candidates = []
        for group in groups:
            weights, traffic = 0, 0.0
            for begin in range(end - 1, max(-1, end - 1 - _MAX_LAYERS), -1):
                layer = costs[begin]
                weights += layer.weights
                traffic += _CALL_BYTES * (layer.last - layer.first + 1) / group
                traffic += _PASSES * layer.touched if group > 1 and group * layer.touched > half else 0
                fetched = weights / (group if weights > half else images)
                candidates.append((best[begin][0] + boundary[begin] + traffic + fetched, begin, group))
        best.append(min(candidates, key=lambda candidate: candidate[0]))
    segments: list[Segment] = []
    end = len(costs)
    while end > 0:
        _, begin, group = best[end]
        segments.append(Segment(costs[begin].first, costs[end - 1].last, group))
        end = begin
    return tuple(reversed(segments))


def _layers(operations: Sequence[Operation], layers: Sequence[str], uses: Uses) -> list[_Layer]:
    """Consecutive operations of the same layer."""
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1]]
    crossing = [0] * (len(operations) + 1)  # change of the live bytes before each operation
    for store, (first, last) in uses.items():
        crossing[first + 1] += 4 * store.size
        crossing[last + 1] -= 4 * store.size
    live = 0
    found = []
    for first, end in zip(starts, [*starts[1:], len(layers)], strict=True):
        members = operations[first:end]
        live_before = live + crossing[first]
        live += sum(crossing[first:end])
        touched = sum(4 * store.size for store in {view.store for op in members for view in op.values()})
        found.append(_Layer(first, end - 1, touched, sum(op.weight_bytes() for op in members), live_before))
    return found
