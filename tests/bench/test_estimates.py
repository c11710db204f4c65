"""Estimates, by which plans are compared, checked against the committed results of each device."""

import functools
import json
from pathlib import Path

import pytest

from onchip.bench.cases import decode, digits, mlp, sentiment, sentiment_rows
from onchip.bench.cases import scan as scans
from onchip.bench.cases.gpu_inference import IO, GpuJob
from onchip.bench.frame import ONCHIP
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import CumSum
from onchip.network.types import TensorType
from onchip.plan.device import H200, Device, Peak
from onchip.plan.kernel import Job, TrainingStep
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.workloads import backprop, faces
from onchip.workloads import decode as decode_workload
from onchip.workloads import digits as digits_workload
from onchip.workloads import sentiment as sentiment_workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FACTOR = 1.5
MIN_US = 10.0  # of work: below, the launch dominates


@functools.cache
def results(device, name):
    return json.loads((RESULTS / device / f"{name}.json").read_text())


def measured_us(device, name, case, engine=ONCHIP, precision="fp32"):
    found = [
        row["median_ms"]
        for row in results(device, name)["rows"]
        if (row["case"], row["engine"], row["precision"]) == (case, engine, precision)
    ]
    assert len(found) == 1, (name, case, engine, precision)
    return found[0] * 1e3


def assert_near(estimate_us, us):
    assert 1 / FACTOR < estimate_us / us < FACTOR, f"estimate {estimate_us:,.0f} us, measured {us:,.0f} us"


# -- H200 ----------------------------------------------------------------------------------------------------

GPU_JOBS = [("decode", job) for job in decode.gpu_jobs(()) if not job.synchronised]
GPU_JOBS += [
    ("mlp", GpuJob(f"{name}, {B} rows", mlp.network(*widths), B, lambda count: None))
    for name, widths in mlp.SHAPES.items()
    for B in mlp.ROWS
]


def planned(job):
    return make_plan(with_io(job.net, IO[job.io]), H200, kernels_for(H200), Job(job.precision, job.B))


LARGE_JOBS = [(name, job) for name, job in GPU_JOBS if planned(job).estimate_us - H200.launch_us > MIN_US]


def test_there_are_enough_jobs_to_compare():
    assert len(LARGE_JOBS) >= 8


@pytest.mark.parametrize(("name", "job"), LARGE_JOBS, ids=[f"{job.case}, {job.precision}" for _, job in LARGE_JOBS])
def test_an_estimate_is_near_the_measured_time(name, job):
    assert_near(planned(job).estimate_us, measured_us("h200", name, job.case, precision=job.precision))


# -- a CPU: the machine of a result file -----------------------------------------------------------------------

CPU = "cpu-x86_64-2"
L2_BYTES = 2 << 20  # of that machine's cores: its files predate the field


def machine(name):
    facts = results(CPU, name)["machine"]
    peak = {rate: facts["peak"][rate] for rate in ("flops", "bandwidth", "cache_bandwidth", "launch_us")}
    return Device(
        name=facts["name"], kind="cpu", arch=facts["arch"], units=facts["cores"], flops=facts["flops"],
        bandwidth=facts["bandwidth"], launch_us=facts["launch_us"], fast_bytes=facts.get("fast_bytes", L2_BYTES),
        memory_bytes=facts["memory_bytes"], source=facts["rates"], peak=Peak(**peak),
        cache_bytes=facts["peak"]["cache_bytes"],
    )  # fmt: skip


def check(name, case, net, job, engine=ONCHIP, B=None, precision="fp32"):
    """Today's plan with that machine's rates: its estimate is near the measured time, and its floor is below."""
    device, us = machine(name), measured_us(CPU, name, case, engine, precision)
    plan = make_plan(net, device, kernels_for(device), job)
    assert plan.floor_at(B or job.batch) < us
    assert plan.estimate_at(B or job.batch) > MIN_US
    assert_near(plan.estimate_at(B or job.batch), us)


@pytest.mark.parametrize("B", decode.ROWS)
def test_decode_on_a_cpu(B):
    check("decode", f"{B} rows", decode_workload.network(), Job(batch=B))


@pytest.mark.parametrize("case", ["1 image", "32 images", "64 images", "64 images, uint8"])
def test_faces_on_a_cpu(case):
    check("faces", case, faces.network(pixels="uint8" in case), Job(batch=int(case.split()[0])))


@pytest.mark.parametrize("ids", sentiment_rows.IDS)
@pytest.mark.parametrize("engine", sentiment.OURS)
def test_sentiment_on_a_cpu(engine, ids):
    B = sentiment.ROWS[0]
    job = Job(batch=sentiment_workload.SENTENCES, **sentiment.OURS[engine])
    check("sentiment", f"{B} sentences, {ids}", sentiment_workload.network(), job, engine, B)


def test_digits_on_a_cpu():
    check("digits", "infer, 10000 rows", digits_workload.network(digits.WIDTH), Job(batch=10_000))


# The estimate reads cached weights at memory bandwidth, which is low on this machine: 1.8x the time.
SLOW_MEMORY = pytest.param(16, marks=pytest.mark.xfail(strict=True, reason="cache traffic by the memory's bandwidth"))


@pytest.mark.parametrize("batch", [SLOW_MEMORY if batch == 16 else batch for batch in digits.BATCHES])
def test_training_steps_on_a_cpu(batch):
    check(
        "digits",
        f"step, batch {batch}, uint8 pixels",
        digits_workload.network(digits.WIDTH),
        Job("fp32", batch, TrainingStep("cross_entropy")),
    )


def test_full_batch_training_on_a_cpu():
    job = Job("fp32", backprop.PATTERNS, TrainingStep("half_sse", "momentum"))
    check("backprop", f"epoch of {backprop.PATTERNS} patterns, uint8 pixels", backprop.network(), job)


@pytest.mark.parametrize("job", scans.CPU_JOBS, ids=lambda job: f"{job.case}, {job.dtype}")
def test_a_scan_on_a_cpu(job):
    node = Node("sums", CumSum(), ("x",))
    net = Network({"x": TensorType(("B", job.N), job.dtype)}, (node,), ("sums",), {})
    check("scan", job.case, net, Job(batch=1), precision=job.precision)


@functools.cache
def imported(name):
    import torch

    from onchip.bench.cases.imported import subject
    from onchip.bench.peers.frameworks.torch_models import MODELS

    return subject(torch, next(model for model in MODELS if model.name == name)).net


IMPORTED = [row["case"] for row in results(CPU, "imported")["rows"] if row["engine"] == ONCHIP]


@pytest.mark.parametrize("case", IMPORTED)
def test_imported_networks_on_a_cpu(case):
    pytest.importorskip("torch", reason="the networks are torch's")
    name, _, rows = case.rpartition(", ")
    check("imported", case, imported(name), Job(batch=int(rows.split()[0])))
