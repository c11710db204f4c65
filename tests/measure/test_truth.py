"""The reference check of every engine."""

import numpy as np
import pytest

from checks import random_mlp
from onchip.kernels import reference
from onchip.measure import truth


@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_naive_run_has_the_same_bits_on_any_number_of_cores(monkeypatch, cores, dtype):
    monkeypatch.setattr(truth, "core_count", lambda: cores)
    net = random_mlp(9, 7, 5)
    x = np.random.default_rng(0).standard_normal((7, 9), dtype=np.float32)
    got = truth.naive_run(net, x, dtype)
    assert got.tobytes() == reference.forward(net, x, dtype).tobytes()
    assert truth.naive_error(net, x, dtype) == truth.relative_error(got, reference.forward(net, x))


def test_every_core_takes_a_share_of_rows_in_16_bits(monkeypatch):
    seen = []

    def forward(net, x, dtype="float64"):
        seen.append((dtype, len(x[0])))
        return x[0]

    monkeypatch.setattr(truth, "core_count", lambda: 3)
    monkeypatch.setattr(truth.reference, "forward", forward)
    x = np.arange(10.0)[:, None]
    assert np.array_equal(truth.naive_run(None, x, "float16"), x)
    assert np.array_equal(truth.naive_run(None, x, "float32"), x)
    assert sorted(seen) == [("float16", 3), ("float16", 3), ("float16", 4), ("float32", 10)]
