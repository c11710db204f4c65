// pool.cu: the largest or the mean of every window of an image, or of a signal (an image of one line).
//
// Idea    A thread makes one number of y: it walks over its window. Neighbours share most of theirs, through the cache.
// Floor   Every number is read once and written once: 4096 x 64 x 56 x 56 floats by windows of 2 x 2 are
//         3.29 + 0.82 GB / 4.8 TB/s = 856 us.
// Order   Of a sum: tap by tap, the last axis fastest.
// Layout  x and y lie in rows (B, C, H, W), or both with channels last, (B, H, W, C).
// Limits  Any geometry; up to 2^31 numbers a row; float32, float16, bfloat16, float64; sm_80 up.
#include "divide.cuh"
#include "wide.cuh"

constexpr int THREADS = 256;

struct Max {};
struct Mean {};           // over what it finds in x
struct MeanWithPads {};  // and over the pads

template <class How, class T, class Index, bool is_last>
__global__ void __launch_bounds__(THREADS) pool(
    const T* x, T* y, long long count, Divider C, int H, Divider HO, int KH, int SH, int PH, int DH, int EH, int W,
    Divider WO, int KW, int SW, int PW, int DW, int EW) {
    using Number = wide_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    for (long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        Index rest = static_cast<Index>(i);
        const u32 c = is_last ? take_rest(rest, C) : 0;
        const int wo = take_rest(rest, WO), ho = take_rest(rest, HO);
        // What is left are images, or, in rows, channels of images.
        const int apart = is_last ? C.size : 1, row = W * apart;
        const T* from = x + static_cast<long long>(rest) * H * row + c;
        const int h0 = ho * SH - PH, w0 = wo * SW - PW;
        Number found = 0;
        bool is_first = true;
        int counted = 0;
        for (int kh = 0; kh < KH; ++kh) {
            const int h = h0 + kh * DH;
            const bool is_row = static_cast<u32>(h) < static_cast<u32>(H);
            if (!is_row && !is_same<How, MeanWithPads>) continue;
            const T* line = from + static_cast<long long>(h) * row;
            for (int kw = 0; kw < KW; ++kw) {
                const int w = w0 + kw * DW;
                if constexpr (is_same<How, MeanWithPads>) counted += h < EH && w < EW;
                if (!is_row || static_cast<u32>(w) >= static_cast<u32>(W)) continue;
                const Number v = load_wide(line + w * apart);
                if constexpr (is_same<How, Max>) found = is_first ? v : larger(found, v);
                else found += v;
                if constexpr (is_same<How, Mean>) ++counted;
                is_first = false;
            }
        }
        if constexpr (is_same<How, Max>) {
            if (is_first) found = -__int_as_float(0x7f800000);  // a window on pads alone
        } else {
            found /= counted;
        }
        store_wide(y + i, found);
    }
}
