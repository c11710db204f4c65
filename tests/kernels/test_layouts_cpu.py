"""Networks on the CPU whose values lie with channels last between groups: right, and with the bits of those in rows."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from onchip.kernels import reference
from onchip.kernels.cpu import KERNELS
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu import CpuBackend, this_cpu
from onchip.spec.layers import Add, Clip, Conv1d, Conv2d, GlobalMean, MaxPool2d, Mul, Sigmoid, Softmax
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32) / np.float32(
        np.sqrt(np.prod(shape[1:]))
    )


SAME = Conv2d(pads=(1, 1, 1, 1))


def clipped() -> Network:
    """Convolutions with a Clip between them, which is NumPy's on the CPU."""
    nodes = [Node("c0", SAME, ("x",), {"weight": "w0"}), Node("k0", Clip(0, 0.5), ("c0",))]
    nodes += [Node("c1", Conv2d(stride=(2, 1)), ("k0",), {"weight": "w1"}), Node("k1", Clip(-0.2, 0.3), ("c1",))]
    nodes += [Node("c2", SAME, ("k1",), {"weight": "w2"})]
    weights = {"w0": weight(7, 3, 3, 3), "w1": weight(9, 7, 3, 2), "w2": weight(5, 9, 3, 3)}
    return Network({"x": TensorType(("B", 3, 11, 8))}, nodes, ("c2",), weights)


def branched() -> Network:
    """A value with channels last that three read: a sum, a convolution, and one that only takes rows."""
    nodes = [Node("c0", SAME, ("x",), {"weight": "w0"}), Node("k", Clip(0, 0.5), ("c0",))]
    nodes += [Node("c1", SAME, ("k",), {"weight": "w1"}), Node("s", Sigmoid(), ("c1",)), Node("sum", Add(), ("s", "k"))]
    nodes += [
        Node("soft", Softmax(1), ("k",)),
        Node("all", Mul(), ("sum", "soft")),
        Node("pool", MaxPool2d((2, 2)), ("all",)),
    ]
    weights = {"w0": weight(6, 4, 3, 3), "w1": weight(6, 6, 3, 3)}
    return Network({"x": TensorType(("B", 4, 6, 5))}, nodes, ("pool", "sum"), weights)


def text() -> Network:
    nodes = [Node("c0", Conv1d(), ("x",), {"weight": "w0"}), Node("k", Clip(0), ("c0",))]
    nodes += [Node("c1", Conv1d(), ("k",), {"weight": "w1"}), Node("mean", GlobalMean((2,)), ("c1",))]
    return Network({"x": TensorType(("B", 5, 20))}, nodes, ("mean",), {"w0": weight(8, 5, 3), "w1": weight(70, 8, 4)})


def run(net: Network, kernels, x: np.ndarray) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    plan = make_plan(net, this_cpu(), kernels, Job(batch=1 << 20))
    types = plan.network.types
    outputs = {name: np.empty((len(x), *types[name].row_shape), np.float32) for name in net.outputs}
    CpuBackend(None).bind(plan).run({"x": x}, outputs, len(x))
    return outputs, tuple(name for name in plan.between if name.endswith(":channels_last"))


class InRows:
    """A kernel that makes no use of layouts."""

    def __init__(self, kernel) -> None:
        self.name, self.device_kind, self.precisions = kernel.name, kernel.device_kind, kernel.precisions
        self._kernel = kernel

    def claims(self, *given):
        answers = self._kernel.claims(*given)
        return (answer for answer in answers if not getattr(answer, "has_layouts", False))


class Turned(InRows):
    """One that makes use of them wherever it can, whatever conversions cost."""

    def claims(self, *given):
        answers = list(self._kernel.claims(*given))
        return [answer for answer in answers if getattr(answer, "has_layouts", False)] or answers

    def conversion(self, *given):
        return self._kernel.conversion(*given) if self.name == "plain" else None


def test_the_cheapest_way_keeps_channels_last():
    for net in (clipped(), text()):
        assert run(net, KERNELS, rows(3, *net.input.row_shape))[1]


@pytest.mark.parametrize("make", [clipped, branched, text])
@pytest.mark.parametrize("B", [1, 7, 33])
def test_channels_last_between_groups(make, B):
    net = make()
    x = rows(B, *net.input.row_shape, seed=B)
    got, turned = run(net, [Turned(kernel) for kernel in KERNELS], x)
    assert turned
    same, none = run(net, [InRows(kernel) for kernel in KERNELS], x)
    assert none == ()
    truth, naive = (reference.forward_all(net, x, dtype) for dtype in ("float64", "float32"))
    for name in net.outputs:
        assert np.array_equal(got[name], same[name])
        assert_error_within(got[name], truth[name], yardstick=naive[name], factor=2)
