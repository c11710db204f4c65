"""Weights of a chain of Linear layers in one packed array, and the table of sizes and offsets that kernels read."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from onchip.kernels.chain import Chain
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import code_of
from onchip.kernels.cpu.microkernels.tile import pack, packed_size, padded
from onchip.network.graph import Network
from onchip.network.recipe import Array, Recipe, recipe_op


def layer_table(chain: Chain) -> Array:
    """One row per layer: K, N, offsets of its weights and bias in the packed arrays, activation code."""
    offsets = zip(chain.layers, *_offsets(chain), strict=False)
    rows = [(layer.D_in, layer.D_out, w, bias, code_of(layer.activation)) for layer, w, bias in offsets]
    return np.array(rows, np.int64)


def _offsets(chain: Chain) -> tuple[list[int], list[int]]:
    """Start offset of each layer's weights and bias in the packed arrays, then the total size."""
    w_sizes = [packed_size(layer.D_in, layer.D_out) for layer in chain.layers]
    bias_sizes = [padded(layer.D_out) for layer in chain.layers]
    return list(accumulate(w_sizes, initial=0)), list(accumulate(bias_sizes, initial=0))


def packed_recipes(net: Network, chain: Chain, narrow: int) -> dict[str, Recipe]:
    """All weights in one flat packed array, all biases (zero where missing) in another.

    narrow  layers of at most this many columns stay (N, K), as dense_narrow reads them
    """
    (*_, w_size), (*begins, bias_size) = _offsets(chain)
    with_bias = [(begin, layer.bias) for begin, layer in zip(begins, chain.layers, strict=True) if layer.bias]
    starts = tuple(start for start, _ in with_bias)
    return {
        "w": Recipe.of(pack_layers, [layer.weight for layer in chain.layers], (w_size,), size=w_size, narrow=narrow),
        "bias": Recipe.of(pack_biases, [name for _, name in with_bias], (bias_size,), size=bias_size, starts=starts),
    }


@recipe_op
def pack_layers(*weights: Array, size: int, narrow: int) -> Array:
    """Concatenate weights of (D_out, D_in) as packed panels (tile.pack); up to `narrow` rows, row-major."""
    flat, at = aligned_zeros(size), 0
    for weight in weights:
        N, K = weight.shape
        if narrow >= N:
            flat[at : at + N * K] = weight.reshape(-1)
        else:
            pack(weight.T, flat[at : at + packed_size(K, N)])
        at += packed_size(K, N)
    return flat


@recipe_op
def pack_biases(*biases: Array, size: int, starts: tuple[int, ...]) -> Array:
    flat = aligned_zeros(size)
    for bias, start in zip(biases, starts, strict=True):
        flat[start : start + len(bias)] = bias
    return flat
