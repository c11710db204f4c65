"""erf and erfc against known values; running a network does not import SciPy."""

import subprocess
import sys

import numpy as np
import pytest

from onchip.network.error_function import erf, erfc


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5)])
def test_they_add_up_to_one_in_every_shape(dtype, shape):
    x = np.linspace(-3, 3, int(np.prod(shape)), dtype=dtype).reshape(shape)
    assert erf(x).dtype == erfc(x).dtype == dtype
    assert erf(x).shape == shape
    assert np.allclose(erf(x) + erfc(x), 1, atol=4 * np.finfo(dtype).eps)
    assert np.array_equal(erf(-x), -erf(x))


def test_erfc_keeps_its_digits_far_out():
    assert erfc(np.array([10.0]))[0] == pytest.approx(2.088487583762545e-45, rel=1e-13)
    assert np.isnan(erf(np.array([np.nan]))[0])
    assert np.array_equal(erf(np.array([-np.inf, np.inf])), [-1, 1])


def test_a_run_with_cached_kernels_imports_no_numba_scipy_or_onnx():
    code = (
        "import sys; from onchip.cli.main import main; main(['run', 'decode', '--count', '3', '--device', 'cpu']);"
        "heavy = ('numba', 'scipy', 'onnx', 'sklearn', 'torch', 'onchip.formats.onnx.ops');"
        "print([m for m in heavy if m in sys.modules])"
    )
    for _ in range(2):  # the first may compile, which imports more
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
