"""Pools in NumPy (network/layers/): against their definitions, value by value, and torch if any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import ShapeError
from onchip.network.graph import Network, Node
from onchip.network.layers import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d, SequenceMax
from onchip.network.types import TensorType

SETTINGS = settings(max_examples=80)


@st.composite
def pools(draw, average, as_torch=False):
    """A layer and x (B, C, ...) that fits; torch knows even pads of at most half a window, and no dilated means."""
    rank = draw(st.integers(1, 2))

    def numbers(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel = numbers(1, 4)
    stride, dilation = numbers(1, 3), (1,) * rank if as_torch and average else numbers(1, 3)
    most = [k // 2 if as_torch else k - 1 for k in kernel]
    before, after = (tuple(draw(st.integers(0, m)) for m in most) for _ in range(2))
    pads = (*before, *(before if as_torch else after))
    options = {"count_pads": draw(st.booleans())} if average else {}
    kinds = (AvgPool1d, AvgPool2d) if average else (MaxPool1d, MaxPool2d)
    layer = kinds[rank - 1](kernel, stride, pads, dilation, draw(st.booleans()), **options)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [max(1, span - pads[a] - pads[rank + a]) + draw(st.integers(0, 4)) for a, span in enumerate(spans)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return layer, rng.standard_normal((draw(st.integers(0, 2)), draw(st.integers(1, 2)), *sizes))


def run(layer, x):
    with np.errstate(all="ignore"):  # the mean of a dilated window that lies on the pads alone is 0 / 0
        y = layer.forward((x,), {})
    expected = layer.infer((TensorType(("B", *x.shape[1:])),), {})
    assert y.shape == (len(x), *expected.row_shape)
    return y


@SETTINGS
@given(pools(average=False) | pools(average=True))
def test_pool_is_its_definition(case):
    layer, x = case
    y, rank = run(layer, x), layer.rank
    ends = [n + layer.pads[rank + a] for a, n in enumerate(x.shape[2:])]
    for b, c, *p in np.ndindex(y.shape):
        inside, counted = [], 0
        for k in np.ndindex(*layer.kernel):
            at = [p[a] * layer.stride[a] - layer.pads[a] + k[a] * layer.dilation[a] for a in range(rank)]
            if all(0 <= i < n for i, n in zip(at, x.shape[2:], strict=True)):
                inside.append(x[(b, c, *at)])
            counted += all(i < end for i, end in zip(at, ends, strict=True))  # what hangs over the pads is nothing
        if isinstance(layer, MaxPool1d | MaxPool2d):
            expected = max(inside, default=-np.inf)
        else:
            divisor = counted if layer.count_pads else len(inside)
            expected = sum(inside) / divisor if divisor else np.nan
        assert y[(b, c, *p)] == pytest.approx(expected, rel=1e-13, abs=1e-13, nan_ok=True)


@SETTINGS
@given(pools(average=False, as_torch=True) | pools(average=True, as_torch=True))
def test_pool_is_torchs(case):
    torch = pytest.importorskip("torch")
    layer, x = case
    pads = layer.pads[: layer.rank]
    if isinstance(layer, MaxPool1d | MaxPool2d):
        function = (torch.max_pool1d, torch.max_pool2d)[layer.rank - 1]
        y = function(torch.tensor(x), layer.kernel, layer.stride, pads, layer.dilation, layer.ceil)
    else:
        function = (torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d)[layer.rank - 1]
        y = function(torch.tensor(x), layer.kernel, layer.stride, pads, layer.ceil, layer.count_pads)
    np.testing.assert_allclose(run(layer, x), y.numpy(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("axes", [(-1,), (1,), (2, -1), (3, 1), (-1, -2, -3)])
@pytest.mark.parametrize("keep", [True, False])
def test_global_pools(axes, keep):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    over = {axis % 4 for axis in axes}
    kept = [d if axis not in over else 1 for axis, d in enumerate(x.shape)]
    largest, totals = np.full(kept, -np.inf), np.zeros(kept)
    for at in np.ndindex(x.shape):
        into = tuple(0 if axis in over else i for axis, i in enumerate(at))
        largest[into] = max(largest[into], x[at])
        totals[into] += x[at]
    shape = kept if keep else [d for axis, d in enumerate(x.shape) if axis not in over]
    means = totals / (x.size / totals.size)
    np.testing.assert_array_equal(run(GlobalMax(axes, keep), x), largest.reshape(shape))
    np.testing.assert_allclose(run(GlobalMean(axes, keep), x), means.reshape(shape), rtol=1e-13)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 1), (2, 3)])
def test_sequences_of_different_lengths(window, stride):
    x = np.random.default_rng(0).standard_normal((12, 3, 5))
    lengths = np.arange(-2, 10)
    layer = SequenceMax(window, stride)
    y = layer.forward((x, lengths), {})
    for b, length in enumerate(lengths):
        inside = [x[b, :, p] for p in range(5) if p * stride + window <= length]
        np.testing.assert_array_equal(y[b], np.max(inside, axis=0) if inside else np.zeros(3))


def test_lengths_are_whole_numbers_a_row():
    net = {"x": TensorType(("B", 3, 5)), "lengths": TensorType(("B",), "int32")}
    for odd in (TensorType(("B", 1), "int32"), TensorType(("B",), "float32")):
        with pytest.raises(ShapeError, match="layer 'y' \\(SequenceMax\\): bad lengths"):
            Network({**net, "lengths": odd}, (Node("y", SequenceMax(), ("x", "lengths")),), ("y",), {})
    with pytest.raises(ShapeError, match="bad input shape"):
        SequenceMax().infer((TensorType(("B", 3)), net["lengths"]), {})
    with pytest.raises(ShapeError, match="bad window or stride"):
        SequenceMax(0)


def test_a_nan_wins():
    x = np.array([[[np.nan, 1, 2, 3, -np.inf]]])
    np.testing.assert_array_equal(run(MaxPool1d((2,), (1,)), x), [[[np.nan, 2, 3, 3]]])
    np.testing.assert_array_equal(run(MaxPool1d((2,), (1,)), x[..., ::-1]), [[[3, 3, 2, np.nan]]])
    np.testing.assert_array_equal(run(GlobalMax(), x), [[np.nan]])


def test_ties_give_the_gradient_to_the_first():
    x = np.array([[[1.0, 1.0, 0.0, 1.0]]])
    for layer, expected in ((MaxPool1d((2,)), [[[1, 0, 0, 1]]]), (GlobalMax(), [[[1, 0, 0, 0]]])):
        y = run(layer, x)
        (dx,), _ = layer.backward((x,), {}, y, np.ones_like(y))
        np.testing.assert_array_equal(dx, expected)
