"""Scans on the CPU: correct for every op, dtype and size, with the same bits however the work is split."""

import ctypes

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.kernels import reference
from onchip.kernels.cpu.scan import scan as module
from onchip.kernels.cpu.scan.scan import CHUNK, ScanKernel, scan_columns, scan_rows
from onchip.kernels.cpu.scan.segments import SEGMENT
from onchip.kernels.cpu.scan.short_scan import MAX_NUMBERS
from onchip.kernels.reference.scan import scan
from onchip.network.build import sequential
from onchip.network.layers import CumSum
from onchip.network.scan_op import DTYPES, OPS, ScanOp
from onchip.network.types import TensorType
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.runtime.cpu.backend import core_count

TWO = min(2, core_count())
FLAGS = [(exclusive, reverse) for exclusive in (False, True) for reverse in (False, True)]
PAIRS = [("sum", "float32"), ("max", "int32"), ("product", "float64"), ("min", "float32"), ("sum", "int64")]


def values(shape, dtype, op="sum", seed=0):
    rng = np.random.default_rng(seed)
    if "int" in dtype:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x = rng.standard_normal(shape)
    return (np.exp2(x / 100) if op == "product" else x).astype(dtype)  # long products neither vanish nor overflow


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def same_bits(got, expected):
    np.testing.assert_array_equal(bits(got), bits(expected))


def scanned(x, how, threads=TWO, totals=None):
    """x (R, N) by rows or (O, N, I) by columns, into an array of other values."""
    y = np.full_like(x, 77)
    if x.ndim == 3:
        scan_columns(x, y, how, threads)
    else:
        scan_rows(x, y, how, threads, totals)
    return y


def truth_of(x, how):
    return scan(x, how) if x.ndim == 2 else np.moveaxis(scan(np.moveaxis(x, 1, -1), how), -1, 1)


def assert_right(got, x, how):
    """Ints, max and min are exact; float32 sums and products are rounded once; float64 within the naive error."""
    truth = truth_of(x, how)
    assert got.dtype == x.dtype
    if "int" in x.dtype.name or how.op in ("max", "min"):
        np.testing.assert_array_equal(got, truth.astype(x.dtype))
    elif x.dtype == np.float32:
        # float64 rounding moves a few results across the midpoint between two float32.
        np.testing.assert_array_max_ulp(got, truth.astype(np.float32), maxulp=1)
        assert np.mean(got != truth.astype(np.float32)) < 1e-3
    else:
        naive = x.shape[1] * np.finfo(np.float64).eps * np.abs(truth_of(np.abs(x), how))
        assert np.all(np.abs(got - truth) <= naive)


# -- every op, dtype, flag and size ------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_rows(op, dtype):
    for shape in ((3, 1), (5, 7), (1000, 31), (7, 33), (2, SEGMENT), (3, SEGMENT + 1), (2, 3 * SEGMENT - 1)):
        x = values(shape, dtype, op)
        for exclusive, reverse in FLAGS:
            how = ScanOp(op, exclusive, reverse)
            assert_right(scanned(x, how), x, how)


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
@pytest.mark.parametrize("N", [65_535, CHUNK + 5])
def test_long_rows(op, dtype, N):
    x = values((1, N), dtype, op)
    for exclusive, reverse in FLAGS:
        how = ScanOp(op, exclusive, reverse)
        assert_right(scanned(x, how), x, how)


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_columns(op, dtype):
    for shape in ((3, 1, 5), (2, 100, 2), (1, 5000, 9), (2, 700, 67), (3, 40, 128), (1, 50, 1100), (4, 9, 1)):
        x = values(shape, dtype, op)
        for exclusive, reverse in FLAGS:
            how = ScanOp(op, exclusive, reverse)
            assert_right(scanned(x, how), x, how)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 5, 3), (2, 0, 3), (2, 5, 0), (2, 0, 1)])
def test_empty(shape):
    assert scanned(values(shape, "float32"), ScanOp()).shape == shape


# The last: in reverse, a part that is long enough for non-temporal stores, but misaligned.
@pytest.mark.sample(4)
@pytest.mark.parametrize("N", [4 * CHUNK, 4 * CHUNK + 3, 4 * CHUNK + 5001])
@pytest.mark.parametrize("reverse", [False, True])
def test_large_results_use_non_temporal_stores(N, reverse):
    """Arrays and rows at any multiple of the item size."""
    how = ScanOp(reverse=reverse)
    x = values((1, N), "float32")
    whole = scanned(x, how)
    assert_right(whole, x, how)
    for begin in (1, 4):
        memory = np.full(N + begin + 1, 77, np.float32)
        scan_rows(x, memory[begin : begin + N].reshape(1, N), how, TWO)
        same_bits(memory[begin : begin + N], whole[0])
        assert (memory[:begin] == 77).all()
        assert memory[-1] == 77
    rows = values((70_001, 48), "float32", seed=1)
    assert_right(scanned(rows, how), rows, how)


# -- same bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
@pytest.mark.parametrize("shape", [(3, 5 * SEGMENT + 7), (999, 37), (2, 5000, 19)])
def test_bits_depend_on_the_row_alone(op, dtype, shape):
    """Not on the threads, the batch, the row's index, or whether y is x."""
    x = values(shape, dtype, op)
    for exclusive, reverse in FLAGS:
        how = ScanOp(op, exclusive, reverse)
        y = scanned(x, how, TWO)
        same_bits(scanned(x, how, 1), y)
        for row in (0, len(x) - 1):
            same_bits(scanned(x[row : row + 1].copy(), how), y[row : row + 1])
        in_place = x.copy()
        (scan_columns if x.ndim == 3 else scan_rows)(in_place, in_place, how, TWO)
        same_bits(in_place, y)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("op", "dtype"), PAIRS[:3])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_in_chunks(op, dtype, reverse):
    """At multiples of CHUNK, with carried totals: the same bits as at once, also of the last total."""
    assert CHUNK % SEGMENT == 0
    x = values((2, 2 * CHUNK + 77), dtype, op)
    for exclusive in (False, True):
        how = ScanOp(op, exclusive, reverse)
        start = np.full(2, how.identity(dtype)).astype(how.total_dtype(dtype))
        whole_totals, totals = start.copy(), start.copy()
        whole = scanned(x, how, TWO, whole_totals)
        same_bits(scanned(x, how), whole)  # without totals
        y = np.empty_like(x)
        for first, last in ((0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, x.shape[1])):
            here = slice(x.shape[1] - last, x.shape[1] - first) if reverse else slice(first, last)
            y[:, here] = scanned(x[:, here].copy(), how, TWO, totals)
        same_bits(y, whole)
        same_bits(totals, whole_totals)
        if not exclusive:
            np.testing.assert_allclose(totals.astype(dtype), whole[:, 0 if reverse else -1], rtol=1e-12)


def test_short_rows_carry_their_totals():
    x, totals = values((50, 33), "float32"), np.arange(50.0)
    y = scanned(x, ScanOp(), TWO, totals)
    np.testing.assert_allclose(totals, np.arange(50) + x.sum(axis=1, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(y, np.arange(50)[:, None] + np.cumsum(x, axis=1, dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize(("shape", "tile"), [((1, 5 * SEGMENT), SEGMENT), ((1, 5000, 16), 2048)])
def test_no_thread_waits_for_one_that_lost_its_core(monkeypatch, shape, tile):
    """The first part is claimed by a thread that never returns: the others compute its total."""
    x = values(shape, "float32")
    whole = scanned(x, ScanOp())

    def run_without_the_first(*args):
        lanes, parts = args[4:6]
        for at in range(1, lanes * parts):
            module._scan_task(0, at, *args[:-1])

    monkeypatch.setattr(module, "_run", run_without_the_first)
    y = scanned(x, ScanOp())
    assert (y[:, :tile] == 77).all()
    same_bits(y[:, tile:], whole[:, tile:])


@pytest.mark.parametrize("op", ["sum", "product"])
def test_a_carry_out_is_not_used_as_a_carry_in(monkeypatch, op):
    """A thread may begin a row after its last part is done and its carry-out published."""
    x, start = values((1, 5 * SEGMENT), "float32", op), np.array([3.0])
    whole_totals, totals = start.copy(), start.copy()
    whole = scanned(x, ScanOp(op), TWO, whole_totals)

    def run_the_last_first(*args):
        module._scan_task(0, 4, *args[:-1])
        ctypes.c_int64.from_address(args[-3]).value = 0  # another worker, which has joined no part yet
        for at in range(5):
            module._scan_task(0, at, *args[:-1])

    monkeypatch.setattr(module, "_run", run_the_last_first)
    same_bits(scanned(x, ScanOp(op), TWO, totals), whole)
    same_bits(totals, whole_totals)


# -- special values ----------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 2 * SEGMENT + 40), (1, 3000, 17)])
def test_nan_and_inf_pass_on(op, dtype, shape):
    for special in (np.nan, np.inf, -np.inf):
        x = values(shape, dtype, op)
        x[:, shape[1] // 3 :: 500] = special
        x[:, -3] = -special
        for reverse in (False, True):
            how = ScanOp(op, reverse=reverse)
            truth = truth_of(x, how)
            got = scanned(x, how)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(truth))
            np.testing.assert_array_equal(np.isposinf(got), np.isposinf(truth))
            np.testing.assert_array_equal(np.isneginf(got), np.isneginf(truth))


@pytest.mark.parametrize("op", ["max", "min", "sum", "product"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_nan_reaches_all_later_segments(op, dtype):
    x = np.zeros((1, 60_000), dtype)
    x[0, 5] = np.nan
    for row, reverse in ((x, False), (x[:, ::-1].copy(), True)):
        got = scanned(row, ScanOp(op, reverse=reverse))
        assert np.isnan(got).sum() == 59_995
        assert (got[~np.isnan(got)] == 0).all()


# -- products that overflow --------------------------------------------------------------------------------


def left_to_right(x, how):
    """The naive scan, in float64."""
    onwards = slice(None, None, -1 if how.reverse else 1)
    with np.errstate(all="ignore"):
        y = np.multiply.accumulate(x[:, onwards], axis=1, dtype=np.float64)
        if how.exclusive:
            y = np.concatenate((np.ones_like(y[:, :1]), y[:, :-1]), axis=1)
        return y[:, onwards].astype(x.dtype)


def assert_left_to_right(got, x, how):
    """NaN, inf and zeros are equal; everything else up to rounding."""
    expected = left_to_right(x, how)
    for kind in (np.isnan, np.isposinf, np.isneginf, lambda y: y == 0):
        np.testing.assert_array_equal(kind(got), kind(expected))
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(expected[zeros]))
    usual = np.abs(expected) >= np.finfo(x.dtype).tiny  # subnormal ones have fewer digits
    rtol = 3e-7 if x.dtype == np.float32 else 2e-11
    np.testing.assert_allclose(got[usual & ~np.isinf(got)], expected[usual & ~np.isinf(got)], rtol=rtol)


def out_of_range(kind, N, seed=0):
    """Rows with parts whose products overflow or underflow where the prefix products do not."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 0.3, N)
    signs = rng.choice([-1.0, 1.0], N)
    ramp = np.where(np.arange(N) // (N // 2), 0.2, -0.2)
    if kind == "zero in a growing row":
        x = np.exp2(1 + steps)
        x[rng.integers(min(N // 3, 600))] = 0
    elif kind == "inf in a shrinking row":
        x = np.exp2(-1 + steps)
        x[rng.integers(min(N // 3, 600))] = np.inf
    elif kind == "nan":
        x = np.exp2(1 + steps)
        x[N // 4], x[N // 2] = 0, np.nan
    elif kind == "down and up":
        x = np.exp2(ramp * min(1, 3000 / N) + steps / 30)
    elif kind == "up and down":
        x = np.exp2(-ramp * min(1, 9000 / N) + steps / 30)
    else:  # far jumps: products of neighbours overflow, prefix products do not
        x = np.exp2(np.diff(rng.uniform(-100, 100, N + 1)) * 4)
    return x * signs


KINDS = ["zero in a growing row", "inf in a shrinking row", "nan", "down and up", "up and down", "far jumps"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(40, 37), (3, 2 * SEGMENT + 77), (2, 5000, 19), (1, 60, 1030)], ids=str)
def test_products_are_those_from_left_to_right(kind, dtype, shape):
    x = np.stack([out_of_range(kind, shape[1], seed) for seed in range(np.prod(shape) // shape[1])])
    with np.errstate(over="ignore"):
        x = (x if len(shape) == 2 else np.moveaxis(x.reshape(shape[0], shape[2], shape[1]), 2, 1)).astype(dtype)
    x[0] = 1  # a safe row next to unsafe ones
    x = np.ascontiguousarray(x)
    for exclusive, reverse in FLAGS:
        how = ScanOp("product", exclusive, reverse)
        y = scanned(x, how)
        assert_left_to_right(y, x, how)
        same_bits(scanned(x, how, 1), y)
        same_bits(scanned(x[-1:].copy(), how), y[-1:])
        in_place = x.copy()
        (scan_columns if x.ndim == 3 else scan_rows)(in_place, in_place, how, TWO)
        same_bits(in_place, y)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["zero in a growing row", "down and up", "up and down"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unsafe_rows_in_chunks(kind, dtype):
    """The same bits as at once, and the same carry-out."""
    x = np.stack([out_of_range(kind, CHUNK + 3 * SEGMENT + 77, seed) for seed in range(2)]).astype(dtype)
    for exclusive, reverse in FLAGS:
        how = ScanOp("product", exclusive, reverse)
        whole, whole_totals, totals = scanned(x, how), np.ones(2), np.ones(2)
        assert_left_to_right(whole, x, how)
        same_bits(scanned(x, how, TWO, whole_totals), whole)
        y = np.empty_like(x)
        for first, last in ((0, CHUNK), (CHUNK, x.shape[1])):
            here = slice(x.shape[1] - last, x.shape[1] - first) if reverse else slice(first, last)
            y[:, here] = scanned(x[:, here].copy(), how, TWO, totals)
        same_bits(y, whole)
        same_bits(totals, whole_totals)
        ends = left_to_right(x.astype(np.float64), ScanOp("product", reverse=reverse))[:, 0 if reverse else -1]
        np.testing.assert_allclose(totals, ends, rtol=1e-9)


@pytest.mark.parametrize(
    "x", [[0, 1e200, 1e200], [1e-200, 1e200, 1e200], [1e-200, 1e200, 1e200, 1e-200], [np.inf, 1e-200, 1e-200]], ids=str
)
def test_short_products_are_those_from_left_to_right(x):
    """In the third, only the middle would be wrong."""
    x = np.array([x])
    same_bits(scanned(x, ScanOp("product")), left_to_right(x, ScanOp("product")))
    totals = np.array([2.0])
    scanned(x, ScanOp("product"), TWO, totals)
    np.testing.assert_array_equal(totals, left_to_right(np.append(2.0, x)[None], ScanOp("product"))[:, -1])


def test_products_keep_their_digits():
    """Neighbours with a subnormal product, in a row of normal prefix products."""
    x = np.ones((1, 35))
    x[0, 32:] = 2.0**300, 2.0**-520 / 3, 2.0**-530 / 7
    np.testing.assert_allclose(scanned(x, ScanOp("product")), left_to_right(x, ScanOp("product")), rtol=1e-15)
    totals = np.array([2.0**400])
    x = np.array([[1] * 14 + [2.0**-800 / 3, 2.0**-350]])
    y = scanned(x, ScanOp("product", exclusive=True), TWO, totals)
    np.testing.assert_allclose(y, [[2.0**400] * 15 + [2.0**-400 / 3]], rtol=1e-15)
    np.testing.assert_allclose(totals, [2.0**-750 / 3], rtol=1e-15)  # which y does not show


def test_products_exceed_the_range_and_return():
    """float32 products are carried in float64: an intermediate 1e60 does not overflow."""
    x = np.array([[1e30, 1e30, 1e-30, 1e-30]] * 3, np.float32)
    np.testing.assert_allclose(scanned(x, ScanOp("product"))[:, [0, 3]], [[1e30, 1]] * 3, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ints_wrap(dtype):
    x = np.full((1, SEGMENT + 9), np.iinfo(dtype).max, dtype)
    for op, ufunc in (("sum", np.add), ("product", np.multiply)):
        np.testing.assert_array_equal(scanned(x, ScanOp(op)), ufunc.accumulate(x, axis=1, dtype=dtype))


def test_memory_maps_and_read_only_arrays(tmp_path):
    x = values((1, 5000), "float32")
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=x.shape)
    y = np.memmap(tmp_path / "y", np.float32, "w+", shape=x.shape)
    scan_rows(mapped, y, ScanOp(), TWO)
    same_bits(y, scanned(x, ScanOp()))


# -- accuracy ----------------------------------------------------------------------------------------------


def alternating(rng, N):
    x = rng.random(N, np.float32)
    x[::2] *= 1e6
    x[2::4] *= -1
    return x


@pytest.mark.parametrize(
    "data", [lambda rng, N: rng.standard_normal(N, np.float32), lambda rng, N: rng.random(N, np.float32), alternating],
    ids=["normal", "positive", "alternating"],
)  # fmt: skip
@pytest.mark.parametrize("as_column", [False, True])
def test_sums_are_no_worse_than_pairwise_summation(data, as_column):
    N = 3 * SEGMENT + 5
    x = data(np.random.default_rng(0), N)
    y = (
        scanned(np.repeat(x[:, None], 3, axis=1)[None], ScanOp())[0, :, 1]
        if as_column
        else scanned(x[None], ScanOp())[0]
    )
    truth = scan(x, ScanOp())
    at = np.arange(1, N, 97)
    pairwise = np.array([np.sum(x[: i + 1]) for i in at], np.float64)
    ours = np.abs(y[at] - truth[at])
    assert ours.max() <= np.abs(pairwise - truth[at]).max()
    assert ours.mean() <= np.abs(pairwise - truth[at]).mean()
    # Half an ulp of the result, plus the float64 rounding of all additions.
    lost = 2.0**-40 * scan(np.abs(x), ScanOp())
    assert np.all(np.abs(y - truth) <= np.spacing(np.abs(truth).astype(np.float32)) / 2 + lost)


# -- CumSum layers -----------------------------------------------------------------------------------------


def cum_sum(axis, exclusive, reverse, row, dtype="float32"):
    return sequential(TensorType(("B", *row), dtype), [("y", CumSum(axis, exclusive, reverse))], {})


@pytest.mark.parametrize(("exclusive", "reverse"), FLAGS)
@pytest.mark.parametrize(("axis", "row"), [(1, (7, 5)), (2, (7, 5)), (-1, (1003,)), (1, (40, 3, 9)), (-2, (2, 300, 1))])
def test_networks(axis, row, exclusive, reverse):
    net = cum_sum(axis, exclusive, reverse, row)
    engine = onchip.compile(net, device="cpu")
    kernel = "scan" if np.prod(row) > MAX_NUMBERS else "short_scan"
    assert [group.claim.kernel for group in engine.plan.groups] == [kernel]
    x = values((33, *row), "float32")
    y = engine(x)
    truth, naive = reference.forward(net, x), reference.forward(net, x, "float32")
    assert_error_within(y, truth, baseline=naive)
    for B, first in ((1, 0), (1, 32), (7, 11)):
        same_bits(engine(x[first : first + B].copy()), y[first : first + B])
    same_bits(onchip.compile(net, device="cpu", threads=1)(x), y)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_networks_of_other_dtypes(dtype):
    net, x = cum_sum(-1, False, False, (300,), dtype), values((5, 300), dtype)
    np.testing.assert_allclose(onchip.compile(net, device="cpu")(x), np.cumsum(x, axis=1, dtype=dtype), rtol=1e-11)


def test_claims():
    def answers(net):
        return list(ScanKernel().claims(net, 0, onchip.compile(net, device="cpu").plan.device, Job()))

    (claim,) = answers(cum_sum(-1, False, False, (9,)))
    assert isinstance(claim, Claim)
    assert (claim.cost.row_flop, claim.cost.row_bytes, claim.label) == (9, 72, "scan<sum>")
    (refusal,) = answers(cum_sum(-1, False, False, (9,), "int8"))
    assert isinstance(refusal, Refusal)
    assert "not int8" in refusal.why
