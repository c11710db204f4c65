"""Algebra that can be done once: each rewrite is a pure function Network -> Network.

A rewrite derives weights only as recipes, so planning costs nothing however large the network is. Most of them make
every device's work less and are always done; those in PRICED are work once for less work a row, or for other work, so
the planner prices the network with each and without. `narrow_values` comes last of all: it alone changes what numbers
are rounded to, and only where the job's precision asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onchip.network.graph import Network
from onchip.plan.rewrites.batchnorm import fold_batchnorm
from onchip.plan.rewrites.beside import merge_beside
from onchip.plan.rewrites.channels_last import make_channels_last
from onchip.plan.rewrites.convs import merge_convs
from onchip.plan.rewrites.drop import drop_idle, drop_stretches, drop_unread
from onchip.plan.rewrites.edit import Told
from onchip.plan.rewrites.embedding import fold_embeddings
from onchip.plan.rewrites.late import sink_moves
from onchip.plan.rewrites.linear import absorb_permutes, merge_linears
from onchip.plan.rewrites.narrow import narrow_values
from onchip.plan.rewrites.one_window import multiply_windows
from onchip.plan.rewrites.phases import activate_phases, split_phases
from onchip.plan.rewrites.row_norm import fold_scales
from onchip.plan.rewrites.trim import trim_convs

__all__ = [
    "REWRITES", "absorb_permutes", "activate_phases", "drop_idle", "drop_stretches", "drop_unread", "fold_batchnorm",
    "fold_embeddings",
    "fold_scales",
    "make_channels_last", "merge_beside", "merge_convs", "merge_linears", "multiply_windows", "narrow_values",
    "rewrite", "sink_moves", "split_phases", "trim_convs",
]  # fmt: skip

# In this order, round after round; the name is what a user says to leave one out, "" is for those that nobody would.
REWRITES: tuple[tuple[str, Callable[[Network], Told]], ...] = (
    ("", drop_unread),
    ("", drop_idle),
    ("", drop_stretches),
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
# In the order in which they are priced: "early" is of use to phases alone. "tables": the fold of an Embedding. "last":
# a product's image with channels last, which undoes what absorb_permutes does, and so comes when that is done.
# "beside": Linears of one value in one, which is cut apart again.
PRICED = ("early", "tables", "merge", "windows", "phases", "last", "beside")


def rewrite(net: Network, without: Sequence[str] = ()) -> tuple[Network, tuple[str, ...]]:
    """Apply every rewrite but those left out until none finds anything to do; also says what was done, a line each.

    One may make room for another: a Permute that was absorbed no longer keeps two Linears apart. It ends, since each
    takes away layers, Permutes or transposed convolutions and brings none of these that another takes away.
    """
    net, told = _rewrite_until_done(net, without)
    if "last" not in without:
        net, lines = make_channels_last(net)
        told += lines
    if not {"fold", "tables"} & set(without):
        net, lines = fold_embeddings(net)
        told += lines
    if "beside" not in without:
        net, lines = merge_beside(net)
        told += lines
        if lines:  # what two layers read has one reader now
            net, more = _rewrite_until_done(net, without)
            told += more
    return sink_moves(net)[0], tuple(told)


def _rewrite_until_done(net: Network, without: Sequence[str]) -> tuple[Network, list[str]]:
    told: list[str] = []
    while True:
        before = net
        for name, step in REWRITES:
            if name not in without:
                net, lines = step(net)
                told += lines
        if net is before:
            return net, told
