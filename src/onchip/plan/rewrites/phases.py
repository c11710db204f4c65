"""A transposed convolution as convolutions without zero insertion, one per phase of its stride."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Elementwise, Interleave
from onchip.network.recipe import Array, rearranging_op
from onchip.plan.rewrites.edit import Draft, Rewritten


def split_phases(net: Network) -> Rewritten:
    """ConvTranspose(stride s)   becomes   s x s convolutions without a stride, and Interleave.

    Along an axis, output p + s q depends on input i through tap k = p + s q + before - s i. So the outputs of phase p
    use every s-th tap, from k0 = (p + before) mod s on: a convolution of x with these taps reversed, without inserted
    zeros. Stride 1 has one phase and needs no Interleave. A layer is not rewritten if it has dilation, a phase without
    taps, or a phase that begins or ends inside the input (large pads and a small kernel).
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        if isinstance(node.layer, ConvTranspose1d | ConvTranspose2d) and (nodes := _phases(draft, node)):
            draft.put(*nodes)
            what = f"{len(nodes) - 1} convolutions, one per phase" if len(nodes) > 1 else "a convolution"
            notes.append(f"split {node.name} into {what}: no multiplications with inserted zeros")
    return draft.done(notes)


def activate_phases(net: Network) -> Rewritten:
    """activation(Interleave(a, b, ...))   becomes   Interleave(activation(a), activation(b), ...).

    This lets the kernel of each phase fuse the activation, but prevents a kernel from fusing it with the whole layer.
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        reader = draft.sole_reader(node.name) if isinstance(node.layer, Interleave) else None
        if reader is None or not isinstance(reader.layer, Elementwise):
            continue
        names = [draft.fresh(f"{reader.name}.{phase.rpartition('.')[2]}") for phase in node.inputs]
        activations = [Node(name, reader.layer, (phase,)) for name, phase in zip(names, node.inputs, strict=True)]
        draft.put(*activations, Node(reader.name, node.layer, tuple(names)))
        draft.drop(node)
        notes.append(f"moved {reader.name} before {node.name}: applied to each phase")
    return draft.done(notes)


def _phases(draft: Draft, node: Node) -> list[Node]:
    """The nodes that replace a transposed convolution; [] if it is not rewritten."""
    layer, w = node.layer, node.weights["weight"]
    assert isinstance(layer, ConvTranspose1d | ConvTranspose2d)
    C_in, C_group, *kernel = draft.weights[w].shape
    if any(d != 1 for d in layer.dilation) or any(s > k for s, k in zip(layer.stride, kernel, strict=True)):
        return []  # if the stride exceeds the kernel, some phase has no tap
    sizes_in, sizes_out = (draft.types[value].row_shape[1:] for value in (node.inputs[0], node.name))
    interleave = Interleave(layer.stride)
    geometries = []  # per phase: its AxisPhase per axis, and its convolution's padding at the end of each axis
    for phase in interleave.phases():
        axes = zip(phase, layer.stride, layer.pads[: layer.rank], kernel, sizes_out, strict=True)
        axes_of_phase = [axis_phase(*axis) for axis in axes]
        # From outputs = n_in + before + after - (taps - 1). If negative, there is no such convolution: it would begin
        # or end inside the input, or have no output.
        after = [
            one.outputs - n_in - one.before + one.taps - 1 if one.outputs else -1
            for one, n_in in zip(axes_of_phase, sizes_in, strict=True)
        ]
        if min(*(one.before for one in axes_of_phase), *after) < 0:
            return []
        geometries.append((axes_of_phase, after))
    convs = []
    for phase, (axes_of_phase, after) in zip(interleave.phases(), geometries, strict=True):
        firsts, taps, before = zip(*((one.first, one.taps, one.before) for one in axes_of_phase), strict=True)
        tag = "_".join(map(str, phase))
        shape = (C_group * layer.groups, C_in // layer.groups, *taps)
        weight = draft.derive(
            f"{node.name}.{tag}.weight", taps_of_phase, (w,), shape, firsts=firsts, stride=layer.stride,
            groups=layer.groups,
        )  # fmt: skip
        roles = {**node.weights, "weight": weight}
        pads = (*before, *after)
        conv = Conv1d(pads=pads, groups=layer.groups) if layer.rank == 1 else Conv2d(pads=pads, groups=layer.groups)
        name = node.name if len(geometries) == 1 else draft.fresh(f"{node.name}.{tag}")
        convs.append(Node(name, conv, node.inputs, roles))
    return convs if len(convs) == 1 else [*convs, Node(node.name, interleave, tuple(conv.name for conv in convs))]


@dataclass(frozen=True)
class AxisPhase:
    """The outputs of a transposed convolution along an axis that share the same taps: p, p + s, p + 2s, ..."""

    first: int  # tap; the others follow at every s-th
    taps: int
    before: int  # pixels between the window's start and q, for output p + s q; below 0: the window starts after q
    outputs: int  # how many


def axis_phase(p: int, s: int, pad: int, K: int, n_out: int) -> AxisPhase:
    """Phase p of stride s, with `pad` elements cropped at the start, K taps and n_out outputs."""
    first, shift = (p + pad) % s, (p + pad) // s
    taps = len(range(first, K, s))
    return AxisPhase(first, taps, taps - 1 - shift, len(range(p, n_out, s)))


@rearranging_op
def taps_of_phase(W: Array, firsts: tuple[int, ...], stride: tuple[int, ...], groups: int) -> Array:
    """(C_in, C_out / groups, taps...) -> (C_out, C_in / groups, every s-th tap, reversed)."""
    every = (slice(None), slice(None), *(slice(first, None, s) for first, s in zip(firsts, stride, strict=True)))
    flipped = np.flip(W[every], tuple(range(2, W.ndim)))
    C_in, C_group, *taps = flipped.shape
    return flipped.reshape(groups, -1, C_group, *taps).swapaxes(1, 2).reshape(C_group * groups, C_in // groups, *taps)
