// Race detector: two threads of a launch access a byte, one of them writes it, and no synchronisation orders the two.
// With -fsanitize=thread g++ calls the hooks below for every access, instead of its runtime library.
//
// In a block, __syncthreads, cluster barriers and, within a warp, __syncwarp order accesses; shuffles do not. Between
// blocks, for global memory: a store by st.relaxed, an atomic or a volatile releases the block's earlier accesses to
// blocks that load the word the same way. Checking stops at the first mbarrier wait of a launch. A byte remembers its
// readers in the last two blocks.
#pragma once

#define NO_TSAN __attribute__((no_sanitize("thread")))

namespace emulated {

static unsigned epoch HOST_DATA = 1, warp_epochs[MAX_THREADS / 32] HOST_DATA = {};  // count barriers and releases
static bool checks_races HOST_DATA = false, in_kernel HOST_DATA = false;  // in_kernel: not in the scheduler
extern "C" __attribute__((visibility("hidden"))) char __bss_start, _end, __start_emulator, __stop_emulator;

}  // namespace emulated

#ifndef __SANITIZE_THREAD__

namespace emulated {
static void record_access(const void*, long, bool) {}
static void acquire(const volatile void*) {}
static void release(const volatile void*) {}
static void begin_race_check() {}
static void end_race_check() {}
}  // namespace emulated

#else

namespace emulated {

constexpr signed char MULTIPLE = -1;
constexpr unsigned MAX_BLOCKS = 4096;
constexpr size_t PAGES = 1 << 16;  // of the hash table

// The last access to a byte: thread and epoch.
struct Access {
    unsigned epoch, warp_epoch;
    unsigned short block;
    signed char warp, lane;  // or MULTIPLE
};
struct ShadowByte {
    Access write, read, other_read;  // other_read: by another block
};
// The last release of a word: block and epoch.
struct Release {
    unsigned short block;
    unsigned epoch;
};
struct ShadowPage {
    const char* at;
    ShadowByte bytes[PAGE];
    Release words[PAGE / 4];
};
static ShadowByte* shadow HOST_DATA = nullptr;  // dynamic, then static
static ShadowPage** pages HOST_DATA = nullptr;         // of global memory
static unsigned* clocks HOST_DATA = nullptr;       // (blocks, blocks): [a][b]: b's epochs up to it happen before a
static unsigned first_epoch HOST_DATA = 0, blocks HOST_DATA = 0;  // of the launch

NO_TSAN static ShadowPage& page_of(const char* at) {
    const char* const begin = at - reinterpret_cast<size_t>(at) % PAGE;
    size_t slot = reinterpret_cast<size_t>(begin) / PAGE * 0x9e3779b97f4a7c15ULL >> 48;
    for (size_t tries = 0; pages[slot] && pages[slot]->at != begin; slot = (slot + 1) % PAGES)
        if (++tries == PAGES) fail("too much memory for the race detector");
    if (!pages[slot]) {
        pages[slot] = static_cast<ShadowPage*>(mmap(nullptr, sizeof(ShadowPage), PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        pages[slot]->at = begin;
    }
    return *pages[slot];
}
NO_TSAN static unsigned short this_block() { return blockIdx.y * gridDim.x + blockIdx.x; }

NO_TSAN static bool is_race(const Access& last, const Access& access, bool is_shared) {
    if (last.epoch < first_epoch) return false;
    if (last.block != access.block) return !is_shared && last.epoch > clocks[access.block * blocks + last.block];
    if (last.epoch < current->last_barrier) return false;
    return last.warp != access.warp || (last.warp_epoch == access.warp_epoch && last.lane != access.lane);
}
NO_TSAN static void update(Access& last, const Access& access) {
    if (last.epoch < current->last_barrier || last.block != access.block) {
        last = access;
        return;
    }
    last.epoch = access.epoch;
    if (last.warp != access.warp) last.warp = MULTIPLE;
    else if (last.warp_epoch != access.warp_epoch) last.warp_epoch = access.warp_epoch, last.lane = access.lane;
    else if (last.lane != access.lane) last.lane = MULTIPLE;
}
NO_TSAN static bool is_in(const char* at, const void* begin, size_t bytes) {
    return at >= begin && at < static_cast<const char*>(begin) + bytes;
}
NO_TSAN static void record_access(const void* at, long size, bool is_write) {
    if (!checks_races || !in_kernel) return;
    const char* const from = static_cast<const char*>(at);
    const bool is_dynamic = is_in(from, smem, MAX_SHARED), is_static = is_in(from, &__bss_start, &_end - &__bss_start);
    const bool is_shared = is_dynamic || is_static;
    if (!is_shared && is_in(from, &__start_emulator, &__stop_emulator - &__start_emulator)) return;
    if (!is_shared && is_in(from, current, sizeof(Block))) return;
    if (!is_shared && is_in(from, current->stacks, threads * static_cast<size_t>(STACK_BYTES))) return;  // stack
    const Access access = {epoch, warp_epochs[running / 32], this_block(), static_cast<signed char>(running / 32),
                           static_cast<signed char>(running % 32)};
    for (const char* each = from; each < from + size; ++each) {
        ShadowByte& byte = is_dynamic  ? shadow[each - smem]
                           : is_static ? shadow[MAX_SHARED + (each - &__bss_start)]
                                       : page_of(each).bytes[reinterpret_cast<size_t>(each) % PAGE];
        const bool has_race = is_race(byte.write, access, is_shared) ||
                              (is_write && (is_race(byte.read, access, is_shared) ||
                                            is_race(byte.other_read, access, is_shared)));
        if (has_race && is_shared) fail(is_write ? "race: unordered write" : "race: unordered read");
        if (has_race) fail(is_write ? "global memory race: unordered write" : "global memory race: unordered read");
        if (!is_write && byte.read.block != access.block) byte.other_read = byte.read;
        update(is_write ? byte.write : byte.read, access);
    }
}

NO_TSAN static Release& word_of(const volatile void* at) {
    const char* const from = const_cast<const char*>(static_cast<const volatile char*>(at));
    return page_of(from).words[reinterpret_cast<size_t>(from) % PAGE / 4];
}
// The loaded word acquires its writer's earlier accesses, and all that those had acquired.
NO_TSAN static void acquire(const volatile void* at) {
    if (!checks_races || !in_kernel) return;
    const Release& word = word_of(at);
    if (word.epoch < first_epoch || word.block == this_block()) return;
    unsigned* const access = clocks + this_block() * blocks;
    const unsigned* const released = clocks + word.block * blocks;
    for (unsigned i = 0; i < blocks; ++i)
        if (released[i] > access[i]) access[i] = released[i];
    if (word.epoch > access[word.block]) access[word.block] = word.epoch;
}
NO_TSAN static void release(const volatile void* at) {
    if (!checks_races || !in_kernel) return;
    word_of(at) = {this_block(), epoch++};
}

NO_TSAN static void begin_race_check() {
    if (!shadow) shadow = static_cast<ShadowByte*>(calloc(MAX_SHARED + (&_end - &__bss_start), sizeof(ShadowByte)));
    first_epoch = ++epoch;
    blocks = gridDim.x * gridDim.y;
    checks_races = blocks <= MAX_BLOCKS;
    pages = static_cast<ShadowPage**>(calloc(PAGES, sizeof(ShadowPage*)));
    clocks = static_cast<unsigned*>(calloc(checks_races ? blocks * static_cast<size_t>(blocks) : 1, sizeof(unsigned)));
}
NO_TSAN static void end_race_check() {
    for (size_t i = 0; i < PAGES; ++i)
        if (pages[i]) munmap(pages[i], sizeof(ShadowPage));
    free(pages), free(clocks);
}

}  // namespace emulated

// Hooks called by g++.
#define HIDDEN extern "C" NO_TSAN __attribute__((visibility("hidden")))
#define ON_ACCESS(name, size)                                                                 \
    HIDDEN void __tsan_##name##read##size(void* at) { emulated::record_access(at, size, false); } \
    HIDDEN void __tsan_##name##write##size(void* at) { emulated::record_access(at, size, true); }
ON_ACCESS(, 1) ON_ACCESS(, 2) ON_ACCESS(, 4) ON_ACCESS(, 8) ON_ACCESS(, 16)
ON_ACCESS(unaligned_, 2) ON_ACCESS(unaligned_, 4) ON_ACCESS(unaligned_, 8) ON_ACCESS(unaligned_, 16)
#define ON_VOLATILE(size)                                                       \
    HIDDEN void __tsan_volatile_read##size(void* at) { emulated::acquire(at); } \
    HIDDEN void __tsan_volatile_write##size(void* at) { emulated::release(at); }
ON_VOLATILE(1) ON_VOLATILE(2) ON_VOLATILE(4) ON_VOLATILE(8) ON_VOLATILE(16)
HIDDEN void __tsan_read_range(void* at, long size) { emulated::record_access(at, size, false); }
HIDDEN void __tsan_write_range(void* at, long size) { emulated::record_access(at, size, true); }
HIDDEN void __tsan_init() {}
HIDDEN void __tsan_func_entry(void*) {}
HIDDEN void __tsan_func_exit() {}

#endif
