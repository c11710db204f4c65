// gradient/channels.cuh: sums over each channel of a batch in two launches, whose blocks cover the same elements.
//
// Planes: NCHW; a block covers a slice of the batch's elements of one channel. Columns: NHWC and (B, C); a block covers
// a slice of the rows of up to 32 channels. channel_sums writes the partial sums of each block. The blocks of the next
// launch add up those of their channels first (channel_total), so that no launch in between is needed.
//
// Order   Sums are float64. Per thread in the order of memory, then 16 threads per channel with stride 16 and a tree:
//         over the threads of a block, then over the slices. Depends on B and the shape alone.
#pragma once
#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

constexpr int CHANNEL_THREADS = 512;
constexpr int SUMMERS = 16;                                 // adjacent threads that add up the sums of a channel
constexpr int MAX_COLUMNS = CHANNEL_THREADS / SUMMERS;      // channels per block

// How blocks divide a batch: blockIdx.x is a tile of channels, blockIdx.y a slice of their elements.
struct Slices {
    Divider plane;          // Planes: elements of a channel in a row
    u32 channels, lanes;    // lanes: threads that share a row of Columns; 1 of Planes
    u32 slices;
    long long count, slice; // elements per channel: of the batch, of a slice
};
// The sums of a and of a b over a channel.
struct alignas(16) Sums {
    double sum, product;
};

// Index  of the elements of a channel: u32, or long long
// V      adjacent elements per load; divides the plane
template <class Index, int V>
struct Planes {
    static constexpr int VECTOR = V, OWN = 1;  // channels per thread
    const Slices& of;

    __device__ __forceinline__ explicit Planes(const Slices& slices) : of(slices) {}
    __device__ __forceinline__ u32 first_channel() const { return blockIdx.x; }
    __device__ __forceinline__ int columns() const { return 1; }  // channels of the block
    __device__ __forceinline__ int lines() const { return CHANNEL_THREADS; }  // threads per channel
    __device__ __forceinline__ int own_column() const { return 0; }
    // Calls visit with the offset of each vector of this thread.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const long long begin = blockIdx.y * of.slice;
        const Index end = static_cast<Index>(begin + of.slice < of.count ? begin + of.slice : of.count);
#pragma unroll 4
        for (Index e = static_cast<Index>(begin) + threadIdx.x * V; e < end; e += CHANNEL_THREADS * V) {
            Index row = e;
            const u32 at = pop_index(row, of.plane);
            visit((static_cast<long long>(row) * of.channels + blockIdx.x) * of.plane.size + at);
        }
    }
};

// V  adjacent channels per load and per thread; divides the number of channels
template <int V>
struct Columns {
    static constexpr int VECTOR = V, OWN = V;
    const Slices& of;
    int lane, line;

    __device__ __forceinline__ explicit Columns(const Slices& slices)
        : of(slices), lane(threadIdx.x % slices.lanes), line(threadIdx.x / slices.lanes) {}
    __device__ __forceinline__ u32 first_channel() const { return blockIdx.x * of.lanes * V; }
    __device__ __forceinline__ int columns() const { return of.lanes * V; }
    __device__ __forceinline__ int lines() const { return CHANNEL_THREADS / of.lanes; }
    __device__ __forceinline__ int own_column() const { return lane * V; }
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const u32 channel = first_channel() + own_column();
        if (line >= lines() || channel >= of.channels) return;
        const long long begin = blockIdx.y * of.slice;
        const long long end = begin + of.slice < of.count ? begin + of.slice : of.count;
#pragma unroll 4
        for (long long row = begin + line; row < end; row += lines()) visit(row * of.channels + channel);
    }
};

// The sum of `count` partial sums, `stride` apart; each of SUMMERS adjacent threads gets it.
__device__ __forceinline__ Sums add_up(const Sums* from, int count, int stride) {
    Sums total{0, 0};
#pragma unroll 4
    for (int i = threadIdx.x % SUMMERS; i < count; i += SUMMERS) {
        total.sum += from[i * stride].sum;
        total.product += from[i * stride].product;
    }
#pragma unroll
    for (int mask = SUMMERS / 2; mask > 0; mask /= 2) {
        total.sum += __shfl_xor_sync(~0u, total.sum, mask);
        total.product += __shfl_xor_sync(~0u, total.product, mask);
    }
    return total;
}

// The channel that SUMMERS threads of a block add up.
template <class Covered>
struct Summed {
    int column;
    u32 channel;
    bool is_channel, is_writer;  // one of the threads writes

    __device__ __forceinline__ explicit Summed(const Covered& covered)
        : column(threadIdx.x / SUMMERS), channel(covered.first_channel() + column),
          is_channel(column < covered.columns() && channel < covered.of.channels),
          is_writer(is_channel && threadIdx.x % SUMMERS == 0) {}
};

// V elements; 0 where those of a mask are 0.
template <bool IS_MASKED, class T, int V>
__device__ __forceinline__ void load_masked(const T* from, const T* mask, long long at, acc_t<T> (&v)[V]) {
    load_contiguous(from + at, v);
    if constexpr (IS_MASKED) {
        acc_t<T> kept[V];
        load_contiguous(mask + at, kept);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = kept[j] != 0 ? v[j] : 0;
    }
}

// partial (C, slices): the sums of a, masked, and of a b. SQUARES: b is a.
template <class Covered, class T, bool SQUARES, bool IS_MASKED>
__global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    channel_sums(const T* a, const T* b, const T* mask, Sums* partial, Slices slices) {
    constexpr int V = Covered::VECTOR, OWN = Covered::OWN;
    __shared__ Sums totals[CHANNEL_THREADS * OWN];  // of each line of threads, the columns of the block
    const Covered covered(slices);
    Sums own[OWN] = {};
    covered.each([&](long long at) {
        acc_t<T> from_a[V], from_b[V];
        load_masked<IS_MASKED>(a, mask, at, from_a);
        if constexpr (!SQUARES) load_contiguous(b + at, from_b);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            Sums& sums = own[j % OWN];
            const double v = from_a[j];
            sums.sum += v;
            sums.product = fma(v, SQUARES ? v : static_cast<double>(from_b[j]), sums.product);
        }
    });
#pragma unroll
    for (int j = 0; j < OWN; ++j) totals[threadIdx.x * OWN + j] = own[j];
    __syncthreads();
    const Summed<Covered> summed(covered);
    const Sums total = add_up(totals + summed.column, summed.is_channel ? covered.lines() : 0, covered.columns());
    if (summed.is_writer) partial[static_cast<long long>(summed.channel) * slices.slices + blockIdx.y] = total;
}

// The sums of a channel over the batch.
template <class Covered>
__device__ __forceinline__ Sums channel_total(const Sums* partial, const Summed<Covered>& summed, const Slices& slices) {
    const Sums* from = partial + static_cast<long long>(summed.channel) * slices.slices;
    return add_up(from, summed.is_channel ? slices.slices : 0, 1);
}
