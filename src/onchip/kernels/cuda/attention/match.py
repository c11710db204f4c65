"""Match attention in a network: two gemms, the softmax between them, and the layout nodes around them.

    softmax(q k^T) v   as   MatMul(q, k) [-> Mul(scalar)] [-> Add(constant)] -> Softmax -> MatMul(., v) [-> Permute]

q, k and v are values, or strided views of values through Slice, Reshape, Permute and a Mul by a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.strides import Heads, View
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, MatMul, Mul, Permute, Reshape, Slice, Softmax

MAX_NODES = 64  # search limit from `start`: long chains of layout nodes hold no attention


@dataclass(frozen=True)
class Attention:
    """q (heads, Sq, D), k (heads, Sk, D), v (heads, Sk, V) -> y (heads, Sq, V), per batch row."""

    nodes: tuple[Node, ...]
    leading: tuple[int, ...]  # axes of heads
    Sq: int
    Sk: int
    D: int
    V: int
    q: Heads
    k: Heads
    v: Heads
    y: Heads
    scales: tuple[str, ...]  # single-element weights
    shift: str | None  # weight added to the scores; broadcasts to (.., Sq, Sk)


def find_attention(net: Network, start: int) -> Attention | None:
    """The attention that starts at net.nodes[start], layout nodes included; None if none starts there."""
    nodes, roles = _walk(net, start)
    if roles is None or not is_closed(net, list(nodes)):
        return None
    inside = {node.name: node for node in nodes}
    first, second, scores = roles
    a, b = net.types[first.inputs[0]].row_shape, net.types[first.inputs[1]].row_shape
    last = net.types[second.name].row_shape
    views = [View.of(net, inside, name) for name in (*first.inputs, second.inputs[1])]
    q, k, v = (
        view.heads(last[:-2], *matrix) for view, matrix in zip(views, ((-2, -1), (-1, -2), (-2, -1)), strict=True)
    )
    row = stored = np.empty(net.types[nodes[-1].name].row_shape, np.int8)
    if nodes[-1] is not second:  # invert the Permute: where elements of the second gemm are stored
        layer = nodes[-1].layer
        assert isinstance(layer, Permute)
        stored = stored.transpose(np.argsort([axis - 1 for axis in layer.axes[1:]]))
    y = View(nodes[-1].name, row, stored).heads(last[:-2], -2, -1)
    if q is None or k is None or v is None or y is None:
        return None
    scales = [name for view in views for name in view.scales]
    scales += [node.weights["constant"] for node in scores if isinstance(node.layer, Mul)]
    shifts = [node.weights["constant"] for node in scores if isinstance(node.layer, Add)]
    return Attention(nodes, last[:-2], a[-2], b[-1], a[-1], last[-1], q, k, v, y, tuple(scales), (*shifts, None)[0])


def _walk(net: Network, start: int) -> tuple[tuple[Node, ...], tuple[Node, Node, list[Node]] | None]:
    """The chain of nodes; of these the first gemm, the second gemm, and the nodes on the scores between them."""
    nodes: list[Node] = []
    first: Node | None = None
    scores: list[Node] = []  # after the first gemm
    for node in net.nodes_from(start):
        if len(nodes) == MAX_NODES:
            break
        nodes.append(node)
        layer, last = node.layer, scores[-1].name if scores else first.name if first is not None else ""
        is_softmax = bool(scores) and isinstance(scores[-1].layer, Softmax)
        if isinstance(layer, MatMul) and len(node.inputs) == 2:
            if first is None:
                first = node
            elif is_softmax and node.inputs[0] == last != node.inputs[1]:
                readers = net.readers(node.name)
                is_permuted = len(readers) == 1 and isinstance(readers[0].layer, Permute) and node.name not in net.kept
                follows = is_permuted and net.nodes[start + len(nodes)] is readers[0]
                return (*nodes, *(readers if follows else ())), (first, node, scores)
            else:
                break
        elif first is not None and node.inputs == (last,) and not is_softmax and _acts_on_scores(net, node, scores):
            scores.append(node)
        elif last in node.inputs or not _is_move(net, node):
            break
    return (), None


def _acts_on_scores(net: Network, node: Node, scores: Sequence[Node]) -> bool:
    kinds = [type(each.layer) for each in scores]
    if isinstance(node.layer, Softmax):
        return node.layer.axis % len(net.types[node.name].shape) == len(net.types[node.name].shape) - 1
    return (_is_scale(net, node) and Add not in kinds) or (
        isinstance(node.layer, Add) and Add not in kinds and set(node.weights) == {"constant"}
        and net.types[node.name] == net.types[node.inputs[0]]
    )  # fmt: skip


def _is_scale(net: Network, node: Node) -> bool:
    """Whether it multiplies a value by a scalar."""
    if not isinstance(node.layer, Mul) or len(node.inputs) != 1 or net.types[node.name] != net.types[node.inputs[0]]:
        return False
    return int(np.prod(net.weights[node.weights["constant"]].shape, dtype=int)) == 1


def _is_move(net: Network, node: Node) -> bool:
    return isinstance(node.layer, Reshape | Permute | Slice) or _is_scale(net, node)
