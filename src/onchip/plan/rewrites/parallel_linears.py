"""Linears that read the same value, merged into one."""

from __future__ import annotations

from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, Slice
from onchip.plan.rewrites.convs import concatenated, concatenated_biases
from onchip.plan.rewrites.edit import Draft, Rewritten


def merge_parallel_linears(net: Network) -> Rewritten:
    """x -> Linear A,  x -> Linear B   becomes   x -> Linear AB -> Slice A,  AB -> Slice B.

    One gemm with more columns, one pass over x. The Slices cost a pass, unless their reader fuses them, as attention
    does with queries, keys and values.
    """
    draft = Draft(net)
    notes = []
    by_input: dict[tuple[str, ...], list[Node]] = {}
    for node in net.nodes:
        dtypes = {draft.dtype(name) for name in node.weights.values()}
        if isinstance(node.layer, Linear) and len(dtypes) == 1:
            by_input.setdefault((node.inputs[0], *dtypes), []).append(node)
    for (value, *_), alike in by_input.items():
        if len(alike) > 1:
            _merge(draft, alike)
            others = ", ".join(node.name for node in alike[1:])
            notes.append(f"merged {others} into {alike[0].name}: a single pass over {value}")
    return draft.done(notes)


def _merge(draft: Draft, alike: list[Node]) -> None:
    """Put the merged Linear before the first of them, and replace each by a Slice of it."""
    weights = [node.weights["weight"] for node in alike]
    widths = [draft.weights[name].shape[0] for name in weights]
    biases = [node.weights.get("bias") for node in alike]
    wanted, total = "+".join(node.name for node in alike), sum(widths)
    roles = {
        "weight": draft.derive(f"{wanted}.weight", concatenated, weights, (total, *draft.weights[weights[0]].shape[1:]))
    }
    if present := [name for name in biases if name]:
        missing = tuple(0 if name else width for name, width in zip(biases, widths, strict=True))
        roles["bias"] = draft.derive(f"{wanted}.bias", concatenated_biases, present, (total,), missing=missing)
    merged = Node(draft.fresh(wanted), Linear(), alike[0].inputs, roles)
    begin = 0
    for i, (node, width) in enumerate(zip(alike, widths, strict=True)):
        sizes = (*draft.types[node.name].row_shape[:-1], width)
        cut = Slice((*(0,) * (len(sizes) - 1), begin), sizes, (1,) * len(sizes))
        draft.put(*([merged] if i == 0 else []), Node(node.name, cut, (merged.name,)))
        begin += width
