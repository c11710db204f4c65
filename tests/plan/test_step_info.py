"""The steps of a plan, as a profiler receives them: on every device, for any number of rows."""

import numpy as np
import pytest

from fake_cuda import FakeDriver, fake_gpu
from gpu_networks import two_groups
from onchip.kernels.cuda import KERNELS
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.plan.step_info import steps_of_chunks
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.placement import plan


@pytest.fixture(params=["cpu", "cuda"])
def bound(request, monkeypatch):
    if request.param == "cpu":
        return CpuBackend(None).bind(plan(two_groups(), "cpu"))
    fake_gpu(monkeypatch, FakeDriver())
    return CudaBackend(0).bind(make_plan(two_groups(), H200, KERNELS))


@pytest.mark.parametrize("B", [1, 7, 1000])
def test_steps_are_the_plans_groups_with_their_work(bound, B):
    steps = bound.steps(B)
    assert [step.label for step in steps] == [group.claim.label for group in bound.plan.groups]
    assert [name for step in steps for name in step.layers] == ["a", "b"]
    prices = [group.claim.cost for group in bound.plan.groups]
    parts = 3 if prices[0].precision == "tf32" else 1  # tf32 multiplications per float32 one
    assert [step.flop for step in steps] == [parts * 2 * 6 * 9 * B, parts * 2 * 9 * 4 * B]
    assert steps[0].nbytes == 4 * (6 + 9) * B + prices[0].fixed_bytes
    assert np.isclose(sum(step.floor_us for step in steps), bound.plan.floor_at(B))
    for step in steps:
        assert 0 <= step.floor_us <= step.estimate_us


def test_chunks_of_a_batch_add_up(bound):
    large, small = bound.steps(100), bound.steps(7)
    for step, a, b in zip(steps_of_chunks(bound.plan, (100, 7, 100)), large, small, strict=True):
        assert (step.label, step.layers) == (a.label, a.layers)
        assert (step.nbytes, step.flop) == (2 * a.nbytes + b.nbytes, 2 * a.flop + b.flop)
        assert np.isclose(step.floor_us, 2 * a.floor_us + b.floor_us)
        assert np.isclose(step.estimate_us, 2 * a.estimate_us + b.estimate_us)
