// scan_one_thread.cu: prefix sum by one thread with one accumulator.
//
// Idea    The definition. y[i] needs y[i - 1], so one thread walks the row and the rest of the chip idles.
// Floor   8*N B and N additions. N = 2^24 at 4.8 TB/s: 134 MB, 28.0 us. One thread has a few loads in flight and waits
//         for each of them: one lane of 32, on 1 of 132 SMs.
// Layout  x, y (N,) float32.
// Limits  Any N; fp32; sm_80 up.
__global__ void one_thread(const float* __restrict__ x, float* __restrict__ y, long long N) {
    float total = 0.0f;
    for (long long i = 0; i < N; ++i) {
        total += x[i];
        y[i] = total;
    }
}
