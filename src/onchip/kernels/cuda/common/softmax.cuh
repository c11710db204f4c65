// common/softmax.cuh: a row made to sum up to 1, whoever holds its numbers.
//
// A Row has max(); sum(f), of f(v) over every v, which f may change, in an order of its own; and each(f), which puts
// f(v) in the place of v.
// max() steps over NaNs: they come back through the sum.
#pragma once

struct NoNormaliser {
    template <class Row>
    static __device__ __forceinline__ void apply(Row) {}
};
struct Softmax {
    template <class Row>
    static __device__ __forceinline__ void apply(Row row) {
        const float most = row.max();
        const float sum = row.sum([=](float& v) { return v = expf(v - most); });
        row.each([=](float v) { return v / sum; });
    }
};
struct LogSoftmax {
    template <class Row>
    static __device__ __forceinline__ void apply(Row row) {
        const float most = row.max();
        const float log_sum = logf(row.sum([=](float v) { return expf(v - most); }));
        row.each([=](float v) { return v - most - log_sum; });
    }
};
