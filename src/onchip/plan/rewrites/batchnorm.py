"""Batch normalisation folded into the Linear or convolution before or after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm1d, BatchNorm2d, Convolution, Linear, TransposedConvolution
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Array, Attribute, recipe_op
from onchip.network.types import TensorType
from onchip.plan.rewrites.edit import Draft, Moves, Rewritten, moves_after, moves_as_data, moves_before, origin


def fold_batchnorm(net: Network) -> Rewritten:
    """gemm(W, b) -> BatchNorm   becomes   gemm(W s, b s + t);
    BatchNorm -> gemm(W, b)   becomes   gemm(W s, b + W t),   without padding (the padded zeros would lack t).

    s = weight / sqrt(var + eps) and t = bias - mean s are a BatchNorm's scale and shift per channel. A gemm is a
    Linear or a convolution (a transposed one only before the norm). Between a Linear and the BatchNorm, Reshapes and
    Permutes are allowed. New weights are computed in float64 and rounded once.
    """
    draft = Draft(net)
    notes = []
    norms = [node.name for node in net.nodes if isinstance(node.layer, BatchNorm1d | BatchNorm2d)]
    # First into the previous gemm, in order; then into the next gemm, in reverse: so consecutive norms all fold.
    for find, norm_first in ((moves_before, False), (moves_after, True)):
        for name in reversed(norms) if norm_first else norms:
            if name not in draft.nodes:
                continue
            gemm, moves = find(draft, draft.nodes[name])
            if gemm is not None and _can_fold(draft, gemm, moves, norm_first):
                _fold(draft, draft.nodes[name], gemm, moves, norm_first)
                notes.append(f"folded {name} into {gemm.name}")
    return draft.done(notes)


def _can_fold(draft: Draft, gemm: Node, moves: list[Node], norm_first: bool) -> bool:
    """Whether the norm before (`norm_first`) or after a gemm can be folded into it."""
    layer = gemm.layer
    if isinstance(layer, Linear):
        return len(draft.types[gemm.name].shape) == 2
    if isinstance(layer, Convolution):
        pads = geometry(layer)[1]
        return not moves and not (norm_first and any(pads))
    return isinstance(layer, TransposedConvolution) and not moves and not norm_first


def _fold(draft: Draft, norm: Node, gemm: Node, moves: list[Node], norm_first: bool) -> None:
    layer, types = gemm.layer, draft.types
    assert isinstance(norm.layer, BatchNorm1d | BatchNorm2d)
    groups = 1 if isinstance(layer, Linear) else conv_groups(layer)
    axis = 1 if norm_first or isinstance(layer, TransposedConvolution) else 0  # the axis of W with the norm's channels

    w, old = gemm.weights["weight"], [gemm.weights["bias"]] if "bias" in gemm.weights else []
    of_norm = norm.weights.values()
    shape = draft.weights[w].shape
    size, D_out = math.prod(shape), int(types[gemm.name].shape[1])
    wanted = f"{gemm.name}+{norm.name}"
    sources, flop = (w, *old, *of_norm), 2 * size if norm_first else 2 * D_out
    attributes: dict[str, Attribute] = {
        "roles": tuple(norm.weights), "eps": norm.layer.eps, "groups": groups, "along": axis,
        "channels": _channels(types, norm, moves, norm_first) if isinstance(layer, Linear) else None,
    }  # fmt: skip
    roles = {
        "weight": draft.derive(f"{wanted}.weight", normed_weight, (w, *of_norm), shape, size, **attributes),
        "bias": draft.derive(f"{wanted}.bias", normed_bias, sources, (D_out,), flop, behind=norm_first, **attributes),
    }
    draft.put(dataclasses.replace(gemm, weights=roles))
    draft.bypass(norm.name)


# Maps elements of a Linear's row to the norm's channels: the norm's row shape, the moves between, and `norm_first`.
Channels = tuple[tuple[int, ...], Moves, bool]


def _channels(types: Mapping[str, TensorType], norm: Node, moves: list[Node], norm_first: bool) -> Channels:
    return types[norm.name].row_shape, moves_as_data(types, moves) if moves else (), norm_first


def _channel_of_each(channels: Channels) -> Array:
    """The norm's channel of each element of a Linear's row."""
    row_shape, moves, norm_first = channels
    channel = np.arange(math.prod(row_shape)) // math.prod(row_shape[1:])
    if not moves:
        return channel
    indices = origin(moves)  # if `norm_first`, moves lead from the norm's row to the Linear's; else the other way
    found: Array = channel[indices if norm_first else np.argsort(indices)]
    return found


def _factors(
    norm: Sequence[Array], roles: tuple[str, ...], eps: float, channels: Channels | None
) -> tuple[Array, Array]:
    """s and t per channel of the gemm."""
    s, t = factor_and_shift(dict(zip(roles, norm, strict=True)), eps)
    if channels is None:
        return s, t
    channel = _channel_of_each(channels)
    return s[channel], t[channel]


@recipe_op
def normed_weight(
    W: Array, *norm: Array, roles: tuple[str, ...], eps: float, groups: int, along: int, channels: Channels | None
) -> Array:
    return _scaled(W, _factors(norm, roles, eps, channels)[0], groups, along)


@recipe_op
def normed_bias(
    W: Array, *arrays: Array, roles: tuple[str, ...], eps: float, groups: int, along: int, channels: Channels | None,
    behind: bool,
) -> Array:  # fmt: skip
    """arrays: the gemm's bias, if any, and the norm's weights. behind: the gemm follows the norm."""
    old, norm = arrays[: -len(roles)], arrays[-len(roles) :]
    s, t = _factors(norm, roles, eps, channels)
    b = old[0].astype(np.float64) if old else np.zeros(1)
    return b + _scaled(W, t, groups, along).reshape(len(W), -1).sum(axis=1) if behind else b * s + t


def _scaled(W: Array, s: Array, groups: int, axis: int) -> Array:
    """W in float64, each element times its channel's s; the channels are axis 0 or 1 of W, group by group."""
    grouped = W.astype(np.float64).reshape(groups, len(W) // groups, W.shape[1], -1)
    scaled: Array = grouped * s.reshape((groups, 1, -1, 1) if axis else (groups, -1, 1, 1))
    return scaled.reshape(W.shape)
