"""Planning time is proportional to the number of layers, for any layers and any connections."""

import functools

import numpy as np
import pytest

from onchip.bench.cases.training_networks import NETWORKS
from onchip.kernels.chain import find_chain
from onchip.kernels.cpu.mlp.fused import MlpFusedKernel
from onchip.kernels.cuda.mlp.tensor_core import MAX_LAYERS
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Concat, Conv2d, Linear, ReLU, Reshape, Slice, Softmax, Tanh
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.planner import make_plan
from onchip.plan.rewrites.late import sink_moves
from onchip.runtime.placement import kernels_for
from python_calls import python_calls
from takers import CPU, stored


def linears(count):
    """Alternating Linear and ReLU; adjacent Linears have different shapes."""
    widths = [30 + 7 * i % 40 for i in range(count // 2 + 1)]
    layers = [pair for i in range(count // 2) for pair in ((f"l{i}", Linear()), (f"r{i}", ReLU()))]
    weights = {f"l{i}.weight": stored(widths[i + 1], widths[i]) for i in range(count // 2)}
    return sequential(TensorType(("B", widths[0])), layers, weights)


def convolutions(count, odd=1 << 30):
    """Alternating Conv2d and ReLU; some convolutions are replaced by a softmax over an image."""
    kinds = [Softmax(1) if i % odd == odd - 1 else Conv2d(pads=(1, 1, 1, 1)) for i in range(count // 2)]
    layers = [pair for i, kind in enumerate(kinds) for pair in ((f"l{i}", kind), (f"r{i}", ReLU()))]
    weights = {f"l{i}.weight": stored(8, 8, 3, 3) for i, kind in enumerate(kinds) if isinstance(kind, Conv2d)}
    return sequential(TensorType(("B", 8, 8, 8)), layers, weights)


def residual(count, layer, *shape):
    """Repeated residual blocks: two layers and the sum with their input."""
    nodes, value = [], "x"
    for i in range(count // 3):
        nodes.append(Node(f"a{i}", layer, (value,), {"weight": f"a{i}.weight"}))
        nodes.append(Node(f"b{i}", layer, (f"a{i}",), {"weight": f"b{i}.weight"}))
        nodes.append(Node(f"s{i}", Add(), (value, f"b{i}")))
        value = f"s{i}"
    kernel = (3, 3) if isinstance(layer, Conv2d) else ()
    weights = {name: stored(8, 8, *kernel) for node in nodes for name in node.weights.values()}
    return Network({"x": TensorType(("B", *shape))}, tuple(nodes), (value,), weights)


def side_by_side(count):
    """Branches from one value, concatenated at the end."""
    nodes, weights = [], {}
    for i in range(count // 2):
        nodes += [Node(f"l{i}", Linear(), ("x",), {"weight": f"l{i}.weight"}), Node(f"r{i}", ReLU(), (f"l{i}",))]
        weights[f"l{i}.weight"] = stored(4, 8)
    nodes.append(Node("all", Concat(1), tuple(f"r{i}" for i in range(count // 2))))
    return Network({"x": TensorType(("B", 8))}, tuple(nodes), ("all",), weights)


def cut_apart(count):
    """Linears of one value, which become one Linear and Slices; concatenated at the end."""
    nodes = [Node(f"l{i}", Linear(), ("x",), {"weight": f"l{i}.weight"}) for i in range(count)]
    nodes.append(Node("all", Concat(1), tuple(f"l{i}" for i in range(count))))
    weights = {f"l{i}.weight": stored(4, 8) for i in range(count)}
    return Network({"x": TensorType(("B", 8))}, tuple(nodes), ("all",), weights)


LONG = {
    "linears": linears,
    "convolutions": convolutions,
    "convolutions, some of which conv_fused does not take": lambda count: convolutions(count, odd=5),
    "residual": lambda count: residual(count, Linear(), 8),
    "residual convolutions": lambda count: residual(count, Conv2d(pads=(1, 1, 1, 1)), 8, 8, 8),
    "side by side": side_by_side,
    "cut apart": cut_apart,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
@pytest.mark.parametrize("shape", LONG)
def test_the_work_of_planning_goes_with_the_number_of_layers(shape, device):
    kernels = kernels_for(device)

    def calls(count):
        net = LONG[shape](count)
        return python_calls(lambda: make_plan(net, device, kernels, whole=False))

    calls(20)  # imports, and what is cached between plans
    assert calls(700) < 3.2 * calls(350)  # not 2: groups grow until a kernel is full; quadratic time would be 4


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_so_does_that_of_planning_a_step(device):
    """Many values of the forward pass live until their gradients, some in layouts of their own."""
    kernels, trained = kernels_for(device), NETWORKS["transformer"]

    def calls(blocks):
        net = trained.build(vocabulary=9, tokens=4, width=4, heads=2, blocks=blocks)
        step = training_step(net, trained.step, trainable=trained.is_trained)
        return python_calls(lambda: make_plan(step, device, kernels, whole=False))

    calls(1)
    assert calls(12) < 2.4 * calls(6)


class Counted(str):
    """A name whose lookup calls a counted function."""

    def __hash__(self):
        return super().__hash__()


def test_a_step_of_images_is_planned_in_few_calls():
    """Convolutions to few channels search for their tile: most of the calls."""
    kernels, trained = kernels_for(H200), NETWORKS["u_net"]
    step = training_step(trained.build(), trained.step)
    plan = functools.partial(make_plan, step, H200, kernels, Job("bf16", trained.batch))
    plan()  # fills caches
    assert python_calls(plan) < 3_500 * len(step.nodes)


def test_a_reader_of_many_moves_looks_at_each_once():
    def calls(count):
        names = [Counted(f"s{i}") for i in range(count)]
        nodes = [Node(name, Slice((i,), (1,), (1,)), ("x",)) for i, name in enumerate(names)]
        nodes.append(Node("all", Concat(1), tuple(names)))
        net = Network({"x": TensorType(("B", count))}, tuple(nodes), ("all",), {})
        return python_calls(lambda: sink_moves(net))

    assert calls(400) < 2.5 * calls(200)


def test_a_long_chain_is_cut_where_a_kernel_would_be_too_long():
    groups = make_plan(linears(200), H200, kernels_for(H200)).groups
    assert max(len(group.claim.nodes) for group in groups) <= 2 * MAX_LAYERS
    assert [name for group in groups for name in group.claim.nodes] == [node.name for node in linears(200).nodes]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 7])
def test_a_chain_from_the_middle_is_the_end_of_the_whole(start):
    """As the first caller finds it."""
    layers = [
        ("flat", Reshape((-1,))), ("a", Linear()), ("b", ReLU()), ("c", Linear()), ("d", Linear()), ("e", Reshape()),
        ("f", Tanh()), ("g", Linear()), ("h", Softmax()),
    ]  # fmt: skip
    weights = {"a.weight": stored(5, 6), "c.weight": stored(4, 5), "d.weight": stored(3, 4), "g.weight": stored(2, 3)}

    def net():
        return sequential(TensorType(("B", 2, 3)), layers, weights)

    requested = net()
    find_chain(requested, 0)
    assert find_chain(requested, start) == find_chain(net(), start)


def test_conv_fused_takes_what_is_between_layers_that_it_does_not_take():
    plan = make_plan(convolutions(40, odd=5), CPU, kernels_for(CPU))
    assert [group.claim.kernel for group in plan.groups] == ["conv_fused", "rowwise"] * 4 + ["rowwise"]
    assert [len(group.claim.nodes) for group in plan.groups] == [8, 1, 9, 1, 9, 1, 9, 1, 1]


def test_inside_a_chain_mlp_fused_offers_nothing_that_it_does_not_offer_before():
    def claims(dtype, start):
        weights = {"a.weight": np.zeros((5, 6), dtype), "b.weight": np.zeros((4, 5), np.float32)}
        net = sequential(TensorType(("B", 6)), [("a", Linear()), ("r", ReLU()), ("b", Linear())], weights)
        return [type(answer) for answer in MlpFusedKernel().claims(net, start, CPU, Job())]

    assert (claims("float32", 0), claims("float32", 2)) == ([Claim], [])
    assert (claims("float64", 0), claims("float64", 2)) == ([Refusal], [Claim])
