"""Spectra of whole signals and of windows, as NumPy's FFT computes them."""

from __future__ import annotations

import numpy as np
import pytest

from onchip.kernels import reference
from onnx_models import model, numbers, op, read, refused


def complexes(y):
    return y[..., 0] + 1j * y[..., 1]


@pytest.mark.parametrize("length", [None, 9, 20])
@pytest.mark.parametrize("onesided", [0, 1])
def test_of_real_numbers(tmp_path, onesided, length):
    operands = "x" if length is None else "x n"
    proto = model([op("DFT", operands, axis=1, onesided=onesided)], {"n": np.array(length or 0)}, ("N", 12, 3, 1))
    x = numbers(4, 12, 3, 1).astype(np.float64)
    got = complexes(reference.forward(read(tmp_path, proto), x))
    transform = np.fft.rfft if onesided else np.fft.fft
    np.testing.assert_allclose(got, transform(x[..., 0], length, axis=1), atol=1e-6)


@pytest.mark.parametrize("inverse", [0, 1])
def test_of_complex_numbers(tmp_path, inverse):
    proto = model([op("DFT", "x  axis", inverse=inverse)], {"axis": np.array(-2)}, ("N", 5, 8, 2), opset=20)
    proto.graph.node[0].input.insert(1, "")
    x = numbers(4, 5, 8, 2).astype(np.float64)
    transform = np.fft.ifft if inverse else np.fft.fft
    got = complexes(reference.forward(read(tmp_path, proto), x))
    np.testing.assert_allclose(got, transform(complexes(x), axis=2), atol=1e-6)


@pytest.mark.parametrize("onesided", [0, 1])
def test_of_windows(tmp_path, onesided):
    window, x = np.hanning(8).astype("f4"), numbers(3, 30).astype(np.float64)
    proto = model([op("STFT", "x step w", onesided=onesided)], {"step": np.array(3), "w": window}, ("N", 30))
    frames = np.lib.stride_tricks.sliding_window_view(x, 8, axis=1)[:, ::3] * window
    expected = (np.fft.rfft if onesided else np.fft.fft)(frames)
    np.testing.assert_allclose(complexes(reference.forward(read(tmp_path, proto), x)), expected, atol=1e-6)
    refused(tmp_path, model([op("STFT", "x step w")], {"step": np.array(3), "w": window}, ("N", 30, 2)), "bad signal")
    refused(tmp_path, model([op("STFT", "x step w")], {"step": np.array(3), "w": window}, ("N", 5)), "bad window")


def test_what_is_too_long(tmp_path):
    refused(tmp_path, model([op("DFT", "x", axis=1)], {}, ("N", 5000, 1)), "too long")
    refused(tmp_path, model([op("DFT", "x", axis=0)], {}, ("N", 5, 1)), "bad axis")
