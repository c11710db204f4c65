// copy_rows.cu: rows of an array to places further apart: one operand of a Concat.
//
// Idea    Threads move words, as long as widths and places allow (16 B at most), neighbours side by side.
// Floor   Every byte is read once and written once: 2^30 B take 2.15 GB / 4.8 TB/s = 447 us.
// Layout  x (rows, width) words without a gap; y has `pitch` words from row to row, and these begin at `offset`.
// Limits  Any shape; words of 1, 2, 4, 8 or 16 bytes; sm_80 up.

constexpr int THREADS = 256;

template <class Word>
__global__ void __launch_bounds__(THREADS)
    copy_rows(const Word* x, Word* y, long long rows, long long width, long long pitch, long long offset) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    for (long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; i < rows * width; i += step) {
        const long long row = i / width;
        y[row * pitch + offset + i - row * width] = x[i];
    }
}
