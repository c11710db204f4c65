// recurrent.cuh: the cells of recurrent.cu and recurrent_held.cu: what becomes of a unit's gates at a step.
#pragma once

#include "activation.cuh"
#include "wide.cuh"

struct Lstm {};
struct GruAfter {};
struct GruBefore {};
struct RnnTanh {};
struct RnnRelu {};

template <class Cell>
constexpr bool IS_GRU = is_same<Cell, GruAfter> || is_same<Cell, GruBefore>;
template <class Cell>
constexpr int GATES = is_same<Cell, Lstm> ? 4 : IS_GRU<Cell> ? 3 : 1;

// A unit's next state; not of a GruBefore, whose last sum needs another step's worth of exchange.
// given   what the input gives to the gates; sums: what the states before give
// inside  the bias of a GruAfter's last gate
// cell    of an Lstm: it becomes the next one
template <class Cell, class W>
__device__ __forceinline__ W next_state(const W (&given)[GATES<Cell>], const W (&sums)[GATES<Cell>], W inside, W state,
                                        W& cell) {
    if constexpr (is_same<Cell, Lstm>) {
        const W i = exact_sigmoid(given[0] + sums[0]), o = exact_sigmoid(given[1] + sums[1]);
        const W f = exact_sigmoid(given[2] + sums[2]), c = exact_tanh(given[3] + sums[3]);
        cell = multiply_add(f, cell, i * c);
        return o * exact_tanh(cell);
    } else if constexpr (IS_GRU<Cell>) {
        const W z = exact_sigmoid(given[0] + sums[0]), reset = exact_sigmoid(given[1] + sums[1]);
        const W made = exact_tanh(multiply_add(reset, sums[2] + inside, given[2]));
        return multiply_add(z, state, (W(1) - z) * made);
    } else if constexpr (is_same<Cell, RnnTanh>) {
        return exact_tanh(given[0] + sums[0]);
    } else {
        return ReLU::apply(given[0] + sums[0]);
    }
}
