"""Shared by first_layer.py and last_layer/mma.py: the layers they fuse, and weights as mma.sync fragments."""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import ELEMENT_TYPES
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.common.window import POOLS
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Convolution, Elementwise, Layer, ToPixels, TransposedConvolution
from onchip.network.recipe import Array, Recipe
from onchip.plan.kernel import Cost

THREADS = 256
PART = 32  # K elements per partial sum in fp32
COLUMNS = 8  # per fragment
# Instructions that an SM issues in the time of an mma.sync: 1.6 per clock, at a sustained 0.68 mma per clock. An
# estimate with 2.4 per clock was 1.3 to 2.1 times too fast for layers of 1 to 64 channels (H200).
ISSUED_PER_MMA = 2.3


def even_share(n: int, most: int) -> int:
    """The largest size up to `most` that splits n into chunks of about equal size."""
    return math.ceil(n / math.ceil(n / most))


def find_nodes(net: Network, start: int, layers: tuple[type[Layer], ...] = (Convolution,)) -> tuple[Node, ...]:
    """Match Cast, convolution, activation, Cast or ToPixels; all but the convolution are optional.

    Empty if no convolution starts here. Intermediate values have no other readers.
    """
    found: list[Node] = []
    patterns: list[tuple[type[Layer], ...]] = [(Cast,), layers, ACTIVATIONS, (Cast, ToPixels)]
    for node in net.nodes[start : start + len(patterns)]:
        follows = not found or (node.inputs == (found[-1].name,) and is_closed(net, [*found, node]))
        while patterns and not isinstance(node.layer, patterns[0]):
            if patterns.pop(0) is layers:
                return ()
        if not patterns or not follows:
            break
        patterns.pop(0)
        found.append(node)
    return tuple(found) if any(isinstance(node.layer, layers) for node in found) else ()


def convolution_of(nodes: tuple[Node, ...]) -> Node:
    return next(node for node in nodes if isinstance(node.layer, Convolution | TransposedConvolution))


def activation_of(nodes: tuple[Node, ...]) -> Elementwise | None:
    return next((node.layer for node in nodes if isinstance(node.layer, Elementwise)), None)


def are_floats(net: Network, nodes: tuple[Node, ...]) -> bool:
    """Whether input, weights and output are floats that the tensor cores support."""
    weights = [net.weight_type(name).dtype for name in convolution_of(nodes).weights.values()]
    values = [net.types[nodes[0].inputs[0]].dtype, *(net.types[node.name].dtype for node in nodes)]
    if isinstance(nodes[-1].layer, ToPixels):
        values.pop()
    return {*values, *weights} <= ELEMENT_TYPES.keys()


def cost_of(
    net: Network, nodes: tuple[Node, ...], fixed_bytes: int, precision: str, rate: float, min_us: float
) -> Cost:
    """Cost at a share of the tensor cores' rate; fp32 counts as three TF32 gemms."""
    splits = PRECISIONS[precision].splits
    return Cost(
        sum(map(net.row_flop, nodes)) * (3 if splits > 1 else 1),
        net.types[nodes[0].inputs[0]].row_bytes + net.types[nodes[-1].name].row_bytes,
        fixed_bytes,
        precision="tf32" if splits > 1 else "",
        rate=rate,
        min_us=min_us,
    )


def label_of(name: str, net: Network, nodes: tuple[Node, ...]) -> str:
    node = convolution_of(nodes)
    C, N = (net.types[value].row_shape[0] for value in (node.inputs[0], node.name))
    taps = "x".join(map(str, net.weights[node.weights["weight"]].shape[2:]))
    fused = [each.layer.kind for each in nodes if isinstance(each.layer, (*ACTIVATIONS, *POOLS, ToPixels))]
    return f"{name}<{','.join([str(C), str(N), taps, *fused])}>"


def fragment_shape(K: int, N: int, per_word: int) -> tuple[int, int]:
    """Shape of (K, N) as fragments: (steps * tiles of 8 columns, elements per tile)."""
    steps = round_up(K, COLUMNS * per_word) // (COLUMNS * per_word)
    return steps * (round_up(N, COLUMNS) // COLUMNS), 64 * per_word


def in_fragments(matrix: Array, per_word: int) -> Array:
    """(K, N), zero-padded, as mma.sync B fragments: (steps * tiles of 8 columns, elements per tile).

    Lane (g, q) = (lane / 4, lane % 4) has column g, and 32-bit words q and q + 4 of the column's 8 per step.
    """
    K, N = matrix.shape
    steps, tiles = -(-K // (8 * per_word)), -(-N // COLUMNS)
    full = np.zeros((steps * 8 * per_word, tiles * COLUMNS), matrix.dtype)
    full[:K, :N] = matrix
    split = full.reshape(steps, 2, 4, per_word, tiles, COLUMNS)  # step, word, q, element, tile, g
    return split.transpose(0, 4, 5, 2, 1, 3).reshape(steps * tiles, 64 * per_word)


def multiplied_fragments(arranged: Recipe, precision: str) -> Recipe:
    """Fragments in the precision's type; 3xTF32: all high halves, then all low ones."""
    rows, size = arranged.shape
    return multiplied_weight(arranged, (rows, size), precision)
