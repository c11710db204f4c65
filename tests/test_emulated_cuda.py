"""The emulator of CUDA kernels finds what a sanitizer would."""

from __future__ import annotations

import numpy as np
import pytest

import emulated_cuda
from emulated_cuda import Kernel, guarded_bytes, needs_gxx
from onchip.kernels.cuda.program import Program

pytestmark = needs_gxx

SOURCE = """
__global__ void touch(float* to, const float* from, int shared, int global) {
    extern __shared__ float room[];
    room[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) to[0] = room[shared] + from[global];
}
__global__ void part(int* to) {
    if (threadIdx.x < 16) __syncthreads();
    to[0] = 1;
}
"""


@pytest.fixture
def touch(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE)
    kernel, made = Kernel(Program(source, "touch")), np.zeros(1, np.float32)
    pointer, kept = guarded_bytes(4 * 32)

    def run(shared=0, of_global=0):
        kept[:] = 0
        kernel.run(1, 32, (made.ctypes.data, pointer, shared, of_global), shared_bytes=4 * 32)
        return made[0]

    return run


def test_a_kernel_that_keeps_to_its_own_is_right(touch):
    assert touch(31, 31) == 1


@pytest.mark.parametrize("places", [{"shared": 32}, {"of_global": 32}])
def test_who_reads_behind_what_is_his_fails(touch, places):
    with pytest.raises(AssertionError, match="memory that is not the kernel's"):
        touch(**places)
    assert touch() == 1  # and nobody else


def test_what_nobody_has_written_is_no_number(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE.replace("room[threadIdx.x] = 1.0f;", ""))
    made, given = np.zeros(1, np.float32), np.zeros(32, np.float32)
    Kernel(Program(source, "touch")).run(1, 32, (made.ctypes.data, given.ctypes.data, 0, 0), shared_bytes=128)
    assert np.isnan(made[0])


def test_a_race_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "SANITIZED", ["-fsanitize=thread"])
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE.replace("__syncthreads();\n    if", "if"))
    made, given = np.zeros(1, np.float32), np.zeros(32, np.float32)
    with pytest.raises(AssertionError, match="a race: it reads what another writes"):
        Kernel(Program(source, "touch")).run(1, 32, (made.ctypes.data, given.ctypes.data, 3, 0), shared_bytes=128)


def test_a_barrier_that_some_do_not_reach_fails(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE)
    with pytest.raises(AssertionError, match="a barrier that not all threads reach"):
        Kernel(Program(source, "part")).run(1, 32, (np.zeros(1, np.int32).ctypes.data,))
