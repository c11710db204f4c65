"""Kernels that take what a test says, and weights that nobody may compute."""

from onchip.network.recipe import Recipe, recipe_op
from onchip.plan.device import Device, Peak
from onchip.plan.kernel import Claim, Cost, Refusal

CPU = Device(
    name="two cores", kind="cpu", arch="x86_64", units=2, flops={"fp32": 270e9}, bandwidth=20e9, launch_us=3.0,
    peak=Peak({"fp32": 360e9}, 30e9, 720e9, 0.0), cache_bytes=32 << 20,
    fast_bytes=2 << 20, memory_bytes=8 << 30, source="made up for the tests", vector_bytes=64,
)  # fmt: skip


class Take:
    """A kernel that claims runs of given lengths at a given price."""

    device_kind, precisions = "cpu", ("fp32",)

    def __init__(self, name: str, *lengths: int, flop: int = 100) -> None:
        self.name, self.lengths, self.cost = name, lengths, Cost(flop, 8)

    def claims(self, net, start, device, job):
        for length in self.lengths:
            names = tuple(node.name for node in net.nodes[start : start + length])
            if len(names) == length:
                yield Claim(self.name, f"{self.name}<{length}>", names, self.cost, "the test says so")
            else:
                yield Refusal(self.name, net.nodes[start].name, f"needs {length} layers")


class TakeBut(Take):
    """Takes every layer but one kind."""

    def __init__(self, kind: type) -> None:
        super().__init__(f"all but {kind.__name__}", 1)
        self.kind = kind

    def claims(self, net, start, device, job):
        if not isinstance(net.nodes[start].layer, self.kind):
            yield from super().claims(net, start, device, job)


@recipe_op
def never(*_):
    raise AssertionError("a weight was computed while planning")


@recipe_op
def doubled(weight):
    return 2 * weight


def stored(*shape: int, dtype: str = "float32", flop: int = 0) -> Recipe:
    """A weight that must not be looked at."""
    return Recipe.of(never, (), shape, dtype, flop)
