"""What first_layer.py and last_layer/mma.py share: the layers that they fuse, and weights as mma.sync fragments."""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import NUMBERS
from onchip.kernels.cuda.gemm.sm90 import multiplied_weight
from onchip.kernels.cuda.pool.pool import POOLS
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Convolution, Elementwise, Layer, ToPixels, TransposedConvolution
from onchip.network.recipe import Array, Recipe
from onchip.plan.kernel import Price

THREADS = 256
PART = 32  # terms of a sum of float32
COLUMNS = 8  # of a fragment
# Instructions that a multiprocessor issues while its tensor cores make one product of mma.sync at their steady rate,
# which is 0.68 a clock: 1.6 a clock. Layers of 1 to 64 channels took 1.3 to 2.1 times what 2.4 a clock would (H200).
ISSUED_A_PRODUCT = 2.3


def even_share(n: int, most: int) -> int:
    """At most `most`, such that n falls into parts of about the same size."""
    return math.ceil(n / math.ceil(n / most))


def find_nodes(net: Network, start: int, layers: tuple[type[Layer], ...] = (Convolution,)) -> tuple[Node, ...]:
    """A Cast, a convolution, its activation and a Cast or ToPixels, where they stand: none but the layer is needed.

    None at all where no convolution begins. Nobody else reads what is made on the way.
    """
    found: list[Node] = []
    wanted: list[tuple[type[Layer], ...]] = [(Cast,), layers, ACTIVATIONS, (Cast, ToPixels)]
    for node in net.nodes[start : start + len(wanted)]:
        follows = not found or (node.inputs == (found[-1].name,) and is_closed(net, [*found, node]))
        while wanted and not isinstance(node.layer, wanted[0]):
            if wanted.pop(0) is layers:
                return ()
        if not wanted or not follows:
            break
        wanted.pop(0)
        found.append(node)
    return tuple(found) if any(isinstance(node.layer, layers) for node in found) else ()


def convolution_of(nodes: tuple[Node, ...]) -> Node:
    return next(node for node in nodes if isinstance(node.layer, Convolution | TransposedConvolution))


def activation_of(nodes: tuple[Node, ...]) -> Elementwise | None:
    return next((node.layer for node in nodes if isinstance(node.layer, Elementwise)), None)


def are_numbers(net: Network, nodes: tuple[Node, ...]) -> bool:
    """Whether tensor cores take what goes in, the weights, and what comes out as floats."""
    weights = [net.weight_type(name).dtype for name in convolution_of(nodes).weights.values()]
    values = [net.types[nodes[0].inputs[0]].dtype, *(net.types[node.name].dtype for node in nodes)]
    if isinstance(nodes[-1].layer, ToPixels):
        values.pop()
    return {*values, *weights} <= NUMBERS.keys()


def price_of(
    net: Network, nodes: tuple[Node, ...], fixed_bytes: int, precision: str, rate: float, least_us: float
) -> Price:
    """Of what is asked for, at a share of the tensor cores' rate; three products of tf32 make one of fp32."""
    parts = PRECISIONS[precision].parts
    return Price(
        sum(map(net.row_flop, nodes)) * (3 if parts > 1 else 1),
        net.types[nodes[0].inputs[0]].row_bytes + net.types[nodes[-1].name].row_bytes,
        fixed_bytes,
        precision="tf32" if parts > 1 else "",
        rate=rate,
        least_us=least_us,
    )


def label_of(name: str, net: Network, nodes: tuple[Node, ...]) -> str:
    node = convolution_of(nodes)
    C, N = (net.types[value].row_shape[0] for value in (node.inputs[0], node.name))
    taps = "x".join(map(str, net.weights[node.weights["weight"]].shape[2:]))
    behind = [each.layer.kind for each in nodes if isinstance(each.layer, (*ACTIVATIONS, *POOLS, ToPixels))]
    return f"{name}<{','.join([str(C), str(N), taps, *behind])}>"


def fragment_shape(K: int, N: int, per_word: int) -> tuple[int, int]:
    """Of a matrix (K, N) as fragments: its tiles of 8 columns, step by step, and the numbers of each."""
    steps = round_up(K, COLUMNS * per_word) // (COLUMNS * per_word)
    return steps * (round_up(N, COLUMNS) // COLUMNS), 64 * per_word


def in_fragments(matrix: Array, per_word: int) -> Array:
    """(K, N), zeros filled in, as what each lane of mma.sync takes of a step and 8 columns: (steps * tiles, numbers).

    Lane (g, q) = (lane / 4, lane % 4) has column g, and words q and q + 4 of the 8 that a column has of a step.
    """
    K, N = matrix.shape
    steps, tiles = -(-K // (8 * per_word)), -(-N // COLUMNS)
    full = np.zeros((steps * 8 * per_word, tiles * COLUMNS), matrix.dtype)
    full[:K, :N] = matrix
    cut = full.reshape(steps, 2, 4, per_word, tiles, COLUMNS)  # step, word, q, number, tile, g
    return cut.transpose(0, 4, 5, 2, 1, 3).reshape(steps * tiles, 64 * per_word)


def multiplied_fragments(arranged: Recipe, precision: str) -> Recipe:
    """As the tensor cores multiply them; of fp32 the upper parts, then the lower ones."""
    rows, numbers = arranged.shape
    return multiplied_weight(arranged, (rows, numbers), precision)
