// common/softmax.cuh: softmax and log-softmax of a row, wherever its values are stored.
//
// A Row provides max(), sum(f) and each(f). sum(f) adds f(v) over every v in its own reduction order, and f may modify
// v; each(f) replaces v by f(v). max() skips NaNs: they propagate through the sum.
#pragma once

struct NoNormaliser {
    template <class Row>
    static __device__ __forceinline__ void apply(Row) {}
};
struct Softmax {
    template <class Row>
    static __device__ __forceinline__ void apply(Row row) {
        const float max_value = row.max();
        const float sum = row.sum([=](float& v) { return v = expf(v - max_value); });
        row.each([=](float v) { return v / sum; });
    }
};
struct LogSoftmax {
    template <class Row>
    static __device__ __forceinline__ void apply(Row row) {
        const float max_value = row.max();
        const float log_sum = logf(row.sum([=](float v) { return expf(v - max_value); }));
        row.each([=](float v) { return v - max_value - log_sum; });
    }
};
