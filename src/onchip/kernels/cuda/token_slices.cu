// token_slices.cu: tables as token_max.cu looks them up, made of tables that lie token by token.
//
// Idea    Blocks take 128 rows of one tap and one slice of channels: 8 threads a row, 16 B of it each. What is written
//         is in one piece, what is read are pieces of 128 B or more.
// Floor   Each number is read and written once. Sentiment's 9 taps in 16 bits: 2 * 399 MB / 4.8 TB/s = 166 us.
// Layout  x (V, K, C); y (slices, K, V + 1, 128 B): row V, and channels from C on, are zeros. Both 16 B aligned.
// Limits  Sizes are run-time values; x and y float32, float16, bfloat16; sm_80 up.
#include "wide.cuh"

constexpr int THREADS = 256, LANES = 8, ROW_BYTES = 128, ROWS = 128;

// chunks  of ROWS rows, of V + 1
template <class X, class T>
__global__ void __launch_bounds__(THREADS) token_slices(const X* x, T* y, long long V, u32 K, u32 C, u32 chunks) {
    constexpr int WIDTH = 16 / sizeof(T);
    const u32 pair = blockIdx.x / chunks, slice = pair / K, k = pair - slice * K;  // slice by slice, tap by tap
    const u32 lane = threadIdx.x % LANES, c = (slice * LANES + lane) * WIDTH;
    const long long first = static_cast<long long>(blockIdx.x - pair * chunks) * ROWS;
#pragma unroll
    for (u32 row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
        const long long v = first + row;
        if (v > V) return;
        const X* from = x + (v * K + k) * C + c;
        float numbers[WIDTH];
        if (v < V && C % 4 == 0 && c + WIDTH <= C) {
#pragma unroll
            for (int i = 0; i < WIDTH; i += 4) {
                const float4 four = load4(from + i);
                numbers[i] = four.x, numbers[i + 1] = four.y, numbers[i + 2] = four.z, numbers[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) numbers[i] = v < V && c + i < C ? to_float(from[i]) : 0.0f;
        }
        store_neighbours(y + ((pair * (V + 1)) + v) * (ROW_BYTES / sizeof(T)) + lane * WIDTH, numbers);
    }
}
