"""The reference's scan: against plain Python, value by value."""

import functools
import math
import operator

import numpy as np
import pytest

from onchip.kernels.reference import scan as module
from onchip.kernels.reference.scan import scan
from onchip.network.scan_op import DTYPES, OPS, ScanOp

COMBINE = {"sum": operator.add, "product": operator.mul, "max": max, "min": min}


def numbers(shape, dtype, seed=0):
    x = np.random.default_rng(seed).integers(-3, 4, shape)
    return np.where(x == 0, 1, x).astype(dtype)  # whole numbers: sums and short products are exact


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_number(op, dtype, exclusive, reverse, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)  # several chunks per row
    how = ScanOp(op, exclusive, reverse)
    x = numbers((2, 3, 11), dtype)
    y = scan(x, how)
    assert y.shape == x.shape
    assert y.dtype == ("float64" if "float" in dtype else dtype)
    for *at, i in np.ndindex(x.shape):
        row = x[tuple(at)].tolist()
        terms = row[i + exclusive :] if reverse else row[: i + 1 - exclusive]
        expected = functools.reduce(COMBINE[op], terms) if terms else how.identity(dtype)
        assert y[(*at, i)] == expected


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ints_wrap(dtype):
    top = np.iinfo(dtype).max
    y = scan(np.array([top, 1, 2], dtype), ScanOp())
    assert y.tolist() == [top, -top - 1, -top + 1]
    assert scan(np.array([top, 2], dtype), ScanOp("product")).tolist() == [top, -2]


@pytest.mark.parametrize("op", OPS)
def test_nan_passes_on(op):
    y = scan(np.array([1, 2, np.nan, 3], np.float32), ScanOp(op))
    np.testing.assert_array_equal(np.isnan(y), [False, False, True, True])
    y = scan(np.array([1, np.nan, 3, 4], np.float32), ScanOp(op, reverse=True))
    np.testing.assert_array_equal(np.isnan(y), [True, True, False, False])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,), (2, 1)])
def test_nothing_and_one(shape):
    x = numbers(shape, "float64")
    np.testing.assert_array_equal(scan(x, ScanOp("max")), x)
    np.testing.assert_array_equal(scan(x, ScanOp("max", exclusive=True)), np.full(shape, -np.inf))


def test_the_truth_is_exact_and_a_named_dtype_is_naive():
    x = np.random.default_rng(0).random(200_000).astype(np.float32)
    exact = math.fsum(x.tolist())
    assert scan(x, ScanOp())[-1] == exact
    naive = scan(x, ScanOp(), "float32")
    assert naive.dtype == np.float32
    np.testing.assert_array_equal(naive, np.cumsum(x))
    assert naive[-1] != exact
