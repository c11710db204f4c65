"""A transposed convolution as plain convolutions, one per phase of its stride."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Elementwise, Interleave
from onchip.network.recipe import Array, recipe_op
from onchip.plan.rewrites.edit import Draft, Rewritten


def split_phases(net: Network) -> Rewritten:
    """ConvTranspose(stride s)   becomes   s x s convolutions without a stride, and Interleave.

    Along an axis, output p + s q gets input i through tap k = p + s q + before - s i. So the outputs of one phase p use
    every s-th tap, from k0 = (p + before) mod s on: a convolution of J taps (reversed) over x itself, without inserted
    zeros. Stride 1 has one phase and needs no Interleave. A layer is left as it is if it has dilation, a phase without
    taps, or a phase that begins or ends inside the input (large pads and a small kernel).
    """
    draft = Draft(net)
    told = []
    for node in net.nodes:
        if isinstance(node.layer, ConvTranspose1d | ConvTranspose2d) and (made := _phases(draft, node)):
            draft.put(*made)
            what = f"{len(made) - 1} convolutions, one a phase" if len(made) > 1 else "a convolution"
            told.append(f"split {node.name} into {what}: no product with an inserted zero")
    return draft.done(told)


def activate_phases(net: Network) -> Rewritten:
    """activation(Interleave(a, b, ...))   becomes   Interleave(activation(a), activation(b), ...).

    This lets the kernel of each phase fuse the activation; a kernel that fused the whole layer and activation no longer
    can.
    """
    draft = Draft(net)
    told = []
    for node in net.nodes:
        reader = draft.sole_reader(node.name) if isinstance(node.layer, Interleave) else None
        if reader is None or not isinstance(reader.layer, Elementwise):
            continue
        names = [draft.fresh(f"{reader.name}.{part.rpartition('.')[2]}") for part in node.inputs]
        parts = [Node(name, reader.layer, (part,)) for name, part in zip(names, node.inputs, strict=True)]
        draft.put(*parts, Node(reader.name, node.layer, tuple(names)))
        draft.drop(node)
        told.append(f"moved {reader.name} in front of {node.name}: to the phases that it is made of")
    return draft.done(told)


def _phases(draft: Draft, node: Node) -> list[Node]:
    """The nodes that replace a transposed convolution; none if it stays."""
    layer, w = node.layer, node.weights["weight"]
    assert isinstance(layer, ConvTranspose1d | ConvTranspose2d)
    C_in, C_group, *kernel = draft.weights[w].shape
    if any(d != 1 for d in layer.dilation) or any(s > k for s, k in zip(layer.stride, kernel, strict=True)):
        return []  # if the stride exceeds the kernel, some phase has no tap
    sizes_in, sizes_out = (draft.types[value].row_shape[1:] for value in (node.inputs[0], node.name))
    weave = Interleave(layer.stride)
    cuts = []  # per phase: its PhaseAlong per axis, and its convolution's padding after each axis
    for phase in weave.phases():
        axes = zip(phase, layer.stride, layer.pads[: layer.rank], kernel, sizes_out, strict=True)
        cut = [phase_along(*axis) for axis in axes]
        # Such that places = n_in + before + after - (taps - 1). Below 0 there is no such convolution: it begins or
        # ends inside the input, or has no output.
        after = [
            along.places - n_in - along.before + along.taps - 1 if along.places else -1
            for along, n_in in zip(cut, sizes_in, strict=True)
        ]
        if min(*(along.before for along in cut), *after) < 0:
            return []
        cuts.append((cut, after))
    parts = []
    for phase, (cut, after) in zip(weave.phases(), cuts, strict=True):
        firsts, taps, before = zip(*((along.first, along.taps, along.before) for along in cut), strict=True)
        tag = "_".join(map(str, phase))
        shape = (C_group * layer.groups, C_in // layer.groups, *taps)
        weight = draft.derive(
            f"{node.name}.{tag}.weight", taps_of_phase, (w,), shape, firsts=firsts, stride=layer.stride,
            groups=layer.groups,
        )  # fmt: skip
        roles = {**node.weights, "weight": weight}
        pads = (*before, *after)
        conv = Conv1d(pads=pads, groups=layer.groups) if layer.rank == 1 else Conv2d(pads=pads, groups=layer.groups)
        name = node.name if len(cuts) == 1 else draft.fresh(f"{node.name}.{tag}")
        parts.append(Node(name, conv, node.inputs, roles))
    return parts if len(parts) == 1 else [*parts, Node(node.name, weave, tuple(part.name for part in parts))]


@dataclass(frozen=True)
class PhaseAlong:
    """The outputs of a transposed convolution along an axis that share the same taps: p, p + s, p + 2s, ..."""

    first: int  # tap; the others follow every s
    taps: int
    before: int  # pixels between the window's start and q, for output p + s q; below 0: the window starts after q
    places: int  # the number of outputs


def phase_along(p: int, s: int, pad: int, K: int, n_out: int) -> PhaseAlong:
    """Phase p of stride s, with `pad` elements cropped at the start, K taps and n_out outputs."""
    first, shift = (p + pad) % s, (p + pad) // s
    taps = len(range(first, K, s))
    return PhaseAlong(first, taps, taps - 1 - shift, len(range(p, n_out, s)))


@recipe_op
def taps_of_phase(W: Array, firsts: tuple[int, ...], stride: tuple[int, ...], groups: int) -> Array:
    """(C_in, C_out / groups, taps...) -> (C_out, C_in / groups, every s-th tap, reversed)."""
    every = (slice(None), slice(None), *(slice(first, None, s) for first, s in zip(firsts, stride, strict=True)))
    turned = np.flip(W[every], tuple(range(2, W.ndim)))
    C_in, C_group, *taps = turned.shape
    return turned.reshape(groups, -1, C_group, *taps).swapaxes(1, 2).reshape(C_group * groups, C_in // groups, *taps)
