"""fp8 tables: scales are powers of two, so that a value's bits do not depend on the rest of its table."""

import numpy as np
import pytest

from onchip.kernels.fp8_tables import LARGEST, in_fp8, scales, table_peaks


def round_trip(T):
    peaks = table_peaks(T)
    return in_fp8(T, peaks).astype(np.float32) * scales(peaks)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e37])
def test_a_value_is_rounded_independently(size):
    T = (size * np.random.default_rng(0).standard_normal((400, 3, 50))).astype(np.float32)
    whole = round_trip(T)
    near = np.abs(T) > 1e-3 * np.abs(T).max()
    assert np.array_equal(round_trip(T[:20])[near[:20]], whole[:20][near[:20]])
    assert (np.abs(whole - T)[near] <= np.abs(T)[near] / 15.99).all()


def test_peaks_are_the_next_power_of_two_times_the_largest():
    sizes = np.array([448, 448.0001, 447.9999, 1, 3.5, 3.5000002, 1e-33, 0, 3.4e38], np.float32)
    powers = np.array([1, 2, 1, 2**-8, 2**-7, 2**-6], np.float32)
    peaks = table_peaks(np.stack([sizes, -sizes / 2])[:, None])
    assert peaks[:6].tolist() == (LARGEST * powers).tolist()
    assert peaks[6:].tolist() == sizes[6:].tolist()  # zeros, and values without a next power
    assert np.isfinite(round_trip(sizes[None, None])).all()
