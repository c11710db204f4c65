"""CPU networks with NHWC values between groups: correct, and bit-identical to NCHW."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import branched, signal, sines
from onchip.kernels import reference
from onchip.kernels.cpu import KERNELS
from onchip.network.graph import Network
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import CpuBackend, this_cpu


def run(net: Network, kernels, x: np.ndarray) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    plan = make_plan(net, this_cpu(), kernels, Job(batch=1 << 20))
    types = plan.network.types
    outputs = {name: np.empty((len(x), *types[name].row_shape), np.float32) for name in net.outputs}
    CpuBackend(None).bind(plan).run({"x": x}, outputs, len(x))
    return outputs, tuple(name for name in plan.between if name.endswith(":channels_last"))


class InRows:
    """A kernel that claims default layouts only."""

    def __init__(self, kernel) -> None:
        self.name, self.device_kind, self.precisions = kernel.name, kernel.device_kind, kernel.precisions
        self._kernel = kernel

    def claims(self, *given):
        answers = self._kernel.claims(*given)
        return (answer for answer in answers if not getattr(answer, "has_layouts", False))


class InNhwc(InRows):
    """A kernel that claims NHWC wherever it can, whatever conversions cost."""

    def claims(self, *given):
        answers = list(self._kernel.claims(*given))
        return [answer for answer in answers if getattr(answer, "has_layouts", False)] or answers

    def conversion(self, *given):
        return self._kernel.conversion(*given) if self.name == "move" else None


def test_the_cheapest_way_keeps_channels_last():
    for net in (sines(), signal()):
        assert run(net, KERNELS, rows(3, *net.input.row_shape))[1]


@pytest.mark.parametrize("make", [sines, branched, signal])
@pytest.mark.parametrize("B", [1, 7, 33])
def test_channels_last_between_groups(make, B):
    net = make()
    x = rows(B, *net.input.row_shape, seed=B)
    got, nhwc_values = run(net, [InNhwc(kernel) for kernel in KERNELS], x)
    assert nhwc_values
    same, none = run(net, [InRows(kernel) for kernel in KERNELS], x)
    assert none == ()
    truth, naive = (reference.forward_all(net, x, dtype) for dtype in ("float64", "float32"))
    for name in net.outputs:
        assert np.array_equal(got[name], same[name])
        assert_error_within(got[name], truth[name], baseline=naive[name], factor=2)
