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
    """product(W, b) -> BatchNorm   becomes   product(W s, b s + t);
    BatchNorm -> product(W, b)   becomes   product(W s, b + W t),   if no padding is involved (it would lack t).

    s = weight / sqrt(var + eps) and t = bias - mean s are a BatchNorm's scale and shift per channel. A product is a
    Linear or a convolution (a transposed one only before the norm). Reshapes and Permutes may stand between a Linear
    and the BatchNorm. New weights are computed in float64 and rounded once.
    """
    draft = Draft(net)
    told = []
    norms = [node.name for node in net.nodes if isinstance(node.layer, BatchNorm1d | BatchNorm2d)]
    # First into the product before, front to back, then into the product after, back to front: consecutive norms
    # vanish.
    for find, behind in ((moves_before, False), (moves_after, True)):
        for name in reversed(norms) if behind else norms:
            if name not in draft.nodes:
                continue
            product, moves = find(draft, draft.nodes[name])
            if product is not None and _takes(draft, product, moves, behind):
                _fold(draft, draft.nodes[name], product, moves, behind)
                told.append(f"folded {name} into {product.name}")
    return draft.done(told)


def _takes(draft: Draft, product: Node, moves: list[Node], behind: bool) -> bool:
    """Whether the norm before (`behind`) or after a product can be folded into it."""
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
    groups = 1 if isinstance(layer, Linear) else conv_groups(layer)
    along = 1 if behind or isinstance(layer, TransposedConvolution) else 0  # the axis of W with the norm's channels

    w, old = product.weights["weight"], [product.weights["bias"]] if "bias" in product.weights else []
    of_norm = norm.weights.values()
    shape = draft.weights[w].shape
    size, D_out = math.prod(shape), int(types[product.name].shape[1])
    wanted = f"{product.name}+{norm.name}"
    sources, flop = (w, *old, *of_norm), 2 * size if behind else 2 * D_out
    told: dict[str, Attribute] = {
        "roles": tuple(norm.weights), "eps": norm.layer.eps, "groups": groups, "along": along,
        "channels": _channels(types, norm, moves, behind) if isinstance(layer, Linear) else None,
    }  # fmt: skip
    roles = {
        "weight": draft.derive(f"{wanted}.weight", normed_weight, (w, *of_norm), shape, size, **told),
        "bias": draft.derive(f"{wanted}.bias", normed_bias, sources, (D_out,), flop, behind=behind, **told),
    }
    draft.put(dataclasses.replace(product, weights=roles))
    draft.bypass(norm.name)


# A norm's channels as elements of a Linear's row: the norm's row shape, the moves between, and `behind`.
Channels = tuple[tuple[int, ...], Moves, bool]


def _channels(types: Mapping[str, TensorType], norm: Node, moves: list[Node], behind: bool) -> Channels:
    return types[norm.name].row_shape, moves_as_data(types, moves) if moves else (), behind


def _channel_of_each(channels: Channels) -> Array:
    """The norm's channel of each element of a Linear's row."""
    row_shape, moves, behind = channels
    channel = np.arange(math.prod(row_shape)) // math.prod(row_shape[1:])
    if not moves:
        return channel
    places = origin(moves)  # after the norm, moves lead from its row to the Linear's; before it, the other way
    found: Array = channel[places if behind else np.argsort(places)]
    return found


def _factors(
    given: Sequence[Array], roles: tuple[str, ...], eps: float, channels: Channels | None
) -> tuple[Array, Array]:
    """s and t per channel of the product."""
    s, t = factor_and_shift(dict(zip(roles, given, strict=True)), eps)
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
    W: Array, *given: Array, roles: tuple[str, ...], eps: float, groups: int, along: int, channels: Channels | None,
    behind: bool,
) -> Array:  # fmt: skip
    """given: the bias, if there is one, and the norm's weights."""
    old, norm = given[: -len(roles)], given[-len(roles) :]
    s, t = _factors(norm, roles, eps, channels)
    b = old[0].astype(np.float64) if old else np.zeros(1)
    return b + _scaled(W, t, groups, along).reshape(len(W), -1).sum(axis=1) if behind else b * s + t


def _scaled(W: Array, s: Array, groups: int, along: int) -> Array:
    """W in float64, each element times the s of its channel; channels are on axis 0 or 1, group by group."""
    grouped = W.astype(np.float64).reshape(groups, len(W) // groups, W.shape[1], -1)
    scaled: Array = grouped * s.reshape((groups, 1, -1, 1) if along else (groups, -1, 1, 1))
    return scaled.reshape(W.shape)
