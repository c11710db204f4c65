"""The emulator of CUDA kernels finds what a sanitizer would."""

from __future__ import annotations

import numpy as np
import pytest

import emulated_cuda
from emulated_cuda import FIND_RACES, Kernel, guarded_bytes, needs_gxx
from onchip.kernels.cuda.common.program import Program

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
    with pytest.raises(AssertionError, match="outside the kernel"):
        touch(**places)
    assert touch() == 1  # and nobody else


def test_what_nobody_has_written_is_no_number(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE.replace("room[threadIdx.x] = 1.0f;", ""))
    made, given = np.zeros(1, np.float32), np.zeros(32, np.float32)
    Kernel(Program(source, "touch")).run(1, 32, (made.ctypes.data, given.ctypes.data, 0, 0), shared_bytes=128)
    assert np.isnan(made[0])


def test_a_race_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "SANITIZED", FIND_RACES)
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE.replace("__syncthreads();\n    if", "if"))
    made, given = np.zeros(1, np.float32), np.zeros(32, np.float32)
    with pytest.raises(AssertionError, match="race: unordered read"):
        Kernel(Program(source, "touch")).run(1, 32, (made.ctypes.data, given.ctypes.data, 3, 0), shared_bytes=128)


RACES = """
__device__ void publish(unsigned* at, unsigned word) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(at), "r"(word) : "memory");
}
__device__ unsigned look(const unsigned* at) {
    unsigned v[4];
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(at) : "memory");
    return v[0];
}
// The first block's last thread writes a neighbour's element with its own, as a vector store does.
__global__ void neighbours(float* to) {
    to[threadIdx.x] = 1.0f;
    if (threadIdx.x == 63) to[0] = 1.0f;
}
__global__ void barrier_between(float* to) {
    to[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 63) to[0] = 1.0f;
}
__global__ void blocks_write(float* to) { to[threadIdx.x] = blockIdx.x; }
__global__ void blocks_read(float* to) {
    if (blockIdx.x == 1) to[threadIdx.x] += 1.0f;
    else to[64 + threadIdx.x] = to[threadIdx.x];
}
// The second block waits for a word of the first one; ordered: which stores it after its other work, not before.
template <bool IS_ORDERED>
__global__ void blocks_wait(float* to) {
    unsigned* const word = reinterpret_cast<unsigned*>(to + 64);
    if (blockIdx.x == 0) {
        if (!IS_ORDERED && threadIdx.x == 0) publish(word, 7);
        to[threadIdx.x] = 1.0f;
        __syncthreads();
        if (IS_ORDERED && threadIdx.x == 0) publish(word, 7);
    } else {
        while (look(word) != 7) {
            unsigned long long now;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :);
        }
        to[threadIdx.x] += 1.0f;
    }
}
"""


@pytest.mark.parametrize(
    ("kernel", "blocks", "found"),
    [("neighbours", 1, "unordered write"), ("barrier_between", 1, ""),
     ("blocks_write", 2, "unordered write"), ("blocks_read", 2, "unordered write"),
     ("blocks_read", 1, ""), ("blocks_wait<true>", 2, ""), ("blocks_wait<false>", 2, "unordered read")],
)  # fmt: skip
def test_a_race_for_global_memory_is_found(kernel, blocks, found, tmp_path, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "SANITIZED", FIND_RACES)
    source = tmp_path / "planted.cu"
    source.write_text(RACES)
    pointer, kept = guarded_bytes(4 * 128)
    kept[:] = 0
    run = Kernel(Program(source, kernel)).run
    if found:
        with pytest.raises(AssertionError, match=f"global memory race: {found}"):
            run(blocks, 64, (pointer,))
    else:
        run(blocks, 64, (pointer,))


def test_a_barrier_that_some_do_not_reach_fails(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text(SOURCE)
    with pytest.raises(AssertionError, match="barrier not reached"):
        Kernel(Program(source, "part")).run(1, 32, (np.zeros(1, np.int32).ctypes.data,))


@needs_gxx
def test_ladders_include_the_engines_headers_and_transposed_matrices_are_loaded(tmp_path):
    """Four 8 x 8 matrices side by side, by ldmatrix.trans: a lane gets two rows' elements of one column."""
    source = tmp_path / "deep" / "cuda" / "load.cu"
    source.parent.mkdir(parents=True)
    source.write_text("""#include "mma/cp_async.cuh"
        __global__ void load(const unsigned short* x, u32* y) {
            __shared__ __align__(16) unsigned short tile[8][32];
            const int lane = threadIdx.x;
            for (int i = lane; i < 256; i += 32) tile[i / 32][i % 32] = x[i];
            __syncthreads();
            u32 to[4];
            const u32 at = shared_address(&tile[lane % 8][lane / 8 * 8]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
            for (int m = 0; m < 4; ++m) y[4 * lane + m] = to[m];
        }""")
    x, y = np.arange(256, dtype=np.uint16).reshape(8, 32), np.zeros((32, 4), np.uint32)
    Kernel(Program(source, "load")).run(1, 32, (x.ctypes.data, y.ctypes.data))
    lane, matrix = np.arange(32)[:, None], np.arange(4)
    row, column = 2 * (lane % 4), 8 * matrix + lane // 4
    np.testing.assert_array_equal(y, x[row, column] | x[row + 1, column].astype(np.uint32) << 16)
