// recurrent/gradient.cuh: the arrays and the cells' gradients of recurrent/gradient.cu and gradient_resident.cu.
#pragma once

#include "recurrent/cells.cuh"

template <class T>
struct Arrays {
    const T *x, *dy;
    const T *sums[2], *before[2];
    const T* first_c;  // or null
    const acc_t<T>*R, *bias;
    T* y;
    acc_t<T>* cells;
};

// Gates of the result: a GruAfter's n has a gradient by the states and one by the input.
template <class Cell>
constexpr int OUT_GATES = GATES<Cell> + is_same<Cell, GruAfter>;

// A step of an Lstm's cell: c = forget * c + added.
template <class W>
struct CellStep {
    W forget, added;
};
template <class W>
__device__ __forceinline__ CellStep<W> cell_step(const W (&x)[4], const W (&h)[4]) {
    return {exact_sigmoid(x[2] + h[2]), exact_sigmoid(x[0] + h[0]) * exact_tanh(x[3] + h[3])};
}

// The derivatives of a step. They do not depend on its gradients.
template <class Cell, class W>
struct Derivatives {
    W gates[OUT_GATES<Cell>];  // of the state by each gate; Lstm: of the cell by i, f, g. GruBefore: [1] is the reset
    W carry;  // Lstm: of the cell by the cell before; IS_GRU: of the state by the state before, without the gates
    W cell;   // Lstm: of the state by the cell
};

// x, h    gate pre-activations from the input, and from the states before
// inner   bias inside the reset of a GruAfter's candidate gate
// state, c  before the step; IS_GRU reads the state, Lstm the cell
template <class Cell, class W>
__device__ __forceinline__ Derivatives<Cell, W> derivatives_of(const W (&x)[GATES<Cell>], const W (&h)[GATES<Cell>],
                                                               W inner, W state, W c) {
    Derivatives<Cell, W> d;
    d.carry = d.cell = 0;
    if constexpr (is_same<Cell, Lstm>) {
        const W i = exact_sigmoid(x[0] + h[0]), o = exact_sigmoid(x[1] + h[1]);
        const W f = exact_sigmoid(x[2] + h[2]), g = exact_tanh(x[3] + h[3]);
        const W t = exact_tanh(multiply_add(f, c, i * g));
        d.gates[0] = g * i * (1 - i);
        d.gates[1] = t * o * (1 - o);
        d.gates[2] = c * f * (1 - f);
        d.gates[3] = i * (1 - g * g);
        d.carry = f;
        d.cell = o * (1 - t * t);
    } else if constexpr (IS_GRU<Cell>) {
        constexpr bool RESETS_FIRST = is_same<Cell, GruBefore>;
        const W z = exact_sigmoid(x[0] + h[0]), reset = exact_sigmoid(x[1] + h[1]), of_n = h[2] + inner;
        const W candidate = exact_tanh(RESETS_FIRST ? x[2] + h[2] : multiply_add(reset, of_n, x[2]));
        const W by_n = (1 - z) * (1 - candidate * candidate);
        d.gates[0] = (state - candidate) * z * (1 - z);
        d.carry = z;
        if constexpr (RESETS_FIRST) {
            d.gates[1] = reset;
            d.gates[2] = by_n;
        } else {
            d.gates[1] = by_n * of_n * reset * (1 - reset);
            d.gates[2] = by_n * reset;
            d.gates[3] = by_n;
        }
    } else if constexpr (is_same<Cell, RnnTanh>) {
        const W state_after = exact_tanh(x[0] + h[0]);
        d.gates[0] = 1 - state_after * state_after;
    } else {
        d.gates[0] = x[0] + h[0] > 0;
    }
    return d;
}

// The gradients of a step's gates. GruBefore: out[1] is the reset; its gradient needs a product first.
// dh       of the state after the step
// carried  Lstm: the gradient of the cell after the step, replaced by that of the cell before; IS_GRU: replaced by the
//          part of the gradient of the state before that does not go through the gates
template <class Cell, class W>
__device__ __forceinline__ void step_back(const Derivatives<Cell, W>& d, W dh, W& carried, W (&out)[OUT_GATES<Cell>]) {
    constexpr bool IS_LSTM = is_same<Cell, Lstm>;
    const W dc = IS_LSTM ? multiply_add(dh, d.cell, carried) : W(0);
#pragma unroll
    for (int g = 0; g < OUT_GATES<Cell>; ++g) out[g] = (IS_LSTM && g != 1 ? dc : dh) * d.gates[g];
    if constexpr (is_same<Cell, GruBefore>) out[1] = d.gates[1];
    if constexpr (IS_LSTM) carried = dc * d.carry;
    if constexpr (IS_GRU<Cell>) carried = dh * d.carry;
}
