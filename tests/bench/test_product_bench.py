"""The product benchmark: its cases on the CPU, those of a GPU on a stage of NumPy arrays."""

import numpy as np
import pytest

from numpy_stage import NumpyStage
from onchip.bench import CASES
from onchip.bench.cases import gpu_inference, product
from onchip.bench.frame import run_cases
from onchip.bench.options import Options
from onchip.kernels import reference
from onchip.kernels.cuda.gemm.gemv import MAX_ROWS
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


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(product, "CUBE", 12)
    for name in ("LAYERS", "FEW_LAYERS"):
        monkeypatch.setattr(product, name, ((24, 8),))


def test_on_a_gpu(monkeypatch, small):
    def compile(net, device, precision, batch_hint, io):
        return lambda x, out: out.__setitem__(..., reference.forward(net, x.astype(np.float32)))

    monkeypatch.setattr(gpu_inference, "make_stage", Stage)
    monkeypatch.setattr(gpu_inference, "compile", compile)
    monkeypatch.setattr(gpu_inference, "find_device", lambda name, threads=None: (H200, None, "cuda:0"))
    outcome = run_cases(product.cases(Options(device="cuda")), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    rows = [(row.case, row.precision) for row in outcome.rows]
    assert rows[:4] == [("12 cubed", precision) for precision in ("fp16", "bf16", "tf32", "fp32")]
    assert rows[4:6] == [("24 to 8, ReLU, 16384 rows", "fp16"), ("24 to 8, ReLU, 1 row", "fp16")]
    assert len(rows) == 4 + 1 + len(product.FEW_ROWS)


def test_on_the_cpu(small):
    outcome = run_cases(product.cases(Options(rows=(7,))), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert [row.case for row in outcome.rows] == ["24 to 8, ReLU, 7 rows"]


def test_every_layer_is_one_launch_of_the_tensor_cores():
    assert CASES["product"] is product.cases
    for B in (product.MANY_ROWS, *product.FEW_ROWS):
        for D_in, D_out in (*product.LAYERS, *product.FEW_LAYERS):
            planned = plan(with_io(product.network(D_in, D_out), "float16"), H200, Job("fp16", B))
            kernels = ("gemm_sm90", "gemv") if B <= MAX_ROWS else ("gemm_sm90",)
            assert [group.claim.kernel in kernels for group in planned.groups] == [True], (B, D_in, D_out)
