"""Pack the weights of mlp/tensor_core.cu into the fragment order of shared memory.

k of the first layer follows the order in which lanes load x; k of later layers follows the accumulator layout of the
previous layer. Columns of the last layer follow the order in which lanes store y.
"""

from __future__ import annotations

import itertools

import numpy as np

from onchip.kernels.chain import Chain, Dense
from onchip.kernels.cuda.common.precision import PRECISIONS, Precision, narrowed, round_tf32, round_up
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES

# Tensor cores truncate sums to float32: half an ulp too small on average, and the next layer sums this error over all
# its inputs. Scaling fp32 weights up compensates; the low splits have the bits for it. A rounded addition after every
# step would be as exact, but takes several times as long.
_TRUNCATION_FACTOR = 1 + 2.0**-24


# -- sizes ---------------------------------------------------------------------------------------------------


def weight_bytes(chain: Chain, precision: Precision) -> int:
    return sum(
        layer_bytes(layer, K, precision) for layer, K in zip(chain.layers, depths(chain, precision), strict=True)
    )


def fitting_layers(chain: Chain, precision: Precision, limit_bytes: int) -> int:
    """Length of the longest prefix of layers whose weights take at most `limit_bytes`."""
    sizes = map(layer_bytes, chain.layers, depths(chain, precision), itertools.repeat(precision))
    return sum(total <= limit_bytes for total in itertools.accumulate(sizes))


def layer_bytes(layer: Dense, K: int, precision: Precision) -> int:
    """Bytes of one layer in shared memory: W in tiles, then the bias in fp32."""
    N = round_up(layer.D_out, 8)
    return N * (precision.splits * K * 4 // precision.per_word + (4 if layer.bias is not None else 0))


def depths(chain: Chain, precision: Precision) -> list[int]:
    """K of each layer, padded to whole k steps."""
    first = first_steps(chain.layers[0].D_in, precision) * precision.step
    return [first, *(round_up(round_up(layer.D_in, 8), precision.step) for layer in chain.layers[1:])]


def first_steps(D_in: int, precision: Precision) -> int:
    """k steps of the first layer: each of four lanes holds a quarter of the row, padded to whole steps."""
    return round_up(round_up(D_in, 4) // 4, 2 * precision.per_word) // (2 * precision.per_word)


# -- fragment order ------------------------------------------------------------------------------------------


def pack_recipe(chain: Chain, precision: Precision, x_dtype: str) -> Recipe:
    """All layers in execution order: the weight bytes of a block's shared memory."""
    sources = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
    return Recipe.of(
        pack_fragments, sources, (weight_bytes(chain, precision),), "uint8", precision=precision.name,
        x_bytes=DTYPE_BYTES[x_dtype], has_bias=tuple(layer.bias is not None for layer in chain.layers),
    )  # fmt: skip


@recipe_op
def pack_fragments(*weights: Array, precision: str, x_bytes: int, has_bias: tuple[bool, ...]) -> Array:
    """W (D_out, D_in) and optional b (D_out,) of every layer -> (bytes,) uint8."""
    P = next(each for each in PRECISIONS.values() if each.name == precision)
    arrays, packed = iter(weights), list[bytes]()
    for i, with_bias in enumerate(has_bias):
        weight = next(arrays)
        D_out, D_in = weight.shape
        columns = input_columns(D_in, x_bytes, P) if i == 0 else hidden_columns(round_up(D_in, 8), P)
        N = round_up(D_out, 8)
        order = output_order(N) if i == len(has_bias) - 1 else np.arange(N)
        packed += [split.tobytes() for split in pack_matrix(weight, columns, order, P)]
        if with_bias:
            bias = np.zeros(N, np.float32)
            bias[:D_out] = next(arrays)
            packed.append(bias[order].tobytes())
    return np.frombuffer(b"".join(packed), np.uint8)


def pack_matrix(weight: Array, columns: Array, order: Array, precision: Precision) -> list[Array]:
    """The splits of W (D_out, D_in), each in tiles of 8 rows x 16 B of k; tiles of the same k are contiguous.

    columns  (K,) column of W for each k; D_in or more: zero
    order    (N,) row of W for each packed row
    """
    D_out, D_in = weight.shape
    padded = np.zeros((round_up(D_out, 8), D_in + 1), np.float32)  # the last column is the zero padding
    padded[:D_out, :D_in] = weight
    in_order = padded[order][:, np.minimum(columns, D_in)]
    if precision.per_word == 2:
        splits = [narrowed(in_order, precision.dtype)]
    else:
        high = round_tf32(in_order)
        splits = [high]
        if precision.splits == 2:
            splits.append(round_tf32((in_order.astype(np.float64) * _TRUNCATION_FACTOR - high).astype(np.float32)))
    return [split.reshape(len(padded), -1, 4 * precision.per_word).swapaxes(0, 1) for split in splits]


def input_columns(D: int, item_bytes: int, precision: Precision) -> Array:
    """Column of x for each k of the first layer, D for padding; the groups of mlp/rows_in.cuh."""
    elements = np.full((4, 2 * precision.per_word * first_steps(D, precision)), D)  # per lane
    start = 0
    while start < D:
        V = 16 // item_bytes
        while V > 1 and (D % V or D - start < 4 * V):
            V //= 2
        group = start + np.arange(4)[:, None] * V + np.arange(V)
        elements[:, start // 4 : start // 4 + V] = np.minimum(group, D)
        start += 4 * V
    k = np.empty(elements.size, int)
    k[_lane_k(elements.shape[1], precision)] = elements
    return k


def _lane_k(count: int, precision: Precision) -> Array:
    """(4, count): the k of each element of each lane."""
    lane, e = np.arange(4)[:, None], np.arange(count)
    word, within = e // precision.per_word, e % precision.per_word  # two 32-bit words per step
    k: Array = word * (precision.step // 2) + lane * precision.per_word + within
    return k


def hidden_columns(N: int, precision: Precision) -> Array:
    """Output of the previous layer for each k, in accumulator order; N or more is padding."""
    K = round_up(N, precision.step)
    if precision.per_word == 2:
        return np.arange(K)
    return np.arange(K).reshape(-1, 4, 2).swapaxes(1, 2).reshape(-1)  # of 8 columns: 0 2 4 6 1 3 5 7


def output_order(N: int) -> Array:
    """Output for each packed column of the last layer, so that a lane's columns are contiguous in y."""
    order, start = np.empty(N, int), 0
    while start < N:
        blocks = next(blocks for blocks in (4, 2, 1) if 8 * blocks <= N - start)
        block, lane, i = np.ix_(np.arange(blocks), np.arange(4), np.arange(2))
        order[start : start + 8 * blocks] = (start + 2 * blocks * lane + 2 * block + i).reshape(-1)
        start += 8 * blocks
    return order
