// Instead of mma/tma.cuh, on the host: a box is there as soon as it is asked for, and a signal counts.
#pragma once

#include "mma/cluster.cuh"

#include "common/dtype.cuh"

#undef SHARED_ALIGNMENT
#define SHARED_ALIGNMENT 1024  // places are mixed by their address

struct __align__(64) TensorMap {
    unsigned long long words[16];  // as fake_cuda.py encodes it
};

static u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
static char* shared_place(u32 address) { return &shared_base + static_cast<int>(address); }
// Of rows of so many bytes.
static char* mixed(u32 address, int line_bytes = 128) {
    return shared_place(address ^ (address >> 7 & (line_bytes / 16 - 1)) << 4);
}

struct Signal {
    unsigned short count, left;
    int turns_bytes;  // how often it has turned, in the highest bit, and the bytes that are missing

    void init(u32 of) { count = left = of, turns_bytes = 0; }
    int bytes() const { return turns_bytes << 1 >> 1; }
    void add(int more) {
        turns_bytes = (turns_bytes & 1 << 31) | ((bytes() + more) & ~(1 << 31));
        if (left == 0 && bytes() == 0) {
            turns_bytes ^= 1 << 31;
            left = count;
            ++emulated::moves;
        }
    }
    void arrive() {
        if (!left) emulated::fail("more arrive than the signal is for");
        --left;
        add(0);
    }
    void arrive_expecting(u32 bytes) {
        turns_bytes += bytes;
        arrive();
    }
    void wait(u32 parity) {
        emulated::is_verified = false;
        while (static_cast<u32>(turns_bytes) >> 31 == parity) emulated::pause();
    }
};
static void show_signals() {}

// A number of float32 that came as tf32: to 10 bits behind the point.
static void round_number(char* at) {
    u32 bits;
    memcpy(&bits, at, 4);
    if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0x1000) & 0xffffe000;
    memcpy(at, &bits, 4);
}

// Rank, sizes, bytes from line to line and the box's sizes stand behind the pointer; last, whether to round.
static void load_box(void* to, const TensorMap& map, Signal& signal, int x, int y, int z = 0, int t = 0) {
    const unsigned long long* told = map.words;
    const int rank = told[1], begin[4] = {x, y, z, t};
    const unsigned long long *sizes = told + 2, *strides = sizes + rank, *box = strides + rank - 1;
    const int element_bytes = strides[0] / sizes[0], line_bytes = box[0] * element_bytes;
    const u32 at = shared_address(to);
    if (line_bytes != 128 || box[rank] != 3 || at % 1024) emulated::fail("a box that is not as mma/tma.cuh says");
    int lines = 1;
    for (int axis = 1; axis < rank; ++axis) lines *= box[axis];
    for (int line = 0; line < lines; ++line) {
        long long from = told[0];
        bool is_there = true;
        for (int axis = 1, rest = line; axis < rank; rest /= box[axis++]) {
            const long long place = begin[axis] + rest % static_cast<int>(box[axis]);
            is_there &= place >= 0 && place < static_cast<long long>(sizes[axis]);
            from += place * static_cast<long long>(strides[axis - 1]);
        }
        for (int byte = 0; byte < line_bytes; ++byte) {
            const int column = x + byte / element_bytes;
            const bool is_inside = is_there && column >= 0 && column < static_cast<int>(sizes[0]);
            *mixed(at + 128 * line + byte) =
                is_inside ? *reinterpret_cast<const char*>(from + column * element_bytes + byte % element_bytes) : 0;
            if (told[15] && byte % 4 == 3) round_number(mixed(at + 128 * line + byte - 3));
        }
    }
    signal.add(-lines * line_bytes);
}

static void store_box(const TensorMap& map, const void* from, int c, int w, int h, int image) {
    const unsigned long long *told = map.words, *sizes = told + 2, *strides = sizes + 4, *box = strides + 3;
    const int element_bytes = strides[0] / sizes[0];
    if (told[1] != 4 || box[0] * element_bytes != 128 || box[1] * box[2] != 1 || shared_address(from) % 1024)
        emulated::fail("a box that is not as mma/tma.cuh says");
    if (w >= sizes[1] || h >= sizes[2]) return;
    for (int line = 0; line < box[3] && image + line < sizes[3]; ++line)
        for (int byte = 0; byte < 128 && c + byte / element_bytes < sizes[0]; ++byte)
            reinterpret_cast<char*>(told[0])[(image + line) * strides[2] + h * strides[1] + w * strides[0] +
                                             c * element_bytes + byte] =
                *mixed(shared_address(from) + 128 * line + byte);
}
template <int n>
void wait_for_stores() {}
static void show_box() {}

// fake_cuda.py says what stands where in the map.
static void load_pixels(void* to, const TensorMap& map, Signal& signal, int c, int w, int h, int image, u32 right,
                        u32 down) {
    const auto* told = reinterpret_cast<const long long*>(map.words);
    const long long C = told[1], W = told[2], H = told[3], B = told[4], element_bytes = told[5], pixels = told[7];
    const int line_bytes = told[6] * element_bytes;
    const u32 at = shared_address(to);
    if (line_bytes != 16 << told[14] || line_bytes < 32 || at % (8 * line_bytes))
        emulated::fail("a box that is not as it should be");
    if (w < told[8] || w > W - 1 + told[10] || h < told[9] || h > H - 1 + told[11]) emulated::fail("no window begins there");
    for (int pixel = 0; pixel < pixels; ++pixel) {
        const int column = w + right, line = h + down;
        for (int byte = 0; byte < line_bytes; ++byte) {
            const int channel = c + byte / element_bytes;
            const bool is_inside = channel < C && column >= 0 && column < W && line >= 0 && line < H && image < B;
            const char* from = reinterpret_cast<const char*>(told[0]) +
                               (((image * H + line) * W + column) * C + channel) * element_bytes + byte % element_bytes;
            *mixed(at + line_bytes * pixel + byte, line_bytes) = is_inside ? *from : 0;
            if (told[15] && byte % 4 == 3) round_number(mixed(at + line_bytes * pixel + byte - 3, line_bytes));
        }
        if ((w += told[12]) > W - 1 + told[10]) {
            w = told[8];
            if ((h += told[13]) > H - 1 + told[11]) h = told[9], ++image;
        }
    }
    signal.add(-line_bytes * static_cast<int>(pixels));
}

static void wait_for_team(int team) {
    emulated::is_verified = false;
    static emulated::Barrier of_teams[emulated::MAX_THREADS / 128];
    emulated::arrive(of_teams[team], 128);
}
static void let_next_begin() {}
static void wait_for_kernel_before() {}
static float4 read_of_block(const float* at, u32 rank) {
    if (rank > 0) emulated::fail("blocks run one after the other here");
    emulated::check_16(at);
    return {at[0], at[1], at[2], at[3]};
}

template <int COUNT>
void keep_registers() {}
template <int COUNT>
void take_registers() {}
