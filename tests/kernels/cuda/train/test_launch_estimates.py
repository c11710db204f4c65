"""The estimate of a training step, split over its launches."""

import pytest

from onchip.kernels.chain import find_chain
from onchip.kernels.cuda.train.large_batch import launches, three_launch
from onchip.kernels.cuda.train.layer_parallel import layer_parallel
from onchip.kernels.cuda.train.resident import resident
from onchip.kernels.pointwise import TRAINED
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import H200

DIGITS, BACKPROP, WIDE_OUTPUT = (784, 320, 160, 10), (784, 56, 28, 10), (30, 50, 200)
CASES = [
    (launches, DIGITS, 64, "fp32", {}),
    (launches, DIGITS, 64, "bf16", {"clip_norm": 1.0}),
    (launches, WIDE_OUTPUT, 100, "fp32", {"loss": "mse"}),  # the head does not compute the last layer
    (launches, (30, 10), 64, "fp32", {}),
    (launches, (8,) * 12, 64, "fp32", {}),  # several launches update the weights
    (launches, DIGITS, 4096, "fp32", {}),
    (launches, DIGITS, 4096, "bf16", {"byte_scale": 1.0}),
    (launches, DIGITS, 1024, "fp32", {"byte_scale": 1.0}),
    (launches, BACKPROP, 60_000, "fp32", {"byte_scale": 1.0}),
    (three_launch, DIGITS, 256, "tf32", {"byte_scale": 1.0}),
    (resident, DIGITS, 64, "fp32", {}),
    (layer_parallel, DIGITS, 64, "bf16", {"byte_scale": 1.0}),
]


@pytest.mark.parametrize(("module", "widths", "batch", "precision", "training"), CASES)
def test_the_launches_of_a_step_add_up(module, widths, batch, precision, training):
    chain = find_chain(mlp(*widths), 0, TRAINED)
    training = TrainingStep(**{"loss": "cross_entropy"} | training)
    lowering = module.make_lowering(chain, training, precision, batch, H200)
    one, two = lowering.launch_estimates(1), lowering.launch_estimates(2)
    assert len(two) == len(lowering.steps(2).launches)
    expected = lowering.step_us + lowering.launches_per_step * H200.graph_launch_us
    expected -= (lowering.launches_per_step - len(two) + len(one)) * one[0]  # the first split of the weights counts too
    assert sum(two) - sum(one) == pytest.approx(expected)
    assert all(us > 0 for us in one)
