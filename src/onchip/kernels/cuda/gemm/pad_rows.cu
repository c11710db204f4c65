// gemm/pad_rows.cu: zero-pads rows to multiples of 16 bytes, as TMA requires.
//
// Idea    A lane writes 16 bytes, read in the widest words that divide a row. Adjacent lanes share a row.
// Floor   Bytes in and out: 5,248 rows of 100 float16: 2.1 MB, which stay in L2: 0.1 us, and a launch.
// Layout  x (M, words) and y (M, chunks) row-major, y 16 B aligned; a chunk is 16 bytes.
// Limits  Any sizes; 2^lanes lanes per row, at most 32; sm_80 up.
#include "mma/tma.cuh"

template <class Word>
__global__ void __launch_bounds__(256) pad_rows(const Word* x, uint4* y, long long M, long long words, long long chunks,
                                               u32 lanes) {
    constexpr int EACH = 16 / static_cast<int>(sizeof(Word));
    const long long first = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const long long step = static_cast<long long>(gridDim.x) * 256 >> lanes;
    launch_dependent_grids();
    wait_on_dependent_grids();
    for (long long m = first >> lanes; m < M; m += step)
        for (long long i = first & ((1 << lanes) - 1); i < chunks; i += 1 << lanes) {
            union {
                Word word[EACH];
                uint4 vector;
            } chunk;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const long long at = i * EACH + j;
                chunk.word[j] = at < words ? x[m * words + at] : Word(0);
            }
            y[m * chunks + i] = chunk.vector;
        }
}
