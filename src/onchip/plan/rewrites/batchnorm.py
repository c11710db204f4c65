"""Batch normalisation folded into the product before it, or into the one behind it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from onchip.plan.rewrites.edit import Draft, Told, moves_before, moves_behind, origin
from onchip.spec.layers import BatchNorm1d, BatchNorm2d, Convolution, Linear, TransposedConvolution
from onchip.spec.layers.conv import conv_groups, geometry
from onchip.spec.layers.norm import factor_and_shift
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array
from onchip.spec.types import TensorType


def fold_batchnorm(net: Network) -> Told:
    """product(W, b) -> BatchNorm   becomes   product(W s, b s + t);
    BatchNorm -> product(W, b)   becomes   product(W s, b + W t),   where no pad would see the missing t.

    s = weight / sqrt(var + eps) and t = bias - mean s are a BatchNorm's factor and shift of a channel. A product is a
    Linear or a convolution (a transposed one only in front). Reshapes and Permutes may stand between a Linear and the
    BatchNorm. New weights are taken in float64 and rounded once.
    """
    draft = Draft(net)
    told = []
    norms = [node.name for node in net.nodes if isinstance(node.layer, BatchNorm1d | BatchNorm2d)]
    # Into what stands before them from the front, then into what stands behind from the back: so rows of norms vanish.
    for find, behind in ((moves_before, False), (moves_behind, True)):
        for name in reversed(norms) if behind else norms:
            if name not in draft.nodes:
                continue
            product, moves = find(draft, draft.nodes[name])
            if product is not None and _takes(draft, product, moves, behind):
                _fold(draft, draft.nodes[name], product, moves, behind)
                told.append(f"folded {name} into {product.name}")
    return draft.done(told)


def _takes(draft: Draft, product: Node, moves: list[Node], behind: bool) -> bool:
    """Whether a product can take over the norm before it, or the one behind it."""
    layer = product.layer
    if isinstance(layer, Linear):
        return len(draft.types[product.name].shape) == 2
    if isinstance(layer, Convolution):
        pads = geometry(layer)[1]
        return not moves and not (behind and any(pads))
    return isinstance(layer, TransposedConvolution) and not moves and not behind


def _fold(draft: Draft, norm: Node, product: Node, moves: list[Node], behind: bool) -> None:
    layer, types = product.layer, draft.types
    assert isinstance(norm.layer, BatchNorm1d | BatchNorm2d)
    eps = norm.layer.eps
    groups = 1 if isinstance(layer, Linear) else conv_groups(layer)
    along = 1 if behind or isinstance(layer, TransposedConvolution) else 0  # the axis of W with the norm's channels

    def factors(*given: Array) -> tuple[Array, Array]:
        """s and t of every channel of the product."""
        s, t = factor_and_shift(dict(zip(norm.weights, given, strict=True)), eps)
        if isinstance(layer, Linear):
            channel = _channels(types, norm, moves, behind)
            return s[channel], t[channel]
        return s, t

    def weight(W: Array, *given: Array) -> Array:
        return _scaled(W, factors(*given)[0], groups, along)

    def bias(W: Array, *given: Array) -> Array:
        old, of_norm = given[: -len(norm.weights)], given[-len(norm.weights) :]
        s, t = factors(*of_norm)
        b = old[0].astype(np.float64) if old else np.zeros(1)
        return b + _scaled(W, t, groups, along).reshape(len(W), -1).sum(axis=1) if behind else b * s + t

    w, old = product.weights["weight"], [product.weights["bias"]] if "bias" in product.weights else []
    of_norm = norm.weights.values()
    shape = draft.weights[w].shape
    size, D_out = math.prod(shape), int(types[product.name].shape[1])
    wanted = f"{product.name}+{norm.name}"
    sources, flop = (w, *old, *of_norm), 2 * size if behind else 2 * D_out
    roles = {
        "weight": draft.derive(f"{wanted}.weight", "fold_norm", (w, *of_norm), shape, weight, size),
        "bias": draft.derive(f"{wanted}.bias", "fold_norm_bias", sources, (D_out,), bias, flop),
    }
    draft.put(dataclasses.replace(product, weights=roles))
    draft.bypass(norm.name)


def _channels(types: Mapping[str, TensorType], norm: Node, moves: list[Node], behind: bool) -> Array:
    """The norm's channel that each number of a Linear's row belongs to."""
    row = types[norm.name]
    channel = np.arange(row.row_size) // math.prod(row.row_shape[1:])
    if not moves:
        return channel
    places = origin(types, moves)  # behind the norm, moves lead from its row to the Linear's; before it, the other way
    found: Array = channel[places if behind else np.argsort(places)]
    return found


def _scaled(W: Array, s: Array, groups: int, along: int) -> Array:
    """W in float64, each number times the s of its channel; channels lie along axis 0 or 1, group after group."""
    grouped = W.astype(np.float64).reshape(groups, len(W) // groups, W.shape[1], -1)
    scaled: Array = grouped * s.reshape((groups, 1, -1, 1) if along else (groups, -1, 1, 1))
    return scaled.reshape(W.shape)
