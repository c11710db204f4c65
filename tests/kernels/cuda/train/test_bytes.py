"""Detection of rows that are bytes times a scale."""

from __future__ import annotations

import numpy as np
import pytest

from onchip.kernels import training
from onchip.kernels.training import bytes_of

PIXELS = np.random.default_rng(0).integers(0, 256, (700, 33), np.uint8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(training, "CHUNK", 100)


@pytest.mark.parametrize("levels", [1, 255])
def test_pixels_are_bytes(levels):
    x = PIXELS.astype(np.float32) / np.float32(levels)
    found, scale = bytes_of(x)
    assert found.dtype == np.uint8
    assert np.array_equal(found, PIXELS)
    assert scale == 1 / levels


def test_every_byte_has_one_value():
    x = np.arange(256, dtype=np.float32) / np.float32(255)
    assert np.array_equal(bytes_of(x)[0], np.arange(256))
    for other in (np.nextafter(x, np.float32(2)), np.nextafter(x[1:], np.float32(-1))):
        assert all(bytes_of(other[i : i + 1]) is None for i in range(len(other)))


@pytest.mark.parametrize("at", [0, 99, 100, 7_000, PIXELS.size - 1])
@pytest.mark.parametrize("other", [0.3, -1.0, 256.0, np.nan, np.inf, 3e38])
def test_one_other_value_is_enough(at, other):
    for levels in (1, 255):
        x = PIXELS.astype(np.float32) / np.float32(levels)
        x.flat[at] = other
        assert bytes_of(x) is None


def test_zeros_and_ones_and_empty_arrays_are_bytes():
    x = (PIXELS > 100).astype(np.float32)
    found, scale = bytes_of(x)
    assert np.array_equal(found * np.float32(scale), x)
    assert bytes_of(np.zeros((0, 5), np.float32))[0].shape == (0, 5)


def test_integers_after_zeros_and_ones_are_found():
    x = np.ones(1000, np.float32)
    x[-1] = 7
    found, scale = bytes_of(x)
    assert scale == 1
    assert np.array_equal(found, x)
