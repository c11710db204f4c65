"""Every layer's gradient in a training step on an emulated GPU, in the plan that a user gets, against float64."""

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from gradient_cases import GRADIENT_CASES
from layer_cases import network, random_inputs
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan
from training_steps import assert_right, begin, trained_through

NARROW = ("float16", "bfloat16")  # of a Cast: no kernel computes losses in them
CASES = [case for case in GRADIENT_CASES if getattr(case.layer, "dtype", "") not in NARROW]


@needs_gxx
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer(monkeypatch, case):
    gpu, net = emulate_device(monkeypatch), trained_through(network(case))
    step = training_step(net, TrainingStep("mse", "momentum"))
    target, share = np.random.default_rng(3).standard_normal((5, net.output.row_size)), np.full(5, 1 / 5)
    rows, state = (*random_inputs(case, 5), *(each.astype(net.output.dtype) for each in (target, share))), begin(step)
    bound = CudaStep(gpu, plan(step, "cuda", Job(batch=5)))
    bound.write_state(state)
    outputs = bound.run(dict(zip(step.inputs, rows, strict=True)), 5)
    assert_right(step, bound.read_state() | outputs, rows, state)
