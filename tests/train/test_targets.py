"""Targets of any network: their shape, kind and range, for every loss."""

import ml_dtypes
import numpy as np
import pytest

from onchip.errors import InputError, ShapeError
from onchip.network.build import mlp, sequential
from onchip.network.layers import ArgMax, Identity
from onchip.network.types import TensorType
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.rows import CHUNK, check_finite
from onchip.train.targets import check_targets

REAL = ["half_sse", "mse", "mae", "huber", "bce_with_logits"]
ROWS = [(), (4,), (3, 5), (2, 3, 4)]


def network(row, dtype="float32"):
    return sequential(TensorType(("B", *row), dtype), [("y", Identity())], {})


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("loss", REAL)
def test_targets_are_shaped_like_the_output(loss, row):
    net, y = network(row), np.random.default_rng(0).random((6, *row)).astype(np.float32)
    assert np.array_equal(check_targets(net, 6, y, loss), y)
    with pytest.raises(ShapeError, match="targets do not fit") as caught:
        check_targets(net, 6, y.reshape(6, -1, 1), loss)
    assert caught.value.expected == f"float32{[6, *row]}"
    assert caught.value.hint == f"y.reshape{(6, *row)}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_targets_have_the_output_s_dtype(dtype):
    net, y = network((4,), dtype), np.ones((6, 4), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    assert check_targets(net, 6, y, "mae").dtype == y.dtype
    with pytest.raises(ShapeError, match="targets do not fit") as caught:
        check_targets(net, 6, y.astype(np.float32), "mae")
    assert caught.value.hint == f"y.astype(np.{dtype})"


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8])
def test_labels_of_zeros_and_ones_are_converted(dtype):
    y = np.random.default_rng(0).integers(0, 2, (6, 4)).astype(dtype)
    got = check_targets(network((4,)), 6, y, "bce_with_logits")
    assert got.dtype == np.float32
    assert np.array_equal(got, y)
    with pytest.raises(ShapeError, match="targets do not fit"):
        check_targets(network((4,)), 6, y, "mse")


@pytest.mark.parametrize(("value", "dtype"), [(1.5, "float32"), (-0.25, "float32"), (2, "int64"), (-1, "int64")])
def test_labels_out_of_range_name_their_row(value, dtype):
    y = np.zeros((6, 2, 4), dtype)
    y[3, 1, 2] = value
    with pytest.raises(InputError, match="a target is out of range") as caught:
        check_targets(network((2, 4)), 6, y, "bce_with_logits")
    assert (caught.value.got, caught.value.expected) == (f"{value} in row 3, position 1, 2", "0 to 1")


def test_one_class_per_row_is_not_for_several_labels():
    with pytest.raises(ShapeError) as caught:
        check_targets(network((4,)), 6, np.zeros(6, np.int64), "bce_with_logits")
    assert "cross_entropy" in caught.value.hint
    with pytest.raises(ShapeError) as caught:
        check_targets(network((4,)), 6, np.zeros((6, 4), np.int64), "cross_entropy")
    assert "bce_with_logits" in caught.value.hint


@pytest.mark.parametrize(
    ("net", "loss", "expected"),
    [
        (network((3, 4)), "cross_entropy", "classes"),
        (network(()), "cross_entropy", "classes"),
        (sequential(TensorType(("B", 4)), [("y", ArgMax())], {}), "mse", "a float output"),
    ],
)
def test_an_output_that_does_not_fit_the_loss(net, loss, expected):
    with pytest.raises(ShapeError, match=f"loss '{loss}' does not fit the output") as caught:
        check_targets(net, 6, np.zeros(6, np.int64), loss)
    assert expected in caught.value.expected
    assert caught.value.hint


def test_runs_that_share_targets_need_one_kind():
    runs = [Run(mlp(3, 2), TrainOptions(loss=loss)) for loss in ("mae", "bce_with_logits")]
    with pytest.raises(ShapeError, match="different data") as caught:
        fit_runs(runs, np.zeros((6, 3), np.float32), np.full((6, 2), 7, np.float32), device="cpu")
    assert "from 0 to 1" in caught.value.got


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite(value, dtype):
    """Also in a later chunk; values whose sum overflows are finite."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.full((3, CHUNK // 2), ml_dtypes.finfo(kind).max, kind)
    check_finite(x)
    x[2, 5:7], x[2, 3] = np.nan, value
    with pytest.raises(InputError, match="the rows are not finite") as caught:
        check_finite(x, "the rows")
    assert caught.value.got == f"{value} in row 2, position 3"
    check_finite(np.zeros((0, 4), kind))
