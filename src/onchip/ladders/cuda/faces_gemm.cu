// faces_gemm.cu: a 5x5 transposed convolution with stride 2 as a gemm with accumulators in registers.
//
// Idea    Stretch x: a zero between any two pixels, three zeros before and two after. Then every output pixel is a row of
//         25 C values, its 5x5 window, and y = rows * w + bias. The rows are read from x as a tile needs them.
//         A block of T * V threads computes T pixels times T * V channels: each thread one channel, its T sums in
//         registers. The tile of rows is in shared memory, transposed: a thread reads the T values of a column four at a
//         time, the same for all threads (a broadcast), and uses its one value of w, from global memory, T times.
// Order   Taps (r, s) row by row, then channels.
// Floor   2 * 25 * C * K flop per output pixel, of which 3/4 multiply the zeros of the stretched x.
//         T = 16: 16 FFMAs for four 16-byte loads from shared memory and one 4-byte load through the L1 cache.
// Layout  x (faces, n, n, C), y (faces, 2n, 2n, K), C and K fastest; w (5, 5, C, K), the taps in reverse order.
// Shared  T*T*4 = 1 024 B
// Limits  V divides T; T a multiple of 4; any faces, n, C, K with fewer than 2^31 values of y; fp32; sm_80 up.
template <int T, int V>
__global__ void __launch_bounds__(T * V)
tconv_gemm(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
           float* __restrict__ y, int faces, int n, int C, int K) {
    static_assert(T % V == 0 && T % 4 == 0, "a thread loads T / V values of a tile");
    alignas(16) __shared__ float tile[T][T];  // [column][row]
    const int pixels = faces * 4 * n * n, first = T * blockIdx.x, k = T * V * blockIdx.y + threadIdx.x;

    // This thread loads column `column` of the rows row, row + V, ..
    const int column = threadIdx.x % T, row = threadIdx.x / T;
    int face[T / V], h[T / V], v[T / V];
#pragma unroll
    for (int i = 0; i < T / V; ++i) {
        const int pixel = first + row + i * V;
        face[i] = pixel / (4 * n * n), h[i] = pixel / (2 * n) % (2 * n), v[i] = pixel % (2 * n);
    }
    float sum[T] = {};
    for (int tap = 0; tap < 25; ++tap)
        for (int c = 0; c < C; c += T) {
#pragma unroll
            for (int i = 0; i < T / V; ++i) {
                const int a = h[i] - 3 + tap / 5, b = v[i] - 3 + tap % 5;  // in the stretched x
                const bool is_zero = a % 2 != 0 || b % 2 != 0 || a < 0 || b < 0 || a >= 2 * n || b >= 2 * n;
                const bool is_value = !is_zero && c + column < C && face[i] < faces;
                tile[column][row + i * V] = is_value ? x[((face[i] * n + a / 2) * n + b / 2) * C + c + column] : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float weight = k < K && c + t < C ? w[(tap * C + c + t) * K + k] : 0.0f;
#pragma unroll
                for (int i = 0; i < T; i += 4) {
                    const float4 values = *reinterpret_cast<const float4*>(&tile[t][i]);
                    sum[i] += weight * values.x;
                    sum[i + 1] += weight * values.y;
                    sum[i + 2] += weight * values.z;
                    sum[i + 3] += weight * values.w;
                }
            }
            __syncthreads();
        }
    for (int i = 0; i < T; ++i)
        if (k < K && first + i < pixels) y[(first + i) * K + k] = sum[i] + bias[k];
}
