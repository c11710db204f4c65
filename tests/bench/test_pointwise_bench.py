"""The pointwise benchmark: its cases on the CPU, those of a GPU on a stage of NumPy arrays."""

import numpy as np
import pytest

from numpy_stage import NumpyStage
from onchip.bench import CASES
from onchip.bench.cases import gpu_inference, pointwise
from onchip.bench.frame import run_cases
from onchip.bench.options import Options
from onchip.kernels import reference
from onchip.measure.pace import Pace
from onchip.network.io import with_io
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=0, pause_s=0, min_runs=1, max_runs=2)


class Stage(NumpyStage):
    def ms(self, work):
        work()
        return 1.0

    def copy(self, x, y):
        y[...] = x
        return y


@pytest.fixture
def fake_gpu(monkeypatch):
    def compile(net, device, precision, batch_hint, io):
        return lambda x, out: out.__setitem__(..., reference.forward(net, x.astype(np.float32)))

    monkeypatch.setattr(pointwise, "ROW", (4, 3, 5))
    for module in (gpu_inference, pointwise):
        monkeypatch.setattr(module, "make_stage", Stage)
    monkeypatch.setattr(gpu_inference, "compile", compile)
    monkeypatch.setattr(gpu_inference, "find_device", lambda name, threads=None: (H200, None, "cuda:0"))


def test_it_is_listed():
    assert CASES["pointwise"] is pointwise.cases


def test_every_network_is_one_launch_that_reads_and_writes_every_element_once():
    for net in pointwise.networks().values():
        for io, size in (("float32", 4), ("float16", 2)):
            planned = plan(with_io(net, io), H200, Job("fp32", 2048))
            assert [group.claim.kernel for group in planned.groups] == ["pointwise"]
            assert planned.groups[0].claim.cost.row_bytes == 2 * size * net.input.row_size


def test_right_and_then_timed(fake_gpu):
    outcome = run_cases(pointwise.cases(Options(device="cuda", rows=(7,))), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert [(row.case, row.engine, row.precision) for row in outcome.rows] == [
        (f"{name}, 7 rows", "copy" if name == "copy" else "onchip", precision)
        for precision in pointwise.PRECISIONS
        for name in ("copy", *pointwise.networks())
    ]


def test_on_the_cpu(monkeypatch):
    monkeypatch.setattr(pointwise, "ROW", (4, 3, 5))
    outcome = run_cases(pointwise.cases(Options(rows=(7,))), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert len(outcome.rows) == len(pointwise.networks())
