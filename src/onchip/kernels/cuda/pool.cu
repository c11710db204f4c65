// pool.cu: the largest or the mean of every window of an image, or of a signal (an image of one line).
//
// Idea    A thread makes one number of y: it walks over its window. Neighbours share most of theirs, through the cache.
// Floor   Every number is read once and written once: 4096 x 64 x 56 x 56 floats by windows of 2 x 2 are
//         3.29 + 0.82 GB / 4.8 TB/s = 856 us.
// Order   Of a sum: tap by tap, the last axis fastest.
// Layout  x and y lie in rows (B, C, H, W), or both with channels last, (B, H, W, C).
// Limits  Any geometry; up to 2^31 numbers a row; float32, float16, bfloat16, float64; sm_80 up.
#include "wide.cuh"

constexpr int THREADS = 256;


struct Max {};
struct Mean {};           // over what it finds in x
struct MeanWithPads {};  // and over the pads

template <class How, class T, class Index, bool is_last>
__global__ void __launch_bounds__(THREADS) pool(
    const T* x, T* y, long long count, int C, int H, int HO, int KH, int SH, int PH, int DH, int EH, int W, int WO,
    int KW, int SW, int PW, int DW, int EW) {
    using Number = wide_t<T>;
    const Index step = static_cast<Index>(gridDim.x) * THREADS;
    for (Index i = static_cast<Index>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        Index rest = i;
        int c = 0;
        if constexpr (is_last) {
            c = rest % C;
            rest /= C;
        }
        const int wo = rest % WO;
        rest /= WO;
        const int ho = rest % HO;
        rest /= HO;  // of rows: the image and the channel; of channels last: the image
        const T* from = x + (is_last ? static_cast<long long>(rest) * H * W * C + c : static_cast<long long>(rest) * H * W);
        const int apart = is_last ? C : 1;
        Number found = 0;
        bool is_first = true;
        int counted = 0;
        for (int kh = 0; kh < KH; ++kh) {
            const int h = ho * SH - PH + kh * DH;
            for (int kw = 0; kw < KW; ++kw) {
                const int w = wo * SW - PW + kw * DW;
                const bool is_inside = h >= 0 && h < H && w >= 0 && w < W;
                counted += is_same<How, MeanWithPads> ? h < EH && w < EW : is_inside;
                if (!is_inside) continue;
                const Number v = load_wide(from + static_cast<long long>(h * W + w) * apart);
                if constexpr (is_same<How, Max>) found = is_first ? v : larger(found, v);
                else found += v;
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
