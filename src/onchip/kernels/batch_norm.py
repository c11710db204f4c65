"""Batch norms that were not folded into a Linear or convolution: as pointwise operations, for all devices."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Network, Node, changing_weights
from onchip.network.layers import Add, BatchNorm1d, BatchNorm2d, Broadcast, Mul
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Array, Recipe, as_is, recipe_op

BATCH_NORMS = (BatchNorm1d, BatchNorm2d)


def is_changing_norm(net: Network, node: Node) -> bool:
    """Whether it is a batch norm whose weights change from run to run: no launch computes its recipes then."""
    if not net.state or not isinstance(node.layer, BATCH_NORMS):
        return False
    names = node.weights.values()
    return not net.state.keys().isdisjoint(names) or bool(changing_weights(names, net))


@recipe_op
def negated(weight: Array) -> Array:
    return -weight.astype(np.float64)


@recipe_op
def norm_factor(*weights: Array, roles: tuple[str, ...], eps: float) -> Array:
    """weight / sqrt(var + eps) per channel."""
    return factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[0]


def batch_norm_ops(node: Node, channels: int, dtype: str) -> list[tuple[type[Broadcast], Recipe]]:
    """(x - mean) * factor + bias: the subtraction first, since values far from 0 would lose digits otherwise.

    The operations in order, each with a constant of one value per channel.
    """
    weights, eps = node.weights, node.layer.attributes()["eps"]
    roles = tuple(role for role in ("var", "weight", "mean") if role in weights)
    sources = [weights[role] for role in roles]
    parts: list[tuple[type[Broadcast], Recipe]] = [
        (Add, Recipe.of(negated, (weights["mean"],), (channels,), dtype)),
        (Mul, Recipe.of(norm_factor, sources, (channels,), dtype, 3 * channels, roles=roles, eps=eps)),
    ]
    if "bias" in weights:
        parts.append((Add, Recipe.of(as_is, (weights["bias"],), (channels,), dtype)))
    return parts
