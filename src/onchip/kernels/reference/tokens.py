"""Tokens: table rows looked up by ids, and sums of such rows."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import Embedding, TokenConv
from onchip.network.recipe import Array
from onchip.network.tokens import check_token_ids

_NO_TOKEN = -1


@forward_of(Embedding)
def embedding(layer: Embedding, xs: Arrays, w: Weights) -> Array:
    check_token_ids(xs[0], len(w["weight"]))  # NumPy would count a negative id from the end
    return w["weight"][xs[0]]


@backward_of(Embedding)
def embedding_back(layer: Embedding, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    dweight = np.zeros(w["weight"].shape, dy.dtype)
    np.add.at(dweight, xs[0], dy)
    return (None,), {"weight": dweight}


@forward_of(TokenConv)
def token_conv(layer: TokenConv, xs: Arrays, w: Weights) -> Array:
    (ids,), weight = xs, w["weight"]
    check_token_ids(ids, len(weight))
    y = np.zeros((1, 1, 1), weight.dtype)
    # Tap by tap, not one sum over them: the reduction order is then the same for every shape.
    for k, read in enumerate(_read_by_taps(layer, ids, weight)):
        y = y + np.where((read != _NO_TOKEN)[..., None], weight[read, k], 0)
    return np.swapaxes(y + w["bias"] if "bias" in w else y, 1, 2)


@backward_of(TokenConv)
def token_conv_back(layer: TokenConv, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (ids,), weight = xs, w["weight"]
    dweight = np.zeros(weight.shape, dy.dtype)
    for k, read in enumerate(_read_by_taps(layer, ids, weight)):
        inside = read != _NO_TOKEN
        np.add.at(dweight[:, k], read[inside], dy.swapaxes(1, 2)[inside])
    dw = {"weight": dweight}
    if "bias" in w:
        dw["bias"] = dy.sum(axis=(0, 2))
    return (None,), dw


def _read_by_taps(layer: TokenConv, ids: Array, weight: Array) -> list[Array]:
    """For each tap k the ids (B, P) that it reads at every position; _NO_TOKEN outside the sequence."""
    padded = np.pad(ids, ((0, 0), layer.pads), constant_values=_NO_TOKEN)
    K = weight.shape[1]
    last = padded.shape[1] - K  # the last start of a window
    return [padded[:, k : k + last + 1 : layer.stride] for k in range(K)]
