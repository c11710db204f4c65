"""Estimates, by which plans are compared, against what was measured: the committed results of the H200."""

import json
from pathlib import Path

import pytest

from onchip.bench import decode, mlp
from onchip.bench.gpu_inference import IO, GpuJob
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.engine import kernels_for
from onchip.spec.io import with_io

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
LEAST_US = 10.0  # of work: below, a launch is most of it
JOBS = [job for job in decode.gpu_jobs(()) if not job.synchronised]
JOBS += [
    GpuJob(f"{name}, {B} rows", mlp.network(*widths), B, lambda count: None)
    for name, widths in mlp.SHAPES.items()
    for B in mlp.ROWS
]


def measured_us(job):
    for name in ("decode", "mlp"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            if (row["case"], row["precision"], row["engine"]) == (job.case, job.precision, "onchip"):
                return row["median_ms"] * 1e3
    return None


def planned(job):
    return make_plan(with_io(job.net, IO[job.io]), H200, kernels_for(H200), Job(job.precision, job.B))


WORTH_IT = [job for job in JOBS if planned(job).estimate_us - H200.launch_us > LEAST_US]


def test_there_is_something_to_compare():
    assert len(WORTH_IT) >= 8


@pytest.mark.parametrize("job", WORTH_IT, ids=lambda job: f"{job.case}, {job.precision}")
def test_an_estimate_is_near_what_was_measured(job):
    measured = measured_us(job)
    assert measured is not None
    assert 1 / 1.5 < planned(job).estimate_us / measured < 1.5
