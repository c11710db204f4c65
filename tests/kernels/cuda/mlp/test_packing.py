"""Where mlp_tensor_core's host puts each weight, held against what the kernel's lanes do with it."""

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError
from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32, round_up
from onchip.kernels.cuda.mlp.packing import (
    first_steps,
    hidden_columns,
    input_columns,
    output_order,
    pack_matrix,
    pack_recipe,
)
from onchip.network.recipe import materialise

# -- the lanes, as the .cuh files have them ------------------------------------------------------------------


def widest(item_bytes, D, most):
    V = 16 // item_bytes
    while most < V or D % V:
        V //= 2
    return V


def load_elements(item_bytes, D, start, count, q):
    """rows_in.cuh: the columns of a row that lane q holds, from column `start` on; D where there is none."""
    into, e = [D] * count, 0
    while e < count and start < D:
        V = widest(item_bytes, D, 16)
        while V > 1 and D - start < 4 * V:
            V //= 2
        if start + q * V < D:
            into[e : e + V] = range(start + q * V, start + (q + 1) * V)
        start, e = start + 4 * V, e + V
    return into


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("steps_at_once", [8, 1000])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_lane_multiplies_each_column_of_x_by_its_own_weight(precision, steps_at_once, item_bytes):
    P = PRECISIONS[precision]
    for D in (*range(1, 140), 255, 256, 257, 784, 1000, 1001):
        steps = first_steps(D, P)
        k_of = np.full(steps * P.step, -1)
        for first in range(0, steps, steps_at_once):
            count = 2 * P.per_word * min(steps_at_once, steps - first)
            for q in range(4):
                for e, column in enumerate(load_elements(item_bytes, D, first * 8 * P.per_word, count, q)):
                    word, part = divmod(e, P.per_word)
                    k = first * P.step + word // 2 * P.step + word % 2 * (P.step // 2) + q * P.per_word + part
                    k_of[k] = column
        assert np.array_equal(k_of, input_columns(D, item_bytes, P)), D


@pytest.mark.parametrize("piece", [32, 64, 128, 10_000])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_lane_writes_each_output_where_it_belongs(piece, item_bytes):
    for D in (*range(1, 150), 333, 1000, 1024):
        N, written = round_up(D, 8), []
        order, whole = output_order(N), (D - 1) // piece * piece
        for start in (*range(0, whole, piece), whole):
            width = piece if start < whole else D - whole
            NT = round_up(width, 8) // 8
            for q in range(4):
                j = 0
                while j < NT:
                    blocks = next(b for b in (4, 2, 1) if NT - j // b * b >= b)
                    V, first = widest(item_bytes, D, 2 * blocks), 8 * j + 2 * blocks * q
                    for n in range(0, 2 * blocks, V):
                        if first + n >= width:
                            continue
                        assert (start + first + n) % V == 0  # aligned
                        for i in range(n, n + V):
                            held = start + 8 * (j + i // 2) + 2 * q + i % 2
                            assert order[held] == start + first + i
                            written.append(start + first + i)
                    j += blocks
        assert sorted(written) == list(range(D)), D


# -- what is packed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 71, 72, 100, 784])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_every_column_of_x_is_multiplied_once(precision, D, item_bytes):
    columns = input_columns(D, item_bytes, PRECISIONS[precision])
    assert len(columns) % PRECISIONS[precision].step == 0
    assert len(columns) < D + 4 * PRECISIONS[precision].step
    assert sorted(columns[columns < D]) == list(range(D))
    assert (columns <= D).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("N", [8, 16, 24, 200])
def test_every_output_of_a_layer_is_multiplied_once(precision, N):
    columns = hidden_columns(N, PRECISIONS[precision])
    assert sorted(columns) == list(range(len(columns)))
    assert N <= len(columns) < N + PRECISIONS[precision].step


@pytest.mark.parametrize("N", [8, 16, 24, 32, 40, 64, 200])
def test_a_lane_writes_neighbours(N):
    order = output_order(N)
    assert sorted(order) == list(range(N))
    lanes = order.reshape(-1, 4, 2)  # lane q has the pair q of each block of 8 columns
    wide = N // 32 * 4
    for q in range(4):
        mine = lanes[:wide, q].reshape(-1, 8)
        assert (np.diff(mine, axis=1) == 1).all()
        assert (mine[:, 0] % 8 == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_splits_of_a_packed_matrix_add_up_to_it(precision):
    weight, P = rows(13, 21), PRECISIONS[precision]
    columns = input_columns(21, 4, P)
    order = output_order(16)
    splits = pack_matrix(weight, columns, order, P)
    assert [split.shape for split in splits] == [(len(columns) // (4 * P.per_word), 16, 4 * P.per_word)] * P.splits
    whole = sum(split.astype(np.float64) for split in splits).swapaxes(0, 1).reshape(16, -1)
    back = np.zeros((16, 22))
    back[np.ix_(order, columns)] = whole
    assert not back[13:].any()
    ulp = {"fp32": 2.0**-21, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    assert np.abs(back[:13, :21] - weight).max() <= ulp * np.abs(weight).max()


def test_rounding_to_tf32():
    x = np.array([1, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, np.inf, -np.inf, np.nan, 0], np.float32)
    expected = np.array([1, 1 + 2**-10, 1, -1 - 2**-10, np.inf, -np.inf, np.nan, 0], np.float32)
    assert np.array_equal(round_tf32(x), expected, equal_nan=True)


def test_weights_too_large_for_half_precision_are_refused():
    net = random_mlp(4, 3)
    net = net.replace(weights={**net.weights, "fc1.weight": np.full((3, 4), 1e5, np.float32)})
    recipe = pack_recipe(find_chain(net, 0), PRECISIONS["fp16"], "float32")
    with pytest.raises(InputError, match="a weight is too large for float16"):
        materialise(recipe, net.weights)
    materialise(pack_recipe(find_chain(net, 0), PRECISIONS["bf16"], "float32"), net.weights)


def test_weights_of_fp32_make_up_for_what_tensor_cores_cut_off():
    """High and low split of a weight add up to it plus half an ulp, on average and to 22 bits."""
    P, w = PRECISIONS["fp32"], rows(64, 64)
    high, low = (part.swapaxes(0, 1).reshape(64, 64) for part in pack_matrix(w, np.arange(64), np.arange(64), P))
    assert np.array_equal(high, round_tf32(w))
    assert np.array_equal(low, round_tf32(low))
    share = (high.astype(np.float64) + low) / w - 1
    assert np.abs(share - 2.0**-24).max() < 2.0**-22
    assert abs(share.mean() - 2.0**-24) < 2.0**-27
