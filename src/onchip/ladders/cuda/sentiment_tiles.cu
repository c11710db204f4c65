// sentiment_tiles.cu: sentiment_wmma.cu's gemm with shared-memory tiles.
//
// Idea    A block computes 16 * WARPS channels of one sentence. It loads 32 columns of its weights and 32 rows of the
//         windows into shared memory with 16-byte loads, and its warps load their fragments from there: the windows are
//         read once per block, not once per warp.
//         THROUGH_GLOBAL: the padded sums go through global memory instead of shared memory, 16 KB per 256 channels.
//         The report did so to save shared memory, and then tuned the tiles. BLOCKS_PER_SM = 2 blocks of 32 warps take
//         every warp slot of an SM with 64: the compiler then uses at most 32 registers.
// Floor   A loaded weight still serves one sentence: for K = 9, 75 MB per sentence from L2, for 1.2 us of an H200's
//         tensor cores. The windows are 1.2 MB per block, and 4 or 2 blocks read them. No occupancy changes that.
// Layout  As in sentiment_wmma.cu; padded (B, C_out, 16) fp32. The tiles' rows are not padded (the report says
//         nothing of it): the 8 rows of a fragment of A fall into two groups of banks, 4-way conflicts.
// Shared  33 792 B, both WARPS = 16: (256*32 + 32*16) * 2 + 256*16*4, and 32, THROUGH_GLOBAL: (512*32 + 32*16) * 2
// Limits  As in sentiment_wmma.cu.
#include "wmma.cuh"

constexpr int DEPTH = 32, CHUNK = 8;  // k per tile; fp16 values per 16-byte load

// Grid (sentences, C_out / (16 * WARPS)). `padded` is used with THROUGH_GLOBAL only.
template <int WARPS, int BLOCKS_PER_SM, bool THROUGH_GLOBAL>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
matmul_tiles(const f16* __restrict__ w, const f16* __restrict__ windows, const float* __restrict__ bias, float* padded,
             float* __restrict__ y, long long C_out, long long rows, long long steps) {
    constexpr int CHANNELS = WMMA_SIZE * WARPS, THREADS = 32 * WARPS, SUMS = WMMA_SIZE * WMMA_SIZE;
    __shared__ __align__(16) f16 tile_a[CHANNELS * DEPTH], tile_b[DEPTH * WMMA_SIZE];
    __shared__ float shared_sums[THROUGH_GLOBAL ? 1 : WARPS * SUMS];
    const int warp = threadIdx.x / 32, n0 = CHANNELS * blockIdx.y, n = n0 + WMMA_SIZE * warp;
    w += n0 * rows;
    windows += blockIdx.x * rows * WMMA_SIZE;
    FragmentA a;
    FragmentB b;
    Accumulators c;
    for (int k0 = 0; k0 < rows; k0 += DEPTH) {
        for (int i = threadIdx.x; i < CHANNELS * DEPTH / CHUNK; i += THREADS) {
            const int channel = i / (DEPTH / CHUNK), k = k0 + i % (DEPTH / CHUNK) * CHUNK;
            uint4 chunk = {0, 0, 0, 0};
            if (n0 + channel < C_out && k < rows) chunk = *reinterpret_cast<const uint4*>(w + channel * rows + k);
            reinterpret_cast<uint4*>(tile_a)[i] = chunk;
        }
        if (threadIdx.x < DEPTH * WMMA_SIZE / CHUNK) {
            const int i = threadIdx.x, k = k0 + i / (WMMA_SIZE / CHUNK);
            uint4 chunk = {0, 0, 0, 0};
            if (k < rows) chunk = reinterpret_cast<const uint4*>(windows + k0 * WMMA_SIZE)[i];
            reinterpret_cast<uint4*>(tile_b)[i] = chunk;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k += WMMA_SIZE) {
            load_matrix(a, tile_a + WMMA_SIZE * warp * DEPTH + k, DEPTH);
            load_matrix(b, tile_b + k * WMMA_SIZE, WMMA_SIZE);
            multiply_add(c, a, b);
        }
        __syncthreads();
    }
    if (n >= C_out) return;  // a whole warp
    const long long channel = blockIdx.x * C_out + n;
    float* const sums = THROUGH_GLOBAL ? padded + channel * WMMA_SIZE : shared_sums + warp * SUMS;
    store_matrix(sums, c, WMMA_SIZE);
    __syncwarp();
    copy_unpadded(sums, bias + n, y + channel * steps, steps);
}

// What cudaMemcpyDeviceToDevice does: count quads of float.
__global__ void __launch_bounds__(256) copy_quads(const uint4* __restrict__ x, uint4* __restrict__ y, long long count) {
    const long long i = 256LL * blockIdx.x + threadIdx.x;
    if (i < count) y[i] = x[i];
}
