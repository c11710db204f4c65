"""Convolutions that read the same value, merged into one."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    Concat,
    Convolution,
    Elementwise,
    GlobalMax,
    GlobalMean,
    MaxPool1d,
    MaxPool2d,
)
from onchip.network.layers.conv import conv_groups
from onchip.network.recipe import Array, recipe_op
from onchip.plan.rewrites.edit import Draft, Rewritten


def merge_convs(net: Network) -> Rewritten:
    """x -> conv A -> f,  x -> conv B -> f,  Concat(A, B)   becomes   x -> conv AB -> f,  Concat(AB).

    For convolutions of equal geometry whose values are adjacent in a Concat of channels, each followed by the same
    channel-wise layers f: one gemm with more columns, a single pass over x.
    """
    draft = Draft(net)
    notes = []
    for concat in net.nodes:
        if not isinstance(concat.layer, Concat) or concat.layer.axis % len(net.types[concat.name].shape) != 1:
            continue
        inputs: list[str] = []
        paths = [(value, _path(draft, value)) for value in draft.nodes[concat.name].inputs]
        for key, group in itertools.groupby(paths, lambda path: _merge_key(draft, path[1])):
            values, mergeable = zip(*group, strict=True)
            if key is None or len(values) == 1:
                inputs += values
                continue
            _merge(draft, mergeable)
            inputs.append(values[0])
            first, *others = (path[0].name for path in mergeable)
            notes.append(f"merged {', '.join(others)} into {first}: a single pass over {mergeable[0][0].inputs[0]}")
        draft.put(dataclasses.replace(draft.nodes[concat.name], inputs=tuple(inputs)))
    return draft.done(notes)


def _path(draft: Draft, value: str) -> list[Node]:
    """The convolution that computes a value and the channel-wise layers between; [] if another layer is between.

    Every value on the path has one reader.
    """
    path: list[Node] = []
    while True:
        node = draft.nodes.get(value)
        if node is None or draft.sole_reader(value) is None:
            return []
        path.insert(0, node)
        if isinstance(node.layer, Convolution):
            return path
        if not _keeps_channels(draft, node):
            return []
        value = node.inputs[0]


def _keeps_channels(draft: Draft, node: Node) -> bool:
    if isinstance(node.layer, GlobalMax | GlobalMean):
        rank = len(draft.types[node.inputs[0]].shape)
        return all(axis % rank != 1 for axis in node.layer.axes)
    return isinstance(node.layer, Elementwise | MaxPool1d | MaxPool2d | AvgPool1d | AvgPool2d)


def _merge_key(draft: Draft, path: list[Node]) -> object:
    """Paths with equal keys can be merged; None for a path that cannot."""
    if not path or conv_groups(path[0].layer) > 1:
        return None
    conv = path[0]
    dtypes = {draft.dtype(name) for name in conv.weights.values()}
    if len(dtypes) > 1:
        return None
    return [node.layer for node in path], conv.inputs, draft.weights[conv.weights["weight"]].shape[1:], dtypes


def _merge(draft: Draft, paths: tuple[list[Node], ...]) -> None:
    """Merge the paths into the first one, their channels concatenated."""
    convs = [path[0] for path in paths]
    weights = [conv.weights["weight"] for conv in convs]
    counts = [draft.weights[name].shape[0] for name in weights]
    biases = [conv.weights.get("bias") for conv in convs]

    wanted = "+".join(conv.name for conv in convs)
    shape = (sum(counts), *draft.weights[weights[0]].shape[1:])
    roles = {"weight": draft.derive(f"{wanted}.weight", concatenated, weights, shape)}
    if present := [name for name in biases if name]:
        missing = tuple(0 if name else C for name, C in zip(biases, counts, strict=True))
        roles["bias"] = draft.derive(f"{wanted}.bias", concatenated_biases, present, (sum(counts),), missing=missing)
    draft.put(dataclasses.replace(convs[0], weights=roles))
    for path in paths[1:]:
        for node in path:
            draft.drop(node)


@recipe_op
def concatenated(*weights: Array) -> Array:
    return np.concatenate(weights)


@recipe_op
def concatenated_biases(*biases: Array, missing: tuple[int, ...]) -> Array:
    """Concatenated biases. `missing`: per bias, the zeros to insert if it is absent, else 0."""
    present, dtype = iter(biases), biases[0].dtype
    return np.concatenate([np.zeros(count, dtype) if count else next(present) for count in missing])
