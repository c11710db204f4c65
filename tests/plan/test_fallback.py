"""A kernel that claims any layer is used only where no other kernel claims it."""

import functools

import pytest

from every_network import every_network
from onchip.kernels.cpu import INFERENCE, KERNELS
from onchip.kernels.cpu.plain import PlainKernel
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import ReLU
from onchip.network.types import TensorType
from onchip.plan.kernel import Claim, Job
from onchip.plan.planner import make_plan
from random_networks import random_network
from takers import CPU, Take

COMPILED = [kernel for kernel in INFERENCE if not isinstance(kernel, PlainKernel)]


@functools.cache
def networks() -> list[Network]:
    """Compiled kernels compute in float32, most of them."""
    return [tested.net for tested in every_network().values() if tested.dtype == "float32"]


class Fallback(Take):
    def claims(self, net, start, device, job):
        name = net.nodes[start].name
        yield Claim(self.name, self.name, (name,), self.cost, "the test says so", is_fallback=True)


def three_layers() -> Network:
    return sequential(TensorType(("B", 4)), [(name, ReLU()) for name in "abc"], {})


@pytest.mark.parametrize("batch", [1, 10**6])
def test_a_cheap_fallback_waits_for_a_dear_kernel(batch):
    kernels = [Fallback("any", 1, flop=0), Take("dear", 1, flop=10**6)]
    plan = make_plan(three_layers(), CPU, kernels, Job(batch=batch))
    assert [group.claim.kernel for group in plan.groups] == ["dear"] * 3


def test_as_few_layers_as_can_be_are_left_to_it():
    """A pair leaves one of the three layers, either the first or the last."""
    plan = make_plan(three_layers(), CPU, [Fallback("any", 1, flop=0), Take("pair", 2, flop=10**6)])
    assert sorted(group.claim.kernel for group in plan.groups) == ["any", "pair"]


def assert_no_other_claims(net: Network, batch: int) -> None:
    job = Job(batch=batch)
    plan = make_plan(net, CPU, KERNELS, job)
    left = {name for group in plan.groups if group.claim.is_fallback for name in group.claim.nodes}
    found = [
        (answer.label, answer.nodes)
        for start in range(len(plan.network.nodes) if left else 0)
        for kernel in COMPILED
        for answer in kernel.claims(plan.network, start, CPU, job)
        if isinstance(answer, Claim) and not left.isdisjoint(answer.nodes)
    ]
    assert found == []


@pytest.mark.parametrize("batch", [1, 1024, 10**5])
def test_numpy_only_where_no_compiled_kernel_claims(batch):
    for net in networks():
        assert_no_other_claims(net, batch)


@pytest.mark.parametrize("batch", [1, 1024, 10**5])
def test_and_in_random_networks(batch):
    for seed in range(30, 70):
        assert_no_other_claims(random_network(seed), batch)
