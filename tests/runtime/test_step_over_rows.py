"""Steps over a data set on the CPU: the same bits as steps with rows from the host."""

import numpy as np
import pytest

from onchip.kernels import reference
from onchip.plan.gradient.over_rows import LOG, POSITION
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan
from row_steps import BATCHES, CASES, data_of, logged, made, one_by_one, order_of, read, rows_of_any_kind, share, write


def bind(step):
    return CpuStep(plan(step, "cpu", Job(batch=16)), 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("N", "batches"), BATCHES)
def test_the_same_bits(case, N, batches):
    step, whole, state = made(case, N, batches)
    expected = one_by_one(step, bind, batches, data_of(step, N), order_of(N, batches))
    bound = bind(whole)
    write(bound, state)
    for B in batches:
        bound.run({"share": share(B)}, B)
    got = read(bound)
    assert got[LOG].tobytes() == expected.pop("losses").tobytes()
    assert got[POSITION].tolist() == [len(batches), sum(batches)]
    for name, array in expected.items():
        assert got[name].tobytes() == array.tobytes(), name
    kernels = [group.claim.kernel for group in bound.plan.groups]
    assert (kernels[0], kernels[-1]) == ("step_rows", "step_counters")
    in_place = set(bound.plan.updated_in_place.values())
    assert in_place >= {LOG, POSITION} | ({DRAW} if DRAW in whole.state else set())


@pytest.mark.parametrize("case", CASES)
def test_many_steps_of_one_call(case):
    _, whole, state = made(case, 11, (4,) * 6)
    one, many = bind(whole), bind(whole)
    for bound in (one, many):
        write(bound, state)
    losses = [one.run({"share": share(4)}, 4)["loss"] for _ in range(6)]
    assert many.run({"share": share(4)}, 4, count=2)["loss"] == losses[1]
    assert many.run({"share": share(4)}, 4, count=4)["loss"] == losses[5]
    assert all(array.tobytes() == many.state[name].tobytes() for name, array in one.state.items())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bool", "int32"])
@pytest.mark.parametrize("row", [(3,), (2, 4), ()])
def test_rows_of_any_kind(dtype, row, threads):
    """In several tasks; what is outside the order, the data or the table is the nearest that is inside."""
    net, B = rows_of_any_kind(dtype, row), 3000
    bound, x = CpuStep(plan(net, "cpu", Job(batch=B)), threads), np.zeros((B, 2), np.float32)
    assert [group.claim.kernel for group in bound.plan.groups] == ["step_rows"]
    for rows in (B, 1, 0):
        got = bound.run({"x": x[:rows]}, rows)
        expected, _ = reference.run_step(net, x[:rows])
        for array, wanted in zip(got.values(), expected, strict=True):
            assert np.array_equal(array, wanted)


def test_a_log_that_other_layers_read_is_replaced_at_the_end():
    net = logged()
    bound = CpuStep(plan(net, "cpu", Job(batch=4)), 1)
    assert bound.plan.groups[-1].claim.kernel == "step_counters"
    for i in range(1, 5):
        outputs = bound.run({"x": np.full(i, i, np.float32)}, i)
        log = [1, 4, 9][:i] + [0] * (3 - i)
        assert outputs["logged"].tolist() == [log]
        assert bound.state["log"].tolist() == log
        assert outputs["next"].tolist() == [bound.state["position"].tolist()] == [[i, i * (i + 1) // 2]]
        assert bound.state["draw"].tolist() == [5 + 3 * i * (i + 1) // 2, 2 * i]
