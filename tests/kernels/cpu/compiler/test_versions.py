"""What identifies machine code in the cache."""

import pytest

from onchip.kernels.cpu.compiler.machine_code import versions


@pytest.mark.parametrize(("name", "is_other"), [
    ("NUMBA_NUM_THREADS", False), ("NUMBA_CACHE_DIR", False), ("NUMBA_THREADING_LAYER", False), ("NUMBA_OPT", True),
    ("NUMBA_CPU_NAME", True), ("OMP_NUM_THREADS", False),
])  # fmt: skip
def test_settings_that_change_machine_code(monkeypatch, name, is_other):
    """joblib's workers have NUMBA_NUM_THREADS: they use the kernels that other processes compiled."""
    monkeypatch.delenv(name, raising=False)
    before = versions.__wrapped__()
    monkeypatch.setenv(name, "1")
    assert (versions.__wrapped__() != before) == is_other
