// train/large_batch/layers.cuh: layers that one launch of a training step takes rows through, forward and back.
#pragma once

#include "common/dtype.cuh"

constexpr int MOST_WIDTHS = 4;

struct RowMemory {
    const float* w;  // (N, w_stride)
    float* a;        // (size, stride): what the layer gives; nullptr: nobody asks
    float* dz;       // (size, stride); nullptr likewise
    float* parts;    // (blocks, N, w_stride): gradients of each block's rows; nullptr: another launch makes them
};
struct RowLayer {
    int w_stride, stride;
    u32 code, slope, has_bias, unused;
};
struct RowLayers {
    RowMemory memory[MOST_WIDTHS];
    const void* targets;
    double* losses;  // (size,)
    int* hits;       // (size,)
    const float* weights;  // (n,) of rows: what their losses are multiplied by; nullptr: 1
    RowLayer of[MOST_WIDTHS];
    u32 loss;
    float smoothing;  // of cross-entropy: the share of a target that all classes have alike
};
