// Runs .cu files on the host, to test results without a GPU. emulated_cuda.py includes it before a kernel's source and
// appends `export_kernel`.
//
// A CUDA thread is a fiber that runs until it waits: at a barrier, or in a shuffle, which is a warp barrier. Each round
// schedules the fibers in a random order, so a missing barrier leads to stale reads. Blocks run one after another, so
// shared memory is static and waiting for a later block fails; a block that reads the clock while it waits is suspended
// with its shared memory, and others run. These fail too: a barrier that some threads do not reach, misaligned 16-byte
// access, and access past the end of dynamic shared or global memory, which a protected page follows.
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __constant__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define SHARED_ALIGNMENT 16  // of dynamic shared memory; headers raise it

// The emulator's data is in its own section, so .bss is the kernel's shared memory.
#define HOST_DATA __attribute__((section("emulator")))
struct Index {
    unsigned x, y;
};
static Index threadIdx HOST_DATA = {}, blockIdx HOST_DATA = {}, blockDim HOST_DATA = {}, gridDim HOST_DATA = {};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emulated {

constexpr int MAX_THREADS = 1024, STACK_BYTES = 64 << 10, MAX_COPIES = 256, MAX_STORES = 16;
constexpr int MAX_ALIGNMENT = 1024, PAGE = 4096, MAX_SHARED = 228 << 10;  // bytes; upper limits
constexpr long MAX_ROUNDS = 1 << 18;  // scheduling rounds per block

struct Copy {
    void* to;
    const void* from;
    int bytes, group;  // bytes copied, then zeros; index of its group
    int width;
};
// A TMA store (emulated_tma.cuh).
struct Store {
    unsigned long long map[16];
    const void* from;
    int c, w, h, image;
};

struct Fiber {
    jmp_buf at;
    bool has_begun, is_done;
    Copy copies[MAX_COPIES];  // cp.async in flight
    Store stores[MAX_STORES];  // TMA stores in flight, oldest first
    int copy_count, group_count, store_count, exchanges;
};

struct Barrier {
    int arrived;
    long generation;
};

// A block, without its shared memory and stacks.
struct Block {
    Fiber fibers[MAX_THREADS];
    Barrier block_barrier, warp_barriers[MAX_THREADS / 32], warpgroup_barriers[MAX_THREADS / 128];
    unsigned long long words[2][MAX_THREADS];  // of a shuffle; double-buffered
    bool is_done, is_waiting, is_yielding;         // is_waiting: for other blocks; is_yielding: could run
    bool is_poisoned;                              // its dynamic shared memory
    unsigned last_barrier;                         // epoch of its last barrier: earlier accesses are ordered
    long vote_barrier;                             // of __syncthreads_or: barrier generation and votes
    bool votes[2];
    char *stacks, *shared;                         // shared: contents while suspended

    void begin();
};

static Block* current HOST_DATA = nullptr;
static jmp_buf scheduler HOST_DATA = {};
static ucontext_t fiber_context HOST_DATA = {}, scheduler_context HOST_DATA = {};
static const char* failure HOST_DATA = nullptr;
static unsigned long long random_state HOST_DATA = 0;
static int threads HOST_DATA = 0, running HOST_DATA = 0, progress HOST_DATA = 0;
static const void* const* kernel_arguments HOST_DATA = nullptr;  // pointers to the kernel's arguments
static void (*body)() HOST_DATA = nullptr;
static unsigned cluster_size HOST_DATA = 1;
static long* arrivals HOST_DATA = nullptr;  // per block: cluster barriers reached
alignas(PAGE) static char smem[MAX_SHARED + PAGE] HOST_DATA = {};  // dynamic; ends at the protected page
static int dynamic_bytes HOST_DATA = 0;

static void pause() {
    if (!_setjmp(current->fibers[running].at)) _longjmp(scheduler, 1);
}

[[noreturn]] static void fail(const char* message) {
    failure = message;
    _longjmp(scheduler, 1);
}

static void check_16(const volatile void* at) {
    if (reinterpret_cast<unsigned long long>(at) % 16) fail("misaligned 16-byte access");
}

}  // namespace emulated

#include "emulated_races.h"

namespace emulated {

// Skips arrays that fibers write before they read: copies are most of a block.
void Block::begin() {
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.has_begun = fiber.is_done = false;
        fiber.copy_count = fiber.group_count = fiber.store_count = fiber.exchanges = 0;
    }
    block_barrier = {};
    memset(warp_barriers, 0, sizeof warp_barriers);
    memset(warpgroup_barriers, 0, sizeof warpgroup_barriers);
    is_done = is_poisoned = is_waiting = votes[0] = votes[1] = false;
    vote_barrier = 0;
    last_barrier = ++epoch;
}

// epoch: incremented when all have arrived
NO_TSAN static void arrive(Barrier& barrier, int all, unsigned* epoch = nullptr) {
    const long generation = barrier.generation;
    if (++barrier.arrived == all) {
        if (epoch) ++*epoch;
        if (epoch == &emulated::epoch) current->last_barrier = *epoch;
        barrier.arrived = 0;
        ++barrier.generation;
        ++progress;
    }
    while (barrier.generation == generation) pause();
}

// Every lane of the warp passes a value; returns read(values).
template <class T, class Read> auto exchange(T value, Read read) {
    static_assert(sizeof(T) <= 8);
    const int thread = running, first = thread / 32 * 32;
    unsigned long long* words = current->words[current->fibers[thread].exchanges++ % 2];
    memcpy(words + thread, &value, sizeof value);
    arrive(current->warp_barriers[first / 32], threads - first < 32 ? threads - first : 32);
    return read([=](int lane) {
        T result;
        memcpy(&result, words + first + lane, sizeof result);
        return result;
    });
}

template <class T> T shuffle(T value, int lane) {
    return exchange(value, [=](auto of) { return of(lane); });
}

static void entry() {
    body();
    if (current->fibers[running].copy_count) fail("cp.async without a wait");
    if (current->fibers[running].store_count) fail("TMA store without a wait");
    current->fibers[running].is_done = true;
    ++progress;
    _longjmp(scheduler, 1);
}

static void resume(int thread) {
    Fiber& fiber = current->fibers[thread];
    running = thread;
    threadIdx.x = thread;
    if (_setjmp(scheduler)) {
        in_kernel = false;
        return;
    }
    in_kernel = true;
    if (fiber.has_begun) _longjmp(fiber.at, 1);
    fiber.has_begun = true;
    getcontext(&fiber_context);
    fiber_context.uc_stack.ss_sp = current->stacks + thread * static_cast<size_t>(STACK_BYTES);
    fiber_context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber_context, entry, 0);
    swapcontext(&scheduler_context, &fiber_context);
}

static int random_below(int below) {
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<int>((random_state >> 33) % below);
}

// Address of the launch's dynamic shared memory. The first thread fills it with NaN bit patterns.
static char* dynamic_shared(int alignment) {
    char* const at = smem + MAX_SHARED - (dynamic_bytes + alignment - 1) / alignment * alignment;
    if (!current->is_poisoned) memset(at, 0xff, smem + MAX_SHARED - at);
    current->is_poisoned = true;
    return at;
}

// Signal handler of invalid accesses.
static void on_fault(int) { fail("access outside the kernel's memory"); }

// Called by a thread that reads the clock: lets other blocks run.
static void wait_for_others() {
    current->is_waiting = true;
    pause();
}

// Runs the block until it ends or waits for other blocks.
static void run_block() {
    for (long round = 0; !failure; ++round) {
        const int before = progress, first = random_below(threads), step = random_below(2) ? 1 : threads - 1;
        int left = 0;
        current->is_waiting = current->is_yielding = false;
        for (int i = 0, thread = first; i < threads && !failure; ++i, thread = (thread + step) % threads) {
            if (!current->fibers[thread].is_done) resume(thread);
            left += !current->fibers[thread].is_done;
        }
        current->is_done = !left;
        if (!left || failure) return;
        if (current->is_yielding || (progress == before && current->is_waiting)) return;
        if (progress == before) failure = "barrier not reached by all threads";
        if (round == MAX_ROUNDS) failure = "kernel does not terminate";
    }
}

// Runs all blocks; waiting ones are suspended with their shared memory.
static void run_blocks(unsigned count) {
    const size_t static_bytes = &_end - &__bss_start, stack_bytes = threads * static_cast<size_t>(STACK_BYTES);
    const size_t shared_bytes = static_bytes + dynamic_bytes + MAX_ALIGNMENT;
    const auto swap_shared = [&](char* saved, bool restores) {
        char* const regions[] = {&__bss_start, smem + MAX_SHARED - (shared_bytes - static_bytes)};
        const size_t sizes[] = {static_bytes, shared_bytes - static_bytes};
        for (int i = 0; i < 2; saved += sizes[i++])
            restores ? memcpy(regions[i], saved, sizes[i]) : memcpy(saved, regions[i], sizes[i]);
    };
    Block** const waiting = static_cast<Block**>(calloc(count, sizeof(Block*)));
    unsigned done = 0, begun = 0;
    current = nullptr;
    while (done < count && !failure) {
        const int before = progress;
        for (unsigned i = 0; i < count && !failure; ++i) {
            if (i < begun && !waiting[i]) continue;
            if (i < begun) {
                current = waiting[i];
                swap_shared(current->shared, true);
            } else {
                ++begun;
                if (!current) {
                    current = static_cast<Block*>(malloc(sizeof(Block)));
                    current->stacks = static_cast<char*>(malloc(stack_bytes));
                    current->shared = nullptr;
                }
                current->begin();
            }
            blockIdx = {i % gridDim.x, i / gridDim.x};
            run_block();
            if (current->is_done) {  // the next block reuses its memory
                waiting[i] = nullptr;
                ++done;
                if (begun == count) {
                    free(current->stacks), free(current->shared), free(current);
                    current = nullptr;
                }
            } else {
                if (!current->shared) current->shared = static_cast<char*>(malloc(shared_bytes));
                swap_shared(current->shared, false);
                waiting[i] = current;
                current = nullptr;
            }
        }
        if (progress == before && !failure) failure = "deadlock between blocks";
    }
    free(waiting);
}

template <class T> T argument(int i) {
    T value;
    memcpy(&value, kernel_arguments[i], sizeof value);
    return value;
}

template <auto kernel, class... P, size_t... I> void call(std::index_sequence<I...>) { kernel(argument<P>(I)...); }

// Returns an error message, or nullptr.
template <auto kernel, class... P>
const char* launch(void (*)(P...), unsigned blocks, unsigned down, unsigned blocks_of_cluster, int block_threads,
                   int shared_bytes, const void* const* arguments) {
    threads = block_threads;
    dynamic_bytes = shared_bytes;
    cluster_size = blocks_of_cluster;
    arrivals = static_cast<long*>(calloc(blocks * down, sizeof(long)));
    kernel_arguments = arguments;
    failure = nullptr;
    random_state = 0;  // reproducible
    gridDim = {blocks, down};
    blockDim.x = block_threads;
    body = [] { call<kernel, P...>(std::index_sequence_for<P...>{}); };
    struct sigaction before, handler = {};
    handler.sa_handler = on_fault;
    handler.sa_flags = SA_NODEFER;  // the handler does not return
    begin_race_check();
    mprotect(smem + MAX_SHARED, PAGE, PROT_NONE);
    sigaction(SIGSEGV, &handler, &before);
    run_blocks(blocks * down);
    sigaction(SIGSEGV, &before, nullptr);
    end_race_check();
    free(arrivals);
    return failure;
}

template <class... P> int list_sizes(void (*)(P...), int* sizes) {
    ((*sizes++ = sizeof(P)), ...);
    return sizeof...(P);
}

}  // namespace emulated

#define export_kernel(...)                                                                               \
    extern "C" int parameter_sizes(int* sizes) { return emulated::list_sizes(__VA_ARGS__, sizes); }      \
    extern "C" const char* run(unsigned blocks, unsigned down, unsigned cluster_size, int threads,       \
                               int shared_bytes, const void* const* kernel_arguments) {                  \
        return emulated::launch<__VA_ARGS__>(__VA_ARGS__, blocks, down, cluster_size, threads, shared_bytes, \
                                             kernel_arguments);                                          \
    }

// -- CUDA functions ------------------------------------------------------------------------------------------------

static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static void __syncthreads() { emulated::arrive(emulated::current->block_barrier, emulated::threads, &emulated::epoch); }

static bool __syncthreads_or(bool value) {
    emulated::Block* const block = emulated::current;
    const long at = block->block_barrier.generation + 1;  // 0: none
    if (block->vote_barrier != at) block->vote_barrier = at, block->votes[at % 2] = false;
    block->votes[at % 2] |= value;
    __syncthreads();
    return block->votes[at % 2];
}

static void __syncwarp() {
    const int first = emulated::running / 32 * 32;
    const int all = emulated::threads - first < 32 ? emulated::threads - first : 32;
    emulated::arrive(emulated::current->warp_barriers[first / 32], all, &emulated::warp_epochs[first / 32]);
}

template <class T> T __shfl_sync(unsigned, T v, int lane, int width = 32) {
    const int thread = threadIdx.x % 32;
    return emulated::shuffle(v, thread / width * width + lane % width);
}
template <class T> T __shfl_up_sync(unsigned, T v, int by, int width = 32) {
    const int thread = threadIdx.x % 32;
    return emulated::shuffle(v, thread % width < by ? thread : thread - by);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return emulated::shuffle(v, threadIdx.x % 32 ^ mask); }
static unsigned __ballot_sync(unsigned, bool predicate) {
    return emulated::exchange(predicate, [](auto of) {
        unsigned result = 0;
        for (int lane = 0; lane < 32; ++lane) result |= static_cast<unsigned>(of(lane)) << lane;
        return result;
    });
}
template <class T> unsigned __match_any_sync(unsigned, T v) {
    return emulated::exchange(v, [=](auto of) {
        unsigned result = 0;
        for (int lane = 0; lane < 32; ++lane) result |= static_cast<unsigned>(of(lane) == v) << lane;
        return result;
    });
}
static bool __any_sync(unsigned all, bool predicate) { return __ballot_sync(all, predicate) != 0; }

template <class To, class From> To same_bits(From v) {
    To bits;
    static_assert(sizeof bits == sizeof v);
    memcpy(&bits, &v, sizeof v);
    return bits;
}
static unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
static float __int_as_float(int bits) { return same_bits<float>(bits); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // the C library declares __expf
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
NO_TSAN static unsigned atomicAdd(unsigned* at, unsigned by) {
    emulated::acquire(at), emulated::release(at);
    return (*at += by) - by;
}
template <class T> NO_TSAN static T atomicAdd(T* at, T by) {  // of float and double
    emulated::acquire(at), emulated::release(at);
    return (*at += by) - by;
}
NO_TSAN static unsigned long long atomicMin(unsigned long long* at, unsigned long long v) {
    emulated::acquire(at), emulated::release(at);
    const unsigned long long before = *at;
    if (v < before) *at = v;
    return before;
}
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

template <class T> T __ldcs(const T* from) {
    if (sizeof(T) == 16) emulated::check_16(from);
    return *from;
}
template <class T> T __ldg(const T* from) {
    if (sizeof(T) == 16) emulated::check_16(from);
    return *from;
}
// A texture object's handle is the address (fake_cuda.py).
template <class T> T tex1Dfetch(unsigned long long object, int i) { return reinterpret_cast<const T*>(object)[i]; }
template <class T> T __ldcg(const T* from) {
    if (sizeof(T) == 16) emulated::check_16(from);
    return *from;
}
template <class T> void __stcs(T* to, T value) {
    if (sizeof(T) == 16) emulated::check_16(to);
    *to = value;
}
#ifdef RANDOM_DELAYS
static void __nanosleep(unsigned) {  // lets other blocks run first
    emulated::current->is_yielding = true;
    ++emulated::progress;
    emulated::pause();
}
#else
static void __nanosleep(unsigned) { emulated::fail("waits for a block that has not started"); }
#endif
static void ptx_clock(unsigned& ticks) { ticks = emulated::random_below(1 << 30); }
static void ptx_clock(unsigned long long& ticks) {  // %clock64: later calls see later times
    static unsigned long long calls = 0;
    ticks = ++calls;
}

// -- PTX -----------------------------------------------------------------------------------------------------------

alignas(1024) static char shared_base;  // origin of 32-bit shared addresses
static size_t __cvta_generic_to_shared(const void* at) { return static_cast<const char*>(at) - &shared_base; }

// Publishes a value and its flag in 16 bytes, which must have been cleared.
NO_TSAN static void ptx_store_b128(void* to, unsigned long long low, unsigned long long high) {
    const unsigned long long nothing[] = {0, 0}, both[] = {low, high};
    emulated::check_16(to);
    if (memcmp(to, nothing, 16)) emulated::fail("published to a slot that was not cleared");
    emulated::release(to);
    memcpy(to, both, 16);
}
NO_TSAN static void ptx_store_tagged(void* to, unsigned long long low, unsigned long long high) {
    const unsigned long long both[] = {low, high};
    emulated::check_16(to);
    emulated::release(to);
    memcpy(to, both, 16);
    ++emulated::progress;
}
NO_TSAN static void ptx_load_b128(unsigned long long& low, unsigned long long& high, const void* from) {
    emulated::check_16(from);
    emulated::acquire(from);
    memcpy(&low, from, 8);
    memcpy(&high, static_cast<const char*>(from) + 8, 8);
}
// The copy happens at the wait.
static void ptx_copy_async_narrow(unsigned to, const void* from, int width, int bytes) {
    emulated::Fiber& fiber = emulated::current->fibers[emulated::running];
    char* const dst = &shared_base + static_cast<int>(to);
    if ((reinterpret_cast<size_t>(from) | reinterpret_cast<size_t>(dst)) % width) emulated::fail("misaligned cp.async");
    if (fiber.copy_count == emulated::MAX_COPIES) emulated::fail("too many cp.async in flight");
    fiber.copies[fiber.copy_count++] = {dst, from, bytes, fiber.group_count, width};
}
static void ptx_copy_async(unsigned to, const void* from, int n = 16) { ptx_copy_async_narrow(to, from, 16, n); }
static void ptx_close_copies() { ++emulated::current->fibers[emulated::running].group_count; }
// Completes all groups but the last `left`.
static void ptx_wait_for_groups(int left) {
    emulated::Fiber& fiber = emulated::current->fibers[emulated::running];
    int pending = 0;
    for (int i = 0; i < fiber.copy_count; ++i) {
        const emulated::Copy copy = fiber.copies[i];
        if (copy.group >= fiber.group_count - left) {
            fiber.copies[pending++] = copy;
            continue;
        }
        emulated::record_access(copy.from, copy.bytes, false);
        emulated::record_access(copy.to, copy.width, true);
        memset(copy.to, 0, copy.width);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    fiber.copy_count = pending;
}
static void ptx_wait_for_copies() {
    ptx_close_copies();
    ptx_wait_for_groups(0);
}

// Lanes 8 m to 8 m + 7 address the rows of matrix m, 16 bytes each; lane (g, q) gets 32-bit word q of row g of each.
static void ptx_load_matrices(unsigned& first, unsigned& second, unsigned& third, unsigned& fourth, unsigned at) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    unsigned* const result[] = {&first, &second, &third, &fourth};
    emulated::exchange(at, [&](auto of) {
        for (int m = 0; m < 4; ++m) {
            const char* const row = &shared_base + static_cast<int>(of(8 * m + g));
            emulated::check_16(row);
            memcpy(result[m], row + 4 * q, 4);
        }
        return 0;
    });
}
// The same, each matrix transposed: lane (g, q) gets elements g of rows 2q and 2q + 1.
static void ptx_load_transposed(unsigned& first, unsigned& second, unsigned& third, unsigned& fourth, unsigned at) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    unsigned* const result[] = {&first, &second, &third, &fourth};
    emulated::exchange(at, [&](auto of) {
        for (int m = 0; m < 4; ++m) {
            for (int i = 0; i < 2; ++i) {
                const char* const row = &shared_base + static_cast<int>(of(8 * m + 2 * q + i));
                emulated::check_16(row);
                memcpy(reinterpret_cast<char*>(result[m]) + 2 * i, row + 2 * g, 2);
            }
        }
        return 0;
    });
}

// 16-bit elements, two per 32-bit word, the first operand in the upper half.
static void ptx_from_f16(float& wide, unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : ldexpf(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
    wide = bits >> 15 ? -size : size;
}
static unsigned f16_bits(float v) {  // rounded to even
    const unsigned bits = __float_as_uint(v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (v != v) return 0x7fff;
    if (fabsf(v) >= 65520) return sign | 0x7c00;
    if (fabsf(v) < ldexpf(1, -14)) return sign | static_cast<unsigned>(nearbyintf(ldexpf(fabsf(v), 24)));
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
static void ptx_pack_f16(unsigned& word, float upper, float lower) { word = f16_bits(upper) << 16 | f16_bits(lower); }
static unsigned bf16_bits(float v) {  // rounded to even
    const unsigned bits = __float_as_uint(v);
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static void ptx_pack_bf16(unsigned& word, float upper, float lower) {
    word = bf16_bits(upper) << 16 | bf16_bits(lower);
}
static void ptx_round_tf32(unsigned& rounded, float v) {
    rounded = std::isfinite(v) ? (__float_as_uint(v) + 0x1000) & 0xffffe000 : __float_as_uint(v);
}
static void ptx_from_e4m3(unsigned& word, unsigned short pair) {
    float wide[2];
    for (int i = 0; i < 2; ++i) {
        const int bits = pair >> 8 * i, exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = (bits & 127) == 127 ? NAN
                           : ldexpf(exponent ? 8 + fraction : fraction, (exponent ? exponent : 1) - 10);
        wide[i] = bits & 128 ? -size : size;
    }
    ptx_pack_f16(word, wide[1], wide[0]);
}
static unsigned e4m3_bits(float v) {  // rounded to even; saturates
    const unsigned sign = __float_as_uint(v) >> 24 & 128;
    if (v != v) return 127;
    const float size = fabsf(v);
    if (size >= 448) return sign | 126;
    const int exponent = size == 0 || ilogbf(size) < -6 ? -6 : ilogbf(size);
    const int steps = nearbyintf(ldexpf(size, 3 - exponent));  // 16 steps are 8 of the next exponent
    return sign | (steps < 8 ? steps : (exponent + 7 << 3) + steps - 8);
}
static void ptx_pack_e4m3(unsigned short& pair, float upper, float lower) {
    pair = e4m3_bits(upper) << 8 | e4m3_bits(lower);
}
static void ptx_add_f16(unsigned& word, unsigned a, unsigned b) {
    float of_a[2], of_b[2];
    for (int i = 0; i < 2; ++i) {
        ptx_from_f16(of_a[i], a >> 16 * i);
        ptx_from_f16(of_b[i], b >> 16 * i);
    }
    ptx_pack_f16(word, of_a[1] + of_b[1], of_a[0] + of_b[0]);
}
static void ptx_f16_of_double(unsigned short& bits, double v) {  // rounded once: the result fits a float
    const int exponent = v == 0 || !std::isfinite(v) ? 0 : ilogb(v);
    const double step = ldexp(1, (exponent < -14 ? -14 : exponent) - 10);
    bits = f16_bits(std::isfinite(v) ? nearbyint(v / step) * step : v);
}

// Approximations have the maximum error of the hardware, of either sign; subnormals flush to 0.
static float flush(double v) { return std::fabs(v) < ldexp(1, -126) ? std::copysign(0.0, v) : v; }
static double with_error(double v, double error, float kernel_arguments) {
    return v * (__float_as_uint(kernel_arguments) % 7 < 3 ? 1 - error : 1 + error);
}
static void ptx_exp2(float& result, float v) { result = flush(with_error(exp2(flush(v)), ldexp(1, -22), v)); }
static void ptx_inverse(float& result, float v) { result = flush(with_error(1.0 / flush(v), ldexp(1, -23), v)); }
static void ptx_tanh(float& result, float v) { result = with_error(tanh(v), ldexp(1, -11), v); }
static void ptx_at_least(float& result, float a, float b) { result = a != a ? a : b != b ? b : a < b ? b : a; }
static void ptx_at_most(float& result, float a, float b) { result = a != a ? a : b != b ? b : b < a ? b : a; }
static void ptx_larger_f16(unsigned& word, unsigned a, unsigned b) {
    float of_a[2], of_b[2], larger[2];
    for (int i = 0; i < 2; ++i) {
        ptx_from_f16(of_a[i], a >> 16 * i);
        ptx_from_f16(of_b[i], b >> 16 * i);
        ptx_at_least(larger[i], of_a[i], of_b[i]);
    }
    ptx_pack_f16(word, larger[1], larger[0]);
}
static void ptx_larger_bf16(unsigned& word, unsigned a, unsigned b) {
    float larger[2];
    for (int i = 0; i < 2; ++i)
        ptx_at_least(larger[i], __uint_as_float(a >> 16 * i << 16), __uint_as_float(b >> 16 * i << 16));
    ptx_pack_bf16(word, larger[1], larger[0]);
}
// Two bytes as bf16, by the same steps as the instructions.
static void ptx_widen_bytes(unsigned& result, unsigned word, unsigned which, unsigned less, unsigned half) {
    const unsigned both = __byte_perm(word, 0x43434343, which);
    result = 0;
    for (int i = 0; i < 2; ++i) {
        const auto element = [=](unsigned two) { return __uint_as_float((two >> 16 * i & 0xffff) << 16); };
        const float a = element(both) + element(less), b = element(both) * element(half);
        result |= __float_as_uint(a < b ? a : b) >> 16 << 16 * i;
    }
}
NO_TSAN static void ptx_store_word(void* to, unsigned word) {
    emulated::release(to);
    *static_cast<unsigned*>(to) = word;
}
NO_TSAN static void ptx_store_four(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
    emulated::check_16(to);
    const unsigned words[] = {a, b, c, d};
    emulated::release(to);
    memcpy(to, words, 16);
}
NO_TSAN static void ptx_load_four(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
    emulated::check_16(from);
    const unsigned* words = static_cast<const unsigned*>(from);
    for (int i = 0; i < 4; ++i) emulated::acquire(words + i);  // each may have a different writer
    a = words[0], b = words[1], c = words[2], d = words[3];
}
static void ptx_time(unsigned long long& time) {
    time = 0;
    emulated::wait_for_others();
}
template <class... Operands> void ptx_unknown(Operands&&...) { emulated::fail("PTX without a host version"); }
