"""Estimated time of a call with host rows: compared with measurements, and used to choose a device."""

import dataclasses

import pytest

from checks import random_mlp
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import Conv2d, Embedding, Linear, ReLU, Reshape
from onchip.network.types import TensorType
from onchip.plan.device import H200, KNOWN
from onchip.plan.host_call import call_us, compare, min_us
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.workloads import decode, faces
from takers import CPU, stored

HOST = dataclasses.replace(CPU, call_us=4.0)
BATCHES = [1, 7, 64, 500, 1024, 4097, 12_800, 25_600, 60_000, 100_000, 1_000_000, 2**31 + 1]


def planned(net, device, B=1024, precision="fp32"):
    return make_plan(net, device, kernels_for(device), Job(precision, B))


def convolution():
    layers = [("c", Conv2d(pads=(1, 1, 1, 1))), ("r", ReLU()), ("d", Conv2d(pads=(1, 1, 1, 1)))]
    return sequential(
        TensorType(("B", 3, 28, 28)), layers, {"c.weight": stored(16, 3, 3, 3), "d.weight": stored(8, 16, 3, 3)}
    )


# Rows of 152 B, fp16 in and out, on an H200 with 16 host cores; the second is 0.43 MB, the last 44 GB/s.
MEASURED = [(7, 24.0), (2828, 79.0), (12_800, 230.0), (25_600, 390.0), (100_000, 1090.0), (2_097_152, 7250.0)]


@pytest.mark.parametrize(("B", "us"), MEASURED)
def test_it_is_near_what_was_measured(B, us):
    plan = planned(with_io(decode.network(), "float16"), H200, B, "fp16")
    assert 1 / 1.25 < call_us(plan, B) / us < 1.25


@pytest.mark.parametrize("device", [HOST, *KNOWN.values()], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "net", [random_mlp(8, 16, 3), decode.network(), convolution(), faces.network()], ids=lambda n: n.name
)
def test_more_rows_take_longer_and_no_row_is_free(net, device):
    plan = planned(net, device)
    times = [call_us(plan, B) for B in BATCHES]
    assert times == sorted(times)
    assert times[0] > device.call_us
    assert times[-1] > plan.floor_at(BATCHES[-1])


@pytest.mark.parametrize(
    "net", [random_mlp(8, 16, 3), decode.network(), random_mlp(784, 320, 160, 10)], ids=lambda n: str(n.input)
)
@pytest.mark.parametrize("cores", [2, 16])
def test_there_is_at_most_one_number_of_rows_from_which_on_a_gpu_is_sooner(net, cores):
    host = dataclasses.replace(HOST, units=cores, flops={"fp32": cores * 100e9}, bandwidth=cores * 10e9)
    here, there = planned(net, host), planned(net, H200)
    counts = sorted({int(1.3**i) for i in range(70)})
    sooner = [call_us(there, B) < call_us(here, B) for B in counts]
    assert sooner == sorted(sooner)
    assert not sooner[0] or net.input.row_size == 784  # 1.2 MB of weights for one row
    assert sooner[-1] or (net.input.row_size == 8 and cores == 16)  # the bus takes longer than the 16 cores


def test_launches_behind_the_first_are_nodes_of_a_graph():
    one, many = planned(random_mlp(8, 8), H200), planned(random_mlp(*[8 + i % 5 for i in range(200)]), H200)
    assert len(many.groups) > 3
    more = call_us(many, 1) - call_us(one, 1)
    assert (len(many.groups) - 1) * H200.graph_launch_us <= more < (len(many.groups) - 1) * H200.launch_us


def test_rows_that_are_read_often_are_copied(monkeypatch):
    plan = planned(convolution(), H200)
    assert plan.is_read_often
    copied = call_us(plan, 1)
    monkeypatch.setattr("onchip.plan.host_call.OFTEN_BYTES", 1 << 20)
    assert copied - call_us(plan, 1) == pytest.approx(2 * H200.launch_us)


def test_a_narrow_bus_is_felt_by_many_rows_and_not_by_one():
    slow = dataclasses.replace(H200, bus_bandwidth=5e9)
    fast, slow = planned(decode.network(), H200), planned(decode.network(), slow)
    assert call_us(slow, 1) == pytest.approx(call_us(fast, 1), rel=0.01)
    assert call_us(slow, 10**7) > 5 * call_us(fast, 10**7)


def test_a_value_that_is_input_and_output_crosses_once_each_way_at_most():
    nodes = (Node("a", Linear(), ("x",), {"weight": "w"}),)
    twice = Network({"x": TensorType(("B", 6))}, nodes, ("a", "a"), {"w": stored(4, 6)})
    once = Network({"x": TensorType(("B", 6))}, nodes, ("a",), {"w": stored(4, 6)})
    assert call_us(planned(twice, H200), 1000) == call_us(planned(once, H200), 1000)


def folded():
    layers = [("e", Embedding()), ("r", Reshape((4 * 64,))), ("l", Linear())]
    weights = {"e.weight": stored(50, 64), "l.weight": stored(32, 256)}
    return sequential(TensorType(("B", 4), "int32"), layers, weights)


@pytest.mark.parametrize("net", [decode.network(), convolution(), faces.network(), folded()], ids=lambda n: n.name)
def test_no_plan_for_a_cpu_is_sooner_than_the_least(net):
    for B in (1, 64, 10_000):
        for without in ((), ("fold", "merge", "phases")):
            job = Job(batch=B, without=without)
            plan = make_plan(net, HOST, kernels_for(HOST), job)
            assert 0 < min_us(net, job, HOST, B) < call_us(plan, B)


@pytest.mark.parametrize(
    ("there", "here", "B", "options", "text"),
    [
        (25.0, 9.0, 64, {}, "cpu (auto: 64 rows take about 9.0 µs, 25.0 µs on cuda:0)"),
        (31.0, 1200.0, 1024, {}, "cuda:0 (auto: 1,024 rows take about 31.0 µs, 1.20 ms on the CPU)"),
        (24.0, 24.0, 1, {}, "cpu (auto: 1 row takes about 24.0 µs, 24.0 µs on cuda:0)"),
        (9.0, 5e6, 5, {"is_least": True}, "cuda:0 (auto: 5 rows take about 9.0 µs, at least 5.00 s on the CPU)"),
    ],
)
def test_the_reason_is_one_line(there, here, B, options, text):
    assert compare("cuda:0", there, here, B, **options) == text
