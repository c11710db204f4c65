"""Adjacent Linears merged, and Reshapes and Permutes absorbed into a Linear, once, by changing the weights."""

from __future__ import annotations

import dataclasses

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, Permute, Reshape
from onchip.network.recipe import SLICE_ROWS, Array, recipe_op, sliced_op
from onchip.plan.rewrites.edit import Draft, Moves, Rewritten, moves_after, moves_as_data, moves_before, origin

# K limit of a merged Linear. Over D_mid separate sums the rounding errors average out; in one sum they do not. With
# positive weights and biases, K = 8,192 had 15 times the naive error, 1.3 of the tolerance; K = 4,096 had 0.7 of it.
MAX_TERMS = 4096


def merge_linears(net: Network) -> Rewritten:
    """Linear(W1, b1) -> Linear(W2, b2)   becomes   Linear(W2 W1, W2 b1 + b2), where that is less work.

    Only if they are adjacent, the first has no other reader, the merged weight has fewer elements than its factors (a
    bottleneck stays), and its K is at most MAX_TERMS. New weights are computed in float64 and rounded once.
    """
    draft = Draft(net)
    notes = []
    for name in tuple(draft.nodes):
        # A merged Linear may merge again with the one before it, so no mergeable pair is left at the end.
        while (first := _first_of_pair(draft, draft.nodes[name])) is not None:
            second = draft.nodes[name]
            D_mid, D_in = draft.weights[first.weights["weight"]].shape
            D_out, _ = draft.weights[second.weights["weight"]].shape
            _merge(draft, first, second)
            notes.append(f"merged {first.name} into {name}: {D_in}-{D_mid}-{D_out} becomes {D_in}-{D_out}")
    return draft.done(notes)


def _first_of_pair(draft: Draft, second: Node) -> Node | None:
    """The Linear before this one, if merging them is less work, as exact, and it has no other reader."""
    first = draft.nodes.get(second.inputs[0])
    if not isinstance(second.layer, Linear) or first is None or not isinstance(first.layer, Linear):
        return None
    if draft.sole_reader(first.name) is None:
        return None
    D_mid, D_in = draft.weights[first.weights["weight"]].shape
    D_out, _ = draft.weights[second.weights["weight"]].shape
    return first if D_in <= MAX_TERMS and D_out * D_in < D_mid * (D_in + D_out) else None


def _merge(draft: Draft, first: Node, second: Node) -> None:
    w1, w2 = first.weights["weight"], second.weights["weight"]
    b1, b2 = first.weights.get("bias"), second.weights.get("bias")
    D_mid, D_in = draft.weights[w1].shape
    D_out, _ = draft.weights[w2].shape
    wanted = f"{first.name}+{second.name}"

    flop = 2 * D_out * D_mid
    roles = {"weight": draft.derive(f"{wanted}.weight", merged_weight, (w2, w1), (D_out, D_in), flop * D_in)}
    if b1 is not None:
        sources = (w2, b1) if b2 is None else (w2, b1, b2)
        roles["bias"] = draft.derive(f"{wanted}.bias", merged_bias, sources, (D_out,), flop)
    elif b2 is not None:
        roles["bias"] = b2
    draft.put(Node(second.name, Linear(), first.inputs, roles))
    draft.drop(first)


@sliced_op
def merged_weight(W2: Array, W1: Array) -> Array:
    wide = W1.astype(np.float64)
    merged = np.empty((len(W2), W1.shape[1]))
    for row in range(0, len(W2), SLICE_ROWS):
        merged[row : row + SLICE_ROWS] = W2[row : row + SLICE_ROWS].astype(np.float64) @ wide
    return merged


@recipe_op
def merged_bias(W2: Array, b1: Array, *b2: Array) -> Array:
    total: Array = W2.astype(np.float64) @ b1.astype(np.float64)
    return total + b2[0].astype(np.float64) if b2 else total


def absorb_permutes(net: Network) -> Rewritten:
    """Linear -> moves   becomes   Linear with its rows in the moved order -> one Reshape;
    moves -> Linear   becomes   one Reshape -> Linear with its columns in that order.

    Moves are Reshapes and Permutes, at least one a Permute. The values between have no other reader.
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        if not isinstance(node.layer, Linear) or len(net.types[node.name].shape) != 2:
            continue
        for linear_first in (True, False):
            linear = draft.nodes[node.name]
            _, moves = moves_after(draft, linear) if linear_first else moves_before(draft, linear)
            permutes = [move.name for move in moves if isinstance(move.layer, Permute)]
            if permutes:
                _absorb(draft, linear, moves, linear_first)
                notes.append(f"absorbed {', '.join(permutes)} into {node.name}: permuted its weights")
    return draft.done(notes)


def _absorb(draft: Draft, linear: Node, moves: list[Node], linear_first: bool) -> None:
    types, roles = draft.types, dict(linear.weights)
    op, data = rows_in_order if linear_first else columns_in_order, moves_as_data(types, moves)
    for role in roles if linear_first else ("weight",):
        source = linear.weights[role]
        shape = draft.weights[source].shape
        roles[role] = draft.derive(f"{linear.name}.{role}.moved", op, (source,), shape, moves=data)
    draft.put(dataclasses.replace(linear, weights=roles))
    draft.put(Node(moves[-1].name, Reshape(types[moves[-1].name].row_shape), moves[0].inputs))
    for move in moves[:-1]:
        draft.drop(move)


@recipe_op
def rows_in_order(W: Array, moves: Moves) -> Array:
    return W[origin(moves)]


@recipe_op
def columns_in_order(W: Array, moves: Moves) -> Array:
    return W[:, np.argsort(origin(moves))]
