// A CUDA kernel on the host, for a look at its arithmetic where there is no GPU: a CUDA thread is a thread, a shuffle
// goes through an array with a barrier for the warp. Blocks run one after the other, so shared memory can be static.
//
// g++ -std=c++20 -pthread -DSOURCE='"kernel.cu"' -DRUN='launch(blocks, threads, [&] { kernel(x, y, N); });' ...
//
// runs it over rows of several lengths, in exact numbers, and prints the lengths for which y is not the running sums of
// x, or where more than y was written.
#include <barrier>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
    int x;
};
thread_local Index threadIdx, blockIdx;

struct Warp {
    explicit Warp(int lanes) : gate(lanes) {}
    std::barrier<> gate;
    unsigned words[32] = {};
};
std::vector<std::unique_ptr<Warp>> warps;
std::unique_ptr<std::barrier<>> block;

void __syncthreads() { block->arrive_and_wait(); }

template <class Read>
unsigned exchange(unsigned mine, Read read) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = mine;
    warp.gate.arrive_and_wait();
    const unsigned found = read(warp.words);
    warp.gate.arrive_and_wait();
    return found;
}
unsigned __float_as_uint(float v) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    return bits;
}
float __uint_as_float(unsigned bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
float __shfl_sync(unsigned, float v, int lane) {
    return __uint_as_float(exchange(__float_as_uint(v), [=](const unsigned* words) { return words[lane]; }));
}
float __shfl_up_sync(unsigned all, float v, int by) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(all, v, lane < by ? lane : lane - by);
}
float __shfl_xor_sync(unsigned all, float v, int mask) { return __shfl_sync(all, v, threadIdx.x % 32 ^ mask); }
unsigned __ballot_sync(unsigned, bool is_so) {
    return exchange(is_so, [](const unsigned* words) {
        unsigned found = 0;
        for (int lane = 0; lane < 32; ++lane) found |= words[lane] << lane;
        return found;
    });
}
bool __any_sync(unsigned all, bool is_so) { return __ballot_sync(all, is_so) != 0; }
int __ffs(unsigned bits) { return __builtin_ffs(bits); }
unsigned atomicAdd(unsigned* at, unsigned by) { return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST); }

#include SOURCE

template <class Kernel>
void launch(int blocks, int threads, Kernel kernel) {
    const int lanes = threads < 32 ? threads : 32;
    warps.clear();
    for (int first = 0; first < threads; first += 32) warps.push_back(std::make_unique<Warp>(lanes));
    block = std::make_unique<std::barrier<>>(threads);
    for (int b = 0; b < blocks; ++b) {
        std::vector<std::thread> all;
        for (int t = 0; t < threads; ++t)
            all.emplace_back([=] {
                threadIdx.x = t;
                blockIdx.x = b;
                kernel();
            });
        for (auto& each : all) each.join();
    }
}

#ifdef LOOK_BACK
// Tiles that have said their totals, 0, 1, 2, ..; one of them, and the first, the whole sum.
void check_look_back() {
    for (long long tile : {1, 2, 32, 33, 65, 100})
        for (long long whole : {0, 1, 31, 32, 40, 99}) {
            if (whole >= tile) continue;
            std::vector<u64> words(tile);
            float sum = 0;
            for (int t = 0; t < tile; ++t) {
                sum += t;
                words[t] = t == 0 || t == whole ? word_of(WHOLE_SUM, sum) : word_of(TOTAL, t);
            }
            launch(1, 32, [&] {
                if (look_back(words.data(), tile) != sum) printf("look back %lld %lld\n", tile, whole);
            });
        }
}
#endif

int main() {
    for (const long long N : {1, 7, 1025, 4096, 9001}) {
        std::vector<float> room(N + 4, 1e9f), out(N + 4, -1);
        float *x = room.data(), *y = out.data(), sum = 0;
        for (int i = 0; i < N; ++i) x[i] = i * 37 % 101 - 30;
        const int tiles = (N + 4095) / 4096;
        RUN
        bool is_right = y[N] == -1 && y[N + 1] == -1 && y[N + 2] == -1 && y[N + 3] == -1;
        for (int i = 0; i < N; ++i) is_right &= y[i] == (sum += x[i]);
        if (!is_right) printf("%lld\n", N);
    }
#ifdef LOOK_BACK
    check_look_back();
#endif
}
