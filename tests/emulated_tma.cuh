// Host version of mma/tma.cuh: loads complete at once, stores at the last moment; an mbarrier counts arrivals and bytes.
#pragma once

#include "mma/cluster.cuh"

#include "common/dtype.cuh"

#undef SHARED_ALIGNMENT
#define SHARED_ALIGNMENT 1024  // the swizzle depends on the address

struct __align__(64) TensorMap {
    unsigned long long words[16];  // as fake_cuda.py encodes it
};

static u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
static char* shared_pointer(u32 address) { return &shared_base + static_cast<int>(address); }
// line_bytes: bytes per row of the tile
static char* swizzled(u32 address, int line_bytes = 128) {
    return shared_pointer(address ^ (address >> 7 & (line_bytes / 16 - 1)) << 4);
}

struct Mbarrier {
    unsigned short count, pending;
    int phase_and_bytes;  // top bit: parity of the phase; else pending bytes

    void init(u32 of) { count = pending = of, phase_and_bytes = 0; }
    int bytes() const { return phase_and_bytes << 1 >> 1; }
    void add(int more) {
        phase_and_bytes = (phase_and_bytes & 1 << 31) | ((bytes() + more) & ~(1 << 31));
        if (pending == 0 && bytes() == 0) {
            phase_and_bytes ^= 1 << 31;
            pending = count;
            ++emulated::progress;
        }
    }
    void arrive() {
        if (!pending) emulated::fail("more arrivals than the mbarrier expects");
        --pending;
        add(0);
    }
    void arrive_expect_tx(u32 bytes) {
        phase_and_bytes += bytes;
        arrive();
    }
    void wait(u32 parity) {
        emulated::checks_races = false;
        while (static_cast<u32>(phase_and_bytes) >> 31 == parity) emulated::pause();
    }
};
static void fence_mbarriers() {}

// Rounds a float32 to tf32: 10 mantissa bits.
static void round_to_tf32(char* at) {
    u32 bits;
    memcpy(&bits, at, 4);
    if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0x1000) & 0xffffe000;
    memcpy(at, &bits, 4);
}

// The descriptor (fake_cuda.py): pointer, rank, sizes, strides in bytes, tile sizes; last, whether to round to tf32.
static void tma_load(void* to, const TensorMap& map, Mbarrier& mbarrier, int x, int y, int z = 0, int t = 0) {
    const unsigned long long* desc = map.words;
    const int rank = desc[1], begin[4] = {x, y, z, t};
    const unsigned long long *sizes = desc + 2, *strides = sizes + rank, *box = strides + rank - 1;
    const int element_bytes = strides[0] / sizes[0], line_bytes = box[0] * element_bytes;
    const u32 at = shared_address(to);
    if (line_bytes != 128 || box[rank] != 3 || at % 1024) emulated::fail("TMA tile does not match mma/tma.cuh");
    int lines = 1;
    for (int axis = 1; axis < rank; ++axis) lines *= box[axis];
    for (int line = 0; line < lines; ++line) {
        long long from = desc[0];
        bool is_valid = true;
        for (int axis = 1, index = line; axis < rank; index /= box[axis++]) {
            const long long position = begin[axis] + index % static_cast<int>(box[axis]);
            is_valid &= position >= 0 && position < static_cast<long long>(sizes[axis]);
            from += position * static_cast<long long>(strides[axis - 1]);
        }
        for (int byte = 0; byte < line_bytes; ++byte) {
            const int column = x + byte / element_bytes;
            const bool is_inside = is_valid && column >= 0 && column < static_cast<int>(sizes[0]);
            *swizzled(at + 128 * line + byte) =
                is_inside ? *reinterpret_cast<const char*>(from + column * element_bytes + byte % element_bytes) : 0;
            if (desc[15] && byte % 4 == 3) round_to_tf32(swizzled(at + 128 * line + byte - 3));
        }
    }
    mbarrier.add(-lines * line_bytes);
}

static void store_tile(const emulated::Store& store) {
    const unsigned long long *desc = store.map, *sizes = desc + 2, *strides = sizes + 4, *box = strides + 3;
    const int element_bytes = strides[0] / sizes[0], c = store.c;
    if (store.w >= sizes[1] || store.h >= sizes[2]) return;
    for (int line = 0; line < box[3] && store.image + line < sizes[3]; ++line)
        for (int byte = 0; byte < 128 && c + byte / element_bytes < sizes[0]; ++byte)
            reinterpret_cast<char*>(desc[0])[(store.image + line) * strides[2] + store.h * strides[1] +
                                             store.w * strides[0] + c * element_bytes + byte] =
                *swizzled(shared_address(store.from) + 128 * line + byte);
}
static void tma_store(const TensorMap& map, const void* from, int c, int w, int h, int image) {
    const unsigned long long *desc = map.words, *sizes = desc + 2, *strides = sizes + 4, *box = strides + 3;
    const int element_bytes = strides[0] / sizes[0];
    if (desc[1] != 4 || box[0] * element_bytes != 128 || box[1] * box[2] != 1 || shared_address(from) % 1024)
        emulated::fail("TMA tile does not match mma/tma.cuh");
    emulated::Fiber& fiber = emulated::current->fibers[emulated::running];
    if (fiber.store_count == emulated::MAX_STORES) emulated::fail("too many TMA stores without a wait");
    emulated::Store& store = fiber.stores[fiber.store_count++];
    memcpy(store.map, map.words, sizeof store.map);
    store.from = from, store.c = c, store.w = w, store.h = h, store.image = image;
}
// Tiles are read from shared memory as late as the waits allow.
template <int n>
void tma_store_wait() {
    emulated::Fiber& fiber = emulated::current->fibers[emulated::running];
    const int done = fiber.store_count > n ? fiber.store_count - n : 0;
    for (int i = 0; i < done; ++i) store_tile(fiber.stores[i]);
    memmove(fiber.stores, fiber.stores + done, (fiber.store_count - done) * sizeof(emulated::Store));
    fiber.store_count -= done;
}
static void fence_for_tma() {}

// Descriptor fields: fake_cuda.py.
static void tma_load_im2col(void* to, const TensorMap& map, Mbarrier& mbarrier, int c, int w, int h, int image,
                            u32 right, u32 down) {
    const auto* desc = reinterpret_cast<const long long*>(map.words);
    const long long C = desc[1], W = desc[2], H = desc[3], B = desc[4], element_bytes = desc[5], pixels = desc[7];
    const int line_bytes = desc[6] * element_bytes;
    const u32 at = shared_address(to);
    if (line_bytes != 16 << desc[14] || line_bytes < 32 || at % (8 * line_bytes))
        emulated::fail("im2col tile does not match mma/tma.cuh");
    if (w < desc[8] || w > W - 1 + desc[10] || h < desc[9] || h > H - 1 + desc[11])
        emulated::fail("im2col coordinates out of bounds");
    for (int pixel = 0; pixel < pixels; ++pixel) {
        const int column = w + right, line = h + down;
        for (int byte = 0; byte < line_bytes; ++byte) {
            const int channel = c + byte / element_bytes;
            const bool is_inside = channel < C && column >= 0 && column < W && line >= 0 && line < H && image < B;
            const char* from = reinterpret_cast<const char*>(desc[0]) +
                               (((image * H + line) * W + column) * C + channel) * element_bytes + byte % element_bytes;
            *swizzled(at + line_bytes * pixel + byte, line_bytes) = is_inside ? *from : 0;
            if (desc[15] && byte % 4 == 3) round_to_tf32(swizzled(at + line_bytes * pixel + byte - 3, line_bytes));
        }
        if ((w += desc[12]) > W - 1 + desc[10]) {
            w = desc[8];
            if ((h += desc[13]) > H - 1 + desc[11]) h = desc[9], ++image;
        }
    }
    mbarrier.add(-line_bytes * static_cast<int>(pixels));
}

static void wait_for_warpgroup(int warpgroup) {
    emulated::checks_races = false;
    static emulated::Barrier warpgroup_barriers[emulated::MAX_THREADS / 128];
    emulated::arrive(warpgroup_barriers[warpgroup], 128);
}
static void launch_dependent_grids() {}
static void wait_on_dependent_grids() {}
static float4 dsmem_load4(const float* at, u32 rank) {
    if (rank > 0) emulated::fail("DSMEM loads of other blocks are not emulated");
    emulated::check_16(at);
    return {at[0], at[1], at[2], at[3]};
}

template <int COUNT>
void warpgroup_reg_dealloc() {}
template <int COUNT>
void warpgroup_reg_alloc() {}
