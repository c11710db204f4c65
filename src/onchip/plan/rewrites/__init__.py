"""Graph rewrites: each is a pure function Network -> Network.

A rewrite derives weights only as recipes, so planning is cheap however large the network is. Most rewrites reduce work
on every device and always apply. Those in ESTIMATED trade one-time work for less work per row, or change the kind of
work, so the planner estimates the cost with and without each. `narrow_values` comes last: it alone changes how
values are rounded, and only if the job's precision requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onchip.network.graph import Network
from onchip.plan.rewrites.batchnorm import fold_batchnorm
from onchip.plan.rewrites.channels_last import make_channels_last
from onchip.plan.rewrites.convs import merge_convs
from onchip.plan.rewrites.drop import drop_idle, drop_tiles, drop_unread
from onchip.plan.rewrites.edit import Rewritten
from onchip.plan.rewrites.embedding import fold_embeddings
from onchip.plan.rewrites.late import sink_moves
from onchip.plan.rewrites.linear import absorb_permutes, merge_linears
from onchip.plan.rewrites.narrow import narrow_values
from onchip.plan.rewrites.one_window import multiply_windows
from onchip.plan.rewrites.parallel_linears import merge_parallel_linears
from onchip.plan.rewrites.phases import activate_phases, split_phases
from onchip.plan.rewrites.row_norm import fold_scales
from onchip.plan.rewrites.trim import trim_convs

__all__ = [
    "REWRITES",
    "absorb_permutes",
    "activate_phases",
    "drop_idle",
    "drop_tiles",
    "drop_unread",
    "fold_batchnorm",
    "fold_embeddings",
    "fold_scales",
    "make_channels_last",
    "merge_convs",
    "merge_linears",
    "merge_parallel_linears",
    "multiply_windows",
    "narrow_values",
    "rewrite",
    "sink_moves",
    "split_phases",
    "trim_convs",
]  # fmt: skip

# Applied in this order, repeatedly. Users leave rewrites out by name; "" cannot be left out.
REWRITES: tuple[tuple[str, Callable[[Network], Rewritten]], ...] = (
    ("", drop_unread),
    ("", drop_idle),
    ("", drop_tiles),
    ("", trim_convs),
    ("fold", fold_batchnorm),
    ("", fold_scales),
    ("windows", multiply_windows),
    ("", absorb_permutes),
    ("merge", merge_linears),
    ("merge", merge_convs),
    ("phases", split_phases),
    ("early", activate_phases),
)
# Estimated in this order: "early" helps only with "phases". "tables" folds Embeddings. "last" stores a Linear's image
# in NHWC; it undoes absorb_permutes, so it runs later. "parallel" merges Linears that read the same value.
ESTIMATED = ("early", "tables", "merge", "windows", "phases", "last", "parallel")


def rewrite(net: Network, without: Sequence[str] = ()) -> tuple[Network, tuple[str, ...]]:
    """Apply every rewrite except those in `without` until none applies; also returns one line per change.

    One may enable another: once a Permute is absorbed, the Linears around it are adjacent. It terminates, since each
    rewrite removes layers, Permutes or transposed convolutions and adds none that another removes.
    """
    net, notes = _rewrite_until_done(net, without)
    if "last" not in without:
        net, lines = make_channels_last(net)
        notes += lines
    if not {"fold", "tables"} & set(without):
        net, lines = fold_embeddings(net)
        notes += lines
    if "parallel" not in without:
        net, lines = merge_parallel_linears(net)
        notes += lines
        if lines:  # values with two readers may now have one
            net, more = _rewrite_until_done(net, without)
            notes += more
    return sink_moves(net)[0], tuple(notes)


def _rewrite_until_done(net: Network, without: Sequence[str]) -> tuple[Network, list[str]]:
    notes: list[str] = []
    while True:
        before = net
        for name, step in REWRITES:
            if name not in without:
                net, lines = step(net)
                notes += lines
        if net is before:
            return net, notes
