"""A row norm followed by a multiply and an add with constants: the norm's weight and bias."""

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
    notes = []
    for node in net.nodes:
        layer = node.layer
        while isinstance(layer, RowNorm) and node.name in draft.nodes:
            merged = _scaled(draft, draft.nodes[node.name])
            if merged is None:
                break
            notes.append(f"folded {merged.name} into {node.name}")
            node = merged
    return draft.done(notes)


def _scaled(draft: Draft, norm: Node) -> Node | None:
    """Fold the Mul or Add after a norm into its weight or bias; None if there is no such layer."""
    layer = norm.layer
    assert isinstance(layer, RowNorm)
    scale = reader = draft.sole_reader(norm.name)
    if isinstance(layer, GroupNorm) and not norm.weights and reader is not None and isinstance(reader.layer, Reshape):
        scale = draft.sole_reader(reader.name)
    if scale is None or len(scale.inputs) != 1 or set(scale.weights) != {"constant"}:
        return None
    role = "weight" if isinstance(scale.layer, Mul) else "bias" if isinstance(scale.layer, Add) else ""
    if role not in layer.optional or role in norm.weights or (role == "weight" and "bias" in norm.weights):
        return None
    x = draft.types[scale.name]
    if isinstance(layer, GroupNorm) and (len(x.shape) < 3 or x.row_shape[0] % layer.groups):
        return None
    constant = scale.weights["constant"]
    constant_shape, shape = draft.weights[constant].shape, layer.weight_shape(x)
    aligned = (1,) * (len(x.row_shape) - len(constant_shape)) + constant_shape
    sizes = aligned[:1] if isinstance(layer, GroupNorm) else aligned[len(aligned) - len(shape) :]
    others = aligned[1:] if isinstance(layer, GroupNorm) else aligned[: len(aligned) - len(shape)]
    if draft.types[norm.name].row_size != x.row_size or any(size != 1 for size in others):
        return None
    name = draft.derive(f"{norm.name}+{scale.name}.{role}", as_weight, (constant,), shape, kept=sizes, made=shape)
    if scale is not reader:
        assert reader is not None
        draft.put(dataclasses.replace(reader, inputs=norm.inputs))
    inputs = norm.inputs if scale is reader else (scale.inputs[0],)
    merged = Node(scale.name, layer, inputs, {**norm.weights, role: name})
    draft.put(merged)
    draft.drop(norm)
    return merged


@recipe_op
def as_weight(constant: Array, kept: tuple[int, ...], made: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(constant.reshape(kept), made))
