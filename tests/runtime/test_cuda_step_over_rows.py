"""Steps over a data set on a GPU, real or emulated: the same bits as steps with rows from the host."""

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.plan.gradient.over_rows import LOG, POSITION
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job
from onchip.runtime.cuda import bound_plan
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan
from row_steps import BATCHES, CASES, data_of, made, one_by_one, order_of, read, share, write


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu)])
def bind(request, monkeypatch):
    gpu = emulate_device(monkeypatch) if request.param == "emulated" else Gpu.get(0)
    return lambda step: CudaStep(gpu, plan(step, "cuda", Job(batch=16)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("N", "batches"), BATCHES)
def test_the_same_bits(bind, case, N, batches):
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
def test_many_steps_of_one_call(bind, case, monkeypatch):
    """Directly, then as graphs of four steps, and of the rest."""
    monkeypatch.setattr(bound_plan, "GRAPH_RUNS", 4)
    _, whole, state = made(case, 11, (3,) * 23)
    one, many = bind(whole), bind(whole)
    for bound in (one, many):
        write(bound, state)
    losses = [one.run({"share": share(3)}, 3)["loss"] for _ in range(23)]
    end = 0
    for count in (1, 4, 6, 6, 6):
        end += count
        assert many.run({"share": share(3)}, 3, count)["loss"] == losses[end - 1]
    after = read(many)
    assert all(array.tobytes() == after[name].tobytes() for name, array in read(one).items())


@needs_gxx
@pytest.mark.parametrize(
    ("runs", "launches", "graphs"), [(4, 1024, [0, 2, 2]), (16, 1024, [0, 1, 1]), (16, 1, [5, 6, 6])]
)
def test_graphs_of_a_call(monkeypatch, runs, launches, graphs):
    """Six steps, three times: the first time with a size runs without a graph."""
    monkeypatch.setattr(bound_plan, "GRAPH_RUNS", runs)
    monkeypatch.setattr(bound_plan, "GRAPH_LAUNCHES", launches)
    gpu, (_, whole, state) = emulate_device(monkeypatch), made("squares", 5, (2,) * 18)
    bound = CudaStep(gpu, plan(whole, "cuda", Job(batch=2)))
    write(bound, state)
    for expected in graphs:
        before = len(gpu.driver.replays)
        bound.run({"share": share(2)}, 2, 6)
        assert len(gpu.driver.replays) - before == expected
    assert np.count_nonzero(read(bound)[LOG]) == 18
