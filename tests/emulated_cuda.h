// Runs .cu files on the host, for a look at what they compute where there is no GPU. emulated_cuda.py puts this in
// front of a kernel's source, and `export_kernel` behind it.
//
// A CUDA thread is a fiber. It runs until it waits: at a barrier, or in a shuffle, which is a barrier of its warp. Who
// goes on next is drawn anew every round, so threads that should have waited and do not read what is not there yet.
// Blocks run one after the other, which is why shared memory can be static, and why whoever waits for a later block
// fails; but one that looks at the clock while it waits is put aside, shared memory and all, and others go on. A barrier
// that not all threads reach fails, too, and so do 16 bytes that do not lie at a multiple of 16. The shared memory that a
// launch asks for, and every piece of global memory, ends where a page begins that nobody may touch: who reads or writes
// behind it fails.
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
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define SHARED_ALIGNMENT 16  // of what a launch asks for, until a header wants more

// What is ours lies in a section by itself, so .bss is the kernel's: its shared memory.
#define OURS __attribute__((section("emulator")))
struct Index {
    unsigned x, y;
};
static Index threadIdx OURS = {}, blockIdx OURS = {}, blockDim OURS = {}, gridDim OURS = {};
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

constexpr int MAX_THREADS = 1024, STACK_BYTES = 64 << 10, MOST_COPIES = 256;
constexpr int MOST_ALIGNMENT = 1024, PAGE = 4096, MOST_SHARED = 228 << 10;  // bytes; of all that a launch may ask for
constexpr long MOST_ROUNDS = 1 << 18;  // of a block

struct Copy {
    void* to;
    const void* from;
    int bytes, group;  // zeros behind so many bytes; groups that were closed before
    int width;
};

struct Fiber {
    jmp_buf at;
    bool has_begun, is_done;
    Copy copies[MOST_COPIES];  // begun and not waited for
    int copy_count, group_count, exchanges;
};

struct Barrier {
    int arrived;
    long generation;
};

// All that a block has but its shared memory and its stacks.
struct Block {
    Fiber fibers[MAX_THREADS];
    Barrier of_block, of_warps[MAX_THREADS / 32], of_teams[MAX_THREADS / 128];
    unsigned long long words[2][MAX_THREADS];  // of a shuffle; the next one has the others
    bool is_done, waits, yields;                // waits: for other blocks; yields: could go on
    bool is_spoilt;                             // its shared memory, which a launch asks for
    unsigned since;                             // epoch of its last barrier: what it did before is ordered
    long found_at;                              // of __syncthreads_or: which barrier, and what was found there
    bool found[2];
    char *stacks, *shared;                      // shared: what it had when it was put aside

    void begin();
};

static Block* now OURS = nullptr;
static jmp_buf scheduler OURS = {};
static ucontext_t fresh OURS = {}, caller OURS = {};
static const char* failure OURS = nullptr;
static unsigned long long random_state OURS = 0;
static int threads OURS = 0, running OURS = 0, moves OURS = 0;
static const void* const* given OURS = nullptr;  // where the kernel's arguments lie
static void (*body)() OURS = nullptr;
static unsigned cluster OURS = 1;
static long* arrivals OURS = nullptr;  // of each block: how often it has come to the cluster's barrier
alignas(PAGE) static char room[MOST_SHARED + PAGE] OURS = {};  // what launches ask for, at the end of all but a page
static int requested_bytes OURS = 0;

static void pause() {
    if (!_setjmp(now->fibers[running].at)) _longjmp(scheduler, 1);
}

[[noreturn]] static void fail(const char* what) {
    failure = what;
    _longjmp(scheduler, 1);
}

static void check_16(const volatile void* at) {
    if (reinterpret_cast<unsigned long long>(at) % 16) fail("16 bytes that are not aligned");
}

}  // namespace emulated

#include "emulated_races.h"

namespace emulated {

// Without what fibers have no use for before they write it: copies are most of a block.
void Block::begin() {
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.has_begun = fiber.is_done = false;
        fiber.copy_count = fiber.group_count = fiber.exchanges = 0;
    }
    of_block = {};
    memset(of_warps, 0, sizeof of_warps);
    memset(of_teams, 0, sizeof of_teams);
    is_done = is_spoilt = waits = found[0] = found[1] = false;
    found_at = 0;
    since = ++epoch;
}

// epoch: counts how often all have come
UNSEEN static void arrive(Barrier& barrier, int all, unsigned* epoch = nullptr) {
    const long generation = barrier.generation;
    if (++barrier.arrived == all) {
        if (epoch) ++*epoch;
        if (epoch == &emulated::epoch) now->since = *epoch;
        barrier.arrived = 0;
        ++barrier.generation;
        ++moves;
    }
    while (barrier.generation == generation) pause();
}

// Every lane of the warp leaves a value; what `read` makes of all of them.
template <class T, class Read> auto exchange(T mine, Read read) {
    static_assert(sizeof(T) <= 8);
    const int me = running, first = me / 32 * 32;
    unsigned long long* words = now->words[now->fibers[me].exchanges++ % 2];
    memcpy(words + me, &mine, sizeof mine);
    arrive(now->of_warps[first / 32], threads - first < 32 ? threads - first : 32);
    return read([=](int lane) {
        T found;
        memcpy(&found, words + first + lane, sizeof found);
        return found;
    });
}

template <class T> T take(T mine, int lane) {
    return exchange(mine, [=](auto of) { return of(lane); });
}

static void entry() {
    body();
    if (now->fibers[running].copy_count) fail("a copy that is not waited for");
    now->fibers[running].is_done = true;
    ++moves;
    _longjmp(scheduler, 1);
}

static void resume(int thread) {
    Fiber& fiber = now->fibers[thread];
    running = thread;
    threadIdx.x = thread;
    if (_setjmp(scheduler)) {
        in_kernel = false;
        return;
    }
    in_kernel = true;
    if (fiber.has_begun) _longjmp(fiber.at, 1);
    fiber.has_begun = true;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = now->stacks + thread * static_cast<size_t>(STACK_BYTES);
    fresh.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fresh, entry, 0);
    swapcontext(&caller, &fresh);
}

static int draw(int below) {
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<int>((random_state >> 33) % below);
}

// Where the shared memory lies that the launch has asked for. What nobody has written yet is no number; the first thread
// that comes is before all others.
static char* asked_room(int alignment) {
    char* const at = room + MOST_SHARED - (requested_bytes + alignment - 1) / alignment * alignment;
    if (!now->is_spoilt) memset(at, 0xff, room + MOST_SHARED - at);
    now->is_spoilt = true;
    return at;
}

// Of whoever touches what is not his.
static void on_fault(int) { fail("memory that is not the kernel's"); }

// For other blocks: a thread that looks at the clock.
static void wait_for_others() {
    now->waits = true;
    pause();
}

// Until it is done, or waits for others.
static void run_block() {
    for (long round = 0; !failure; ++round) {
        const int before = moves, first = draw(threads), step = draw(2) ? 1 : threads - 1;
        int left = 0;
        now->waits = now->yields = false;
        for (int i = 0, thread = first; i < threads && !failure; ++i, thread = (thread + step) % threads) {
            if (!now->fibers[thread].is_done) resume(thread);
            left += !now->fibers[thread].is_done;
        }
        now->is_done = !left;
        if (!left || failure) return;
        if (now->yields || (moves == before && now->waits)) return;
        if (moves == before) failure = "a barrier that not all threads reach";
        if (round == MOST_ROUNDS) failure = "it does not end";
    }
}

// Blocks by turns; what waits is put aside with its shared memory.
static void run_blocks(unsigned count) {
    const size_t own_bytes = &_end - &__bss_start, stack_bytes = threads * static_cast<size_t>(STACK_BYTES);
    const size_t shared_bytes = own_bytes + requested_bytes + MOST_ALIGNMENT;
    const auto move = [&](char* aside, bool is_back) {
        char* const pieces[] = {&__bss_start, room + MOST_SHARED - (shared_bytes - own_bytes)};
        const size_t sizes[] = {own_bytes, shared_bytes - own_bytes};
        for (int i = 0; i < 2; aside += sizes[i++])
            is_back ? memcpy(pieces[i], aside, sizes[i]) : memcpy(aside, pieces[i], sizes[i]);
    };
    Block** const waiting = static_cast<Block**>(calloc(count, sizeof(Block*)));
    unsigned done = 0, begun = 0;
    now = nullptr;
    while (done < count && !failure) {
        const int before = moves;
        for (unsigned i = 0; i < count && !failure; ++i) {
            if (i < begun && !waiting[i]) continue;
            if (i < begun) {
                now = waiting[i];
                move(now->shared, true);
            } else {
                ++begun;
                if (!now) {
                    now = static_cast<Block*>(malloc(sizeof(Block)));
                    now->stacks = static_cast<char*>(malloc(stack_bytes));
                    now->shared = nullptr;
                }
                now->begin();
            }
            blockIdx = {i % gridDim.x, i / gridDim.x};
            run_block();
            if (now->is_done) {  // what it had is the next one's
                waiting[i] = nullptr;
                ++done;
                if (begun == count) {
                    free(now->stacks), free(now->shared), free(now);
                    now = nullptr;
                }
            } else {
                if (!now->shared) now->shared = static_cast<char*>(malloc(shared_bytes));
                move(now->shared, false);
                waiting[i] = now;
                now = nullptr;
            }
        }
        if (moves == before && !failure) failure = "blocks that wait for each other";
    }
    free(waiting);
}

template <class T> T argument(int i) {
    T value;
    memcpy(&value, given[i], sizeof value);
    return value;
}

template <auto kernel, class... P, size_t... I> void call(std::index_sequence<I...>) { kernel(argument<P>(I)...); }

// What is wrong; nullptr: nothing.
template <auto kernel, class... P>
const char* launch(void (*)(P...), unsigned blocks, unsigned down, unsigned blocks_of_cluster, int block_threads,
                   int shared_bytes, const void* const* arguments) {
    threads = block_threads;
    requested_bytes = shared_bytes;
    cluster = blocks_of_cluster;
    arrivals = static_cast<long*>(calloc(blocks * down, sizeof(long)));
    given = arguments;
    failure = nullptr;
    random_state = 0;  // the same every time
    gridDim = {blocks, down};
    blockDim.x = block_threads;
    body = [] { call<kernel, P...>(std::index_sequence_for<P...>{}); };
    struct sigaction before, ours = {};
    ours.sa_handler = on_fault;
    ours.sa_flags = SA_NODEFER;  // it does not return
    begin_judging();
    mprotect(room + MOST_SHARED, PAGE, PROT_NONE);
    sigaction(SIGSEGV, &ours, &before);
    run_blocks(blocks * down);
    sigaction(SIGSEGV, &before, nullptr);
    end_judging();
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
    extern "C" const char* run(unsigned blocks, unsigned down, unsigned cluster, int threads,            \
                               int shared_bytes, const void* const* given) {                             \
        return emulated::launch<__VA_ARGS__>(__VA_ARGS__, blocks, down, cluster, threads, shared_bytes,  \
                                             given);                                                     \
    }

// -- what kernels call ---------------------------------------------------------------------------------------------

static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static void __syncthreads() { emulated::arrive(emulated::now->of_block, emulated::threads, &emulated::epoch); }

static bool __syncthreads_or(bool mine) {
    emulated::Block* const block = emulated::now;
    const long at = block->of_block.generation + 1;  // none is 0
    if (block->found_at != at) block->found_at = at, block->found[at % 2] = false;
    block->found[at % 2] |= mine;
    __syncthreads();
    return block->found[at % 2];
}

static void __syncwarp() {
    const int first = emulated::running / 32 * 32;
    const int all = emulated::threads - first < 32 ? emulated::threads - first : 32;
    emulated::arrive(emulated::now->of_warps[first / 32], all, &emulated::warp_epochs[first / 32]);
}

template <class T> T __shfl_sync(unsigned, T v, int lane, int width = 32) {
    const int me = threadIdx.x % 32;
    return emulated::take(v, me / width * width + lane % width);
}
template <class T> T __shfl_up_sync(unsigned, T v, int by, int width = 32) {
    const int me = threadIdx.x % 32;
    return emulated::take(v, me % width < by ? me : me - by);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return emulated::take(v, threadIdx.x % 32 ^ mask); }
static unsigned __ballot_sync(unsigned, bool is_so) {
    return emulated::exchange(is_so, [](auto of) {
        unsigned found = 0;
        for (int lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(of(lane)) << lane;
        return found;
    });
}
static bool __any_sync(unsigned all, bool is_so) { return __ballot_sync(all, is_so) != 0; }

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
    unsigned made = 0;
    for (int i = 0; i < 4; ++i) made |= static_cast<unsigned>(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return made;
}
static float __int_as_float(int bits) { return same_bits<float>(bits); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // the C library has one of its own
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
UNSEEN static unsigned atomicAdd(unsigned* at, unsigned by) {
    emulated::acquire(at), emulated::release(at);
    return (*at += by) - by;
}
UNSEEN static unsigned long long atomicMin(unsigned long long* at, unsigned long long v) {
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
template <class T> T __ldcg(const T* from) {
    if (sizeof(T) == 16) emulated::check_16(from);
    return *from;
}
template <class T> void __stcs(T* to, T value) {
    if (sizeof(T) == 16) emulated::check_16(to);
    *to = value;
}
#ifdef RANDOM_DELAYS
static void __nanosleep(unsigned) {  // others go first
    emulated::now->yields = true;
    ++emulated::moves;
    emulated::pause();
}
#else
static void __nanosleep(unsigned) { emulated::fail("waits for a block that has not run yet"); }
#endif
static void ptx_clock(unsigned& now) { now = emulated::draw(1 << 30); }

// -- PTX -----------------------------------------------------------------------------------------------------------

alignas(1024) static char shared_base;  // where shared memory's 32-bit addresses are counted from
static size_t __cvta_generic_to_shared(const void* at) { return static_cast<const char*>(at) - &shared_base; }

// A value and its flag, for blocks that may already look: what they found until now must have been nothing.
UNSEEN static void ptx_store_b128(void* to, unsigned long long low, unsigned long long high) {
    const unsigned long long nothing[] = {0, 0}, both[] = {low, high};
    emulated::check_16(to);
    if (memcmp(to, nothing, 16)) emulated::fail("published where it was not cleared");
    emulated::release(to);
    memcpy(to, both, 16);
}
UNSEEN static void ptx_store_tagged(void* to, unsigned long long low, unsigned long long high) {
    const unsigned long long both[] = {low, high};
    emulated::check_16(to);
    emulated::release(to);
    memcpy(to, both, 16);
    ++emulated::moves;
}
UNSEEN static void ptx_load_b128(unsigned long long& low, unsigned long long& high, const void* from) {
    emulated::check_16(from);
    emulated::acquire(from);
    memcpy(&low, from, 8);
    memcpy(&high, static_cast<const char*>(from) + 8, 8);
}
// There when it is waited for, not before.
static void ptx_copy_async_narrow(unsigned to, const void* from, int width, int bytes) {
    emulated::Fiber& fiber = emulated::now->fibers[emulated::running];
    char* const there = &shared_base + static_cast<int>(to);
    if ((reinterpret_cast<size_t>(from) | reinterpret_cast<size_t>(there)) % width) emulated::fail("a copy that is not aligned");
    if (fiber.copy_count == emulated::MOST_COPIES) emulated::fail("more copies than are kept here");
    fiber.copies[fiber.copy_count++] = {there, from, bytes, fiber.group_count, width};
}
static void ptx_copy_async(unsigned to, const void* from, int bytes = 16) { ptx_copy_async_narrow(to, from, 16, bytes); }
static void ptx_close_copies() { ++emulated::now->fibers[emulated::running].group_count; }
// Those of all groups but the last `left`.
static void ptx_wait_for_groups(int left) {
    emulated::Fiber& fiber = emulated::now->fibers[emulated::running];
    int kept = 0;
    for (int i = 0; i < fiber.copy_count; ++i) {
        const emulated::Copy copy = fiber.copies[i];
        if (copy.group >= fiber.group_count - left) {
            fiber.copies[kept++] = copy;
            continue;
        }
        emulated::touch(copy.from, copy.bytes, false);
        emulated::touch(copy.to, copy.width, true);
        memset(copy.to, 0, copy.width);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    fiber.copy_count = kept;
}
static void ptx_wait_for_copies() {
    ptx_close_copies();
    ptx_wait_for_groups(0);
}

// Lanes 8 m to 8 m + 7 name the rows of matrix m, 16 bytes each; lane (g, q) gets word q of row g of every matrix.
static void ptx_load_matrices(unsigned& first, unsigned& second, unsigned& third, unsigned& fourth, unsigned at) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    unsigned* const made[] = {&first, &second, &third, &fourth};
    emulated::exchange(at, [&](auto of) {
        for (int m = 0; m < 4; ++m) {
            const char* const row = &shared_base + static_cast<int>(of(8 * m + g));
            emulated::check_16(row);
            memcpy(made[m], row + 4 * q, 4);
        }
        return 0;
    });
}

// Numbers in 16 bits; two in a word, the first operand in the upper half.
static void ptx_from_f16(float& wide, unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : ldexpf(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
    wide = bits >> 15 ? -size : size;
}
static unsigned half_bits(float v) {  // rounded to even
    const unsigned bits = __float_as_uint(v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (v != v) return 0x7fff;
    if (fabsf(v) >= 65520) return sign | 0x7c00;
    if (fabsf(v) < ldexpf(1, -14)) return sign | static_cast<unsigned>(nearbyintf(ldexpf(fabsf(v), 24)));
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
static void ptx_pack_f16(unsigned& word, float upper, float lower) { word = half_bits(upper) << 16 | half_bits(lower); }
static unsigned upper_half(float v) {  // rounded to even
    const unsigned bits = __float_as_uint(v);
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static void ptx_pack_bf16(unsigned& word, float upper, float lower) {
    word = upper_half(upper) << 16 | upper_half(lower);
}
static void ptx_round_tf32(unsigned& rounded, float v) {
    rounded = std::isfinite(v) ? (__float_as_uint(v) + 0x1000) & 0xffffe000 : __float_as_uint(v);
}
static void ptx_from_e4m3(unsigned& word, unsigned short pair) {
    float wide[2];
    for (int i = 0; i < 2; ++i) {
        const int bits = pair >> 8 * i, exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = (bits & 127) == 127 ? NAN : ldexpf(exponent ? 8 + fraction : fraction, (exponent ? exponent : 1) - 10);
        wide[i] = bits & 128 ? -size : size;
    }
    ptx_pack_f16(word, wide[1], wide[0]);
}
static unsigned e4m3_bits(float v) {  // rounded to even; what is too large is the largest
    const unsigned sign = __float_as_uint(v) >> 24 & 128;
    if (v != v) return 127;
    const float size = fabsf(v);
    if (size >= 448) return sign | 126;
    const int exponent = size == 0 || ilogbf(size) < -6 ? -6 : ilogbf(size);
    const int steps = nearbyintf(ldexpf(size, 3 - exponent));  // 16 of them are the next exponent's 8
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
static void ptx_f16_of_double(unsigned short& bits, double v) {  // rounded once: what is left fits a float
    const int exponent = v == 0 || !std::isfinite(v) ? 0 : ilogb(v);
    const double step = ldexp(1, (exponent < -14 ? -14 : exponent) - 10);
    bits = half_bits(std::isfinite(v) ? nearbyint(v / step) * step : v);
}

// Approximations are as wrong as the chip's may be, one way or the other; what is below the normal numbers is 0.
static float flushed(double v) { return std::fabs(v) < ldexp(1, -126) ? std::copysign(0.0, v) : v; }
static double off_by(double v, double error, float given) {
    return v * (__float_as_uint(given) % 7 < 3 ? 1 - error : 1 + error);
}
static void ptx_exp2(float& result, float v) { result = flushed(off_by(exp2(flushed(v)), ldexp(1, -22), v)); }
static void ptx_inverse(float& result, float v) { result = flushed(off_by(1.0 / flushed(v), ldexp(1, -23), v)); }
static void ptx_tanh(float& result, float v) { result = off_by(tanh(v), ldexp(1, -11), v); }
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
// What blocks hand to each other; a reader may come too early, a writer never twice.
// Two bytes as bf16, by what the instructions do to each.
static void ptx_widen_bytes(unsigned& made, unsigned word, unsigned which, unsigned less, unsigned half) {
    const unsigned both = __byte_perm(word, 0x43434343, which);
    made = 0;
    for (int i = 0; i < 2; ++i) {
        const auto number = [=](unsigned two) { return __uint_as_float((two >> 16 * i & 0xffff) << 16); };
        const float a = number(both) + number(less), b = number(both) * number(half);
        made |= __float_as_uint(a < b ? a : b) >> 16 << 16 * i;
    }
}
UNSEEN static void ptx_store_word(void* to, unsigned word) {
    emulated::release(to);
    *static_cast<unsigned*>(to) = word;
}
UNSEEN static void ptx_store_four(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
    emulated::check_16(to);
    const unsigned words[] = {a, b, c, d};
    emulated::release(to);
    memcpy(to, words, 16);
}
UNSEEN static void ptx_load_four(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
    emulated::check_16(from);
    const unsigned* words = static_cast<const unsigned*>(from);
    for (int i = 0; i < 4; ++i) emulated::acquire(words + i);  // each may have another writer
    a = words[0], b = words[1], c = words[2], d = words[3];
}
static void ptx_time(unsigned long long& now) {
    now = 0;
    emulated::wait_for_others();
}
template <class... Operands> void ptx_unknown(Operands&&...) { emulated::fail("PTX that has no twin on the host"); }
