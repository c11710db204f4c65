"""The gradients of layers that move elements: reshaped, permuted, concatenated, selected."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Node
from onchip.network.layers import (
    Add,
    Concat,
    Gather,
    GlobalSum,
    Identity,
    Interleave,
    Pad,
    Permute,
    Reshape,
    Selection,
    Slice,
)
from onchip.network.layers.select import MAX_INDICES
from onchip.network.recipe import Array
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, by_backward, rule_of

MAX_TIMES = 4  # if an element is selected more often, the gradient is a node of its own


@rule_of(Identity)
def identity(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    return (dy,), {}


@rule_of(Reshape)
def reshape(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,) = node.inputs
    return (build.add(f"{x}.grad", Reshape(build.types[x].row_shape), (dy,)),), {}


@rule_of(Permute)
def permute(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), axes = node.inputs, node.layer.attributes()["axes"]
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return (build.add(f"{x}.grad", Permute(back), (dy,)),), {}


@rule_of(Concat)
def concat(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    rank = len(build.types[dy].row_shape)
    axis, begin, d_inputs = node.layer.attributes()["axis"] % (rank + 1) - 1, 0, list[str | None]()
    for x, is_wanted in zip(node.inputs, wanted.inputs, strict=True):
        sizes = build.types[x].row_shape
        layer = Slice(tuple(begin if a == axis else 0 for a in range(rank)), sizes, (1,) * rank)
        d_inputs.append(build.add(f"{x}.grad", layer, (dy,)) if is_wanted else None)
        begin += sizes[axis]
    return tuple(d_inputs), {}


@rule_of(Interleave)
def interleave(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    layer, d_inputs = node.layer, list[str | None]()
    assert isinstance(layer, Interleave)
    for x, is_wanted, phase in zip(node.inputs, wanted.inputs, layer.phases(), strict=True):
        part = Slice((0, *phase), build.types[x].row_shape, (1, *layer.stride))
        d_inputs.append(build.add(f"{x}.grad", part, (dy,)) if is_wanted else None)
    return tuple(d_inputs), {}


# -- selections --------------------------------------------------------------------------------------------------


@rule_of(Selection)
def selection(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """Axis by axis, the sum of dy over all positions that select an element: 0 if there is none."""
    (x,), layer = node.inputs, node.layer
    assert isinstance(layer, Selection)
    sizes = build.types[x].row_shape
    selected = {a: each for a, each in enumerate(layer.source_indices(sizes)) if each is not None}
    runs = {a: run for a, each in selected.items() if (run := _run(each, sizes[a])) is not None}
    others = {a: each for a, each in selected.items() if a not in runs}
    if not build.types[dy].row_size or not all(_is_short(each, sizes[a]) for a, each in others.items()):
        return by_backward(build, node, dy, wanted)
    dx = dy
    for axis, indices in others.items():
        dx = _repeats_summed(build, x, dx, axis, indices, sizes[axis]) or _gathered(
            build, x, dx, axis, indices, sizes[axis]
        )
    if runs:
        pads = [runs.get(axis, (0, 0)) for axis in range(len(sizes))]
        dx = build.add(f"{x}.grad", Pad((*(before for before, _ in pads), *(after for _, after in pads))), (dx,))
    return (dx,), {}


def _run(indices: Array, n: int) -> tuple[int, int] | None:
    """The zeros that dy lacks before and after it if the indices are a run of neighbours; negative: dy has as many more
    elements than x. None for other indices."""
    at = np.flatnonzero(indices >= 0)
    if not at.size or at[-1] - at[0] + 1 != at.size or (np.diff(indices[at]) != 1).any():
        return None
    before, after = (int(indices[at[0]]), int(at[0])), (n - 1 - int(indices[at[-1]]), len(indices) - 1 - int(at[-1]))
    if all(before) or all(after):
        return None
    return before[0] - before[1], after[0] - after[1]


def _is_short(indices: Array, n: int) -> bool:
    """Whether a few Gathers, or a sum over an axis of repeats, give the gradient."""
    return _repeats(indices, n) is not None or (n <= MAX_INDICES and _times(indices, n) <= MAX_TIMES)


def _times(indices: Array, n: int) -> int:
    return int(np.bincount(indices[indices >= 0], minlength=n).max())


def _repeats(indices: Array, n: int) -> int | None:
    """The axis of the repeats in (n, times), 1, or in (times, n), 0; None: the indices are others."""
    if len(indices) % n:
        return None
    every, times = np.arange(n), len(indices) // n
    if np.array_equal(indices, np.repeat(every, times)):
        return 1
    return 0 if np.array_equal(indices, np.tile(every, times)) else None


def _repeats_summed(build: StepBuilder, x: str, dy: str, axis: int, indices: Array, n: int) -> str | None:
    """Summed over the repeats of each element; None: the indices are others."""
    repeats = _repeats(indices, n)
    if repeats is None:
        return None
    before, after, times = build.types[dy].row_shape[:axis], build.types[dy].row_shape[axis + 1 :], len(indices) // n
    split = (n, times) if repeats else (times, n)
    parts = build.add(f"{x}.grad.repeats", Reshape((*before, *split, *after)), (dy,))
    return build.add(f"{x}.grad", GlobalSum((1 + axis + repeats,)), (parts,))


def _gathered(build: StepBuilder, x: str, dy: str, axis: int, indices: Array, n: int) -> str:
    """The first selection of each element, and the second one of those with two, ...: all from dy, with a 0 added."""
    rank, size = len(build.types[dy].row_shape), len(indices)
    at = np.flatnonzero(indices >= 0)
    at = at[np.argsort(indices[at], kind="stable")]
    counts = np.bincount(indices[at], minlength=n)
    nth = np.arange(at.size) - np.repeat(np.cumsum(counts) - counts, counts)  # of its element's selections
    places = np.full((max(1, int(counts.max())), n), size)
    places[nth, indices[at]] = at
    if (places == size).any():
        pads = [0] * 2 * rank
        pads[rank + axis] = 1
        dy = build.add(f"{x}.grad.padded", Pad(tuple(pads)), (dy,))
    parts = [build.add(f"{x}.grad.part", Gather(axis + 1, tuple(row.tolist())), (dy,)) for row in places]
    return parts[0] if len(parts) == 1 else build.add(f"{x}.grad", Add(), parts)
