"""A multiply and an add with constants after a row norm: its weight and its bias."""

from __future__ import annotations

import dataclasses

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Add, GroupNorm, Mul, Reshape, RowNorm
from onchip.network.recipe import Array, recipe_op
from onchip.plan.rewrites.edit import Draft, Rewritten


def fold_scales(net: Network) -> Rewritten:
    """norm -> Mul(constant)   becomes   norm(weight);   norm(weight) -> Add(constant)   becomes   norm(weight, bias).

    Exporters write a GroupNorm as one of (B, groups, size), whose scale follows a Reshape to (B, C, H, W): the norm
    then moves after the Reshape.
    """
    draft = Draft(net)
    told = []
    for node in net.nodes:
        layer = node.layer
        while isinstance(layer, RowNorm) and node.name in draft.nodes:
            made = _scaled(draft, draft.nodes[node.name])
            if made is None:
                break
            told.append(f"folded {made.name} into {node.name}")
            node = made
    return draft.done(told)


def _scaled(draft: Draft, norm: Node) -> Node | None:
    """Replace the layer that scales a norm by the norm with that weight; None if there is no such layer."""
    layer = norm.layer
    assert isinstance(layer, RowNorm)
    behind = reader = draft.sole_reader(norm.name)
    if isinstance(layer, GroupNorm) and not norm.weights and reader is not None and isinstance(reader.layer, Reshape):
        behind = draft.sole_reader(reader.name)
    if behind is None or len(behind.inputs) != 1 or set(behind.weights) != {"constant"}:
        return None
    role = "weight" if isinstance(behind.layer, Mul) else "bias" if isinstance(behind.layer, Add) else ""
    if role not in layer.optional or role in norm.weights or (role == "weight" and "bias" in norm.weights):
        return None
    x = draft.types[behind.name]
    if isinstance(layer, GroupNorm) and (len(x.shape) < 3 or x.row_shape[0] % layer.groups):
        return None
    constant = behind.weights["constant"]
    given, shape = draft.weights[constant].shape, layer.weight_shape(x)
    aligned = (1,) * (len(x.row_shape) - len(given)) + given
    kept = aligned[:1] if isinstance(layer, GroupNorm) else aligned[len(aligned) - len(shape) :]
    others = aligned[1:] if isinstance(layer, GroupNorm) else aligned[: len(aligned) - len(shape)]
    if draft.types[norm.name].row_size != x.row_size or any(size != 1 for size in others):
        return None
    name = draft.derive(f"{norm.name}+{behind.name}.{role}", as_weight, (constant,), shape, kept=kept, made=shape)
    if behind is not reader:
        assert reader is not None
        draft.put(dataclasses.replace(reader, inputs=norm.inputs))
    inputs = norm.inputs if behind is reader else (behind.inputs[0],)
    made = Node(behind.name, layer, inputs, {**norm.weights, role: name})
    draft.put(made)
    draft.drop(norm)
    return made


@recipe_op
def as_weight(constant: Array, kept: tuple[int, ...], made: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(constant.reshape(kept), made))
