"""Resizes inside conv_fused, and values written directly into the output of a Concat."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import SAME, graph, weight
from onchip.kernels import reference
from onchip.kernels.cpu.conv import fused as conv_fused
from onchip.kernels.cpu.conv.operations.combine import Copy
from onchip.kernels.cpu.conv.operations.resize import Resize
from onchip.network.layers import Concat, Conv1d, Conv2d, LinearResize, MaxPool2d, NearestResize, ReLU, Tanh
from onchip.runtime.engine import compile

HOW = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")


def scales(row, sizes):
    return tuple(size / n for n, size in zip(row, sizes, strict=True))


def check(net, x, monkeypatch):
    """Compare one launch with the reference, for any batch and number of threads; returns its operations."""
    engine = compile(net, "cpu", threads=1)
    (group,) = engine.plan.groups
    assert group.claim.kernel == "conv_fused", str(engine.plan)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(np.concatenate([engine(x[i : i + 1]) for i in range(len(x))]), got, equal_nan=True)
    monkeypatch.setattr(conv_fused, "SHARED_FLOP", -1)
    assert np.array_equal(compile(net, "cpu", threads=2)(x[:1]), got[:1], equal_nan=True)
    return group.claim.facts.program.operations


def between_convolutions(resize, row, N=7):
    C, D = row[0], len(row) - 1
    conv = SAME if D == 2 else Conv1d(pads=(1, 1))
    weights = {"a": weight(C, 3, *(3,) * D), "b": weight(N, C, *(3,) * D)}
    return graph(
        (3, *row[1:]), weights, ("b",), ("a", conv, ("x",), {"weight": "a"}), ("r", resize, ("a",)),
        ("t", Tanh(), ("r",)), ("b", conv, ("t",), {"weight": "b"}),
    )  # fmt: skip


SIZES = [
    ((16, 9, 7), (16, 18, 14)), ((5, 8, 8), (5, 3, 20)), ((33, 6, 6), (33, 6, 9)), ((1, 4, 5), (1, 9, 5)),
    ((17, 5), (17, 11)), ((48, 1, 1), (48, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "sizes"), SIZES, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_means(row, sizes, how, monkeypatch):
    net = between_convolutions(LinearResize(sizes, scales(row, sizes), how), row)
    operations = check(net, rows(5, *net.input.row_shape), monkeypatch)
    assert sum(isinstance(op, Resize) for op in operations) == 1


@pytest.mark.parametrize(("row", "sizes"), SIZES, ids=str)
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "ceil"])
def test_nearest(row, sizes, rounding, monkeypatch):
    net = between_convolutions(NearestResize(sizes, scales(row, sizes), "asymmetric", rounding), row)
    operations = check(net, rows(5, *net.input.row_shape), monkeypatch)
    assert sum(isinstance(op, Resize) for op in operations) == 1


@pytest.mark.parametrize(
    "resize",
    [
        LinearResize((1, 3, 8), (1.0, 1.0, 2.0)),
        LinearResize((1, 6, 4), (1.0, 2.0, 1.0)),
        NearestResize((1, 6, 8), (1.0, 2.0, 2.0)),
    ],
    ids=["pixels", "rows", "nearest"],
)
def test_an_infinity_stays_where_nothing_is_mixed(resize):
    """An infinity times a weight of zero would be a NaN."""
    net = graph((1, 3, 4), {"w": np.ones((1, 1, 1, 1), np.float32)}, ("y",), ("r", resize, ("x",)),
                ("y", Conv2d(), ("r",), {"weight": "w"}))  # fmt: skip
    x = rows(3, 1, 3, 4)
    x[1, 0, 1, 2] = np.inf
    engine = compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"]
    assert np.array_equal(np.isnan(engine(x)), np.isnan(reference.forward(net, x)))


def test_resized_channels_are_left_to_another_kernel():
    row, sizes = (4, 6, 6), (8, 12, 12)
    net = graph(
        (3, 6, 6), {"a": weight(4, 3, 3, 3), "b": weight(7, 8, 3, 3)}, ("b",), ("a", SAME, ("x",), {"weight": "a"}),
        ("r", LinearResize(sizes, scales(row, sizes)), ("a",)), ("b", SAME, ("r",), {"weight": "b"}),
    )  # fmt: skip
    engine = compile(net, "cpu")
    assert "resize" in [group.claim.kernel for group in engine.plan.groups]
    x = rows(4, 3, 6, 6)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize(("C", "D"), [(16, 16), (5, 12), (33, 7)])
def test_a_step_of_a_u_net(C, D, monkeypatch):
    """The resized value is written directly into the Concat; a value that a pool also reads is copied."""
    weights = {"a": weight(C, 3, 3, 3), "d": weight(D, C, 3, 3), "y": weight(4, C + D, 3, 3)}
    net = graph(
        (3, 8, 6), weights, ("y",), ("a", SAME, ("x",), {"weight": "a"}), ("ra", ReLU(), ("a",)),
        ("p", MaxPool2d((2, 2), (2, 2)), ("ra",)), ("d", SAME, ("p",), {"weight": "d"}), ("rd", ReLU(), ("d",)),
        ("u", LinearResize((D, 8, 6), (1.0, 2.0, 2.0)), ("rd",)), ("c", Concat(1), ("ra", "u")),
        ("y", SAME, ("c",), {"weight": "y"}),
    )  # fmt: skip
    operations = check(net, rows(5, 3, 8, 6), monkeypatch)
    assert sum(isinstance(op, Copy) for op in operations) == 1


def test_a_value_twice_in_a_concat_or_read_by_others_is_copied(monkeypatch):
    weights = {"a": weight(8, 3, 3, 3), "y": weight(4, 32, 3, 3)}
    pool = MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1))
    net = graph(
        (3, 6, 6), weights, ("y",), ("a", SAME, ("x",), {"weight": "a"}), ("p", pool, ("a",)), ("q", pool, ("p",)),
        ("s", pool, ("q",)), ("c", Concat(1), ("p", "s", "q", "q")), ("y", SAME, ("c",), {"weight": "y"}),
    )  # fmt: skip
    operations = check(net, rows(5, 3, 6, 6), monkeypatch)
    assert sum(isinstance(op, Copy) for op in operations) == 3  # only s is written there directly
