// Finds races of the threads of a launch for memory: two of them touch a byte, one writes it, and nothing orders the two.
// With -fsanitize=thread g++ calls us for every access, in the place of a library of its own.
//
// In a block, accesses are ordered by a barrier of all threads, of a cluster or, within a warp, by __syncwarp; shuffles
// order nothing. Between blocks, for global memory: what a block did before it stored a word by st.relaxed, an atomic or a
// volatile is ordered before what another block does after it has loaded that word so. Warps that wait for each other by
// other means (mbarriers) are not judged from there on. Of the threads that read a byte the last two blocks are kept.
#pragma once

#define UNSEEN __attribute__((no_sanitize("thread")))

namespace emulated {

static unsigned epoch OURS = 1, warp_epochs[MAX_THREADS / 32] OURS = {};  // count barriers, and words that were released
static bool is_verified OURS = false, in_kernel OURS = false;  // in_kernel: a thread of the kernel runs, not the scheduler
extern "C" __attribute__((visibility("hidden"))) char __bss_start, _end, __start_emulator, __stop_emulator;

}  // namespace emulated

#ifndef __SANITIZE_THREAD__

namespace emulated {
static void touch(const void*, long, bool) {}
static void acquire(const volatile void*) {}
static void release(const volatile void*) {}
static void begin_judging() {}
static void end_judging() {}
}  // namespace emulated

#else

namespace emulated {

constexpr signed char SEVERAL = -1;
constexpr unsigned MAX_BLOCKS = 4096;
constexpr size_t PAGES = 1 << 16;  // of the hash table

// Who touched a byte last, and when.
struct Touch {
    unsigned epoch, warp_epoch;
    unsigned short block;
    signed char warp, lane;  // or SEVERAL
};
struct Byte {
    Touch write, read, read_before;  // read_before: by another block
};
// A word that orders blocks: who stored it, and when.
struct Release {
    unsigned short block;
    unsigned epoch;
};
struct Page {
    const char* at;
    Byte bytes[PAGE];
    Release words[PAGE / 4];
};
static Byte* bytes_of_room OURS = nullptr;  // MOST_SHARED, then those of .bss
static Page** pages OURS = nullptr;         // of global memory
static unsigned* seen OURS = nullptr;       // (blocks, blocks): [a][b] is up to which epoch b's work is before a's
static unsigned first_epoch OURS = 0, blocks OURS = 0;  // of the launch

UNSEEN static Page& page_of(const char* at) {
    const char* const begin = at - reinterpret_cast<size_t>(at) % PAGE;
    size_t slot = reinterpret_cast<size_t>(begin) / PAGE * 0x9e3779b97f4a7c15ULL >> 48;
    for (size_t tries = 0; pages[slot] && pages[slot]->at != begin; slot = (slot + 1) % PAGES)
        if (++tries == PAGES) fail("more memory than races are looked for in");
    if (!pages[slot]) {
        pages[slot] = static_cast<Page*>(mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        pages[slot]->at = begin;
    }
    return *pages[slot];
}
UNSEEN static unsigned short this_block() { return blockIdx.y * gridDim.x + blockIdx.x; }

UNSEEN static bool races(const Touch& touch, const Touch& mine, bool is_shared) {
    if (touch.epoch < first_epoch) return false;
    if (touch.block != mine.block) return !is_shared && touch.epoch > seen[mine.block * blocks + touch.block];
    if (touch.epoch < now->since) return false;
    return touch.warp != mine.warp || (touch.warp_epoch == mine.warp_epoch && touch.lane != mine.lane);
}
UNSEEN static void note(Touch& touch, const Touch& mine) {
    if (touch.epoch < now->since || touch.block != mine.block) {
        touch = mine;
        return;
    }
    touch.epoch = mine.epoch;
    if (touch.warp != mine.warp) touch.warp = SEVERAL;
    else if (touch.warp_epoch != mine.warp_epoch) touch.warp_epoch = mine.warp_epoch, touch.lane = mine.lane;
    else if (touch.lane != mine.lane) touch.lane = SEVERAL;
}
UNSEEN static bool is_in(const char* at, const void* begin, size_t bytes) {
    return at >= begin && at < static_cast<const char*>(begin) + bytes;
}
UNSEEN static void touch(const void* at, long size, bool is_write) {
    if (!is_verified || !in_kernel) return;
    const char* const from = static_cast<const char*>(at);
    const bool is_requested = is_in(from, room, MOST_SHARED), is_static = is_in(from, &__bss_start, &_end - &__bss_start);
    const bool is_shared = is_requested || is_static;
    if (!is_shared && is_in(from, &__start_emulator, &__stop_emulator - &__start_emulator)) return;
    if (!is_shared && is_in(from, now, sizeof(Block))) return;
    if (!is_shared && is_in(from, now->stacks, threads * static_cast<size_t>(STACK_BYTES))) return;  // a thread's own
    const Touch mine = {epoch, warp_epochs[running / 32], this_block(), static_cast<signed char>(running / 32),
                        static_cast<signed char>(running % 32)};
    for (const char* each = from; each < from + size; ++each) {
        Byte& byte = is_requested    ? bytes_of_room[each - room]
                     : is_static ? bytes_of_room[MOST_SHARED + (each - &__bss_start)]
                                 : page_of(each).bytes[reinterpret_cast<size_t>(each) % PAGE];
        const bool is_raced = races(byte.write, mine, is_shared) ||
                              (is_write && (races(byte.read, mine, is_shared) || races(byte.read_before, mine, is_shared)));
        if (is_raced && is_shared) fail(is_write ? "a race: it writes what others touch" : "a race: it reads what another writes");
        if (is_raced) fail(is_write ? "a race for global memory: it writes what others touch"
                                    : "a race for global memory: it reads what another writes");
        if (!is_write && byte.read.block != mine.block) byte.read_before = byte.read;
        note(is_write ? byte.write : byte.read, mine);
    }
}

UNSEEN static Release& word_of(const volatile void* at) {
    const char* const from = const_cast<const char*>(static_cast<const volatile char*>(at));
    return page_of(from).words[reinterpret_cast<size_t>(from) % PAGE / 4];
}
// A word was loaded: what its writer did before it stored that, and what it knew of others then, is before us.
UNSEEN static void acquire(const volatile void* at) {
    if (!is_verified || !in_kernel) return;
    const Release& word = word_of(at);
    if (word.epoch < first_epoch || word.block == this_block()) return;
    unsigned* const mine = seen + this_block() * blocks;
    const unsigned* const theirs = seen + word.block * blocks;
    for (unsigned i = 0; i < blocks; ++i)
        if (theirs[i] > mine[i]) mine[i] = theirs[i];
    if (word.epoch > mine[word.block]) mine[word.block] = word.epoch;
}
UNSEEN static void release(const volatile void* at) {
    if (!is_verified || !in_kernel) return;
    word_of(at) = {this_block(), epoch++};
}

UNSEEN static void begin_judging() {
    if (!bytes_of_room) bytes_of_room = static_cast<Byte*>(calloc(MOST_SHARED + (&_end - &__bss_start), sizeof(Byte)));
    first_epoch = ++epoch;
    blocks = gridDim.x * gridDim.y;
    is_verified = blocks <= MAX_BLOCKS;
    pages = static_cast<Page**>(calloc(PAGES, sizeof(Page*)));
    seen = static_cast<unsigned*>(calloc(is_verified ? blocks * static_cast<size_t>(blocks) : 1, sizeof(unsigned)));
}
UNSEEN static void end_judging() {
    for (size_t i = 0; i < PAGES; ++i)
        if (pages[i]) munmap(pages[i], sizeof(Page));
    free(pages), free(seen);
}

}  // namespace emulated

// What g++ calls.
#define HIDDEN extern "C" UNSEEN __attribute__((visibility("hidden")))
#define TELL_BOTH(name, size)                                                                 \
    HIDDEN void __tsan_##name##read##size(void* at) { emulated::touch(at, size, false); }     \
    HIDDEN void __tsan_##name##write##size(void* at) { emulated::touch(at, size, true); }
TELL_BOTH(, 1) TELL_BOTH(, 2) TELL_BOTH(, 4) TELL_BOTH(, 8) TELL_BOTH(, 16)
TELL_BOTH(unaligned_, 2) TELL_BOTH(unaligned_, 4) TELL_BOTH(unaligned_, 8) TELL_BOTH(unaligned_, 16)
#define ORDER_BOTH(size)                                                        \
    HIDDEN void __tsan_volatile_read##size(void* at) { emulated::acquire(at); } \
    HIDDEN void __tsan_volatile_write##size(void* at) { emulated::release(at); }
ORDER_BOTH(1) ORDER_BOTH(2) ORDER_BOTH(4) ORDER_BOTH(8) ORDER_BOTH(16)
HIDDEN void __tsan_read_range(void* at, long size) { emulated::touch(at, size, false); }
HIDDEN void __tsan_write_range(void* at, long size) { emulated::touch(at, size, true); }
HIDDEN void __tsan_init() {}
HIDDEN void __tsan_func_entry(void*) {}
HIDDEN void __tsan_func_exit() {}

#endif
