// recurrent/cells.cuh: LSTM, GRU and RNN cells of recurrent/simt.cu, register_resident.cu, mma.cu and gradient.cuh.
#pragma once

#include "common/elementwise.cuh"
#include "common/accumulator.cuh"

struct Lstm {};
struct GruAfter {};
struct GruBefore {};
struct RnnTanh {};
struct RnnRelu {};

template <class Cell>
constexpr bool IS_GRU = is_same<Cell, GruAfter> || is_same<Cell, GruBefore>;
template <class Cell>
constexpr int GATES = is_same<Cell, Lstm> ? 4 : IS_GRU<Cell> ? 3 : 1;

// IS_FAST: approximate functions, for 16-bit dtypes.
template <bool IS_FAST, class W>
__device__ __forceinline__ W sigmoid_of(W v) {
    if constexpr (IS_FAST) return fast_sigmoid(v);
    else return exact_sigmoid(v);
}
template <bool IS_FAST, class W>
__device__ __forceinline__ W tanh_of(W v) {
    if constexpr (IS_FAST) return fast_tanh(v);
    else return exact_tanh(v);
}

// A unit's next state. Not for GruBefore: its candidate gate needs a second exchange of states.
// x, h    gate pre-activations from the input, and from the previous states
// inner   bias inside the reset of a GruAfter's candidate gate
// cell    Lstm: updated in place
template <class Cell, bool IS_FAST = false, class W>
__device__ __forceinline__ W next_state(const W (&x)[GATES<Cell>], const W (&h)[GATES<Cell>], W inner, W state,
                                        W& cell) {
    if constexpr (is_same<Cell, Lstm>) {
        const W i = sigmoid_of<IS_FAST>(x[0] + h[0]), o = sigmoid_of<IS_FAST>(x[1] + h[1]);
        const W f = sigmoid_of<IS_FAST>(x[2] + h[2]), c = tanh_of<IS_FAST>(x[3] + h[3]);
        cell = multiply_add(f, cell, i * c);
        return o * tanh_of<IS_FAST>(cell);
    } else if constexpr (IS_GRU<Cell>) {
        const W z = sigmoid_of<IS_FAST>(x[0] + h[0]), reset = sigmoid_of<IS_FAST>(x[1] + h[1]);
        const W candidate = tanh_of<IS_FAST>(multiply_add(reset, h[2] + inner, x[2]));
        return multiply_add(z, state, (W(1) - z) * candidate);
    } else if constexpr (is_same<Cell, RnnTanh>) {
        return tanh_of<IS_FAST>(x[0] + h[0]);
    } else {
        return ReLU::apply(x[0] + h[0]);
    }
}

template <class W, int V>
__device__ __forceinline__ void load_vectors(W (&v)[V], const W* from) {
    constexpr int BYTES = V * sizeof(W), WORD_BYTES = BYTES % 16 == 0 ? 16 : BYTES == 8 ? 8 : sizeof(W);
    using Word = typename Vector<WORD_BYTES>::type;
    constexpr int PER_WORD = WORD_BYTES / sizeof(W);
#pragma unroll
    for (int i = 0; i < V; i += PER_WORD) *reinterpret_cast<Word*>(v + i) = *reinterpret_cast<const Word*>(from + i);
}

template <class T>
__device__ __forceinline__ void prefetch(const T* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
