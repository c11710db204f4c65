// train/large_batch/layers.cuh: arguments of kernels that run rows through all layers after the first.
#pragma once

#include "common/dtype.cuh"

constexpr int MAX_WIDTHS = 4;

struct RowMemory {
    const float* w;  // (N, w_stride)
    float* a;        // (size, stride): activations; nullptr: not stored
    float* dz;       // (size, stride); nullptr: not stored
    float* partials;  // (blocks, N, w_stride): partial dW per block; nullptr: another launch computes dW
};
struct RowLayer {
    int w_stride, stride;
    u32 code, slope, has_bias, unused;
};
struct RowLayers {
    RowMemory memory[MAX_WIDTHS];
    const void* targets;
    double* losses;  // (size,)
    int* correct;    // (size,)
    const float* weights;  // (n,) loss weights per row; nullptr: 1
    RowLayer layer[MAX_WIDTHS];
    u32 loss;
    float smoothing;  // label smoothing of cross-entropy
};
