// Tells of shared memory that threads of a block race for, as compute-sanitizer's racecheck does: two of them touch a
// byte, one writes it, and no barrier lies between. With -fsanitize=thread g++ calls us for every access, in the place of
// a library of its own. Warps that wait for each other by other means than a barrier of all threads, or of a warp or a
// cluster, are not judged from there on.
#pragma once

#define UNSEEN __attribute__((no_sanitize("thread")))

namespace emulated {

static unsigned epoch OURS = 1, warp_epochs[MOST_THREADS / 32] OURS = {};  // barriers are counted
static bool is_judged OURS = false;
extern "C" __attribute__((visibility("hidden"))) char __bss_start, _end;

}  // namespace emulated

#ifndef __SANITIZE_THREAD__

namespace emulated {
static void touch(const void*, long, bool) {}
static void begin_judging() {}
}  // namespace emulated

#else

namespace emulated {

constexpr short SEVERAL = -1;

// Who touched a byte last, and when.
struct Touch {
    unsigned epoch, warp_epoch;  // of the block, and of the warp, since it began
    short warp, lane;            // or SEVERAL
};
struct Byte {
    Touch write, read;
};
static Byte* bytes_of_room OURS = nullptr;  // MOST_SHARED, then those of .bss

UNSEEN static bool races(const Touch& touch, short warp, short lane) {
    if (touch.epoch != epoch) return false;
    return touch.warp != warp || (touch.warp_epoch == warp_epochs[warp] && touch.lane != lane);
}
UNSEEN static void note(Touch& touch, short warp, short lane) {
    if (touch.epoch != epoch) touch = {epoch, warp_epochs[warp], warp, lane};
    else if (touch.warp != warp) touch.warp = SEVERAL;
    else if (touch.warp_epoch != warp_epochs[warp]) touch.warp_epoch = warp_epochs[warp], touch.lane = lane;
    else if (touch.lane != lane) touch.lane = SEVERAL;
}
UNSEEN static void touch(const void* at, long size, bool is_write) {
    const char* const from = static_cast<const char*>(at);
    long first = from - room;
    if (!is_judged) return;
    if (first < 0 || first >= MOST_SHARED) {
        if (from < &__bss_start || from >= &_end) return;
        first = MOST_SHARED + (from - &__bss_start);
    }
    const short warp = running / 32, lane = running % 32;
    for (long i = first; i < first + size; ++i) {
        Byte& byte = bytes_of_room[i];
        if (races(byte.write, warp, lane) || (is_write && races(byte.read, warp, lane)))
            fail(is_write ? "a race: it writes what others touch" : "a race: it reads what another writes");
        note(is_write ? byte.write : byte.read, warp, lane);
    }
}

UNSEEN static void begin_judging() {
    if (!bytes_of_room) bytes_of_room = static_cast<Byte*>(calloc(MOST_SHARED + (&_end - &__bss_start), sizeof(Byte)));
    is_judged = true;
}

}  // namespace emulated

// What g++ calls.
#define HIDDEN extern "C" UNSEEN __attribute__((visibility("hidden")))
#define TELL_BOTH(name, size)                                                                 \
    HIDDEN void __tsan_##name##read##size(void* at) { emulated::touch(at, size, false); }     \
    HIDDEN void __tsan_##name##write##size(void* at) { emulated::touch(at, size, true); }
TELL_BOTH(, 1) TELL_BOTH(, 2) TELL_BOTH(, 4) TELL_BOTH(, 8) TELL_BOTH(, 16)
TELL_BOTH(unaligned_, 2) TELL_BOTH(unaligned_, 4) TELL_BOTH(unaligned_, 8) TELL_BOTH(unaligned_, 16)
HIDDEN void __tsan_read_range(void* at, long size) { emulated::touch(at, size, false); }
HIDDEN void __tsan_write_range(void* at, long size) { emulated::touch(at, size, true); }
HIDDEN void __tsan_init() {}
HIDDEN void __tsan_func_entry(void*) {}
HIDDEN void __tsan_func_exit() {}

#endif
