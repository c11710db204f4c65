"""Gradients of recurrent layers on the CPU: every cell, direction and output, any batch and threads."""

import dataclasses

import numpy as np
import pytest

from onchip.kernels.cpu.recurrent.recurrent import MAX_ROWS
from onchip.network.layers import GRU, LSTM, RNN, Recurrent
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan
from recurrent_gradients import CELLS, gradient, inputs_of, verify
from step_cases import bind, run


def result(net, xs, threads=2):
    return run(bind(net, "recurrent_grad", len(xs[0]), threads), tuple(xs))[net.outputs[0]]


def check(net, B):
    """Verify, also that neither threads nor other rows change a row's bits."""
    xs = inputs_of(net, B)
    got = result(net, xs)
    verify(net, xs, got)
    assert result(net, xs, threads=1).tobytes() == got.tobytes()
    for rows in (slice(0, 1), slice(B // 2, B)):
        assert result(net, [x[rows] for x in xs]).tobytes() == got[rows].tobytes()


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", CELLS, ids=str)
def test_every_cell_and_direction(layer: Recurrent, direction: str):
    layer = dataclasses.replace(layer, direction=direction)
    for B, leading, H in ((7, (3,), 5), (5, (2, 4), 19), (1, (1,), 1), (3, (2,), 96)):
        check(gradient(layer, 0, leading, H, has_extras=H == 19), B)


@pytest.mark.parametrize("layer", CELLS, ids=str)
def test_initial_states_and_last_outputs(layer: Recurrent):
    for output in ("sequence", "last", "cell") if isinstance(layer, LSTM) else ("sequence", "last"):
        changed = dataclasses.replace(layer, output=output, direction="bidirectional")
        for index in range(layer.states + 1):
            check(gradient(changed, index, (3,), 6, has_extras=output != "last"), 3)


@pytest.mark.parametrize("B", [1, MAX_ROWS - 1, 2 * MAX_ROWS + 1, 203])
@pytest.mark.parametrize("layer", [LSTM("bidirectional"), GRU(reset_after=False)], ids=str)
def test_tiles_of_sequences(layer: Recurrent, B: int):
    check(gradient(layer, 0, (3,), 17), B)


@pytest.mark.parametrize("layer", [LSTM(), GRU(), GRU(reset_after=False), RNN("reverse")], ids=str)
def test_sums_longer_than_a_chunk(layer: Recurrent):
    check(gradient(layer, 0, (3,), 143, has_extras=True), 7)


def test_values_that_several_operands_read():
    """dy and the states before are one value, the sums and x another."""
    net = gradient(RNN(), 0, (3,), 5)
    (node,) = net.nodes
    shared = net.replace(nodes=[dataclasses.replace(node, inputs=("x0", "x1", "x0", "x1"))])
    x, dy, *_ = xs = inputs_of(net, 3)
    assert result(shared, xs).tobytes() == result(net, [x, dy, x, dy]).tobytes()


def test_large_gates_saturate():
    net = gradient(LSTM(), 0, (4,), 9)
    xs = [x * np.float32(1e4) if i in (0, 2) else x for i, x in enumerate(inputs_of(net, 3))]
    verify(net, xs, result(net, xs))


def test_other_dtypes_are_refused():
    for dtype in ("float64", "float16"):
        planned = plan(gradient(GRU(), 0, (2,), 3, dtype=dtype), "cpu", Job(batch=3))
        assert [group.claim.kernel for group in planned.groups] == ["plain"]
        (refused,) = (each for each in planned.refusals if each.kernel == "recurrent_grad")
        assert "computes on float32" in refused.why
