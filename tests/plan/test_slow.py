"""A plan is never silently slow: where a group's estimate is more than twice its floor, it prints why."""

import dataclasses

import pytest

from onchip.kernels.cuda import KERNELS
from onchip.network.build import mlp
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.planner import make_plan
from onchip.plan.slow import slow_because
from takers import CPU

REFUSALS = (Refusal("tensor", "a", "multiplies no odd rows"), Refusal("tensor", "b", "is elsewhere"))


def why(cost, job=None, device=H200):
    return slow_because(Claim("k", "k", ("a",), cost, "", {}), device, job or Job(batch=1000), REFUSALS)


def test_near_its_floor_there_is_nothing_to_say():
    assert why(Cost(10**9, 4, rate=0.9)) == ""
    assert why(Cost(0, 10**7)) == ""


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (Cost(10, 4), "the launch takes 100% of it"),
        (Cost(10, 4, launches=3), "launches take 100% of it"),
        (Cost(10, 4, min_us=30.0), "memory latency: each block loads and stores tile after tile"),
        (Cost(10**9, 4, rate=0.2), "CUDA cores at 0.2 of their sustained rate; tensor multiplies no odd rows"),
        (
            Cost(10**9, 4, rate=0.2, precision="tf32"),
            "tensor cores at 0.2 of their sustained rate; tensor multiplies no odd rows",
        ),
        (Cost(0, 10**6, transposed_bytes=10**8), "a pass that transposes values"),
        (Cost(0, 10**4), "data comes from memory; the floor assumes the cache"),
    ],
)
def test_what_most_of_the_time_is(cost, told):
    assert why(cost) == told


def test_a_cpu_says_nothing():
    assert why(Cost(10**9, 4, rate=0.1), device=dataclasses.replace(CPU)) == ""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("B", [1, 4096])
def test_a_plan_says_so_of_every_group(precision, B):
    plan = make_plan(mlp(785, 512, 256, 10), H200, KERNELS, Job(precision, B))
    told = plan.to_dict()["groups"]
    slow = [i for i, group in enumerate(told) if group["estimate_us"] > 2 * group["floor_us"]]
    assert slow == [i for i, group in enumerate(told) if group["slow"]]
    lines = [line for line in str(plan).splitlines() if line.startswith("slow: group")]
    assert [line.split()[2] for line in lines] == [str(i) for i in slow]
