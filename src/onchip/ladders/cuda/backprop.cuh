// backprop.cuh: shared by the kernels of the backprop ladder: sigmoid layers, a grid that slides over a matrix.
#pragma once
#define UNROLL 16
#include "tile_gemm.cuh"

constexpr int PAD = 1, LANES = 32;

__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
// By its value h.
__device__ __forceinline__ float sigmoid_derivative(float h) { return h * (1.0f - h); }

// v = alpha v + g; w -= eta v.
__device__ __forceinline__ void momentum_step(float& w, float& v, float g, float eta, float alpha) {
    v = alpha * v + g;
    w -= eta * v;
}
