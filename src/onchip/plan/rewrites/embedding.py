"""An Embedding folded into the layer that reads it: a gather and a sum instead of a gemm."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Conv1d, Embedding, Linear, Permute, Reshape, TokenConv
from onchip.network.recipe import SLICE_ROWS, Array, sliced_op
from onchip.plan.rewrites.drop import drop_unread
from onchip.plan.rewrites.edit import Draft, Rewritten


def fold_embeddings(net: Network) -> Rewritten:
    """ids -> Embedding -> Permute -> Conv1d(W)   becomes   ids -> TokenConv(T)   with T[v, k] = W[:, :, k] emb[v].

    Both layers are linear, so the product of tap k and the embedding of token v can be looked up. A Linear over the
    embedding is a convolution of one tap, and a Linear over the flattened (S, E) is one of S taps.
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        if (emb := _embedding_of(draft, node)) is not None:
            V, K, C_out = _fold(draft, emb, node)
            tables = f"{K} tables" if K > 1 else "a table"
            notes.append(f"folded {emb.name} into {node.name}: {tables} of {V:,} x {C_out:,} instead of a gemm")
    folded, notes = draft.done(notes)
    return (drop_unread(folded)[0], notes) if notes else (net, [])


def _embedding_of(draft: Draft, node: Node) -> Node | None:
    """The Embedding that a node reads and that can be folded into it, if any."""
    layer, source = node.layer, draft.nodes.get(node.inputs[0])
    if source is None:
        return None
    emb: Node | None = source  # Linear over (B, S, E)
    if isinstance(layer, Conv1d):  # over (B, E, S)
        if source.layer != Permute((0, 2, 1)) or layer.groups > 1 or layer.dilation != (1,):
            return None
        emb = draft.nodes.get(source.inputs[0])
    elif not isinstance(layer, Linear):
        return None
    elif isinstance(source.layer, Reshape) and len(draft.types[source.name].shape) == 2:  # over (B, S * E)
        emb = draft.nodes.get(source.inputs[0])
    if emb is None or not isinstance(emb.layer, Embedding) or len(draft.types[emb.name].shape) != 3:
        return None
    # A TokenConv's output has the dtype of its tables; half-precision tables would be less exact than the network.
    dtypes = {draft.dtype(one.weights["weight"]) for one in (emb, node)}
    return emb if dtypes in ({"float32"}, {"float64"}) else None


def _fold(draft: Draft, emb: Node, node: Node) -> tuple[int, int, int]:
    """Replace a node by a TokenConv; returns the shape of its tables."""
    layer, table, w = node.layer, emb.weights["weight"], node.weights["weight"]
    (V, E), C_out = draft.weights[table].shape, draft.weights[w].shape[0]
    S = draft.types[emb.name].row_shape[0]
    is_flat = len(draft.types[node.name].shape) == 2
    K = draft.weights[w].shape[2] if isinstance(layer, Conv1d) else S if is_flat else 1
    shape = (V, K, C_out)
    tables = draft.derive(f"{node.name}.tables", token_tables, (table, w), shape, 2 * V * E * K * C_out)
    roles = {**node.weights, "weight": tables}
    if isinstance(layer, Conv1d):
        draft.put(Node(node.name, TokenConv(layer.stride[0], layer.pads), emb.inputs, roles))
    else:  # the TokenConv computes (B, C_out, 1) if is_flat, else (B, C_out, S)
        lookup = Node(draft.fresh(f"{node.name}.tokens"), TokenConv(), emb.inputs, roles)
        shaped = Reshape((C_out,)) if is_flat else Permute((0, 2, 1))
        draft.put(lookup, Node(node.name, shaped, (lookup.name,)))
    return shape


@sliced_op
def token_tables(rows: Array, W: Array) -> Array:
    """rows (V, E); W (C_out, E, K) of a Conv1d or (C_out, K * E) of a Linear -> (V, K, C_out)."""
    (V, E), C_out = rows.shape, len(W)
    taps = W.transpose(2, 1, 0) if W.ndim == 3 else W.reshape(C_out, -1, E).transpose(1, 2, 0)  # (K, E, C_out)
    tables = np.empty((V, len(taps), C_out), W.dtype)
    for k, tap in enumerate(taps):
        tap = np.ascontiguousarray(tap)
        for v in range(0, V, SLICE_ROWS):
            tables[v : v + SLICE_ROWS, k] = rows[v : v + SLICE_ROWS] @ tap
    return tables
